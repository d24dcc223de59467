"""A tree that CRIU builds: started, filled, let go, or killed. From its start until `release`
something kills it if the restore fails, and after `kill` nothing of it runs.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from icecore.errors import IcecoreError, RestoreFailed
from icecore.host.criu.log import PID_TAKEN
from icecore.host.criu.program import Criu, RestoreArguments, explain, restore_command
from icecore.host.kernel import procfs
from icecore.restorer.fetch.limits import Limits
from icecore.restorer.fetch.source import Decoder
from icecore.restorer.files.images import LazyMemory
from icecore.restorer.fill.daemon import Daemon
from icecore.restorer.fill.device_file import DeviceFile
from icecore.restorer.fill.tree_fill import TreeFill
from icecore.restorer.gpu.devices import Devices
from icecore.restorer.gpu.resident import Resident
from icecore.restorer.guard.client import RestoreGuard
from icecore.restorer.guard.guard_process import descendants
from icecore.restorer.options import RestoreOptions
from icecore.restorer.place.placers import Placers
from icecore.store.backend.base import Backend
from icecore.store.format.manifest import Manifest
from icecore.store.runtime.loop import LoopThread

_KILL_SECONDS = 60.0
_POLL_SECONDS = 0.2
#: How long CRIU may take to end after all that it restored has ended; it takes milliseconds.
_OVER_SECONDS = 5.0
# CRIU continues if the script fails, and reading ends if the writer dies: only the word itself lets
# the tree go.
_HOLD = """#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = pre-resume ] || exit 0
while :; do
    read -r answer < '{fifo}' && [ "$answer" = go ] && exit 0
    sleep 1
done
"""


class PidTaken(RestoreFailed):
    """Another process got an id of the tree between the check and CRIU's use of it."""


