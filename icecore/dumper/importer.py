"""Store images that CRIU wrote as a snapshot: pages by address, everything else as files. They come
in a directory, or in a container's checkpoint archive, which is only read.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

from icecore.dumper.imported import Images, Piece, open_images
from icecore.dumper.memory.cells import EXTENT
from icecore.dumper.memory.images import ImageSet, Pagemap, read_images
from icecore.dumper.memory.parent import Parent
from icecore.dumper.memory.plain import CompactPages, ImmediatePipeline
from icecore.dumper.memory.sources import FileSource
from icecore.dumper.memory.spaces import ScanContext, SpaceCapture
from icecore.dumper.observe.facts import describe_requirements
from icecore.dumper.storing import Stored, Storing
from icecore.errors import Damaged, NotFound, UsageError
from icecore.events import Event, Sink, discard, phase
from icecore.host.criu import images as criu_images
from icecore.host.kernel import limits
from icecore.sizes import PAGE
from icecore.store.format.contract import IMPORTED
from icecore.store.format.manifest import (
    MANIFEST_FORMAT,
    Manifest,
    Namespaces,
    OpenFile,
    Process,
    Region,
    Sizes,
)
from icecore.store.format.names import new_snapshot_id
from icecore.store.log.repository import StoredRepository
from icecore.store.runtime.loop import LoopThread
from icecore.store.snapshot.trial import Objective
from icecore.text import host_name, job_name, require_label

#: Memory for cells between reading and storing, small so that they are still in a cache when they
#: are hashed again.
_STAGING_BYTES = 20 << 20
_MAX_STREAMS = 16
_THREADS = 4
_MAX_ARGUMENTS = 1 << 17


class ImportResult(msgspec.Struct, frozen=True):
    """The result of an import: the snapshot's id, its lineage and parent, sizes in bytes, and the
    duration.
    """

    snapshot: str
    job: str
    lineage: str
    parent: str
    seconds: float
    sizes: Sizes


def import_images(
    repository: StoredRepository,
    loop: LoopThread,
    directory: str | os.PathLike[str],
    job: str = "",
    *,
    parent: str = "",
    threads: int = 0,
    tags: Sequence[str] = (),
    objective: Objective | None = None,
    emit: Sink = discard,
) -> ImportResult:
    """Store an image directory of ``criu dump``, or a checkpoint archive of Podman, CRI-O or the
    kubelet, as a snapshot.

    Args:
        repository: Where the snapshot goes; it lives in ``loop``.
        directory: Holds the images, including ``pages-*.img``, or is an archive. Incremental dumps
            (with a ``parent`` link) and lazy dumps without their pages are refused.
        job: Name of the job, whose snapshots form the lineage. Empty: the name of the container, or
            of the root process.
        parent: Snapshot to build on; empty: the job's newest, if any.
        threads: Number of threads that read and encode; 0: one per core, up to four.
        tags: Free tags of the snapshot.
        objective: What to save, bytes or time; None: the default.
        emit: Gets ``import.*`` and ``store.*`` events.

    Raises:
        NotFound: ``directory`` is no image directory and no archive.
        UsageError: It depends on other directories.
        Damaged: An image is missing or malformed.
        StoreError: The snapshot could not be stored.
    """
    began = time.perf_counter()
    for tag in tags:
        require_label(tag)
    with ExitStack() as stack:
        images = stack.enter_context(open_images(Path(directory)))
        manifest = _Import(
            repository, loop, images, job, parent, threads, tags, objective, emit, stack
        ).run()
    result = ImportResult(
        manifest.snapshot,
        manifest.job,
        manifest.lineage,
        manifest.parent,
        time.perf_counter() - began,
        manifest.sizes,
    )
    emit(
        Event(
            "import.done",
            {
                "snapshot": result.snapshot,
                "job": result.job,
                "parent": result.parent,
                "seconds": result.seconds,
                "logical": result.sizes.logical,
                "changed": result.sizes.changed,
                "stored": result.sizes.stored,
            },
        )
    )
    return result


class _Import:
    """One import. ``stack`` undoes everything that was begun."""

    def __init__(
        self,
        repository: StoredRepository,
        loop: LoopThread,
        images: Images,
        job: str,
        parent: str,
        threads: int,
        tags: Sequence[str],
        objective: Objective | None,
        emit: Sink,
        stack: ExitStack,
    ) -> None:
        self.repository = repository
        self.loop = loop
        self.images = images
        self.folder = folder = images.folder
        self.tasks = criu_images.load_pstree(folder)
        self.cores = {task.pid: criu_images.load_core(folder, task.pid) for task in self.tasks}
        if not self.tasks:
            raise Damaged("image", "pstree.img", "it has no process")
        self.job = (
            job
            or job_name(images.name)
            or job_name(self.cores[self.tasks[0].pid].command)
            or f"import-{self.tasks[0].pid}"
        )
        self.wanted_parent = parent
        self.threads = threads or limits.threads_for(_THREADS)
        self.tags = list(dict.fromkeys([*tags, *images.tags]))
        self.link_rate = objective.link if objective is not None else 0.0
        self.emit = emit
        self.stack = stack
        self.streams = min(_MAX_STREAMS, len(self.tasks))
        self.commands: dict[int, list[str]] = {}

    def run(self) -> Manifest:
        """Store the directory and commit the snapshot."""
        memory = read_images(self.folder)
        storing = Storing(
            self.repository,
            self.loop,
            self.stack,
            job=self.job,
            parent=self.wanted_parent,
            purpose="import",
            streams=self.streams,
            staging_bytes=_STAGING_BYTES,
            threads=self.threads,
            encode_threads=0,
            link_rate=self.link_rate,
            emit=self.emit,
        )
        if self.wanted_parent not in ("", storing.parent_id):
            raise NotFound(
                f"there is no snapshot {self.wanted_parent}", cure="'icecore ls' lists them"
            )
        with phase(self.emit, "import.store", directory=str(self.images.source)) as running:
            context = replace(
                storing.context,
                pipeline=ImmediatePipeline(storing.writer, storing.staging),
                advance=running.counter(self.images.bytes),
            )
            captures = self._capture(memory, storing.parent, context)
            manifest = self._manifest(storing, storing.finish(captures))
            running.bytes = manifest.sizes.logical + manifest.sizes.zero
            running.fields |= {
                "stored": manifest.sizes.stored,
                "by_codec": dict(manifest.sizes.by_codec),
            }
        storing.writer.commit(manifest)
        return manifest

    # -- content

    def _capture(
        self, images: ImageSet, parent: Parent | None, context: ScanContext
    ) -> list[SpaceCapture]:
        captures = []
        memory = [("process", pagemap) for pagemap in images.processes] + [
            ("shared", p) for p in images.shared
        ]
        for number, (kind, pagemap) in enumerate(memory):
            before = parent.space(kind, str(pagemap.number)) if parent else None
            capture = SpaceCapture.make(
                "process" if kind == "process" else "shared",
                str(pagemap.number),
                0,
                pagemap.regions,
                before,
                stream=number % self.streams,
            )
            captures.append(capture)
            self._pages(capture, pagemap, context)
        for piece in self.images.pieces:
            captures.append(self._image(piece, parent, context))
        return captures

    def _pages(self, capture: SpaceCapture, pagemap: Pagemap, context: ScanContext) -> None:
        if int(pagemap.written["pages"].sum()) != int(pagemap.extents["pages"].sum()):
            raise UsageError(
                f"{self.images.source} is a lazy dump without the memory of {capture.kind} {capture.key}",
                cure="dump without --lazy-pages",
            )
        if not len(pagemap.extents):
            return
        if (np.diff(pagemap.written["address"].astype(np.int64)) < 0).any():
            raise Damaged(
                "image",
                f"pagemap of {capture.kind} {capture.key}",
                "its entries are not in address order",
            )
        piece = self.images.page_image(pagemap.pages)
        source = CompactPages(piece.path, pagemap.extents, (piece.offset, piece.size))
        try:
            if capture.kind == "process":
                self.commands[pagemap.number] = self._command(pagemap.number, source)
            capture.scan(source, pagemap.extents, context)
        finally:
            source.close()

    def _command(self, pid: int, source: CompactPages) -> list[str]:
        """Return a process's arguments, read from where the kernel put them on its stack; empty if
        they are not in the images.
        """
        start, end = criu_images.load_mm(self.folder, pid).arguments
        data = source.read(start, min(end - start, _MAX_ARGUMENTS))
        return [os.fsdecode(word) for word in data.rstrip(b"\0").split(b"\0")] if data else []

    def _image(self, piece: Piece, parent: Parent | None, context: ScanContext) -> SpaceCapture:
        size = piece.size
        before = parent.space("image", piece.key) if parent else None
        regions = (
            [Region(0, -(-size // PAGE) * PAGE, 0, kind="image", name=piece.name)] if size else []
        )
        capture = SpaceCapture.make("image", piece.key, size, regions, before)
        if size:
            descriptor = os.open(piece.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                extents = np.array([(0, -(-size // PAGE))], EXTENT)
                source = FileSource(descriptor, size, piece.name, piece.offset)
                capture.scan(source, extents, context)
            finally:
                os.close(descriptor)
        return capture

    # -- the manifest

    def _manifest(self, storing: Storing, stored: Stored) -> Manifest:
        own_pids = self.tasks[0].pid == 1
        # CRIU's data on a dead process's threads is meaningless.
        alive = [task for task in self.tasks if self.cores[task.pid].state != criu_images.DEAD]
        pids = sorted({task.pid for task in self.tasks}.union(*(task.threads for task in alive)))
        requirements = describe_requirements(
            self.images.criu_version(), [] if own_pids else pids, [], []
        )
        return Manifest(
            format=MANIFEST_FORMAT,
            snapshot=new_snapshot_id(),
            job=self.job,
            lineage=storing.lineage,
            parent=storing.parent_id,
            created_ns=(self.folder / "pstree.img").stat().st_mtime_ns,
            host=host_name(),
            writer="icecore import",
            root_pid=self.tasks[0].pid,
            processes=self._processes(),
            spaces=stored.spaces,
            files=self._files(),
            # The directory may come from another machine, so what it does not name is not required.
            requirements=msgspec.structs.replace(requirements, kernel="", cpu=[]),
            namespaces=self._namespaces(own_pids),
            criu_options=[],
            tags=self.tags,
            sizes=stored.sizes,
            hints=stored.hints,
            hints_digest=stored.hints_digest,
            extra={IMPORTED: str(self.images.source.absolute()), **self.images.extra},
        )

    def _processes(self) -> list[Process]:
        paths = {file.id: file.path for file in criu_images.load_files(self.folder)}
        found = []
        for task in self.tasks:
            core = self.cores[task.pid]
            alive = core.state != criu_images.DEAD
            executable = (
                paths.get(criu_images.load_mm(self.folder, task.pid).executable, "")
                if alive
                else ""
            )
            found.append(
                Process(
                    image_id=task.pid,
                    pid=task.pid,
                    parent=task.parent,
                    group=task.group,
                    session=task.session,
                    threads=len(task.threads) if alive else 0,
                    command=self.commands.get(task.pid) or [core.command],
                    executable=executable,
                    user=self._user(task.pid) if alive else 0,
                    alive=alive,
                )
            )
        return found

    def _user(self, pid: int) -> int:
        """Return the user id of a process (core.proto: the main thread's credentials)."""
        (message,) = criu_images.read_image(self.folder / f"core-{pid}.img", criu_images.CORE)
        return message.message(5).message(10).integer(1)

    def _namespaces(self, own_pids: bool) -> Namespaces:
        def there(pattern: str) -> bool:
            return any(fnmatchcase(piece.key, pattern) for piece in self.images.pieces)

        return Namespaces(
            pid=own_pids,
            ipc=there("ipcns-*.img"),
            mount=there("mountpoints-*.img"),
            network="own" if there("netdev-*.img") else "host",
            uts=there("utsns-*.img"),
        )

    def _files(self) -> list[OpenFile]:
        """Return the regular files that CRIU will look for, with the sizes that it will require.
        Their other attributes are not known.
        """
        ghosts = {remap.original for remap in criu_images.load_remaps(self.folder)}
        found: dict[str, OpenFile] = {}
        for file in criu_images.load_files(self.folder):
            regular = file.mode == 0 or stat.S_ISREG(file.mode)
            if (
                not regular
                or file.size is None
                or file.external
                or file.id in ghosts
                or not file.path.startswith("/")
            ):
                continue
            writable = (file.flags & os.O_ACCMODE) != os.O_RDONLY
            if file.path in found and not writable:
                continue
            found[file.path] = OpenFile(
                path=file.path,
                size=file.size,
                mtime_ns=0,
                inode=0,
                device=0,
                mode=stat.S_IMODE(file.mode),
                user=0,
                group=0,
                writable=writable,
                policy="checked",
            )
        return [found[path] for path in sorted(found)]
