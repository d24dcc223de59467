"""The processes of operations: start, find and signal them without mistaking a reused pid for one."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from icecore.errors import NotFound
from icecore.host.jobs.description import boot_id
from icecore.host.kernel import procfs
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
#: The zygote may have to import everything first, on a busy machine.
_START_SECONDS = 120.0
_END_SECONDS = 2.0
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


class Request(msgspec.Struct):
    """One process to be forked.

    Attributes:
        directory: Of the operation.
        attempt: Which of its processes this one is, from 1.
        descriptors: Its soft and hard limit on descriptors; None: the zygote's.
        priority: Its nice value; None: the zygote's.
    """

    directory: str
    attempt: int
    descriptors: tuple[int, int] | None = None
    priority: int | None = None


class Answer(msgspec.Struct):
    """What became of a request.

    Attributes:
        error: The error number; 0: the process runs, and its pidfd comes with this.
    """

    error: int = 0


class WorkerLost(Exception):
    """The zygote ended before it had said whether it has started a worker."""


class Starter:
    """Starts the processes of operations, each in its own session, by a zygote
    (`icecore.zygote`), which is started when it is first needed, or again if it was killed.
    Used by one thread at a time.

    Args:
        worker: The module, or the file, whose ``main`` each process runs.
    """

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def warm(self) -> None:
        """Start the zygote unless it runs.

        Raises:
            OSError: It cannot be started.
        """
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._control is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_START_SECONDS)
        environment = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
        # Signals stay blocked until the command has installed its handlers.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS.values())
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", _ZYGOTE, str(theirs.fileno()), self._worker],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=(theirs.fileno(),),
                    env=environment,
                )
        except BaseException:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._control = ours

    def start(
        self,
        directory: Path,
        lock: int,
        attempt: int,
        descriptors: tuple[int, int] | None = None,
        priority: int | None = None,
    ) -> int:
        """Start the worker of an operation; return a pidfd of it, which the caller closes.

        Args:
            lock: A descriptor that holds the operation's lock; the worker inherits it.
            descriptors: Its soft and hard limit on descriptors; None: this process's.
            priority: The worker's nice value; None: inherit this thread's.

        Raises:
            WorkerLost: The zygote was killed; the worker may run.
            OSError: It cannot be started.
        """
        self.warm()
        assert self._control is not None
        log = os.open(
            directory / "output.log",
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
        )
        wanted = Request(str(directory), attempt, descriptors, priority)
        try:
            packets.send(self._control, msgspec.json.encode(wanted), [lock, log])
            data, sent = packets.receive(self._control)
        except (packets.PeerDied, TimeoutError) as error:
            self.close()
            raise WorkerLost from error
        finally:
            os.close(log)
        answer = msgspec.json.decode(data, type=Answer)
        if answer.error:
            raise OSError(answer.error, os.strerror(answer.error))
        return sent[0]

    def close(self) -> None:
        """End the zygote. The processes that it has started continue."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:  # it imports still
                self._process.kill()
                self._process.wait()
            self._process = None


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
