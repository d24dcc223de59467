"""What this client remembers of a repository between runs: the newest generation it saw, so that an
older state shown later is an error; and the configuration.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec

from icecore.errors import RecordDamaged, RollbackDetected, StoreError
from icecore.store.format.keys import CONFIG_KIND
from icecore.store.log import notes


class Seen(msgspec.Struct, frozen=True):
    """The newest log entry that was seen: its generation (0: none) and digest in hexadecimal."""

    generation: Annotated[int, msgspec.Meta(ge=0)] = 0
    digest: str = ""


class Watermark:
    """Remembers within this process only; the base class of those that remember longer.

    Args:
        where: The repository's place, for messages.
    """

    def __init__(self, where: str = "PLACE") -> None:
        self._where = where
        self._seen = Seen()

    def load(self) -> Seen:
        """Return the newest entry seen so far."""
        return self._seen

    def save(self, seen: Seen) -> None:
        """Remember ``seen`` if it is newer.

        Raises:
            RollbackDetected: Another entry of the same generation was seen.
        """
        if seen.generation > self._seen.generation:
            self._seen = seen
        elif seen.generation == self._seen.generation and seen.digest != self._seen.digest:
            raise RollbackDetected(
                f"the log in {self._where} has two entries of generation {seen.generation}: this client has seen both",
                cure=f"find out who shows different states to different clients; 'icecore trust {self._where}' shows what is known and what is there",
            )

    def accept(self, seen: Seen, *, instead_of: Seen) -> None:
        """Remember ``seen`` although it may be older, or another entry of the same generation.

        Only for callers with a reason: a repair by this client, or a person's confirmation.

        Args:
            instead_of: What was remembered at the time of that decision.

        Raises:
            RollbackDetected: Something else has been seen since.
        """
        if self._seen != instead_of:
            raise RollbackDetected(
                f"this client has meanwhile seen generation {self._seen.generation} of the log, not {instead_of.generation}",
                cure="look again",
            )
        self._seen = seen


class FileWatermark(Watermark):
    """Remembers in a small file outside the repository, which all processes of this client share.

    Args:
        path: The file; its folder is made when needed. Use one per repository id.
        where: The repository's place, for messages.
    """

    def __init__(self, path: str | os.PathLike[str], where: str = "PLACE") -> None:
        super().__init__(where)
        self._path = Path(path)

    def load(self) -> Seen:
        """Return the newest entry seen so far, by any process.

        Raises:
            RecordDamaged: The file is not what was written.
        """
        data = notes.read(self._path)
        if data is not None:
            self._seen = self._decode(data)
        return self._seen

    def _decode(self, data: bytes) -> Seen:
        try:
            seen = msgspec.json.decode(data, type=Seen)
            if not seen.generation or len(bytes.fromhex(seen.digest)) != 32:
                raise ValueError("it names no log entry")
            return seen
        except ValueError as error:  # msgspec's and Unicode's are, too
            raise RecordDamaged(
                f"{self._path}, the record of what this client has seen of the repository, is damaged: {error}",
                cure=f"'icecore trust {self._where}' shows what is there, and can record it again",
            ) from error

    def save(self, seen: Seen) -> None:
        if seen.generation < self.load().generation or seen == self._seen:
            return
        with notes.locked(self._path.parent):
            self.load()
            before = self._seen
            super().save(seen)
            if self._seen != before:
                notes.write(self._path, msgspec.json.encode(self._seen))

    def accept(self, seen: Seen, *, instead_of: Seen) -> None:
        with notes.locked(self._path.parent):
            self.load()
            super().accept(seen, instead_of=instead_of)
            notes.write(self._path, msgspec.json.encode(seen))

    def replace(self, seen: Seen) -> None:
        """Remember ``seen``, regardless of the file's content: after a person's confirmation."""
        with notes.locked(self._path.parent):
            notes.write(self._path, msgspec.json.encode(seen))
            self._seen = seen


class Recollection:
    """The configuration object of the repository at one place, in a small file outside it. It never
    changes, so it need not be read again.

    It is used only if it verifies under the repository's present keys.

    Args:
        path: The file, one per place; its folder is created when needed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def load(self) -> bytes:
        """Return the remembered object; empty if there is none."""
        try:
            return (notes.read(self._path) or b"")[: CONFIG_KIND.object_limit]
        except StoreError:
            return b""

    def save(self, config: bytes) -> None:
        """Remember the object."""
        try:
            notes.write(self._path, config)
        except StoreError:
            pass  # it is read again next time
