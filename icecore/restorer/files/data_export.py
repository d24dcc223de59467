"""Writes the content of a snapshot's data directory to another place, without restoring the job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from icecore.errors import IcecoreError, NotFound, StoreError, UsageError
from icecore.events import Event, Sink, discard, phase
from icecore.host.kernel.limits import threads_for
from icecore.restorer.fetch.fetcher import PLACE_THREADS
from icecore.restorer.fetch.limits import Limits
from icecore.restorer.files.data import Content
from icecore.restorer.files.filewriter import FileTarget, shortage, write_files
from icecore.restorer.files.images import read_spaces
from icecore.restorer.files.job_directories import MadeDirectory
from icecore.restorer.files.jobfiles import JobFiles
from icecore.restorer.files.jobpaths import Place
from icecore.restorer.files.rights import Owner, inode_of
from icecore.restorer.plan.cells import SpaceCells
from icecore.store.backend.base import Backend
from icecore.store.format.contract import snapshot_owner
from icecore.store.format.data import (
    MAX_TABLE,
    OPEN,
    Entry,
    content_key,
    data_spaces,
    decode_entries,
    read_data,
)
from icecore.store.format.manifest import Manifest, OpenFile
from icecore.store.log.repository import UNREGISTERED, StoredRepository
from icecore.store.runtime.loop import LoopThread
from icecore.store.snapshot.reader import SnapshotReader

_BUDGET = 256 << 20
#: Files that are open together.
_AT_ONCE = 512


class DataExport(msgspec.Struct, frozen=True):
    """What was written: the directory, its entries, the bytes of its files, and how long it took."""

    directory: Path
    entries: int
    bytes: int
    seconds: float


def export_data(
    repository: StoredRepository,
    loop: LoopThread,
    snapshot: str,
    data: str,
    directory: str | os.PathLike[str],
    *,
    register: bool = True,
    emit: Sink = discard,
) -> DataExport:
    """Write the content of a data directory, with owners, modes and times.

    Args:
        data: Path of the data directory, as the job sees it.
        directory: It is made if missing, and must be empty.
        register: Protect what is read from collection meanwhile.
        emit: Gets ``export.*`` events.

    Raises:
        NotFound: There is no such snapshot, or it has no such data directory.
        UsageError: The directory is not empty.
        Damaged: An object of the snapshot is not what was written.
        StoreError: The storage failed, or there is no room.
    """
    session = loop.run(repository.read_session(snapshot, purpose="export")) if register else None
    if session is None:
        emit(Event("export.warning", {"message": UNREGISTERED}))
    try:
        reader = SnapshotReader.open(repository, snapshot, loop.loop)
        with phase(emit, "export.write", snapshot=snapshot) as running:
            done = _export(repository.backend, loop, reader, data, Path(directory).absolute())
            running.bytes = done.bytes
    finally:
        try:
            if session is not None:
                loop.run(session.abort())
        except IcecoreError as error:
            # It only pinned the snapshot, and is fenced after the silence timeout.
            emit(Event("export.warning", {"message": str(error)}))
    return done


def _export(
    backend: Backend, loop: LoopThread, reader: SnapshotReader, data: str, folder: Path
) -> DataExport:
    paths = [one.path for one in read_data(reader.manifest)]
    if data not in paths:
        raise NotFound(
            f"the snapshot has no data directory {data}",
            cure=f"it has {', '.join(paths)}" if paths else "start the job with --data",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty", cure="name a new directory")
        return write_data(backend, loop, reader, data, folder)
    except OSError as error:
        raise StoreError(
            f"cannot write {error.filename or folder}: {error.strerror}",
            cure=f"remove {folder}, and export as root to a directory that only root can change",
        ) from error


def write_data(
    backend: Backend, loop: LoopThread, reader: SnapshotReader, data: str, folder: Path
) -> DataExport:
    """Write the content of a data directory of a snapshot, with owners, modes and times.

    Args:
        folder: An empty directory, which no other user can change meanwhile.

    Raises:
        NotFound: The content of a file is missing.
        OSError: Something cannot be written.
        StoreError: There is no room, or the storage failed.
    """
    began, manifest = time.perf_counter(), reader.manifest
    table, content = data_spaces(manifest, data)
    entries = decode_entries(reader.content(table, MAX_TABLE), data, content.size)
    opened = {os.fsencode(space.key): space for space in manifest.spaces if space.kind == "file"}
    whole = read_spaces(reader, [content], parallel=False)[0]

    def cells(entry: Entry) -> SpaceCells:
        if entry.location != OPEN:
            return Content(content_key(data), entry.location, entry.cells).of(whole)
        space = opened.get(os.fsencode(data) + b"/" + entry.path)
        if space is None:
            raise NotFound(f"the content of {os.fsdecode(entry.path)!a} is not in the snapshot")
        return read_spaces(reader, [space], parallel=False)[0]

    if short := shortage(folder, [FileTarget(str(folder), content.size, whole)]):
        raise StoreError(
            f"there is no room for the files of {data}: {short}",
            cure="free space there, or name a directory on a larger file system",
        )
    with ExitStack() as stack:
        files = stack.enter_context(JobFiles(str(folder)))
        _Writer(files, entries, folder, snapshot_owner(manifest)).write(
            lambda targets: write_files(
                backend,
                reader,
                targets,
                Limits(threads_for(PLACE_THREADS), _BUDGET, 4, 60.0),
                loop,
            ),
            cells,
        )
    size = sum(entry.size for entry in entries)
    return DataExport(folder, len(entries) - 1, size, time.perf_counter() - began)


def link_lost_names(manifest: Manifest, data: str, folder: Path) -> None:
    """Give files in a written data directory again the deleted names under which the job has them
    open: CRIU opens them by these names, and then removes the names.

    Args:
        data: Path of the data directory, as the job sees it.
        folder: Where it was written (`write_data`).

    Raises:
        RestoreFailed: A name leads through a link that the job's user could make.
        OSError: A name cannot be made.
    """
    with JobFiles(str(folder)) as files:
        _link_lost_names(files, manifest, data)


def _link_lost_names(files: JobFiles, manifest: Manifest, data: str) -> None:
    for file in manifest.files:
        source = next((name for name in file.links if name.startswith(f"{data}/")), "")
        if not source or not file.path.startswith(f"{data}/"):
            continue
        place, there = (files.locate(name.removeprefix(data)) for name in (file.path, source))
        about = there.stat()
        if place.stat() is not None or about is None:
            continue
        known = files.open_path(there, inode_of(about))
        try:
            files.link(known, place, Owner(os.geteuid(), os.getegid()))
        finally:
            os.close(known)


class _Writer:
    """Writes the entries of a table below a new directory."""

    def __init__(self, files: JobFiles, entries: Sequence[Entry], folder: Path, owner: int) -> None:
        self._snapshot_owner = owner
        self._files = files
        self._entries = entries
        self._folder = folder
        self._me = Owner(os.geteuid(), os.getegid())
        self._made: list[tuple[MadeDirectory, Entry]] = []

    def write(
        self,
        fill: Callable[[Sequence[FileTarget]], object],
        cells: Callable[[Entry], SpaceCells],
    ) -> None:
        """Write everything: directories first, which get their owner, mode and time last."""
        by_kind: dict[str, list[Entry]] = {}
        for entry in self._entries:
            by_kind.setdefault(entry.kind, []).append(entry)
        for entry in by_kind.get("directory", []):
            if entry.path:
                path = f"/{os.fsdecode(entry.path)}"
                for made in self._files.make_directories(path, self._me, 0o700):
                    self._made.append((made, entry))
        regular = by_kind.get("file", [])
        for first in range(0, len(regular), _AT_ONCE):
            self._write_files(regular[first : first + _AT_ONCE], fill, cells)
        for entry in by_kind.get("link", []):
            source = self._place(entry.target)
            about = source.stat()
            assert about is not None
            known = self._files.open_path(source, inode_of(about))
            try:
                self._files.link(known, self._place(entry.path), self._me)
            finally:
                os.close(known)
        for entry in by_kind.get("symlink", []):
            owner = self._owner(entry)
            place = self._place(entry.path)
            os.close(self._files.create_symlink(place, owner, entry.target, entry.mtime_ns))
        for entry in by_kind.get("fifo", []):
            descriptor = self._files.create_fifo(self._place(entry.path), self._owner(entry))
            try:
                owner = self._owner(entry)
                self._files.settle_fifo(descriptor, owner, entry.mode, entry.mtime_ns)
            finally:
                os.close(descriptor)
        for made, entry in reversed(self._made):
            self._files.hand_directory(
                made, self._owner(entry), entry.mode, entry.mtime_ns, self._attributes(entry)
            )

    def _attributes(self, entry: Entry) -> dict[bytes, bytes]:
        return entry.attributes_for(self._snapshot_owner or self._me.user)

    def _owner(self, entry: Entry) -> Owner:
        return Owner(entry.user, entry.group) if self._me.user == 0 else self._me

    def _place(self, path: bytes) -> Place:
        parent, name = os.path.split(f"/{os.fsdecode(path)}")
        return Place(self._files.directory(parent), name)

    def _write_files(
        self,
        entries: Sequence[Entry],
        fill: Callable[[Sequence[FileTarget]], object],
        cells: Callable[[Entry], SpaceCells],
    ) -> None:
        with ExitStack() as stack:
            targets, opened = [], []
            for entry in entries:
                descriptor = self._files.create(self._place(entry.path), self._me)
                stack.callback(os.close, descriptor)
                opened.append((entry, descriptor))
                shown = f"{self._folder}/{os.fsdecode(entry.path)}"
                targets.append(FileTarget(shown, entry.size, cells(entry), descriptor=descriptor))
            fill(targets)
            for entry, descriptor in opened:
                file = _as_file(entry, self._owner(entry))
                self._files.settle(descriptor, file, self._attributes(entry))


def _as_file(entry: Entry, owner: Owner) -> OpenFile:
    return OpenFile(
        path=f"/{os.fsdecode(entry.path)}",
        size=entry.size,
        mtime_ns=entry.mtime_ns,
        inode=entry.inode,
        device=0,
        mode=entry.mode,
        user=owner.user,
        group=owner.group,
        writable=False,
        policy="content",
    )
