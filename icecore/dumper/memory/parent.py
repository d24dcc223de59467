"""The parent of a snapshot as a dump needs it: its spaces by name, each with grid, records and
fingerprints.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec

from icecore.dumper.memory.spaces import ParentSpace, known_from
from icecore.errors import Damaged, FormatTooNew, NotFound, ObjectMissing, StoreError
from icecore.events import Event, Sink
from icecore.store.format.fingerprints import (
    NO_FINGERPRINTS,
    Fingerprints,
    decode_fingerprints,
    fingerprint_bytes,
)
from icecore.store.format.hints import decode_hints, limited
from icecore.store.format.manifest import Manifest, OpenFile, Space, cells_of
from icecore.store.format.state import SnapshotRecord
from icecore.store.log.repository import StoredRepository
from icecore.store.runtime.loop import LoopThread
from icecore.store.snapshot.reader import SnapshotReader


class Parent(msgspec.Struct):
    """The parent snapshot. A space is read on first use, or all at once by ``prepare``. A damaged one
    is reported and counts as missing.
    """

    manifest: Manifest
    _reader: SnapshotReader
    _emit: Sink
    _fingerprints: dict[str, Fingerprints]
    _spaces: dict[tuple[str, str], Space]
    _files: dict[str, OpenFile]
    _read: dict[tuple[str, str], ParentSpace | None] = msgspec.field(default_factory=dict)

    def space(self, kind: str, key: str) -> ParentSpace | None:
        """Return a space of the parent by kind and key; None: it is missing or damaged.

        Raises:
            StoreError: The storage failed.
        """
        if (kind, key) not in self._read:
            found = self._spaces.get((kind, key))
            self._read[kind, key] = self._load(found) if found is not None else None
        return self._read[kind, key]

    def _load(self, space: Space) -> ParentSpace | None:
        try:
            records = self._reader.records(space)
        except (Damaged, ObjectMissing) as error:
            self._damaged(error)
            return None
        fingerprints = self._fingerprints.get(f"{space.kind}:{space.key}", NO_FINGERPRINTS)
        known = known_from(space.regions, records, fingerprints)
        return ParentSpace(space, records, known, fingerprints.restless)

    def prepare(self) -> None:
        """Read every space now, so that the window does not wait for the storage.

        Raises:
            StoreError: The storage failed.
        """
        for kind, key in self._spaces:
            self.space(kind, key)

    def content(self, space: Space, most: int) -> bytearray | None:
        """Return the content of a file's space; None: it is damaged, which is reported.

        Args:
            most: Bytes; a larger space counts as damaged.
        """
        try:
            return self._reader.content(space, most)
        except (Damaged, ObjectMissing) as error:
            self._damaged(error)
            return None

    def _damaged(self, error: Exception) -> None:
        fields = {"snapshot": self.manifest.snapshot, "error": str(error)}
        self._emit(Event("dump.parent_damaged", {**fields}))

    def file(self, path: str) -> OpenFile | None:
        """Return what the parent recorded of an open file."""
        return self._files.get(path)


def load_parent(
    repository: StoredRepository, loop: LoopThread, record: SnapshotRecord, emit: Sink
) -> Parent | None:
    """Read the manifest and the fingerprints of a parent. A damaged parent is reported and counts as
    missing (None).
    """
    try:
        manifest = loop.run(repository.manifest(record))
    except (Damaged, ObjectMissing) as error:
        emit(Event("dump.parent_damaged", {"snapshot": record.snapshot, "error": str(error)}))
        return None
    fingerprints: dict[str, Fingerprints] = {}
    if manifest.hints:
        try:
            limit = fingerprint_bytes(cells_of(manifest), len(manifest.spaces))
            kind = limited(limit)
            data = loop.run(repository.backend.get(manifest.hints, limit=kind.object_limit))
            body = decode_hints(
                manifest.hints,
                data,
                repository.keys.hints,
                bytes.fromhex(manifest.hints_digest),
                kind=kind,
            )
            fingerprints = decode_fingerprints(body, limit)
        except (Damaged, FormatTooNew, StoreError) as error:
            # Without fingerprints every cell counts as changed, and is then found to be stored by
            # its id: slower, but correct.
            emit(Event("dump.hints_missing", {"snapshot": record.snapshot, "error": str(error)}))
    return Parent(
        manifest,
        SnapshotReader(repository, manifest, loop.loop),
        emit,
        fingerprints,
        {(s.kind, s.key): s for s in manifest.spaces},
        {f.path: f for f in manifest.files},
    )


async def choose_parent(
    repository: StoredRepository, job: str, wanted: str
) -> SnapshotRecord | None:
    """Choose the snapshot to build on: the wanted one if it is still listed, else the job's newest.
    A snapshot that lost data is never chosen, because its chunks may be the damaged ones.
    """
    if wanted:
        with suppress(NotFound):
            record = await repository.find(wanted)
            if not record.quarantined:
                return record
    newest = await repository.newest_of(job)  # reads at most one page of the list
    if newest is None or not newest.quarantined:
        return newest
    own = [
        record
        for record in await repository.snapshots()
        if record.job == job and not record.quarantined
    ]
    return own[-1] if own else None