def criu_arguments(
    manifest: Manifest, options: RestoreOptions, own: Sequence[str], script: Path | None
) -> RestoreArguments:
    """Return CRIU's arguments for a snapshot.

    Args:
        own: Options for the instance's namespaces.
        script: Holds the tree; None: it runs at once.
    """
    closed = options.connections == "close" or "--tcp-close" in manifest.criu_options
    known = {"--tcp-close", "--tcp-established", "--shell-job"}
    return RestoreArguments(
        lazy=True,
        root=Path(options.root) if options.root else None,
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


class Tree:
    """The tree of one restore.

    Args:
        what: What is restored, for messages.
        guard: A guard that has not started CRIU yet.
        work: CRIU's working directory, the guard's own.
        memory: What comes through userfaultfd.
        backend: Holds the chunks.
        decoder: Decodes and verifies them.
        limits: Threads, memory, patience.
        loop: Where the repository lives.
        placers: Processes that place; None: threads do.
        device_file: The device memory that does not come through userfaultfd.

    Attributes:
        failure: What broke first; None: nothing has. The tree is killed then.
        went: `resume` may have let the tree go: before, CRIU holds all of it, and none of it has
            run.
        ran: CRIU has let it go and has ended without an error.
        released: It lives without this process, and nothing kills it any more.
    """

    def __init__(
        self,
        what: str,
        guard: RestoreGuard,
        work: Path,
        memory: Sequence[LazyMemory],
        backend: Backend,
        decoder: Decoder,
        limits: Limits,
        loop: LoopThread,
        *,
        placers: Placers | None = None,
        device_file: DeviceFile | None = None,
    ) -> None:
        self._what = what
        self._guard = guard
        self._work = work
        self._pid_file = work / "restored.pid"
        self.fill = TreeFill(
            guard,
            memory,
            backend,
            decoder,
            limits,
            loop,
            self._failed,
            placers=placers,
            device_file=device_file,
        )
        self.daemon = self.fill.daemon
        self.failure: BaseException | None = None
        self._held = False
        self.daemon.ended = self._criu_ended
        self._lock = threading.Lock()
        self._settled = False
        self.went = False
        self.ran = False
        self.released = False

    # -- bringing it up

    def hold_script(self, stack: ExitStack) -> Path:
        """Make the action script that keeps CRIU from resuming the tree until `resume`.

        CRIU hands the script's path to a shell. So the path names it by a descriptor: no character
        of a path that the user chose reaches a shell.

        Args:
            stack: Closes the descriptor.
        """
        os.mkfifo(self._work / "go", 0o600)
        folder = os.open(self._work, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, folder)
        seen = Path(f"/proc/{os.getpid()}/fd/{folder}")
        script = self._work / "hold"
        script.write_text(_HOLD.format(fifo=seen / "go"))
        script.chmod(0o700)
        self._held = True
        return seen / "hold"

    @property
    def held(self) -> bool:
        """Whether the tree runs only after `resume`."""
        return self._held

    def _criu_ended(self) -> None:
        """Fail if CRIU ends while the tree is held: only `resume` lets it go."""
        if self._held and self.daemon.restored:
            self._failed(self._explain())

    def build(
        self,
        criu: Criu,
        images: Path,
        arguments: RestoreArguments,
        prefix: Sequence[str],
        descriptors: Sequence[int],
        seconds: float,
        environment: Mapping[str, str],
        first: Sequence[tuple[int, int]],
    ) -> None:
        """Run CRIU; return once the tree is built and its memory can be placed.

        Args:
            prefix: Command line before CRIU's.
            descriptors: What CRIU inherits, under the same numbers.
            seconds: How long it may take.
            environment: Variables beside the guard's.
            first: (process, address) of the cells that are wanted first.

        Raises:
            RestoreFailed: CRIU failed or took too long.
        """
        command = restore_command(criu, images, self._work, arguments, pid_file=self._pid_file)
        self._guard.run([*prefix, *command], descriptors, environment)
        # Many threads take a while to start, and CRIU works for a while before any page fault.
        self.fill.start(self.fill.rows_at(first))
        self._await(
            lambda d: d.restored or d.criu_status is not None,
            seconds,
            "build the tree within {:.0f} s",
        )
        if not self.daemon.restored:
            raise self._explain()
        self.fill.open()

    def resume(self, seconds: float) -> int:
        """Let a held tree go; return the root's pid."""
        if self.failure is not None:
            raise self.failure
        self._held = False
        descriptor = os.open(self._work / "go", os.O_RDWR | os.O_CLOEXEC)
        try:
            self.went = True  # first: an interrupt may come between the two
            os.write(descriptor, b"go\n")
            return self.running(seconds)
        finally:
            os.close(descriptor)

    def running(self, seconds: float) -> int:
        """Wait until CRIU has ended and the tree runs; return the root's pid."""
        self._await(
            lambda d: d.criu_status is not None,
            seconds,
            "end within {:.0f} s after it built the tree",
        )
        if self.daemon.criu_status != 0:
            raise self._explain()
        self.ran = True
        return self.root()

    def _await(self, condition: Callable[[Daemon], bool], seconds: float, what: str) -> None:
        """Wait for CRIU.

        Raises:
            RestoreFailed: The time is up, or CRIU failed and waits forever. It does so after it has
                killed a tree with a pid namespace of its own: it waits for the init, which waits
                for processes that have ended and that CRIU traces.
        """
        end, over_since = time.monotonic() + seconds, None
        while not self.daemon.wait_for(condition, _POLL_SECONDS):
            if self.failure is not None:  # the tree was killed meanwhile, CRIU with it
                raise self.failure
            now = time.monotonic()
            if now > end:
                raise RestoreFailed(f"CRIU did not {what.format(seconds)}")
            over_since = (over_since or now) if self._over() else None
            if over_since is not None and now > over_since + _OVER_SECONDS:
                raise self._explain("it waits for processes that have ended")

    def _over(self) -> bool:
        """Return whether all that CRIU restored has ended, and CRIU has not."""
        criu = self.daemon.criu_pid
        try:
            # The root usually lives, and then no other process is looked at.
            return (
                all(map(procfs.is_over, procfs.children(criu)))
                and len(tree := procfs.tree(criu)) > 1
                and all(map(procfs.is_over, tree[1:]))
            )
        except IcecoreError:
            return False

    def root(self) -> int:
        """Return the root's pid, which CRIU writes to a file once it has built the tree."""
        try:
            return int(self._pid_file.read_text())
        except (OSError, ValueError) as error:
            raise RestoreFailed(
                f"CRIU did not write the pid of the tree's root: {error}"
            ) from error

    def _explain(self, why: str = "") -> RestoreFailed:
        """Return why CRIU failed."""
        found = explain(self._work, "restore.log")
        message, cure = found.sentence(self._what)
        status = f"criu's exit status {self.daemon.criu_status}" + (
            f": {self.daemon.criu_error}" if self.daemon.criu_error else ""
        )
        taken = found.cause is not None and found.cause.name == PID_TAKEN
        kind = PidTaken if taken else RestoreFailed
        return kind(f"{message} ({why or status})", cure=cure)

    def bring_devices_back(
        self, devices: Devices, sizes: Mapping[int, int], seconds: float
    ) -> None:
        """Have the driver restore the device memory of a tree that is built and does not run yet,
        while the tree is being filled.

        Args:
            sizes: Image id → bytes of device memory.
            seconds: How long CRIU may take from now until it has built the tree.

        Raises:
            RestoreFailed: The driver or the fill failed.
        """
        held, self._held = (
            self._held,
            False,
        )  # CRIU may end because of what the driver or its helper did, which says more
        if not devices.bring_back(
            self.root, sizes, self.fill, lambda: self.failure, self._end_of_criu, seconds
        ):
            self.running(seconds)  # says why CRIU ended
            raise RestoreFailed(
                "CRIU let the tree go before the driver had restored its device memory"
            )
        self._held = held
        if self.daemon.criu_status is not None:
            self._criu_ended()

    def _end_of_criu(self) -> RestoreFailed | None:
        """Return why CRIU has ended, if it has."""
        return self._explain() if self.daemon.criu_status is not None else None

    def map_resident(self, resident: Resident, devices: Devices) -> None:
        """Have the processes, which the driver has unlocked, map their resident memory once it is
        complete, and run.

        Raises:
            RestoreFailed: They could not, or the fill failed.
        """
        resident.map(devices.pids, lambda: self.failure)

    # -- letting it go

    def release(self, *, stay: bool) -> None:
        """Release a tree that runs and whose memory is complete: it lives without this process.
        Then `leave` or `await_exit` ends the guard.

        Args:
            stay: The guard remains the tree's parent, to report how it ends (`await_exit`).

        Raises:
            RestoreFailed: The tree was killed in the meantime.
        """
        with self._lock:
            if self._settled:
                raise self.failure or RestoreFailed(f"{self._what} was given up")
            self._guard.release(stay=stay)
            self._settled = self.released = True

    def leave(self) -> None:
        """End the thread and the guard of a tree that was released. May be called twice.

        Raises:
            RestoreFailed: The guard did not end.
        """
        self.daemon.stop()
        self._guard.end(_KILL_SECONDS)

    def await_exit(self, pid: int, done: Callable[[int | BaseException], None]) -> None:
        """Call ``done`` in another thread with how the process ``pid`` ends; after a release with
        ``stay``.
        """

        def wait() -> None:
            try:
                self.daemon.wait_for(lambda d: pid in d.exits, None)
                done(self.daemon.exits[pid])
            except BaseException as error:  # noqa: BLE001 - raised by who waits for the end
                done(error)
            finally:
                self.daemon.stop()
                with suppress(RestoreFailed):
                    self._guard.end(_KILL_SECONDS)

        threading.Thread(target=wait, name="exit", daemon=True).start()

    # -- killing it

    def _failed(self, error: BaseException) -> None:
        """Kill the tree because a worker or the daemon failed: it must not run. Who waits for it
        raises the error.
        """
        with self._lock:
            # The released guard ends, which the daemon may see before it is stopped.
            if self.released:
                return
            self.failure = self.failure or error
        self._kill()
        self.fill.fail(error)

    def _kill(self) -> None:
        with self._lock:
            if self._settled:
                return
            self._settled = True
            try:
                self._guard.kill()
            except RestoreFailed:
                self._kill_ourselves()

    def _kill_ourselves(self) -> None:
        """Kill the tree without the guard, which is dead. This process still has duplicates of its
        descriptors open, so nothing has run on zeros yet.
        """
        roots: list[int] = []
        with suppress(OSError, ValueError):
            roots.append(int(self._pid_file.read_text()))
        criu = self.daemon.criu_pid if self.daemon.criu_status is None else 0
        if criu:
            roots.append(criu)
        below: set[int] = set()
        for root in roots:
            try:
                below.update(procfs.tree(root))
            except IcecoreError:  # it ended, or keeps changing
                below.update([root, *descendants(root)])
        # The tasks first: CRIU traces them, and would let them run by dying.
        for pid in sorted(below, key=lambda pid: pid == criu):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill(self, error: BaseException) -> None:
        """Give up the restore because of an error: kill what runs, and end all threads and the
        guard.
        """
        self.failure = self.failure or error  # that CRIU is killed for it explains nothing
        self._kill()
        self.fill.fail(error)
        self.fill.kill_placers()
        # A daemon that never started hears nothing; then there is only the guard, which is waited
        # for below.
        if self.daemon.started:
            with suppress(BaseException):
                self.daemon.wait_for(lambda d: d.killed, _KILL_SECONDS)
        self.fill.stop()
        self.daemon.stop()
        with suppress(RestoreFailed):
            self._guard.end(_KILL_SECONDS)
