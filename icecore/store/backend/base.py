"""The contract of storage: create an object atomically if it is absent; get, get a range, list,
delete. Nothing is overwritten.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from icecore.errors import UsageError

Buffer = bytes | bytearray | memoryview

#: The longest object name in bytes; leaves room for a bucket prefix within S3's 1024.
MAX_NAME = 512
MAX_PART = 200
#: Storage that can run full keeps this many pieces of space in reserve, of this many bytes each.
#: The last number is how many of them stay for whoever frees space when others want to read.
RESERVE_PIECES = 8
RESERVE_PIECE = 256 << 10
READERS_LEAVE = RESERVE_PIECES // 2
_PART = re.compile(r"[a-z0-9][a-z0-9._-]*\Z")
#: No object has bytes beyond this offset, whatever refers to it.
MAX_OFFSET = 1 << 62
#: Most foreign files that are reported.
FOREIGN_AT_MOST = 1000


class ObjectInfo(NamedTuple):
    """One row of a listing: the object's name and its size in bytes."""

    name: str
    size: int


class Foreign(NamedTuple):
    """Something among the objects that is not an object: its name as it is (possibly with
    surrogates) and its kind, in words.
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
        UsageError: It breaks a rule; the message says which.
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
    """Return ``prefix`` if it is empty or consists of whole name parts, each followed by ``/``;
    every back end can list such a prefix.

    Raises:
        UsageError: It is neither.
    """
    if prefix:
        if not prefix.endswith("/"):
            raise UsageError(f"a listing prefix ends with '/': {prefix!r}")
        check_name(prefix[:-1])
    return prefix


def length_of(parts: Sequence[Buffer]) -> int:
    """Return the total bytes of ``parts``."""
    return sum(memoryview(part).nbytes for part in parts)


class Draft(ABC):
    """An object that is written piece by piece and is invisible until it is published. For one
    thread at a time.

    Attributes:
        length: Bytes written so far.
        descriptor: Descriptor of a file that another process may write from ``length`` on; -1: none.
    """

    length: int = 0
    descriptor: int = -1

    @abstractmethod
    def append(self, parts: Sequence[Buffer]) -> None:
        """Append ``parts``; synchronous.

        Raises:
            StoreFull, StoreError: They could not be written; the draft cannot be used any more.
        """

    @abstractmethod
    def grow(self, count: int) -> None:
        """Take over ``count`` bytes that another process has written to ``descriptor``.

        Raises:
            StoreError: As from :meth:`append`.
        """

    @abstractmethod
    def cut(self) -> None:
        """Remove what another process has written to ``descriptor`` and :meth:`grow` has not taken
        over. That process must have stopped writing.

        Raises:
            StoreError: As from :meth:`append`.
        """

    @abstractmethod
    async def publish(self) -> None:
        """Make it an object, as ``Backend.create`` does, with the same errors. The draft is gone
        after either outcome.
        """

    @abstractmethod
    def discard(self) -> None:
        """Discard it, unless it was published. May be called at any time and more than once."""


class Backend(ABC):
    """One place where objects live. Any number of tasks of one event loop may call its methods at
    the same time.

    Attributes:
        read_size: Bytes of a ranged read at which this storage nears its best throughput.
        direct: Whether ``read_into`` works, the synchronous ranged read for worker threads.
        drafts: Whether ``draft`` works, with which worker threads write an object piece by piece.
        where: The place in words, for messages.
        known_as: Names under which a client remembers which repository is here: the place's own
            name, and the one that all its names resolve to. Empty: it is not remembered.
        folder: Directory in which other processes of this machine can read the objects by name;
            empty if they cannot.
        replicas: Other places that may have the same objects (`icecore.store.backend.replicas`), to
            ask for an object that is damaged here.
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
        """The same storage without copies kept elsewhere: what a check must read."""
        return self

    @abstractmethod
    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        """Create the object from the concatenated ``parts``. It is durable on return; other readers
        see all of it or nothing.

        Raises:
            ObjectExists: The name is taken; the existing object is unchanged.
            StoreFull: No space; nothing is left behind.
            StoreError: Anything else. The object may or may not exist afterwards.
        """

    @abstractmethod
    async def get(self, name: str, *, limit: int = 1 << 30) -> bytes:
        """Return the whole object, which must have at most ``limit`` bytes.

        Raises:
            ObjectMissing: No such object.
            Damaged: It is larger than ``limit``, so it is not what its name says.
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
        """List the objects whose name begins with ``prefix`` (empty, or ending with ``/``), in
        ascending order of names.

        An object that exists during the whole listing is listed; one that is absent throughout is
        not. One that is created or deleted meanwhile may or may not be listed.
        """

    async def foreign(self) -> Sequence[Foreign]:
        """Return what lies here and cannot be an object, at most `FOREIGN_AT_MOST`. Listings omit
        it, and reads of its name fail. Where only listings reveal it, what they revealed so far.
        """
        return []

    @abstractmethod
    async def delete(self, name: str) -> None:
        """Delete the object, if it exists."""

    async def delete_many(self, names: Sequence[str]) -> None:
        """Delete these objects, in any order, in as few requests as the storage allows.

        Raises:
            StoreError: Some could not be deleted; others may have been.
        """
        for name in names:
            await self.delete(name)

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        """Do as ``get_into`` without an event loop, from any thread; only if ``direct`` is true."""
        raise UsageError(f"{self.where} has no direct reads")

    def suspect(self, error: Exception) -> None:
        """Take note that an object from here proved damaged or missing, so that the reader goes on
        to ask ``replicas``.
        """
        return None

    def draft(self, name: str) -> Draft:
        """Return a draft of object ``name``, from any thread; only if ``drafts`` is true.

        Raises:
            StoreFull, StoreError: It could not be started.
        """
        raise UsageError(f"{self.where} takes whole objects only")

    async def keep_reserve(self) -> bool:
        """Reserve space for ``give_up_reserve``, unless it is reserved already or free space is
        short. Never fails.

        Returns:
            Whether there is room for more. False if part of the reserve is missing and free space
            is less than the whole reserve. That space is left to operations that free space.
        """
        return True

    async def give_up_reserve(self, leave: int) -> bool:
        """Release a piece of the reserved space, unless only ``leave`` pieces are left. Return
        whether there may be more room now.
        """
        return False

    async def sweep(self, age_seconds: float) -> int:
        """Remove what was left by writes interrupted more than ``age_seconds`` ago; return how
        many. Most storage leaves nothing.
        """
        return 0

    async def close(self) -> None:
        """Release what the back end holds open; further calls are errors."""
        return None
