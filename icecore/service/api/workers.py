"""The processes of operations: start, find and signal them without mistaking a reused pid for one."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from icecore.errors import NotFound
from icecore.host.jobs.description import boot_id
from icecore.host.kernel import procfs
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
#: Variables by which a service manager speaks to the service alone.
_NOT_INHERITED = (
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
)


def spawn(
    command: Sequence[str],
    directory: Path,
    lock: int,
    attempt: int,
    descriptors: tuple[int, int] | None = None,
    priority: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start the worker of an operation in its own session.

    Args:
        command: Its command line, without its arguments.
        lock: A descriptor that holds the operation's lock; the worker inherits it.
        descriptors: Its soft and hard limit on descriptors; None: this process's.
        priority: The worker's nice value; None: inherit this thread's.

    Raises:
        OSError: It cannot be started.
    """
    log = os.open(
        directory / "output.log",
        os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC,
        0o600,
    )
    environment = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
    # Signals stay blocked until the command has installed its handlers.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS.values())
    try:
        child = subprocess.Popen(
            [*command, str(directory), str(lock), str(attempt)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(lock,),
            env=environment,
        )
        if descriptors is not None:  # before it starts a job: its interpreter only begins
            with suppress(ProcessLookupError):
                resource.prlimit(child.pid, resource.RLIMIT_NOFILE, descriptors)
        if priority is not None:
            with suppress(OSError):  # it has ended, or a security module forbids it
                os.setpriority(os.PRIO_PROCESS, child.pid, priority)
        return child
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(log)


async def open_worker(directory: Path, child: subprocess.Popen[bytes] | None) -> int:
    """Return a pidfd of an operation's worker; -1: it has ended.

    Args:
        child: The worker, if it is this process's child.
    """
    if child is not None:
        return os.pidfd_open(child.pid)  # nobody else collects it
    while True:
        # Until a slow worker has written it, the file is absent, or that of an attempt before.
        process = files.read_process(directory)
        pidfd = _open(process) if process is not None else -1
        if pidfd >= 0 or files.is_free(directory) or files.read_result(directory) is not None:
            return pidfd
        await asyncio.sleep(_POLL_SECONDS)


def send(directory: Path, child: subprocess.Popen[bytes] | None, number: int) -> None:
    """Send a signal to an operation's worker, and to no process that reuses its pid.

    Args:
        child: The worker, if it is this process's child.
    """
    if child is not None:
        with suppress(ProcessLookupError):
            os.kill(child.pid, number)  # its pid is not free before it is collected
        return
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
