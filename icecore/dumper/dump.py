"""A dump from beginning to end: preflight, pre-copy, window, storing, commit. Its rule: the job is
never lost, whatever fails.
"""

from __future__ import annotations

import gc
import os
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from icecore.config import without_secrets
from icecore.dumper.capture import HIDDEN_FILE, Capture, Captured
from icecore.dumper.freeze.claim import Claim
from icecore.dumper.freeze.guard import WINDOW_PRIORITY, Guard
from icecore.dumper.freeze.streamed import receive
from icecore.dumper.freeze.window import Window, wait_running
from icecore.dumper.gpu.devices import Devices
from icecore.dumper.gpu.resident import Resident
from icecore.dumper.memory.early import EarlyScan
from icecore.dumper.memory.precopy import PreCopied, pre_copy
from icecore.dumper.observe.ended import Lives
from icecore.dumper.observe.facts import describe_requirements
from icecore.dumper.observe.look import Look, look
from icecore.dumper.options import DumpOptions
from icecore.dumper.preflight.judge import check_target, require, warn
from icecore.dumper.preflight.prediction import predict
from icecore.dumper.storing import Storing
from icecore.dumper.target import Target
from icecore.errors import DumpFailed, HookFailed, PreflightRefused, UsageError
from icecore.events import Event, Sink, discard, phase
from icecore.host.criu.hidden import hides
from icecore.host.criu.program import (
    Criu,
    DumpArguments,
    explain,
    find_criu,
    lazy_dump_command,
    stream_dump_command,
)
from icecore.host.cuda.holder import plugin_folder
from icecore.host.jobs.namespaces import dump_options, dump_prefix
from icecore.host.jobs.shell import run_shell
from icecore.host.kernel import limits, oom, procfs
from icecore.host.kernel.scanning import native_scan_lacks
from icecore.host.workdir import make_work_directory
from icecore.store.format.manifest import MANIFEST_FORMAT, Manifest, Sizes
from icecore.store.format.names import new_snapshot_id
from icecore.store.log.repository import Repository
from icecore.store.runtime.loop import LoopThread
from icecore.text import host_name, require_label

_PRE_COPY_BYTES = 256 << 20
_PRE_COPY_STAGING = 128 << 20
#: A tenth of a second of a window, at the rate at which resident memory without room on its GPU
#: goes into the host's.
_PRE_COPY_RESIDENT = 4 << 30
_STREAM_SECONDS = 60.0
_RUNNING_SECONDS = 5.0
_FREEZE_SECONDS = 30.0
#: Another dump of the same job is waited for so long: one that has device memory may store some of
#: it first.
_CLAIM_SECONDS, _CLAIM_DEVICES_SECONDS = 60.0, 300.0
#: Shard streams at most: each holds a shard buffer.
_MOST_STREAMS = 16
#: Bytes at the end of what a hook printed that its error tells.
_HOOK_WORDS = 300
#: Threads at most, where nothing else is asked for: with more it takes longer (measured on 16
#: cores).
SCAN_THREADS = 8
#: Where they do not need the interpreter between cells (`icecore.host.kernel.scanning`). From 8 to
#: 12 process_vm_readv alone gains a third there, from 12 to 16 an eighth; the scan as a whole was
#: not measured so.
NATIVE_SCAN_THREADS = 12
ENCODE_THREADS = 4
#: Staging that is prefaulted when nothing is known of how much changes, as a share of the private
#: memory.
_GUESS = 0.125


@dataclass(frozen=True)
class DumpResult:
    """What a dump made.

    Attributes:
        snapshot: Its id.
        window_seconds: How long the job stood still (with ``stop``: until CRIU and the scan were
            done).
        seconds: The whole dump.
        sizes: In bytes.
        pre_copied: Bytes that were stored before the window.
        spilled: Staging ran full in the window, which made it longer.
    """

    snapshot: str
    job: str
    lineage: str
    parent: str
    window_seconds: float
    seconds: float
    sizes: Sizes
    pre_copied: int
    spilled: bool


