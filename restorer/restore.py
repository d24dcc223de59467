"""A restore from beginning to end. Its rule: the whole tree runs with all its memory, or none of it runs and nothing of
it is left."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from icecore.errors import Damaged, IcecoreError, NotFound, RestoreFailed
from icecore.events import Event, Phase, Sink, discard, phase
from icecore.host import procfs
from icecore.host.criu import Criu, RestoreArguments, explain, find_criu, restore_command
from icecore.host.job import ExitStatus, Job
from icecore.host.jobs import Registry, Restoring
from icecore.host.namespaces import RunRecord
from icecore.restorer import workingset
from icecore.restorer.fetch import Fetcher, Limits, Spent
from icecore.restorer.files import PutBack
from icecore.restorer.filewriter import FileTarget, FileWriter
from icecore.restorer.filling import Filling
from icecore.restorer.guard import Guard
from icecore.restorer.images import Memory, image_targets, plan_memory, read_spaces, spaces_of
from icecore.restorer.options import RestoreOptions
from icecore.restorer.requirements import Requirements, check_requirements
from icecore.store.backend import Backend
from icecore.store.loop import LoopThread
from icecore.store.manifest import Manifest
from icecore.store.reader import SnapshotReader
from icecore.store.repository import Repository
from icecore.store.session import Session

_DEFAULT_WORKDIR = "/dev/shm"
_KILL_SECONDS = 60.0
#: File systems that a job with a private root has for itself: their files come with CRIU's images.
_OWN_FOLDERS = ("/dev/shm/", "/proc/", "/dev/pts/", "/dev/mqueue/")
_HOLD = """#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = pre-resume ] || exit 0
while :; do
    read -r answer < '{fifo}' && [ "$answer" = go ] && exit 0
done
"""


@dataclass
class Restored:
    """A restored tree.

    Attributes:
        snapshot: What it was restored from.
        pid: Its root, as this machine sees it.
        job: The instance, for jobs that `icecore run` started.
        seconds_to_running: From the call until the tree ran.
        seconds_to_resident: From the call until all memory was there; None until then.
    """

    snapshot: str
    pid: int
    job: Job | None
    seconds_to_running: float
    seconds_to_resident: float | None = None
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
        """Wait for the end of the root process (not with ``detach``, but for a job, which can always be waited for).

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
    snapshot: str,
    options: RestoreOptions | None = None,
    *,
    criu: Criu | None = None,
    registry: Registry | None = None,
    emit: Sink = discard,
) -> Restored:
    """Bring a snapshot's process tree back.

    Args:
        repository: Where the snapshot is; it lives in ``loop``.
        snapshot: Its id.
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
    run = _Run(repository, loop, snapshot, options or RestoreOptions(), criu, registry, emit)
    try:
        return run.start()
    except BaseException as error:
        run.undo(run.failure or error)
        if run.failure is not None and run.failure is not error:
            raise run.failure from None  # what broke first; that CRIU was killed for it explains nothing
        raise


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
        Damaged: Its manifest is not what was written.
    """
    options = options or RestoreOptions()
    manifest = loop.run(repository.manifest(snapshot))
    own = _own_files(manifest, _run_record(manifest))
    return check_requirements(manifest, options, criu or find_criu(), options.workdir or _DEFAULT_WORKDIR, own)


def _run_record(manifest: Manifest) -> RunRecord | None:
    """How `icecore run` started the job, if it did."""
    text = manifest.extra.get("run")
    if text is None:
        return None
    try:
        return RunRecord.decode(text)
    except ValueError as error:
        raise Damaged("manifest", manifest.snapshot, str(error)) from error


def _own_files(manifest: Manifest, record: RunRecord | None) -> frozenset[str]:
    """Open files that the new instance gets otherwise than by path."""
    if record is None:
        return frozenset()
    own = set(record.files.values())
    if record.isolation.root:
        own |= {file.path for file in manifest.files if file.path.startswith(_OWN_FOLDERS)}
    return frozenset(own)


