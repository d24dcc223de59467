"""What this client remembers of a repository between runs: the newest generation it saw, so that an older state shown later is an error."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec


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
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(f".{self._path.name}-{secrets.token_hex(4)}")
        temporary.write_bytes(msgspec.json.encode(seen))
        os.replace(temporary, self._path)
