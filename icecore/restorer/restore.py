"""A restore from beginning to end. Its rule: the whole tree runs with all its memory, or none of it
runs and nothing of it is left.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from icecore.errors import Damaged, IcecoreError, RestoreFailed, RestoreRefused, UsageError
from icecore.events import Event, Phase, Sink, Value, discard, phase
from icecore.host.criu.image_changes import forget_sizes
from icecore.host.criu.program import Criu, find_criu, restore_environment
from icecore.host.cuda import holder as plugin
from icecore.host.jobs.job import ExitStatus, Job, Stream
from icecore.host.jobs.namespaces import INSTANCE_MOUNT, RunRecord
from icecore.host.jobs.registry import Registry, Restoring
from icecore.host.kernel.limits import (
    kernel_version,
    memory_available,
    overcommits,
    raise_descriptor_limit,
    require_directory,
    threads_for,
)
from icecore.host.resident.client import Keeper
from icecore.host.resident.keeper import claimed
from icecore.host.workdir import make_work_directory
from icecore.restorer import workingset
from icecore.restorer.fetch.fetcher import PLACE_THREADS, Limits
from icecore.restorer.files.copies import (
    make_directory,
    remove_empty,
    require_all_covered,
    require_copies_possible,
)
from icecore.restorer.files.file_recovery import command as recovery_command
from icecore.restorer.files.file_recovery import recover
from icecore.restorer.files.filewriter import FileTarget, write_files
from icecore.restorer.files.held_files import require_files
from icecore.restorer.files.images import (
    FILE_NAME,
    SPARE,
    Memory,
    image_targets,
    plan_memory,
    read_spaces,
    spaces_of,
)
from icecore.restorer.files.jobfiles import Inode, JobFiles, Owner
from icecore.restorer.files.put_back import PutBack
from icecore.restorer.files.shortage import shortage
from icecore.restorer.fill.device_file import DeviceFile, FileUnusable
from icecore.restorer.gpu.devices import Devices
from icecore.restorer.gpu.gpus import temporary
from icecore.restorer.gpu.resident import Resident
from icecore.restorer.gpu.resident_record import RecordedProcess, outlives, recorded, resident_bytes
from icecore.restorer.guard.client import Guard
from icecore.restorer.options import RestoreOptions
from icecore.restorer.place.placers import Placers, placers_for
from icecore.restorer.place.placing import PLACER_BYTES
from icecore.restorer.plan.cells import SpaceCells
from icecore.restorer.plan.memory import room_for
from icecore.restorer.requirements import Requirements, check_requirements
from icecore.restorer.tree import Tree, criu_arguments
from icecore.store.format.manifest import Manifest
from icecore.store.format.state import SnapshotRecord
from icecore.store.log.repository import UNREGISTERED, Repository
from icecore.store.log.session import Session
from icecore.store.runtime.loop import LoopThread
from icecore.store.snapshot.reader import SnapshotReader

_DEFAULT_WORKDIR = "/dev/shm"
_GUARD_SECONDS = 60.0
#: The first Linux whose userfaultfd tells of pages that a file in memory has and a process has not
#: mapped yet.
_FIRST_MINOR_FAULTS = (5, 14)
#: Bytes fetched and not yet placed, for each process with device memory.
_BUDGET = 512 << 20
#: File systems that a job with a private root has for itself: their files come with CRIU's images.
_OWN_FOLDERS = ("/dev/shm/", "/proc/", "/dev/pts/", "/dev/mqueue/")


@dataclass
class Restored:
    """A restored tree.

    Attributes:
        snapshot: What it was restored from.
        pid: Its root, as this machine sees it.
        job: The instance, for jobs that `icecore run` started.
        seconds_to_running: From the call until the tree ran.
        seconds_to_resident: From the call until all memory was there; None until then.
        log_sizes: Bytes that the logs of ``job`` held before it ran; what follows them the restored
            instance has written.
    """

    snapshot: str
    pid: int
    job: Job | None
    seconds_to_running: float
    seconds_to_resident: float | None = None
    log_sizes: Mapping[Stream, int] = field(default_factory=dict)
    _resident: Future[float] = field(default_factory=Future)
    _exit: Future[int] = field(default_factory=Future)

    def wait_resident(self, timeout: float | None = None) -> float:
        """Wait until all memory is there; a lazily restored tree dies with this process before.

        Returns:
            `seconds_to_resident`.

        Raises:
            RestoreFailed, Damaged, StoreError: It never will be: the tree was killed.
            TimeoutError: Not in ``timeout`` seconds.
        """
        return self._resident.result(timeout)

    def wait(self, timeout: float | None = None) -> ExitStatus:
        """Wait for the end of the root process (not with ``detach``, but for a job, which can
        always be waited for).

        Raises:
            TimeoutError: It still runs.
        """
        if self.job is not None:
            return self.job.wait(timeout)
        status = self._exit.result(timeout)
        return ExitStatus(code=status) if status >= 0 else ExitStatus(signal=-status)


def restore(
    repository: Repository,
    loop: LoopThread,
    snapshot: str | SnapshotRecord,
    options: RestoreOptions | None = None,
    *,
    criu: Criu | None = None,
    registry: Registry | None = None,
    emit: Sink = discard,
) -> Restored:
    """Bring a snapshot's process tree back.

    Args:
        repository: Where the snapshot is; it lives in ``loop``.
        snapshot: Its id, or its record: then its manifest is read while the session begins, which
            saves round trips to distant storage.
        options: See `RestoreOptions`; None: its defaults.
        criu: Which CRIU; None: the one that `find_criu` finds.
        registry: Where jobs of `icecore run` are noted down; None: the usual one.
        emit: Gets ``restore.*`` events.

    Returns:
        Once the tree runs: with ``mode`` full with all its memory, with ``mode`` lazy at once.

    Raises:
        NotFound: No such snapshot.
        RestoreRefused: This machine does not meet what it requires; nothing was started.
        RestoreFailed: It broke off; nothing of the tree runs.
        Damaged: An object of the snapshot is not what was written; nothing of the tree runs.
        StoreError: The storage failed; nothing of the tree runs.
    """
    try:
        return _attempt(
            _Run(repository, loop, snapshot, options or RestoreOptions(), criu, registry, emit)
        )
    except FileUnusable as error:
        emit(
            Event(
                "restore.warning",
                {
                    "name": "device-memory",
                    "message": f"{error.message}; it is restored once more, without a file for it",
                },
            )
        )
    return _attempt(
        _Run(
            repository,
            loop,
            snapshot,
            options or RestoreOptions(),
            criu,
            registry,
            emit,
            with_file=False,
        )
    )


def _attempt(run: _Run) -> Restored:
    try:
        return run.start()
    except BaseException as error:
        run.undo(run.failure or error)
        if run.failure is not None and run.failure is not error:
            raise run.failure from None  # what broke first; that CRIU was killed for it explains nothing
        raise


def _require_places(options: RestoreOptions) -> None:
    require_directory(options.workdir or _DEFAULT_WORKDIR, "--workdir")
    if options.root:
        require_directory(options.root, "--root")


def check(
    repository: Repository,
    loop: LoopThread,
    snapshot: str,
    options: RestoreOptions | None = None,
    *,
    criu: Criu | None = None,
) -> Requirements:
    """What `restore` would check first, for ``--dry-run``. Arguments as there.

    Raises:
        NotFound: No such snapshot.
        UsageError: A directory that the options name is not there.
        Damaged: Its manifest is not what was written.
    """
    options = options or RestoreOptions()
    _require_places(options)
    manifest = loop.run(repository.manifest(snapshot))
    record = _run_record(manifest)
    _require_job(record, options)
    own = _own_files(manifest, record)
    records = SnapshotReader(repository, manifest, loop.loop).records
    return check_requirements(
        manifest,
        options,
        criu or find_criu(),
        options.workdir or _DEFAULT_WORKDIR,
        own,
        records,
        record,
    )


def _run_record(manifest: Manifest) -> RunRecord | None:
    """How `icecore run` started the job, if it did."""
    text = manifest.extra.get("run")
    if text is None:
        return None
    try:
        return RunRecord.decode(text)
    except ValueError as error:
        raise Damaged("manifest", manifest.snapshot, str(error)) from error


def _require_job(record: RunRecord | None, options: RestoreOptions) -> None:
    """Nothing, unless a name is asked for that there will be no job to have.

    Raises:
        UsageError: It is.
    """
    if record is None and options.instance:
        raise UsageError(
            f"the snapshot is of processes that 'icecore run' did not start: restored they are no job, which could be named {options.instance}",
            cure="leave out --name, and follow them by their pid; what 'icecore run' starts is a job",
        )
    require_copies_possible(options, record)


def _own_files(manifest: Manifest, record: RunRecord | None) -> frozenset[str]:
    """Open files that the new instance gets otherwise than by path."""
    if record is None:
        return frozenset()
    own = set(record.files.values())
    if record.isolation.root:
        own |= {file.path for file in manifest.files if file.path.startswith(_OWN_FOLDERS)}
    return frozenset(own)


def _with_device_memory(manifest: Manifest) -> int:
    """How many processes have device memory among their own, which as many threads of the driver
    wait for; at least 1.
    """
    spaces = spaces_of(manifest, "process")
    return max(1, sum(any(region.kind == "device" for region in space.regions) for space in spaces))


class _Run:
    """One restore. ``stack`` undoes, in reverse, everything that was begun and is not part of the
    tree.
    """

    def __init__(
        self,
        repository: Repository,
        loop: LoopThread,
        snapshot: str | SnapshotRecord,
        options: RestoreOptions,
        criu: Criu | None,
        registry: Registry | None,
        emit: Sink,
        *,
        with_file: bool = True,
    ) -> None:
        self.began = time.perf_counter()
        self.repository = repository
        self.loop = loop
        self.record = snapshot if isinstance(snapshot, SnapshotRecord) else None
        self.snapshot = snapshot.snapshot if isinstance(snapshot, SnapshotRecord) else snapshot
        self.options = options
        self.wanted_criu = criu
        self.registry = registry
        self.emit = emit
        self.stack = ExitStack()
        self.threads = options.threads or threads_for(PLACE_THREADS)
        self.guard: Guard | None = None
        self.tree: Tree | None = None
        self.put_back: PutBack | None = None
        self.restoring: Restoring | None = None
        self.expected: frozenset[Inode] | None = None
        self.own_places: tuple[str, ...] = ()
        self.given_files: set[str] = set()
        self.early: list[tuple[int, int]] = []
        self.devices: Devices | None = None
        self.device_bytes: dict[int, int] = {}
        self.log_sizes: Mapping[Stream, int] = {}
        self.resident: Resident | None = None
        self.with_file = with_file and kernel_version() >= _FIRST_MINOR_FAULTS and overcommits()
        self.device_file: DeviceFile | None = None
        self.filed: Future[None] | None = None
        self.file_placers: Placers | None = None
        self.temporary: dict[int, list[tuple[int, int]]] = {}

    @property
    def _state(self) -> Path:
        return (self.registry or Registry()).state

    @property
    def failure(self) -> BaseException | None:
        """What broke the tree first, if it was not what is being raised."""
        return self.tree.failure if self.tree is not None else None

    def start(self) -> Restored:
        """Everything until the tree runs."""
        options = self.options
        _require_places(options)
        recover(self._state, self._tell)  # what an earlier restore left is no state to plan from
        self.top, lock = make_work_directory(
            "icecore-restore-", options.workdir or _DEFAULT_WORKDIR, self.emit
        )
        top = self.top
        self.stack.callback(os.close, lock)
        self.stack.callback(shutil.rmtree, top, ignore_errors=True)
        images, work = top / "images", top / "work"
        images.mkdir(mode=0o700)
        work.mkdir(mode=0o700)
        self.guard = Guard(str(work), str(top), lock=lock)
        raise_descriptor_limit()  # one for each process and child; after the guard, which starts CRIU with what there was before
        manifest = self._open()
        self.drivers = _with_device_memory(manifest)
        budget = options.budget_bytes or _BUDGET * self.drivers
        self.limits = Limits(self.threads, budget, max(1, options.attempts), options.stall_seconds)
        criu = self.wanted_criu or find_criu()
        record = _run_record(manifest)
        _require_job(record, options)
        requirements = check_requirements(
            manifest,
            options,
            criu,
            str(top),
            _own_files(manifest, record),
            self.reader.records,
            record,
        )
        for warning in requirements.warnings:
            self.emit(Event("restore.warning", {"name": warning.name, "message": warning.message}))
        requirements.require()
        if requirements.gpus is not None:
            self.devices = Devices(requirements.gpus, str(work), self.emit)
            self.stack.callback(self.devices.close)
        if record is not None:
            copies = requirements.copies
            if copies.directory and make_directory(copies.directory):
                self.stack.callback(remove_empty, copies.directory)
            dumped = record.copies
            record = replace(record, files_to=copies.directory, copies=copies.paths)
            registry = self.registry or Registry()
            self.restoring = self.stack.enter_context(
                registry.restoring(
                    record,
                    snapshot=self.snapshot,
                    lineage=manifest.lineage,
                    name=options.instance,
                    dumped=dumped,
                )
            )
        self._begin_resident(manifest, record, str(work))
        size, filed = self._plan_device_file(manifest)
        self.file_placers = self._own_placers(filed, str(work))
        placers = self._own_placers(size - filed, str(work), str(work), beside=filed > 0)
        with phase(self.emit, "restore.images", snapshot=self.snapshot) as running:
            memory = self._write_files(manifest, record, images, criu, requirements, running)
        if filed and not memory.filed:  # it is placed, after all
            placers = self._own_placers(size, str(work), str(work))
        what = f"the restore of snapshot {self.snapshot}"
        backend = self.repository.backend
        self.tree = Tree(
            what,
            self.guard,
            work,
            memory.lazy,
            backend,
            self.reader,
            self.limits,
            self.loop,
            placers=placers,
            device_file=self.device_file,
        )
        self._build(self.tree, manifest, criu, images)
        if options.mode == "full":
            return self._resume_when_resident(self.tree)
        return self._return_while_filling(self.tree, manifest, images)

    def _plan_device_file(self, manifest: Manifest) -> tuple[int, int]:
        """Bytes to bring back, and how many of them can come through a file."""
        resident = resident_bytes(manifest)
        every = max(0, manifest.sizes.logical - resident)
        if self.devices is None or not self.with_file:
            return every, 0
        self.temporary = temporary(manifest)
        mapped = sum(end - start for ranges in self.temporary.values() for start, end in ranges)
        device = min(mapped, max(0, manifest.sizes.device - resident))
        if (
            memory_available() < every + device * SPARE + 2 * self.limits.budget
        ):  # what placers hold, of each kind
            self.temporary, device = {}, 0
        return every, device

    def _begin_resident(self, manifest: Manifest, record: RunRecord | None, word: str) -> None:
        """Resident device memory begins to come now: it needs neither CRIU nor the processes."""
        directory, processes = recorded(manifest)
        if self.options.from_resident and not processes:
            raise RestoreRefused(
                "the snapshot has no resident memory", cure="leave out --from-resident"
            )
        if self.devices is None or not processes:
            return
        place = Path(f"{self.options.root}{directory}")
        if self.restoring is not None and record is not None:
            if record.isolation.root and directory.startswith(f"{INSTANCE_MOUNT}/"):
                place = self.restoring.job.directory / directory.removeprefix(f"{INSTANCE_MOUNT}/")
            self.restoring.has_keeper(place, keep=outlives(manifest))
        if place == Path(
            f"{self.options.root}{directory}"
        ):  # a path of the job's own, which nobody may lead elsewhere
            try:
                with JobFiles(self.options.root) as files:
                    files.make_directories(directory, Owner(os.geteuid(), os.getegid()), 0o700)
            except OSError as error:
                raise RestoreFailed(
                    f"cannot make {place} for the keeper of device memory: {error.strerror}"
                ) from error
        held = self._held_at(manifest, processes, place) if self.options.from_resident else None
        if held is None:
            self._let_go(manifest, processes)
        self.resident = Resident(
            self.repository,
            self.loop,
            self.reader,
            self.limits,
            self.devices.plan,
            place,
            held=held,
            placers=lambda size: self._placers(size, word),
            word=word,
            emit=self.emit,
        )
        self.stack.callback(self.resident.close)

    def _held_at(
        self, manifest: Manifest, processes: Mapping[int, RecordedProcess], place: Path
    ) -> Path:
        """The keeper that has the memory: that of the instance which ended. Of several it is the
        one that was last at this snapshot, or has its job's name.
        """
        wanted = {process.token for process in processes.values()}
        for other in (place, *(self.registry or Registry()).keepers(self.snapshot, manifest.job)):
            if self._claim(other, wanted):
                return other
        raise RestoreRefused(
            "the snapshot's device memory is not held on this machine any more, or another restore takes it",
            cure="restore without --from-resident: all is fetched then",
        )

    def _claim(self, place: Path, wanted: set[bytes]) -> bool:
        """Whether a keeper has memory that nobody else has, or takes while this restore lasts: two
        would write to one memory.
        """
        with suppress(IcecoreError, OSError), ExitStack() as stack:
            if not stack.enter_context(claimed(place)):
                return False
            known = [one for one in Keeper(place).processes() if one.token in wanted]
            if any(one.retained for one in known) and not any(one.alive for one in known):
                self.stack.callback(stack.pop_all().close)
                return True
        return False

    def _let_go(self, manifest: Manifest, processes: Mapping[int, RecordedProcess]) -> None:
        """Have no keeper hold what is fetched anew, or what ended instances of this lineage left
        that are other processes now (workers that were started again): there may not be room for
        both.
        """
        registry = self.registry or Registry()
        wanted = {process.token for process in processes.values()}
        left = registry.left_keepers(
            manifest.lineage, self.restoring.job.instance if self.restoring is not None else ""
        )
        for place in registry.keepers():
            with suppress(IcecoreError, OSError), claimed(place) as ours:
                if not ours:  # another restore takes it
                    continue
                keeper = Keeper(place)
                held = keeper.processes()
                every = place in left and not any(known.alive for known in held)
                for known in held:
                    if not known.alive and (every or known.token in wanted):
                        keeper.forget(known.token)

    def _placers(
        self, size: int, word: str, lock: str = "", *, beside: bool = False
    ) -> Placers | None:
        """Processes that place, if they pay; they start while CRIU's images are written. To be
        closed.
        """
        options, backend = self.options, self.repository.backend
        count = options.placers or (
            0
            if options.threads
            else placers_for(size, self.limits.budget, processes=self.drivers, beside=beside)
        )
        if not count or not size or not backend.direct or not backend.folder:
            return None
        room, key = room_for(PLACER_BYTES), self.repository.keys.chunk
        return Placers(
            count,
            backend.folder,
            key,
            room=room,
            patience=options.stall_seconds,
            word=word,
            lock=lock,
        )

    def _own_placers(
        self, size: int, word: str, lock: str = "", *, beside: bool = False
    ) -> Placers | None:
        """As `_placers`; they end with the restore at the latest."""
        placers = self._placers(size, word, lock, beside=beside)
        if placers is not None:
            self.stack.callback(placers.close)
        return placers

    def _open(self) -> Manifest:
        """The manifest that a session pins, which keeps all that it needs from being deleted."""
        if not self.options.register:
            self.emit(Event("restore.warning", {"name": "session", "message": UNREGISTERED}))
            manifest = self.loop.run(self.repository.manifest(self.snapshot))
            self.reader = SnapshotReader(self.repository, manifest, self.loop.loop)
            return manifest
        beginning = self.loop.submit(self.repository.read_session(self.snapshot))
        early = (
            self.loop.submit(self.repository.manifest(self.record))
            if self.record is not None
            else None
        )
        try:
            opened: Session = beginning.result()
            self.stack.callback(self._end_session, opened)
            assert opened.base is not None
            # Compaction may have given the snapshot another manifest since it was looked up.
            if (
                early is not None
                and self.record is not None
                and opened.base.manifest == self.record.manifest
            ):
                manifest = early.result()
            else:
                manifest = self.loop.run(self.repository.manifest(opened.base))
        finally:
            if early is not None:
                early.cancel()
        self.reader = SnapshotReader(self.repository, manifest, self.loop.loop)
        return manifest

    def _end_session(self, session: Session) -> None:
        try:
            self.loop.run(session.abort())
        except IcecoreError as error:
            # It only pinned the snapshot, and is fenced when it has been silent for long.
            self._tell(Event("restore.warning", {"name": "session", "message": str(error)}))

    # -- files

    def _write_files(
        self,
        manifest: Manifest,
        record: RunRecord | None,
        folder: Path,
        criu: Criu,
        requirements: Requirements,
        running: Phase,
    ) -> Memory:
        """Image files, open files, page images; returns what is to come through userfaultfd."""
        image_spaces = spaces_of(manifest, "image")
        file_spaces = spaces_of(manifest, "file")
        memory_spaces = spaces_of(manifest, "process", "shared")
        far = not self.repository.backend.direct
        cells = iter(
            read_spaces(self.reader, [*image_spaces, *file_spaces, *memory_spaces], parallel=far)
        )
        images = [next(cells) for _ in image_spaces]
        files = {space.key: next(cells) for space in file_spaces}
        actions, own = requirements.files.actions, requirements.copies.own_path
        self.put_back = PutBack(
            actions, lambda path: files[own(path)], self._state, self.options.root, self.snapshot
        )
        self.put_back.prepare()
        logs = self._logs({space.key: space.size for space in file_spaces}, files)
        running.bytes += self._write(
            [*image_targets(folder, image_spaces, images), *self.put_back.targets, *logs]
        )
        if record is not None:
            require_all_covered(folder, requirements.copies, manifest, record)
        self.device_bytes = {
            int(space.key): sum(
                region.length for region in space.regions if region.kind == "device"
            )
            for space in memory_spaces
            if space.kind == "process"
        }
        memory = plan_memory(
            folder,
            list(zip(memory_spaces, cells, strict=True)),
            criu.version,
            lazily=True,
            temporary=self.temporary,
        )
        if memory.filed:
            self._begin_device_file(memory)
        if short := shortage(folder, memory.page_images):
            raise RestoreRefused(
                f"there is no room for CRIU's page images: {short}",
                cure="name another directory with --workdir",
            )
        running.bytes += self._write(memory.page_images)
        self._exchange_files(self.put_back)
        forget_sizes(folder, requirements.shared)
        self.expected = self._expected_files(manifest, requirements, self.put_back)
        if self.restoring is not None:
            self.restoring.bind_copies(folder)
            self.log_sizes = self.restoring.job.log_sizes()
        running.fields |= {
            "files": len(self.put_back.targets) + len(logs),
            "page_image_bytes": sum(target.size for target in memory.page_images),
        }
        return memory

    def _exchange_files(self, put_back: PutBack) -> None:
        """CRIU opens the files by their paths, and checks their sizes: they are put in place now,
        and stay only if the job runs.
        """
        if put_back.journal is not None and self.guard is not None:
            self.guard.undo_with(recovery_command(self._state), put_back.journal.folder)
        for path in put_back.exchange():
            message = (
                f"{path} had a set-user-ID or set-group-ID bit, which a restore does not put back"
            )
            self.emit(Event("restore.warning", {"name": "mode", "message": message}))

    def _expected_files(
        self, manifest: Manifest, requirements: Requirements, put_back: PutBack
    ) -> frozenset[Inode] | None:
        """What the tree may have open; None: that is not known (of imported images), or nobody but
        root could change where a path leads.
        """
        if not requirements.files.exposed or not all(file.inode for file in manifest.files):
            return None
        record = _run_record(manifest)
        self.given_files = {f"/{FILE_NAME}"}
        if record is not None:
            self.given_files |= set(record.files.values())
            self.own_places = (f"{INSTANCE_MOUNT}/", *_OWN_FOLDERS) if record.isolation.root else ()
        return requirements.files.untouched | put_back.inodes

    def _hand_files_over(self, tree: Tree) -> None:
        """The tree is about to run; it is held, unless nobody but root could change anything about
        its files, and nothing was changed.
        """
        if self.expected is not None and tree.held:
            require_files(
                tree.root(), self.top / "images", self.expected, self.own_places, self.given_files
            )
        if self.put_back is not None:
            self.put_back.hand_over()

    def _tell_left(self, sentences: Sequence[str]) -> None:
        for sentence in sentences:
            self._tell(Event("restore.warning", {"name": "files", "message": sentence}))

    def _begin_device_file(self, memory: Memory) -> None:
        """Device memory begins to come now: it needs neither CRIU nor the processes."""
        backend, limits = self.repository.backend, self.limits
        made = DeviceFile(
            memory.filed,
            memory.size,
            backend,
            self.reader,
            limits,
            self.loop,
            placers=self.file_placers,
        )
        pool = self.stack.enter_context(ThreadPoolExecutor(1, "device-file"))
        self.stack.callback(made.close)

        def fill() -> None:
            with self._telling(made), phase(self.emit, "restore.gpu.memory") as running:
                made.run(running.progress)
                spent = made.spent
                running.bytes = spent.produced
                running.fields |= {
                    "stored": spent.stored,
                    "cells": spent.cells,
                    "placers": made.placers,
                    "redone": spent.redone,
                    **{
                        f"{name}_thread_seconds": getattr(spent, name)
                        for name in ("read", "decode", "sink")
                    },
                }

        self.device_file, self.filed = made, pool.submit(fill)

    @staticmethod
    @contextmanager
    def _telling(made: DeviceFile) -> Iterator[None]:
        """An event that nobody hears breaks the filling, which the driver would wait for."""
        try:
            yield
        except BaseException as error:
            made.never(error)
            raise

    def _logs(self, sizes: Mapping[str, int], cells: Mapping[str, SpaceCells]) -> list[FileTarget]:
        """What the job's logs held goes into the new instance's."""
        if self.restoring is None:
            return []
        return [
            FileTarget(str(place), sizes[path], cells[path], existing=True)
            for path, place in self.restoring.redirected.items()
            if sizes.get(path) and place.name.endswith(".log")
        ]

    def _write(self, targets: Sequence[FileTarget]) -> int:
        try:
            return write_files(
                self.repository.backend, self.reader, targets, self.limits, self.loop
            )
        except OSError as error:
            raise RestoreFailed(f"cannot write {error.filename}: {error.strerror}") from error

    # -- the tree

    def _build(self, tree: Tree, manifest: Manifest, criu: Criu, images: Path) -> None:
        """Have CRIU build it, with the daemon listening from before the first fault on."""
        # Until the tree runs the changes of files can be undone: CRIU must not decide when that is.
        held = (
            tree.hold_script(self.stack)
            if self.options.mode == "full" or self.put_back or self.expected is not None
            else None
        )
        own, prefix, descriptors = (
            (self.restoring.options, self.restoring.prefix, self.restoring.pass_fds)
            if self.restoring
            else ([], [], ())
        )
        if self.device_file is not None:
            own = [*own, "--inherit-fd", f"fd[{self.device_file.descriptor}]:{FILE_NAME}"]
            descriptors = (*descriptors, self.device_file.descriptor)
        arguments = criu_arguments(manifest, self.options, [*own, *self._plugins(images)], held)
        if self.options.mode == "lazy":
            self.early = self.loop.run(
                workingset.recall(self.repository, manifest.lineage, self.snapshot)
            )
        tree.filling.listen()
        with phase(self.emit, "restore.criu") as running:
            with self.devices.holder() if self.devices is not None else nullcontext() as holder:
                environment = restore_environment() | plugin.restore_environment(
                    holder.fileno() if holder is not None else None, criu.version
                )
                given = [*descriptors, *([holder.fileno()] if holder is not None else [])]
                tree.build(
                    criu,
                    images,
                    arguments,
                    prefix,
                    given,
                    self.options.criu_seconds,
                    environment,
                    self.early,
                )
            running.fields["faults"] = tree.daemon.faults

    def _plugins(self, images: Path) -> list[str]:
        """Where CRIU takes its plugins from. Not from where it looks itself: CRIU's plugin for CUDA
        would make the driver's calls a second time.
        """
        folder = self.options.criu_plugins
        if self.devices is not None or (images / plugin.RECORD).exists():
            folder = str(plugin.plugin_folder(images.with_name("plugins"), folder))
        return ["--libdir", folder] if folder else []

    def _fill(self, tree: Tree) -> None:
        """Wait until all memory is resident."""
        with phase(self.emit, "restore.memory") as running:
            tree.filling.complete(running.progress)
            spent = tree.filling.spent
            running.bytes = spent.produced
            running.fields |= {
                "stored": spent.stored,
                "cells": spent.cells,
                "faults": tree.daemon.faults,
                "threads": self.threads,
                "placers": tree.filling.placers,
                "redone": spent.redone,
                **{
                    f"{name}_thread_seconds": getattr(spent, name)
                    for name in ("read", "decode", "sink")
                },
            }

    def _resume_when_resident(self, tree: Tree) -> Restored:
        if self.devices is None:
            self._fill(tree)
            self._hand_files_over(tree)
            pid = tree.resume(self.options.criu_seconds)
        else:
            pid = self._resume_before_devices(tree)
        restored = self._running(pid)
        self._resident(tree, restored)
        return restored

    def _resume_before_devices(self, tree: Tree) -> int:
        """The driver moves device memory on; the tree runs once all memory is there."""
        with ThreadPoolExecutor(1, "fill") as pool:
            filled = pool.submit(self._fill, tree)
            try:
                self._bring_devices_back(tree)
            except BaseException as error:
                tree.filling.fail(error)
                raise
            filled.result()
        self._hand_files_over(tree)
        pid = tree.resume(self.options.criu_seconds)
        self._map_resident(tree)
        return pid

    def _return_while_filling(self, tree: Tree, manifest: Manifest, images: Path) -> Restored:
        self._bring_devices_back(tree)
        self._hand_files_over(tree)
        pid = (
            tree.resume(self.options.criu_seconds)
            if tree.held
            else tree.running(self.options.criu_seconds)
        )
        self._map_resident(tree)
        restored = self._running(pid)
        shutil.rmtree(images, ignore_errors=True)

        def finish() -> None:
            try:
                self._fill(tree)
                self._remember(tree, manifest)
                self._resident(tree, restored)
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the memory
                first = tree.failure or error
                try:
                    self.undo(first)
                finally:
                    restored._resident.set_exception(first)

        threading.Thread(target=finish, name="restore", daemon=True).start()
        return restored

    def _bring_devices_back(self, tree: Tree) -> None:
        """The tree waits until then. Until it is done the guard kills the tree if this process
        dies.
        """
        if self.devices is not None:
            tree.bring_devices_back(self.devices, self.device_bytes, self.options.criu_seconds)
        if self.device_file is not None and self.filed is not None:
            self.filed.result()
            # Where its pages are small, giving them back takes a while.
            threading.Thread(target=self.device_file.close, name="device-file", daemon=True).start()

    def _map_resident(self, tree: Tree) -> None:
        """The tree runs, but for the threads that its preload has parked."""
        if self.devices is not None and self.resident is not None:
            tree.map_resident(self.resident, self.devices.plan)
            self.resident.close()

    def _running(self, pid: int) -> Restored:
        """The tree runs."""
        if self.put_back is not None:
            self.put_back.note_ran()
        job = self.restoring.started(pid) if self.restoring is not None else None
        seconds = time.perf_counter() - self.began
        instance = job.instance if job is not None else ""
        fields: dict[str, Value] = {
            "snapshot": self.snapshot,
            "pid": pid,
            "seconds": seconds,
            "instance": instance,
        }
        self.emit(Event("restore.running", fields))
        if self.put_back is not None:
            self._tell_left(self.put_back.finish())
        return Restored(self.snapshot, pid, job, seconds, log_sizes=self.log_sizes)

    def _resident(self, tree: Tree, restored: Restored) -> None:
        """All memory is there: from now on the tree lives without us, and nothing that still fails
        is a failure of its restore.
        """
        tree.release(stay=not self.options.detach)
        seconds = time.perf_counter() - self.began
        restored.seconds_to_resident = seconds

        def done(status: int | BaseException) -> None:
            if isinstance(status, int):
                restored._exit.set_result(status)
            else:
                restored._exit.set_exception(status)

        # In reverse, each whatever becomes of the others.
        with (
            self._warning("the tree runs, but not all of its restore could be put away"),
            ExitStack() as steps,
        ):
            steps.callback(self.stack.close)
            steps.callback(
                self._tell,
                Event("restore.resident", {"snapshot": self.snapshot, "seconds": seconds}),
            )
            if self.options.detach:
                steps.callback(tree.leave)
            else:
                steps.callback(tree.await_exit, restored.pid, done)
            if restored.job is not None:
                steps.callback(self._outlive, restored.job)
        restored._resident.set_result(seconds)

    def _tell(self, event: Event) -> None:
        """Emit what must not stop anything if nobody hears it."""
        with suppress(Exception):
            self.emit(event)

    @contextmanager
    def _warning(self, what: str) -> Iterator[None]:
        """What fails here is told, and no more."""
        try:
            yield
        except Exception as left:  # noqa: BLE001 - what it is part of does not fail for it
            self._tell(
                Event(
                    "restore.warning",
                    {"name": "undo", "message": f"{what}: {type(left).__name__}: {left}"},
                )
            )

    def _outlive(self, job: Job) -> None:
        """Not before all memory is there: where that fails the tree is killed, and would leave its
        device memory.
        """
        if self.resident is None or not job.description.keep_resident:
            return
        try:
            self.resident.outlive(job.pid, job.status_path)
        except (IcecoreError, OSError) as error:
            message = f"device memory does not outlive a crash of this job: {getattr(error, 'message', error)}"
            self._tell(Event("restore.warning", {"name": "keep-resident", "message": message}))

    def _remember(self, tree: Tree, manifest: Manifest) -> None:
        touched = tree.filling.touched()
        if not touched or not self.options.register:
            return
        # What was brought early because of an earlier observation was not waited for, and is no
        # less needed for that.
        cells = list(dict.fromkeys([*touched, *self.early]))
        try:
            self.loop.run(
                workingset.remember(self.repository, manifest.lineage, self.snapshot, cells)
            )
        except IcecoreError as error:
            self.emit(Event("restore.warning", {"name": "working-set", "message": str(error)}))

    # -- failure

    def undo(self, error: BaseException) -> None:
        """Kill what was started, and remove what was made. Of a tree that was released (somebody
        broke off while we were leaving it) only what is ours.
        """
        released = self.tree is not None and self.tree.released
        if not released and not (
            self.with_file and isinstance(error, FileUnusable)
        ):  # else it is tried again
            self._tell(
                Event(
                    "restore.failed",
                    {"snapshot": self.snapshot, "error": f"{type(error).__name__}: {error}"},
                )
            )
        # What broke first is what the caller hears.
        with (
            self._warning("not all of it could be undone"),
            ExitStack() as steps,
        ):  # in reverse, each whatever becomes of the others
            steps.callback(self.stack.close)
            if self.tree is not None and released:
                if (
                    self.options.detach
                ):  # else the guard is its parent, and somebody may wait for its end
                    steps.callback(self.tree.leave)
                return
            if self.put_back is not None:
                steps.callback(self._abandon_files, self.put_back)
            if self.tree is not None:
                steps.callback(self.tree.kill, error)
            elif self.guard is not None:
                steps.callback(self._end_guard, self.guard)

    def _abandon_files(self, put_back: PutBack) -> None:
        went, ran = (self.tree.went, self.tree.ran) if self.tree is not None else (False, False)
        self._tell_left(put_back.abandon(went=went, ran=ran))

    @staticmethod
    def _end_guard(guard: Guard) -> None:
        with suppress(RestoreFailed):
            guard.end(_GUARD_SECONDS)