class _Run:
    """One restore. ``stack`` undoes, in reverse, everything that was begun and is not part of the tree."""

    def __init__(
        self,
        repository: Repository,
        loop: LoopThread,
        snapshot: str,
        options: RestoreOptions,
        criu: Criu | None,
        registry: Registry | None,
        emit: Sink,
    ) -> None:
        self.began = time.perf_counter()
        self.repository = repository
        self.loop = loop
        self.snapshot = snapshot
        self.options = options
        self.criu = criu
        self.registry = registry
        self.emit = emit
        self.stack = ExitStack()
        self.threads = options.threads or os.cpu_count() or 1
        self.limits = Limits(self.threads, options.budget_bytes, options.attempts, options.stall_seconds)
        self.guard: Guard | None = None
        self.filling: Filling | None = None
        self.put_back: PutBack | None = None
        self.restoring: Restoring | None = None
        self.restored: Restored | None = None
        self._dying = threading.Lock()
        self._killed = False
        self.failure: BaseException | None = None

    @property
    def backend(self) -> Backend:
        return self.repository.backend

    def start(self) -> Restored:
        """Everything until the tree runs."""
        options = self.options
        top = Path(tempfile.mkdtemp(prefix="icecore-restore-", dir=options.workdir or _DEFAULT_WORKDIR))
        self.stack.callback(shutil.rmtree, top, ignore_errors=True)
        self.images, self.work = top / "images", top / "work"
        self.pid_file = self.work / "restored.pid"
        self.images.mkdir(mode=0o700)
        self.work.mkdir(mode=0o700)
        self.guard = Guard(str(self.work), str(top))
        manifest = self._open()
        self.criu = self.criu or find_criu()
        record = _run_record(manifest)
        requirements = check_requirements(manifest, options, self.criu, str(top), _own_files(manifest, record))
        for warning in requirements.warnings:
            self.emit(Event("restore.warning", {"name": warning.name, "message": warning.message}))
        requirements.require()
        if record is not None:
            registry = self.registry or Registry()
            self.restoring = self.stack.enter_context(
                registry.restoring(record, snapshot=self.snapshot, lineage=manifest.lineage, name=options.instance)
            )
        with phase(self.emit, "restore.images", snapshot=self.snapshot) as running:
            memory = self._write_files(manifest, requirements, running)
        self.filling = Filling(
            self.guard, memory.lazy, self.backend, self.reader, self.limits, self.loop, self._failed
        )
        first = self.filling.rows_at(self._working_set(manifest)) if options.mode == "lazy" else []
        self.filling.start(first)
        with phase(self.emit, "restore.criu") as running:
            self._run_criu(manifest)
            running.fields["faults"] = self.filling.daemon.faults
        if options.mode == "full":
            return self._resume_when_resident(manifest)
        return self._return_while_filling(manifest)

    def _open(self) -> Manifest:
        """The manifest; at the same time a session begins that keeps the snapshot from being deleted."""
        session = self.loop.submit(self.repository.read_session(self.snapshot))
        try:
            manifest = self.loop.run(self.repository.manifest(self.snapshot))
        finally:
            opened: Session = session.result()
            self.stack.callback(self._end_session, opened)
        self.reader = SnapshotReader(self.repository, manifest, self.loop.loop)
        return manifest

    def _end_session(self, session: Session) -> None:
        try:
            self.loop.run(session.abort())
        except IcecoreError as error:
            # It only pinned the snapshot, and is fenced when it has been silent for long.
            self.emit(Event("restore.warning", {"name": "session", "message": str(error)}))

    # -- files --------------------------------------------------------------------------------------------------------

    def _write_files(self, manifest: Manifest, requirements: Requirements, running: Phase) -> Memory:
        """Image files, open files, page images; returns what is to come through userfaultfd."""
        far = not self.backend.direct
        image_spaces = spaces_of(manifest, "image")
        memory_spaces = spaces_of(manifest, "process", "shared")
        file_spaces = spaces_of(manifest, "file")
        cells = read_spaces(self.reader, [*image_spaces, *file_spaces, *memory_spaces], parallel=far)
        images, rest = cells[: len(image_spaces)], cells[len(image_spaces) :]
        files = dict(zip([space.key for space in file_spaces], rest[: len(file_spaces)], strict=True))
        self.put_back = PutBack(requirements.files.actions, files.__getitem__, self.options.root)
        self.put_back.prepare()
        logs: list[FileTarget] = []
        if self.restoring is not None:
            sizes = {space.key: space.size for space in file_spaces}
            for path, place in self.restoring.redirected.items():
                if sizes.get(path) and place.name.endswith(".log"):
                    logs.append(FileTarget(str(place), sizes[path], files[path], existing=True))
        targets = [*image_targets(self.images, image_spaces, images), *self.put_back.targets, *logs]
        running.bytes += self._write(targets)
        assert self.criu is not None
        memory = plan_memory(
            self.images,
            list(zip(memory_spaces, rest[len(file_spaces) :], strict=True)),
            self.criu.version,
            lazily=True,
        )
        running.bytes += self._write(memory.page_images)
        self.put_back.commit()
        running.fields |= {
            "files": len(self.put_back.targets) + len(logs),
            "page_image_bytes": sum(target.size for target in memory.page_images),
        }
        return memory

    def _write(self, targets: list[FileTarget]) -> int:
        writer = FileWriter(targets)
        try:
            writer.create()
        except OSError as error:
            raise RestoreFailed(f"cannot create {error.filename}: {error.strerror}") from error
        if len(writer.records):
            fetcher = Fetcher(self.backend, self.reader, writer.records, writer.write, self.limits, self.loop)
            fetcher.start(range(len(writer.records)))
            try:
                fetcher.wait()
            finally:
                fetcher.stop()
        return sum(target.size for target in targets)

    # -- CRIU ---------------------------------------------------------------------------------------------------------

    def _command(self, manifest: Manifest) -> tuple[list[str], tuple[int, ...]]:
        """CRIU's command line and the descriptors that it inherits."""
        assert self.criu is not None
        script: Path | None = None
        if self.options.mode == "full":
            fifo, script = self.work / "go", self.work / "hold"
            os.mkfifo(fifo, 0o600)
            script.write_text(_HOLD.format(fifo=fifo))
            script.chmod(0o700)
        closed = self.options.tcp == "close" or "--tcp-close" in manifest.criu_options
        known = {"--tcp-close", "--tcp-established", "--shell-job"}
        own: list[str] = []
        prefix: list[str] = []
        descriptors: tuple[int, ...] = ()
        if self.restoring is not None:
            prefix, own, descriptors = self.restoring.prefix, self.restoring.options, self.restoring.pass_fds
        arguments = RestoreArguments(
            lazy=True,
            root=Path(self.options.root) if self.options.root else None,
            action_script=script,
            sibling=False,
            connections="close" if closed else "keep",
            network_lock="skip",
            file_locks=True,
            shell_job="--shell-job" in manifest.criu_options,
            external_unix=True,
            verbosity=2,
            extra=(*(option for option in manifest.criu_options if option not in known), *own),
        )
        command = restore_command(self.criu, self.images, self.work, arguments, pid_file=self.pid_file)
        return [*prefix, *command], descriptors

    def _run_criu(self, manifest: Manifest) -> None:
        """Start CRIU; returns once it has built the tree (in mode lazy: and the tree runs)."""
        assert self.guard is not None and self.filling is not None
        daemon = self.filling.daemon
        argv, descriptors = self._command(manifest)
        self.guard.run(argv, descriptors)
        done = daemon.wait_for(lambda d: d.restored or d.criu_status is not None, self.options.criu_seconds)
        if not done:
            raise RestoreFailed(f"CRIU did not build the tree within {self.options.criu_seconds:.0f} s")
        if not daemon.restored:
            raise self._explain()
        self.filling.open()

    def _explain(self) -> RestoreFailed:
        """Why CRIU failed."""
        assert self.filling is not None
        daemon = self.filling.daemon
        message, cure = explain(self.work, "restore.log").sentence(f"the restore of snapshot {self.snapshot}")
        why = f": {daemon.criu_error}" if daemon.criu_error else ""
        return RestoreFailed(f"{message} (criu's exit status {daemon.criu_status}{why})", cure=cure)

    def _await_criu(self) -> int:
        """Wait for CRIU's end; the root's pid."""
        assert self.filling is not None
        daemon = self.filling.daemon
        if not daemon.wait_for(lambda d: d.criu_status is not None, self.options.criu_seconds):
            raise RestoreFailed(f"CRIU did not end within {self.options.criu_seconds:.0f} s after it built the tree")
        if daemon.criu_status != 0:
            raise self._explain()
        try:
            return int(self.pid_file.read_text())
        except (OSError, ValueError) as error:
            raise RestoreFailed(f"CRIU left no pid of the tree's root: {error}") from error

    # -- memory -------------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Wait until all memory is resident."""
        assert self.filling is not None
        with phase(self.emit, "restore.memory") as running:
            self.filling.complete()
            spent: Spent = self.filling.spent
            running.bytes = spent.produced
            running.fields |= {
                "stored": spent.stored,
                "cells": spent.cells,
                "faults": self.filling.daemon.faults,
                "threads": self.threads,
                **{f"{name}_thread_seconds": getattr(spent, name) for name in ("read", "decode", "sink")},
            }

    def _resume_when_resident(self, manifest: Manifest) -> Restored:
        self._fill()
        descriptor = os.open(self.work / "go", os.O_RDWR | os.O_CLOEXEC)
        try:
            os.write(descriptor, b"go\n")
            pid = self._await_criu()
        finally:
            os.close(descriptor)
        restored = self._running(pid)
        self._resident(restored)
        return restored

    def _return_while_filling(self, manifest: Manifest) -> Restored:
        restored = self._running(self._await_criu())
        shutil.rmtree(self.images, ignore_errors=True)

        def finish() -> None:
            try:
                self._fill()
                self._remember(manifest)
                self._resident(restored)
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the memory
                self.undo(self.failure or error)
                restored._resident.set_exception(self.failure or error)

        threading.Thread(target=finish, name="restore", daemon=True).start()
        return restored

    def _running(self, pid: int) -> Restored:
        """The tree runs."""
        job = self.restoring.started(pid) if self.restoring is not None else None
        seconds = time.perf_counter() - self.began
        self.restored = Restored(self.snapshot, pid, job, seconds)
        self.emit(
            Event(
                "restore.running",
                {"snapshot": self.snapshot, "pid": pid, "seconds": seconds, "instance": job.instance if job else ""},
            )
        )
        return self.restored

    def _resident(self, restored: Restored) -> None:
        """All memory is there: from now on the tree lives without us."""
        assert self.guard is not None and self.filling is not None
        guard, filling = self.guard, self.filling
        with self._dying:
            if self._killed:
                raise RestoreFailed("the tree was killed because its restore failed")
            guard.release(stay=not self.options.detach)
            self._killed = True  # too late for it
        seconds = time.perf_counter() - self.began
        restored.seconds_to_resident = seconds
        self.emit(Event("restore.resident", {"snapshot": self.snapshot, "seconds": seconds}))
        if self.options.detach:
            filling.daemon.stop()
            guard.end(_KILL_SECONDS)
        else:
            self._await_exit(guard, filling, restored)
        self.stack.close()
        restored._resident.set_result(seconds)

    def _await_exit(self, guard: Guard, filling: Filling, restored: Restored) -> None:
        """Have the guard say how the root process ends, for `Restored.wait`."""

        def wait() -> None:
            try:
                filling.daemon.wait_for(lambda d: restored.pid in d.exits, None)
                restored._exit.set_result(filling.daemon.exits[restored.pid])
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the end
                restored._exit.set_exception(error)
            finally:
                filling.daemon.stop()
                with suppress(RestoreFailed):
                    guard.end(_KILL_SECONDS)

        threading.Thread(target=wait, name="exit", daemon=True).start()

    # -- working set --------------------------------------------------------------------------------------------------

    def _working_set(self, manifest: Manifest) -> list[tuple[int, int]]:
        return self.loop.run(workingset.recall(self.repository, manifest.lineage, self.snapshot))

    def _remember(self, manifest: Manifest) -> None:
        assert self.filling is not None
        touched = self.filling.touched()
        if not touched:
            return
        try:
            self.loop.run(workingset.remember(self.repository, manifest.lineage, self.snapshot, touched))
        except IcecoreError as error:
            self.emit(Event("restore.warning", {"name": "working-set", "message": str(error)}))

    # -- failure ------------------------------------------------------------------------------------------------------

    def _failed(self, error: BaseException) -> None:
        """Something went wrong in a worker or in the daemon: the tree must not run on. Whoever waits raises the error."""
        assert self.filling is not None
        self.failure = self.failure or error
        self._kill()
        self.filling.fail(error)

    def _kill(self) -> None:
        """Kill CRIU and the tree, unless the tree is complete and on its own."""
        with self._dying:
            if self._killed or self.guard is None:
                return
            self._killed = True
            try:
                self.guard.kill()
            except RestoreFailed:
                self._kill_ourselves()

    def _kill_ourselves(self) -> None:
        """The guard is dead, our duplicates of its descriptors are still open: nothing has run on zeros yet."""
        filling = self.filling
        roots: list[int] = []
        with suppress(OSError, ValueError):
            roots.append(int(self.pid_file.read_text()))
        criu = filling.daemon.criu_pid if filling is not None else 0
        if criu and filling is not None and filling.daemon.criu_status is None:
            roots.append(criu)
        below: list[int] = []
        for root in roots:
            with suppress(NotFound):
                below.extend(procfs.tree(root))
        # The tasks first: CRIU traces them, and would let them run by dying.
        for pid in sorted(set(below), key=lambda pid: pid == criu):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def undo(self, error: BaseException) -> None:
        """Kill what was started, and remove what was made."""
        self.emit(Event("restore.failed", {"snapshot": self.snapshot, "error": f"{type(error).__name__}: {error}"}))
        if self.guard is not None:
            self._kill()
            if self.filling is not None:
                daemon = self.filling.daemon
                with suppress(BaseException):
                    daemon.wait_for(lambda d: d.killed, _KILL_SECONDS)
                self.filling.fail(error)
                self.filling.stop()
                daemon.stop()
            with suppress(RestoreFailed):
                self.guard.end(_KILL_SECONDS)
        if self.put_back is not None:
            self.put_back.abandon()
        self.stack.close()