def dump(
    repository: Repository,
    loop: LoopThread,
    target: Target,
    options: DumpOptions | None = None,
    *,
    criu: Criu | None = None,
    workdir: str = "/dev/shm",
    committed: Callable[[DumpResult], None] | None = None,
    emit: Sink = discard,
) -> DumpResult:
    """Take a snapshot of a running process tree.

    Args:
        repository: Where to; it lives in ``loop``.
        target: The tree.
        options: See `DumpOptions`; None: all defaults.
        criu: Which CRIU; None: the one that `find_criu` finds.
        workdir: Directory on tmpfs for CRIU's images while the dump lasts.
        committed: Called with what is then returned once the snapshot is committed and the job
            runs, before the command after it.
        emit: Gets ``dump.*`` and ``store.*`` events.

    Raises:
        PreflightRefused: Something would lose or hang the job; nothing was frozen.
        WindowExceeded: The job would have stood still for too long; it runs.
        DumpFailed: The snapshot was abandoned; the job runs.
        StoreError: It could not be stored; the job runs.
        HookFailed: The snapshot is committed, but the command after it failed.
    """
    started = time.monotonic()
    options = options or DumpOptions()
    if options.keep_resident and not options.stop:
        raise UsageError(
            "resident memory can be kept only of a job that ends",
            cure="add --stop, or leave out --keep-resident",
        )
    if options.stop and options.memory == "streamed":
        raise UsageError(
            "a streamed dump cannot hold the tree until the commit, because CRIU writes its last images when it lets go",
            cure="dump without --stop and end the job afterwards",
        )
    limits.require_directory(workdir, "--workdir")
    for tag in options.tags:
        require_label(tag)
    with _after(options.after, options.hook_seconds, target, emit) as after:
        with ExitStack() as stack:
            dumping = _Dump(
                repository, loop, target, options, criu or find_criu(), workdir, emit, stack
            )
            with dumping.lives.explaining():
                snapshot, manifest, pre_copied, spilled = dumping.run(after)
            after.snapshot = snapshot
        done = DumpResult(
            snapshot=snapshot,
            job=manifest.job,
            lineage=manifest.lineage,
            parent=manifest.parent,
            window_seconds=manifest.window_seconds,
            seconds=time.monotonic() - started,
            sizes=manifest.sizes,
            pre_copied=pre_copied,
            spilled=spilled,
        )
        if committed is not None:
            committed(done)
    emit(
        Event(
            "dump.done",
            {
                "snapshot": snapshot,
                "job": done.job,
                "parent": done.parent,
                "window_seconds": done.window_seconds,
                "seconds": done.seconds,
                "logical": done.sizes.logical,
                "changed": done.sizes.changed,
                "stored": done.sizes.stored,
                "pre_copied": pre_copied,
                "spilled": spilled,
            },
        )
    )
    return done


@dataclass
class _After:
    """What the command after a dump is told, and whether it is due: once the one before it was
    begun, for it may have to undo that.
    """

    due: bool = False
    snapshot: str = ""


@contextmanager
def _after(command: str, seconds: float, target: Target, emit: Sink) -> Iterator[_After]:
    """Run ``command`` at the end, also when the dump failed, whose error then is the one to be
    told.
    """
    after = _After()
    try:
        yield after
    except BaseException:
        if after.due:
            try:
                _hook(command, target, after.snapshot, seconds)
            except HookFailed as error:
                emit(Event("dump.hook", {"command": command, "error": str(error)}))
        raise
    try:
        _hook(command, target, after.snapshot, seconds)
    except HookFailed as error:
        raise HookFailed(
            f"snapshot {after.snapshot} is committed, but {error}", cure="correct the command"
        ) from error


def _hook(command: str, target: Target, snapshot: str, seconds: float) -> None:
    """Run a user's shell command for at most so many seconds; it sees ICECORE_JOB, ICECORE_PID and
    ICECORE_SNAPSHOT.

    Raises:
        HookFailed: It ended with another status than 0, or not in time.
    """
    if not command:
        return
    environment = {
        **without_secrets(os.environ),
        "ICECORE_JOB": target.job,
        "ICECORE_PID": str(target.pid),
        "ICECORE_SNAPSHOT": snapshot,
    }
    # No pipe: what it leaves in the background may hold it open for ever.
    with open(os.memfd_create("icecore-hook"), "r+b") as printed:
        try:
            status = run_shell(command, environment, seconds=seconds, output=printed.fileno())
        except TimeoutError as error:
            raise HookFailed(f"the hook {command!r} did not end within {seconds:g} s") from error
        if status:
            printed.seek(max(0, os.fstat(printed.fileno()).st_size - _HOOK_WORDS))
            raise HookFailed(
                f"the hook {command!r} ended with status {status}: {printed.read().decode(errors='replace').strip()}"
            )


