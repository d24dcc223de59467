"""What this client remembers of a repository between runs: the newest generation it saw, so that an older state shown later is an error; its configuration."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

from icecore.store.keys import CONFIG_KIND


class Seen(msgspec.Struct, frozen=True):
    """The newest log entry that was seen: its generation (0: none) and digest in hexadecimal."""

    generation: int = 0
    digest: str = ""


class Watermark:
    """Remembers in this process only; the base of those that remember longer."""

    def __init__(self) -> None:
        self._seen = Seen()

    def load(self) -> Seen:
        """The newest entry seen so far."""
        return self._seen

    def save(self, seen: Seen) -> None:
        """Remember ``seen`` if it is newer."""
        if seen.generation > self._seen.generation:
            self._seen = seen

    def accept(self, seen: Seen) -> None:
        """Remember ``seen`` even where it is older than, or another than, what was seen: a person has decided that it counts."""
        self._seen = seen


class FileWatermark(Watermark):
    """Remembers in a small file outside the repository.

    Args:
        path: The file; its folder is made when needed. Use one per repository id.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._path = Path(path)

    def load(self) -> Seen:
        try:
            stored = msgspec.json.decode(self._path.read_bytes(), type=Seen)
        except FileNotFoundError:
            stored = Seen()
        except (msgspec.DecodeError, UnicodeDecodeError):
            stored = Seen()  # a torn write of a hint; the worst is that one older state goes unnoticed
        super().save(stored)
        return super().load()

    def save(self, seen: Seen) -> None:
        if seen.generation <= self.load().generation:
            return
        super().save(seen)
        _replace(self._path, msgspec.json.encode(seen))

    def accept(self, seen: Seen) -> None:
        super().accept(seen)
        _replace(self._path, msgspec.json.encode(seen))


class Recollection:
    """The configuration object of the repository at one place, in a small file outside of it: it never changes, so it need not be read again.

    It is used only where it verifies under the keys that the repository has now.

    Args:
        path: The file; its folder is made when needed. Use one per place.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def load(self) -> bytes:
        """The object as it was read before; empty if it was not."""
        try:
            with open(self._path, "rb") as file:
                return file.read(CONFIG_KIND.object_limit)
        except OSError:
            return b""

    def save(self, config: bytes) -> None:
        """Remember the object."""
        try:
            _replace(self._path, config)
        except OSError:
            pass  # it is read again next time


def _replace(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    temporary.write_bytes(data)
    os.replace(temporary, path)
