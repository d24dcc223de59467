"""Writes a snapshot as an image directory for plain ``criu restore``, or as the archive that it was
imported from, so that it can be restored without icecore. What is written is complete, or not there.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from icecore.errors import IcecoreError, StoreError, UsageError
from icecore.events import Event, Progress, Sink, discard, phase
from icecore.host.kernel.limits import threads_for
from icecore.restorer.fetch.fetcher import PLACE_THREADS
from icecore.restorer.fetch.limits import Limits
from icecore.restorer.files.archive import write_archive
from icecore.restorer.files.filewriter import FileTarget, shortage, write_files
from icecore.restorer.files.images import image_targets, plan_memory, read_spaces, spaces_of
from icecore.restorer.files.jobfiles import JobFiles
from icecore.restorer.files.jobpaths import components
from icecore.restorer.files.rights import Owner
from icecore.restorer.plan.cells import SpaceCells
from icecore.store.format.archive import ARCHIVE
from icecore.store.format.data import is_data
from icecore.store.format.manifest import Space
from icecore.store.log.repository import UNREGISTERED, StoredRepository
from icecore.store.runtime.loop import LoopThread
from icecore.store.snapshot.reader import SnapshotReader

#: Where the content of open files goes, below the image directory, each under its path.
OPEN_FILES = "open-files"
_BUDGET = 256 << 20


class ExportResult(msgspec.Struct, frozen=True):
    """What an export wrote.

    Attributes:
        directory: The image directory, or the archive.
        bytes: Of all files.
        images: How many image and page files, or members of the archive.
        open_files: Paths of open files whose content lies under `OPEN_FILES`, and must be put in
            place before ``criu restore``.
        seconds: How long it took.
    """

    directory: Path
    bytes: int
    images: int
    open_files: list[str]
    seconds: float


def export(
    repository: StoredRepository,
    loop: LoopThread,
    snapshot: str,
    directory: str | os.PathLike[str],
    *,
    threads: int = 0,
    register: bool = True,
    emit: Sink = discard,
) -> ExportResult:
    """Write a snapshot as an image directory of CRIU; one that was imported from a checkpoint archive
    becomes that archive again.

    Args:
        repository: Holds the snapshot; it lives in ``loop``.
        snapshot: Its id.
        directory: It is made if missing, and must be empty; an archive must not exist.
        threads: Threads that decode; 0: one for each core, six at most.
        register: Protect what is read from collection meanwhile; False is for repositories that
            cannot be written to.
        emit: Gets ``export.*`` events.

    Raises:
        NotFound: There is no such snapshot.
        UsageError: The directory is not empty, or the archive exists.
        Damaged: An object of the snapshot is not what was written.
        StoreError: The storage failed, or there is no room.
    """
    began = time.perf_counter()
    folder = Path(directory)
    session = loop.run(repository.read_session(snapshot, purpose="export")) if register else None
    if session is None:
        emit(Event("export.warning", {"message": UNREGISTERED}))
    try:
        reader = SnapshotReader.open(repository, snapshot, loop.loop)
        limits = Limits(threads or threads_for(PLACE_THREADS), _BUDGET, 4, 60.0)
        with phase(emit, "export.write", snapshot=snapshot) as running:
            if ARCHIVE in reader.manifest.extra:
                size, members = write_archive(
                    repository.backend, loop, reader, folder, limits, running.progress
                )
                result = ExportResult(folder, size, members, [], time.perf_counter() - began)
            else:
                result = _write_directory(
                    repository, loop, reader, folder, limits, began, running.progress
                )
            running.bytes = result.bytes
    finally:
        try:
            if session is not None:
                loop.run(session.abort())
        except IcecoreError as error:
            # It only pinned the snapshot, and is fenced after the silence timeout.
            emit(Event("export.warning", {"message": str(error)}))
    return result


def _write_directory(
    repository: StoredRepository,
    loop: LoopThread,
    reader: SnapshotReader,
    folder: Path,
    limits: Limits,
    began: float,
    progress: Progress,
) -> ExportResult:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty", cure="name a new directory")
    except OSError as error:
        raise StoreError(f"cannot make {folder}: {error.strerror}") from error
    try:
        return _Export(repository, loop, reader, folder, limits).run(began, progress)
    except BaseException:
        _empty(folder)
        raise


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


class _Export:
    def __init__(
        self,
        repository: StoredRepository,
        loop: LoopThread,
        reader: SnapshotReader,
        folder: Path,
        limits: Limits,
    ) -> None:
        self.backend = repository.backend
        self.loop = loop
        self.reader = reader
        self.folder = folder
        self.limits = limits

    def run(self, began: float, progress: Progress) -> ExportResult:
        manifest = self.reader.manifest
        if any(space.kind == "device" for space in manifest.spaces):
            raise UsageError(
                "the snapshot holds resident device memory, which CRIU's images cannot hold",
                cure="restore it with icecore, or start the job with --no-resident",
            )
        images, memory = spaces_of(manifest, "image"), spaces_of(manifest, "process", "shared")
        files = [space for space in spaces_of(manifest, "file") if not is_data(space)]
        far = not self.backend.direct
        cells = read_spaces(self.reader, [*images, *memory, *files], parallel=far)
        targets = image_targets(self.folder, images, cells[: len(images)])
        self._require_space(targets)
        self._write(targets)
        version = tuple(
            int(number) for number in re.findall(r"\d+", manifest.requirements.criu)[:3]
        )
        own = cells[len(images) : len(images) + len(memory)]
        pages = plan_memory(
            self.folder, list(zip(memory, own, strict=True)), version, lazily=False
        ).page_images
        with ExitStack() as stack:
            own_files = stack.enter_context(JobFiles(str(self.folder)))
            open_files = [
                self._open_file(stack, own_files, space, part)
                for space, part in zip(files, cells[len(images) + len(memory) :], strict=True)
            ]
            self._require_space([*pages, *open_files])
            self._write([*pages, *open_files], progress)
        written = [*targets, *pages, *open_files]
        return ExportResult(
            self.folder,
            sum(target.size for target in written),
            len(targets) + len(pages),
            [space.key for space in files],
            time.perf_counter() - began,
        )

    def _open_file(
        self, stack: ExitStack, files: JobFiles, space: Space, cells: SpaceCells
    ) -> FileTarget:
        """Make the file that the content of an open file goes into, with its directories."""
        components(space.key)
        path, owner = f"/{OPEN_FILES}{space.key}", Owner(os.geteuid(), os.getegid())
        try:
            files.make_directories(os.path.dirname(path), owner)
            descriptor = files.create(files.locate(path), owner)
        except OSError as error:
            raise StoreError(f"cannot write {self.folder}{path}: {error.strerror}") from error
        stack.callback(os.close, descriptor)
        return FileTarget(f"{self.folder}{path}", space.size, cells, descriptor=descriptor)

    def _require_space(self, targets: Sequence[FileTarget]) -> None:
        if short := shortage(self.folder, targets):
            raise StoreError(
                f"there is no room for the export: {short}",
                cure="name a directory on a larger file system",
            )

    def _write(self, targets: Sequence[FileTarget], progress: Progress | None = None) -> None:
        try:
            write_files(self.backend, self.reader, targets, self.limits, self.loop, progress)
        except OSError as error:
            raise StoreError(f"cannot write {error.filename}: {error.strerror}") from error
