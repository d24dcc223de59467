"""What the repository asks of storage: create an object if it is absent, atomically; get, ranged
get, list, delete; nothing is overwritten.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from icecore.errors import UsageError

Buffer = bytes | bytearray | memoryview

#: The longest object name, in bytes; leaves room for a bucket prefix within S3's 1024.
MAX_NAME = 512
MAX_PART = 200
#: Pieces that storage which can run full keeps in reserve, the bytes of each, and how many stay for
#: whoever frees space when others want to read.
RESERVE_PIECES = 8
RESERVE_PIECE = 256 << 10
READERS_LEAVE = RESERVE_PIECES // 2
_PART = re.compile(r"[a-z0-9][a-z0-9._-]*\Z")
#: No object has bytes at an offset beyond this, whatever refers to it.
MAX_OFFSET = 1 << 62
#: So many foreign files are told of at most.
FOREIGN_AT_MOST = 1000


class ObjectInfo(NamedTuple):
    """One row of a listing: the object's name and its size in bytes."""

    name: str
    size: int


class Foreign(NamedTuple):
    """Something that lies among the objects and is none: its name (as it is, maybe with surrogates)
    and what it is, in words.
    """

    name: str
    what: str


def is_part(text: str) -> bool:
    """Return whether ``text`` can be a part of an object's name."""
    return len(text) <= MAX_PART and _PART.match(text) is not None


def is_name(text: str) -> bool:
    """Return whether ``text`` can be an object's name."""
    return 0 < len(text) <= MAX_NAME and all(map(is_part, text.split("/")))


def check_name(name: str) -> str:
    """Return ``name`` if it can name an object on every back end.

    Raises:
        UsageError: Says which rule it breaks.
    """
    if not name:
        raise UsageError("an object name is empty")
    if len(name) > MAX_NAME:
        raise UsageError(
            f"object name {name[:40]!r}… has {len(name)} characters, more than {MAX_NAME}"
        )
    for part in name.split("/"):
        if not _PART.match(part):
            raise UsageError(
                f"object name {name!r}: part {part!r} is not lower-case letters, digits, '.', '_' or '-' beginning with a letter or digit"
            )
        if len(part) > MAX_PART:
            raise UsageError(f"object name {name!r}: part {part[:40]!r}… is longer than {MAX_PART}")
    return name


def check_prefix(prefix: str) -> str:
    """Return ``prefix`` if it is empty or whole name parts each followed by ``/``; what every back
    end can list.

    Raises:
        UsageError: It is neither.
    """
    if prefix:
        if not prefix.endswith("/"):
            raise UsageError(f"a listing prefix ends with '/': {prefix!r}")
        check_name(prefix[:-1])
    return prefix


def length_of(parts: Sequence[Buffer]) -> int:
    """Total bytes of ``parts``."""
    return sum(memoryview(part).nbytes for part in parts)


class Draft(ABC):
    """An object that is written piece by piece. Nobody sees any of it before it is published. For
    one thread at a time.
    """

    @abstractmethod
    def append(self, parts: Sequence[Buffer]) -> None:
        """Write ``parts`` behind what was written before; synchronous.

        Raises:
            StoreFull, StoreError: They could not be written; the draft is of no use any more.
        """

    @abstractmethod
    async def publish(self) -> None:
        """Make it an object, as ``Backend.create`` does, with the same errors; after either outcome
        the draft is gone.
        """

    @abstractmethod
    def discard(self) -> None:
        """Forget it, unless it was published. May be called at any time and more than once."""


class Backend(ABC):
    """One place where objects live. All methods may be called by many tasks of one event loop at
    the same time.

    Attributes:
        read_size: Bytes of a ranged read at which this storage is near its best throughput.
        direct: Whether ``read_into`` works, the synchronous ranged read for worker threads.
        drafts: Whether ``draft`` works, by which worker threads write an object piece by piece.
        where: The place in words, for messages.
        known_as: Names under which a client remembers which repository is here: its own name, and
            the one that all its names lead to. Empty: it is not remembered.
        folder: Directory in which other processes of this machine can read the objects by their
            names; empty: they cannot.
        replicas: Other places that may have the same objects (`icecore.store.backend.replicas`):
            where to ask again for one that is damaged here.
    """

    read_size: int = 16 << 20
    direct: bool = False
    drafts: bool = False
    where: str = ""
    known_as: Sequence[str] = ()
    folder: str = ""
    replicas: Sequence[Backend] = ()

    @property
    def source(self) -> Backend:
        """The same storage without copies that are kept elsewhere: what a check has to look at."""
        return self

    @abstractmethod
    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        """Create the object from ``parts`` back to back, durable when this returns; other readers
        see all of it or nothing.

        Raises:
            ObjectExists: The name is taken; what it holds is untouched.
            StoreFull: No space; nothing is left behind.
            StoreError: Anything else. The object may or may not exist afterwards.
        """

    @abstractmethod
    async def get(self, name: str, *, limit: int = 1 << 30) -> bytes:
        """Return the whole object, read only if it has at most ``limit`` bytes.

        Raises:
            ObjectMissing: No such object.
            Damaged: It is larger than ``limit``, so not what its name says.
            StoreError: It could not be read.
        """

    @abstractmethod
    async def get_into(self, name: str, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the object's bytes from ``offset`` on.

        Raises:
            ObjectMissing: No such object.
            Damaged: It ends before ``out`` is full.
            StoreError: It could not be read.
        """

    @abstractmethod
    async def size(self, name: str) -> int:
        """Return the size of the object in bytes.

        Raises:
            ObjectMissing: No such object.
        """

    @abstractmethod
    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Objects whose name begins with ``prefix`` (empty, or ending with ``/``), in ascending
        name order.

        An object that existed, or was absent, during the whole listing is, or is not, listed; in
        between, either.
        """

    async def foreign(self) -> Sequence[Foreign]:
        """Return what lies here and can be no object, `FOREIGN_AT_MOST` at most: listings leave it
        out, and reads of its name fail. Where only listings show it, what those showed so far.
        """
        return []

    @abstractmethod
    async def delete(self, name: str) -> None:
        """Delete the object; it is no error if there is none."""

    async def delete_many(self, names: Sequence[str]) -> None:
        """Delete these objects, in any order, in as few requests as the storage takes.

        Raises:
            StoreError: Some could not be deleted; others may have been.
        """
        for name in names:
            await self.delete(name)

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        """``get_into`` without an event loop, from any thread; only where ``direct`` is true."""
        raise UsageError(f"{self.where} has no direct reads")

    def suspect(self, error: Exception) -> None:
        """Told by a reader who goes on to ask ``replicas`` that what this gave is damaged or
        missing.
        """
        return None

    def draft(self, name: str) -> Draft:
        """Return a draft of object ``name``, from any thread; only where ``drafts`` is true.

        Raises:
            StoreFull, StoreError: It could not be begun.
        """
        raise UsageError(f"{self.where} takes whole objects only")

    async def keep_reserve(self) -> None:
        """Set space aside for ``give_up_reserve``, as far as it is not yet and there is much more;
        never an error.
        """
        return None

    async def give_up_reserve(self, leave: int) -> bool:
        """Give back a piece of the space that was set aside, unless only ``leave`` pieces are left;
        whether there may be more room now.
        """
        return False

    async def sweep(self, age_seconds: float) -> int:
        """Remove remains of writes that broke off more than ``age_seconds`` ago; returns how many.
        Most storage leaves none.
        """
        return 0

    async def close(self) -> None:
        """Give back what the back end holds open; further calls are errors."""
        return None