@contextmanager
def _undisturbed() -> Iterator[None]:
    """For the window: no cyclic garbage collection, which stops every thread, and precedence over
    whatever else the machine does.

    Threads that are started meanwhile inherit the precedence (it is the thread's in Linux); without
    the right to it, it is done without.
    """
    enabled, thread = gc.isenabled(), threading.get_native_id()
    before = os.getpriority(os.PRIO_PROCESS, thread)
    gc.disable()
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, thread, WINDOW_PRIORITY)
    try:
        yield
    finally:
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, thread, before)
        if enabled:
            gc.enable()


class _Dump:
    """One dump. ``stack`` undoes, in reverse, everything that was begun."""

    def __init__(
        self,
        repository: Repository,
        loop: LoopThread,
        target: Target,
        options: DumpOptions,
        criu: Criu,
        workdir: str,
        emit: Sink,
        stack: ExitStack,
    ) -> None:
        self.repository = repository
        self.loop = loop
        self.target = target
        self.options = options
        self.criu = criu
        self.workdir = workdir
        self.emit = emit
        self.stack = stack
        self.lives = Lives(target.pid, target.job)
        #: Of the working directory; -1 before there is one.
        self.lock = -1
        self.threads = options.scan_threads or limits.threads_for(
            SCAN_THREADS if native_scan_lacks() else NATIVE_SCAN_THREADS
        )
        self.encoders = options.scan_threads or limits.threads_for(ENCODE_THREADS)

    def run(self, after: _After) -> tuple[str, Manifest, int, bool]:
        """All of it; see `dump`."""
        with phase(self.emit, "dump.preflight", pid=self.target.pid) as running:
            found = self._preflight()
            running.fields |= {
                "processes": len(found.processes),
                "private_bytes": found.private_bytes,
            }
            running.fields |= predict(found)
        after.due = True
        try:
            _hook(self.options.before, self.target, "", self.options.hook_seconds)
        except HookFailed as error:
            raise DumpFailed(error.message) from error
        images = self._make_workdir()
        guard = Guard(str(images), lock=self.lock)
        self.stack.callback(guard.release)
        if guard.oom_score > oom.PROTECTED:
            self.emit(
                Event(
                    "dump.unprotected",
                    {"oom_score": guard.oom_score, "wanted": oom.PROTECTED, "cure": oom.CURE},
                )
            )
        devices = self._devices(found, guard, images)
        storing = self.storing = Storing(
            self.repository,
            self.loop,
            self.stack,
            job=self.target.job,
            parent=self.target.parent,
            purpose="dump",
            streams=min(_MOST_STREAMS, len(found.processes)),
            staging_bytes=self._staging_bytes(found),
            threads=self.threads,
            encoders=self.encoders,
            link_rate=self.options.link_rate,
            emit=self.emit,
        )
        if storing.parent is not None:
            self._same_program(storing.parent.manifest)
            storing.parent.prepare()
        copied = self._pre_copy(found)
        self._reserve(found, copied)

        # Not two at a time either that look at device memory: they would take the room on its GPU
        # from each other's window, and a look's end from each other.
        with_devices = (
            [process.pid for process in found.gpus.processes] if found.gpus is not None else []
        )
        claim = Claim(
            {self.target.pid, *with_devices},
            _CLAIM_DEVICES_SECONDS if with_devices else _CLAIM_SECONDS,
        )
        self.stack.callback(claim.release)
        if devices is not None:
            pre_copy = {"off": None, "on": 0}.get(self.options.pre_copy, _PRE_COPY_RESIDENT)
            with storing.staging.limited(_PRE_COPY_STAGING):
                devices.require(
                    self.options.staging_bytes, storing.machinery, storing.parent, pre_copy=pre_copy
                )
            self._predict_again(found, devices)
        storing.pipeline.close_gate()
        window = Window(
            guard,
            self.criu.version,
            limit=None if self.options.stop else self.options.max_window,
            explain=lambda status: self._explain(images, status),
            abandon=storing.abandon,
        )
        capture = Capture(
            self.options,
            images,
            self.criu.version,
            storing.parent,
            copied,
            storing.machinery,
            self.emit,
        )
        # The driver first brings back what it has moved out, then CRIU lets go.
        with window, devices or nullcontext():
            with phase(self.emit, "dump.criu"):
                hidden = images / HIDDEN_FILE
                hidden.touch()
                # A stream is all that there will be of the memory.
                hiding = self.options.memory != "streamed" and hides(self.criu)
                command = self._criu_command(images, devices is not None)
                with devices.holder() if devices is not None else nullcontext() as holder:
                    window.prepare(command, hidden if hiding else None, holder)
            with phase(self.emit, "dump.window") as running, _undisturbed():
                streamed = self.options.memory == "streamed"
                window.begin()
                if devices is None:
                    window.go()
                else:
                    # What the parent tells of what will change may be wrong; the driver copies for
                    # so long that all can be had meanwhile.
                    with storing.staging.growing(found.gpus.most_bytes >> 20 if found.gpus else 0):
                        devices.lock(window.left, storing.machinery, storing.parent)
                        window.go()
                        left = (
                            _FREEZE_SECONDS
                            if window.left is None
                            else min(_FREEZE_SECONDS, window.left)
                        )
                        if not devices.checkpoint(left):
                            window.freeze()  # says why
                            raise DumpFailed(f"CRIU did not freeze the tree within {left:.0f} s")
                device = devices.ranges if devices is not None else {}
                if streamed:
                    window.freeze(streamed=True)
                    running.fields["streamed"] = receive(
                        guard.pages(), self.criu.version, images, _STREAM_SECONDS
                    )
                    before = None
                else:
                    with EarlyScan(
                        self.target.pid,
                        images,
                        storing.parent,
                        copied,
                        device,
                        storing.machinery,
                        self.emit,
                    ) as early:
                        window.freeze()
                        running.fields["freeze_seconds"] = time.monotonic() - window.started
                        before = early.finish()
                captured = capture.in_window(self.target.pid, device, before)
                running.bytes = captured.scanned
                running.fields["hidden"] = captured.hidden
                if devices is not None:
                    devices.wait_copied(window.check)
                if not self.options.stop:
                    window.thaw()
                    if devices is not None:
                        devices.go()
                    window.thawed(list(captured.pids))
                    if devices is not None:
                        devices.give_back()
                        window.over()
                    window.end()
                    claim.release()
                    running.fields["window_seconds"] = window.seconds
                else:
                    window.seconds = time.monotonic() - window.started
            if not self.options.stop:
                self._check_running(captured)
            manifest = self._store(capture, captured, window.seconds, devices)
            snapshot = storing.writer.commit(manifest)
            if devices is not None and self.target.status and not self.options.stop:
                devices.outlive(self.target.pid, Path(self.target.status))
            if self.options.stop:
                if devices is not None:
                    devices.leave()
                self.lives.forget()
                window.kill(list(captured.pids))
                if devices is not None:
                    devices.gone(keep_resident=self.options.keep_resident)
        # Before the guard is released, which removes them if this process is killed until then.
        shutil.rmtree(images, ignore_errors=True)
        pre_copied = sum(c.stored for c in copied.values()) + (
            devices.pre_copied if devices is not None else 0
        )
        return snapshot, manifest, pre_copied, storing.pipeline.spilled

    def _predict_again(self, found: Look, devices: Devices) -> None:
        """Say how long the window will be of what resident memory holds and has changed: preflight
        took all of it for changed.
        """
        if found.resident is not None and devices.foreseen is not None:
            self.emit(
                Event(
                    "dump.predicted",
                    predict(
                        replace(found, resident=replace(found.resident, copies=devices.foreseen))
                    ),
                )
            )

    def _preflight(self) -> Look:
        refusals = check_target(self.target.pid)
        if refusals:
            raise PreflightRefused([(r.name, r.message, r.cure) for r in refusals])
        self.lives.watch([self.target.pid])
        found = look(self.target.pid, self.criu, self.workdir, self.options)
        self.lives.watch(
            [one.pid for one in found.gpus.processes] if found.gpus is not None else []
        )
        require(found)
        record = self.target.record
        if record is not None and record.copies and not record.isolation.root:
            # CRIU works in the root's mount namespace then, and would take any other for one of its
            # own to restore.
            own = {(process.namespaces or {}).get("mnt") for process in found.living}
            if len(own) > 1:
                cure = "snapshot it before it makes them, or restore it without --files-to"
                raise PreflightRefused(
                    [
                        (
                            "namespaces",
                            "the job has copies of files (--files-to), and processes with mount namespaces of their own",
                            cure,
                        )
                    ]
                )
        for warning in warn(found):
            fields = {"name": warning.name, "message": warning.message, "cure": warning.cure}
            self.emit(Event("dump.warning", {**fields}))
        self.shell_job = procfs.status(self.target.pid).session not in {
            p.status.group for p in found.processes
        }
        return found

    def _same_program(self, parent: Manifest) -> None:
        """Two processes that run the same interpreter are not the same job: policies would forget
        the snapshots of one for the other's.
        """
        before = parent.processes[0].command if parent.processes else []
        if self.target.guessed and procfs.command_line(self.target.pid) != before:
            message = f"the newest snapshot of job {self.target.job} is of another command, {shlex.join(before)}: they count as one job's"
            self.emit(
                Event(
                    "dump.warning",
                    {"name": "job", "message": message, "cure": "name the job with --job"},
                )
            )

    def _devices(self, found: Look, guard: Guard, images: Path) -> Devices | None:
        """What makes the driver's calls, if the tree uses GPUs. From now on CUDA is being
        initialised in it, which takes a while.
        """
        if found.gpus is None:
            return None
        resident = None
        if found.resident is not None:
            resident = Resident(
                found.resident, str(images), self.emit, outlives=bool(self.target.status)
            )
            self.stack.callback(resident.close)
        devices = Devices(
            found.root,
            found.gpus,
            guard,
            str(images),
            self.options.gpu_lock,
            self.emit,
            resident,
            self.options.populate,
        )
        self.stack.callback(devices.close)
        return devices

    def _make_workdir(self) -> Path:
        images, self.lock = make_work_directory("icecore-dump-", self.workdir, self.emit)
        self.stack.callback(os.close, self.lock)
        self.stack.callback(shutil.rmtree, images, ignore_errors=True)
        return images

    def _pre_copy(self, found: Look) -> dict[int, PreCopied]:
        """Pre-copy every process that is large enough; pid in the tree's namespace → what was
        learnt.
        """
        mode = self.options.pre_copy
        if mode == "off" or (mode == "auto" and found.private_bytes < _PRE_COPY_BYTES):
            return {}
        out = {}
        parent, machinery = self.storing.parent, self.storing.machinery
        with (
            phase(self.emit, "dump.precopy") as running,
            machinery.staging.limited(_PRE_COPY_STAGING),
        ):
            advance = running.counter(found.private_bytes)
            for number, process in enumerate(found.processes):
                if process.status.zombie or process.private_bytes < (1 << 20):
                    continue
                image = process.status.own_pid
                before = parent.space("process", str(image)) if parent else None
                learnt = pre_copy(
                    process.pid, number % machinery.streams, before, machinery, advance=advance
                )
                if learnt is not None:
                    out[image] = learnt
                    running.bytes += learnt.scanned
            running.fields |= {
                "changed": sum(c.changed for c in out.values()),
                "stored": sum(c.stored for c in out.values()),
            }
        return out

    def _staging_bytes(self, found: Look) -> int:
        """The bound on staging. A checkpoint doubles device memory into the host's; what is staged
        of it comes out of what is left then.
        """
        device = found.gpus.most_bytes if found.gpus is not None else 0
        if not device:
            return self.options.staging_bytes
        return min(
            self.options.staging_bytes + device, max(0, limits.memory_available() - device) // 2
        )

    def _reserve(self, found: Look, copied: dict[int, PreCopied]) -> None:
        """Fault staging in before the window: as much as is likely to change, by what changed since
        the parent; without pre-copy nobody knows, so all.
        """
        if copied and self.storing.parent_id:
            guess = sum(c.changed for c in copied.values())
        elif copied:
            guess = int(found.private_bytes * _GUESS)
        else:
            guess = found.private_bytes
        if found.gpus is not None:
            # Pre-copy knows nothing of device memory: as much is taken to change as did in the
            # parent.
            parent = self.storing.parent
            guess += min(
                found.gpus.most_bytes,
                parent.manifest.sizes.changed if parent else found.gpus.most_bytes,
            )
        staging = self.storing.staging
        staging.reserve(min(staging.capacity, guess // (1 << 20) + 3 * self.threads))

    def _plugins(self, images: Path, devices: bool) -> list[str]:
        """Where CRIU takes its plugins from. Not from where it looks itself: CRIU's plugin for CUDA
        would make the driver's calls a second time.
        """
        folder = self.options.criu_plugins
        if devices:
            folder = str(plugin_folder(images / "plugins", folder))
        return ["--libdir", folder] if folder else []

    def _criu_command(self, images: Path, devices: bool) -> list[str]:
        """CRIU's arguments; the guard fills in what is in braces."""
        record = self.target.record
        own = dump_options(self.target.pid, record) if record else []
        prefix = dump_prefix(self.target.pid, record) if record else []
        arguments = DumpArguments(
            connections=self.options.tcp,
            network_lock="skip",
            file_locks=True,
            external_unix=True,
            shell_job=self.shell_job,
            ghost_limit=self.options.ghost_limit,
            verbosity=2,
            # Connections that nobody has accepted yet are not there after a restore; with ``close``
            # none is.
            extra=(
                "--link-remap",
                *("--action-script", "{hold}"),
                *(["--skip-in-flight"] if self.options.tcp == "close" else []),
                *self._plugins(images, devices),
                *own,
            ),
        )
        if self.options.memory == "streamed":
            self.emit(
                Event(
                    "dump.fallback",
                    {"memory": "streamed", "why": "CRIU sends all memory in the window"},
                )
            )
            return [
                *prefix,
                *stream_dump_command(
                    self.criu, self.target.pid, images, arguments, pages="{pages}"
                ),
            ]
        return [
            *prefix,
            *lazy_dump_command(
                self.criu, self.target.pid, images, arguments, pages="{pages}", status="{status}"
            ),
        ]

    def _restore_options(self) -> list[str]:
        """What a restore of this dump must tell CRIU."""
        options = ["--shell-job"] if self.shell_job else []
        return [*options, "--tcp-close"] if self.options.tcp == "close" else options

    def _explain(self, images: Path, status: int) -> DumpFailed:
        message, cure = explain(images).sentence(f"the dump of process {self.target.pid}")
        return DumpFailed(f"{message} (criu's exit status {status})", cure=cure)

    def _check_running(self, captured: Captured) -> None:
        """CRIU's word is not enough: every process must be seen to run."""
        stuck = wait_running(list(captured.pids), _RUNNING_SECONDS)
        if stuck:
            raise DumpFailed(
                f"{len(stuck)} processes still stand still after the window: {stuck[:5]}",
                cure="look for what traces them ('grep TracerPid /proc/PID/status')",
            )

    def _store(
        self, capture: Capture, captured: Captured, window_seconds: float, devices: Devices | None
    ) -> Manifest:
        """Everything after the window but the commit."""
        if devices is not None:
            devices.let_go()
            devices.warn()
        with phase(self.emit, "dump.store") as running:
            self.storing.pipeline.open_gate(
                running.counter(sum(space.queued for space in captured.spaces))
            )
            capture.after_window(captured)
            if devices is not None:
                captured.spaces += devices.store(self.storing.machinery)
            stored = self.storing.finish(captured.spaces, captured.reused)
            running.bytes = stored.sizes.logical
            running.fields |= {
                "stored": stored.sizes.stored,
                "chunks": stored.chunks,
                "deltas": stored.deltas,
                "by_codec": dict(stored.sizes.by_codec),
            }
        return Manifest(
            format=MANIFEST_FORMAT,
            snapshot=new_snapshot_id(),
            job=self.target.job,
            lineage=self.storing.lineage,
            parent=self.storing.parent_id,
            created_ns=captured.at_ns,
            host=host_name(),
            writer=f"icecore dump, criu {'.'.join(map(str, self.criu.version))}",
            root_pid=captured.pids[self.target.pid],
            processes=captured.processes,
            spaces=stored.spaces,
            files=captured.files,
            requirements=describe_requirements(
                self.criu.version,
                captured.ids,
                captured.ports,
                devices.requirements() if devices else [],
            ),
            namespaces=captured.namespaces,
            criu_options=self._restore_options(),
            tags=list(self.options.tags),
            pinned=self.options.pinned,
            sizes=stored.sizes,
            window_seconds=window_seconds,
            hints=stored.hints,
            hints_digest=stored.hints_digest,
            extra={
                **({"run": self.target.record.encode()} if self.target.record else {}),
                **(devices.describe(captured.pids) if devices else {}),
            },
        )
