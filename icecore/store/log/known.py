"""Records which repository a client knows at a place: its id, and whether it is encrypted. The
record is binding: only a place without one is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from blake3 import blake3

from icecore.errors import RecordDamaged, RepositoryReplaced
from icecore.store.log import notes

_Record = TypeVar("_Record", "_At", "_Alias")


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A repository.

    Attributes:
        id: Its id.
        encrypted: Whether it is encrypted.
        plain: Whether the user accepted it without encryption.
    """

    id: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    encrypted: bool
    plain: bool = False

    def __str__(self) -> str:
        return f"{'encrypted' if self.encrypted else 'plain'} repository {self.id}"


class _At(msgspec.Struct, frozen=True, tag="repository", forbid_unknown_fields=True):
    """The record under a place's own name: which repository is there."""

    place: str
    known: Known


class _Alias(msgspec.Struct, frozen=True, tag="alias", forbid_unknown_fields=True):
    """The record under another name: the place that it led to."""

    place: str
    leads_to: str


class KnownPlace:
    """What a client knows of one place, in files outside it.

    A link may name the place, and users who cannot write to the place may be able to change the
    link, so the record includes where the link led.

    Args:
        folder: Holds a file for each name; created when needed.
        names: `icecore.store.backend.base.Backend.known_as`, the place's own name last.
        where: The place as people name it.
    """

    def __init__(self, folder: Path, names: Sequence[str], where: str) -> None:
        self._folder = folder
        self._aliases = [_printable(name) for name in names[:-1]]
        self._own = _printable(names[-1])
        self._where = _printable(where)

    def recall(self) -> Known | None:
        """Return what is known of the place; None if this client has never used it.

        Raises:
            RecordDamaged: A record is not what was written.
            RepositoryReplaced: A link now leads to a place at which this client knows another
                repository.
        """
        known = self._known_at(self._own)
        for name in self._aliases:
            alias = self._read(name, _Alias)
            # A name without an alias record may have a record from when it was the place itself.
            led = alias.leads_to if alias is not None else name
            if led == self._own:
                continue
            before = self._known_at(led)
            if known is not None and before is not None:
                self._require(known, before, f", where the link led to {led}")
            known = known or before
        return known

    def admit(self, found: Known) -> None:
        """Require that the repository at the place is the known one; record it if none is known.

        Args:
            found: The repository at the place. Its ``plain`` counts only if none is known.

        Raises:
            RepositoryReplaced: Another repository is known, or an encrypted one.
            RecordDamaged: A record is not what was written.
        """
        complete = self._complete()  # before it is compared: another client may record now
        self.require(found)
        if complete:
            return
        with notes.locked(self._folder):
            self.require(found)  # another process may have been first
            self._write(self.recall() or found)

    def require(self, found: Known) -> None:
        """Require that ``found`` is the repository known at the place, if one is known.

        Raises:
            RepositoryReplaced: It is another one.
            RecordDamaged: A record is not what was written.
        """
        known = self.recall()
        if known is not None:
            self._require(found, known, " there")

    def _require(self, found: Known, known: Known, where: str) -> None:
        if (found.id, found.encrypted) != (known.id, known.encrypted):
            raise RepositoryReplaced(
                f"{self._where} holds {found}; this client knows {known}{where}",
                cure=f"find out who replaced it before you use it; 'icecore trust {self._where}' shows both, and can accept the new one",
            )

    def note(self, known: Known) -> None:
        """Record what is at the place, replacing the earlier record: for whoever created the
        repository, and after the user's confirmation.
        """
        with notes.locked(self._folder):
            self._write(known)

    def _complete(self) -> bool:
        led = [self._read(name, _Alias) for name in self._aliases]
        return self._known_at(self._own) is not None and all(
            alias is not None and alias.leads_to == self._own for alias in led
        )

    def _write(self, known: Known) -> None:
        # The place first: an alias without it would be meaningless.
        notes.write(self._path(self._own), msgspec.json.encode(_At(self._own, known)))
        for name in self._aliases:
            notes.write(self._path(f"alias {name}"), msgspec.json.encode(_Alias(name, self._own)))

    def _known_at(self, name: str) -> Known | None:
        record = self._read(name, _At)
        return record.known if record is not None else None

    def _path(self, key: str) -> Path:
        return self._folder / blake3(key.encode()).hexdigest()[:32]

    def _read(self, name: str, kind: type[_Record]) -> _Record | None:
        path = self._path(f"alias {name}" if kind is _Alias else name)
        data = notes.read(path)
        if data is None:
            return None
        try:
            record = msgspec.json.decode(data, type=kind)
            if record.place != name:
                raise ValueError(f"it is the record of {record.place}")
            return record
        except ValueError as error:  # msgspec's and Unicode's are, too
            raise RecordDamaged(
                f"{path}, the record of the repository at {self._where}, is damaged: {error}",
                cure=f"'icecore trust {self._where}' shows what is there, and can record it again",
            ) from error


def _printable(name: str) -> str:
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")
