"""The processes of operations: start, find and signal them without mistaking a reused pid for one."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from icecore.errors import NotFound
from icecore.host.jobs.description import boot_id
from icecore.host.kernel import libc, procfs
from icecore.host.rpc import packets
from icecore.service.api import operation_files as files
from icecore.service.api.operation_files import Process

#: Signals that a client may send to an operation.
SIGNALS = {
    "INT": signal.SIGINT,
    "TERM": signal.SIGTERM,
    "HUP": signal.SIGHUP,
    "USR1": signal.SIGUSR1,
}
_POLL_SECONDS = 0.05
#: The zygote imports everything first, perhaps on a busy machine; then it only forks.
_READY_SECONDS, _ANSWER_SECONDS = 120.0, 10.0
_END_SECONDS = 2.0
_TRIES = 3
_PAUSE_SECONDS = 1.0
_PACKAGE = Path(__file__).resolve().parents[2]
_FILES = (Path(__file__), _PACKAGE / "worker.py", _PACKAGE / "zygote.py")
_NOT_THERE: tuple[tuple[int, int], ...] = ()
_ZYGOTE = "icecore.zygote"
#: Variables by which a service manager speaks to the service alone.
_NOT_INHERITED = (
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
)


class Request(msgspec.Struct, array_like=True):
    """Asks the zygote for a process. A zygote may be newer than the service that asks it, so fields
    are only added, with defaults.

    Attributes:
        directory: Of the operation.
        attempt: Which of its processes this one is, from 1.
        descriptors: Its soft and hard limit on descriptors; None: the zygote's.
        priority: Its nice value; None: the zygote's.
    """

    directory: bytes
    attempt: int
    descriptors: tuple[int, int] | None = None
    priority: int | None = None


class Answer(msgspec.Struct, array_like=True):
    """A message of the zygote: first that it is ready, then the outcome of each request.

    Attributes:
        error: The error number; 0: it is ready, or the process runs and its pidfd comes with this.
    """

    error: int = 0


class StartFailed(Exception):
    """A worker could not be started, and does not run."""


class _Died(StartFailed):
    """The zygote ended before it was ready."""


class Starter:
    """Starts the processes of operations, each in its own session, through a zygote
    (`icecore.zygote`). It starts the zygote on first use, and again if the zygote was killed, hangs
    or is older than the installed icecore. Only `kill` is safe to call from another thread.

    Args:
        worker: The module, or the file, whose ``main`` each process runs.
    """

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._installed = _installed()
        self._ready = False
        self._over = False

    def warm(self) -> None:
        """Start the zygote unless it runs, and wait until it is ready.

        Raises:
            StartFailed: It does not come up.
        """
        if self._process is not None and (
            self._process.poll() is not None or _installed() not in (self._installed, _NOT_THERE)
        ):
            self.close()
        if self._over:
            raise StartFailed("the service ends")
        if self._process is None:
            self._begin()
        if self._ready:
            return
        assert self._process is not None
        try:
            self._hear(_READY_SECONDS)
        except TimeoutError:
            self._process.kill()
            self.close()
            raise StartFailed(
                f"the process that starts operations was not ready after {_READY_SECONDS:.0f} s"
            ) from None
        except packets.PeerDied:
            status = self._process.wait()
            self.close()
            raise _Died(
                f"the process that starts operations ended with status {status};"
                " the service's log says more"
            ) from None
        self._ready = True

    def _begin(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_ANSWER_SECONDS)
        self._installed = _installed()
        environment = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
        # Signals stay blocked until the command has installed its handlers.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS.values())
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", _ZYGOTE, str(theirs.fileno()), self._worker],
                    stdin=subprocess.DEVNULL,
                    stdout=_own_or_none(1),
                    stderr=_own_or_none(2),
                    start_new_session=True,
                    pass_fds=(theirs.fileno(),),
                    env=libc.without_thread_caches(environment),
                )
        except OSError as error:
            ours.close()
            raise StartFailed(f"cannot start a process: {error.strerror}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._control, self._ready = ours, False
        if self._over:
            self._process.kill()

    def start(
        self,
        directory: Path,
        lock: int,
        attempt: int,
        descriptors: tuple[int, int] | None = None,
        priority: int | None = None,
    ) -> int:
        """Start the worker of an operation; return a pidfd of it, which the caller closes. -1: it
        runs, but this process had no descriptor left for its pidfd.

        Args:
            lock: A descriptor that holds the operation's lock; the worker inherits it.
            descriptors: Its soft and hard limit on descriptors; None: the zygote's.
            priority: The worker's nice value; None: the zygote's.

        Raises:
            StartFailed: It does not run.
        """
        try:
            log = os.open(
                directory / "output.log",
                os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o600,
            )
        except OSError as error:
            raise StartFailed(f"cannot start a process: {error.strerror}") from error
        wanted = Request(os.fsencode(directory), attempt, descriptors, priority)
        data = msgspec.msgpack.encode(wanted)
        try:
            for left in range(_TRIES, 0, -1):
                try:
                    self.warm()
                    return self._ask(data, [lock, log])
                except packets.PeerDied:
                    self.close()
                except _Died:
                    if left == 1:
                        raise
                    time.sleep(_PAUSE_SECONDS)  # in the middle of an upgrade, for example
        finally:
            os.close(log)
        raise StartFailed(f"the process that starts operations was killed {_TRIES} times in a row")

    def _ask(self, data: bytes, descriptors: list[int]) -> int:
        """Send a request; return the pidfd, or -1.

        Raises:
            PeerDied: The zygote was killed, and the worker does not run: a zygote lets it begin
                only after it has answered.
            StartFailed: It could not be forked.
        """
        assert self._control is not None and self._process is not None
        try:
            packets.send(self._control, data, descriptors)
            return self._hear(_ANSWER_SECONDS)
        except TimeoutError:
            # It hangs. It may have answered before it dies.
            self._process.kill()
        try:
            return self._hear(_ANSWER_SECONDS)
        except TimeoutError as error:  # it is stuck in the kernel
            raise packets.PeerDied(*error.args) from error

    def _hear(self, seconds: float) -> int:
        assert self._control is not None
        try:
            data, sent = packets.receive(self._control, seconds)
        except packets.DescriptorsLost:
            return -1
        answer = msgspec.msgpack.decode(data, type=Answer)
        if answer.error:
            raise StartFailed(f"cannot start a process: {os.strerror(answer.error)}")
        return sent[0] if sent else -1

    def kill(self) -> None:
        """Kill the zygote, so that present and later calls in other threads end soon."""
        self._over = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the zygote. The processes that it has started continue."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:  # it still imports, or hangs
                self._process.kill()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_SECONDS)
            self._process = None


def _own_or_none(descriptor: int) -> int:
    """Return a standard stream of this process for a child; DEVNULL if it is closed."""
    try:
        os.fstat(descriptor)
    except OSError:
        return subprocess.DEVNULL
    return descriptor


def _installed() -> tuple[tuple[int, int], ...]:
    """Return what differs once icecore was installed anew: an upgrade writes new files. Empty: some
    are missing, in the middle of it.
    """
    try:
        found = [os.stat(path) for path in _FILES]
    except OSError:
        return _NOT_THERE
    return tuple((about.st_ino, about.st_mtime_ns) for about in found)


async def open_worker(directory: Path) -> int:
    """Return a pidfd of an operation's worker; -1: it has ended."""
    while True:
        # Until a slow worker has written it, the file is absent, or that of an attempt before.
        process = files.read_process(directory)
        pidfd = _open(process) if process is not None else -1
        if pidfd >= 0 or files.is_free(directory) or files.read_result(directory) is not None:
            return pidfd
        await asyncio.sleep(_POLL_SECONDS)


def send(directory: Path, number: int) -> None:
    """Send a signal to an operation's worker, and to no process that reuses its pid."""
    process = files.read_process(directory)
    if process is None:
        return  # it checks for a cancel request when it begins
    pidfd = _open(process)
    if pidfd >= 0:
        try:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)
        finally:
            os.close(pidfd)


async def readable(descriptor: int) -> None:
    """Wait until a descriptor is readable; a pidfd is once its process has ended."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def done() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(descriptor, done)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


def _open(process: Process) -> int:
    """Return a pidfd of a worker; -1: it has ended. The start time is compared after the pidfd is
    open, because only then the pid cannot be reused.
    """
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return -1
    try:
        same = process.boot == boot_id() and procfs.start_time(process.pid) == process.start_time
    except NotFound:
        same = False
    if not same:
        os.close(pidfd)
        return -1
    return pidfd
