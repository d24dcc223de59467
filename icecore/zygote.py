"""The zygote: a process that has imported all that operations need, and forks their processes.
``python -m icecore.zygote FD WORKER``.

A new interpreter takes half a second to import the dumper and the restorer, and each one has its
own copy of them in memory. A forked one begins at once and shares the copy.

It has one thread, and ends with its socket; the processes that it forked go on. It says once that
it is ready (`icecore.service.api.workers.Answer`). Each request (`Request` there) comes with two
descriptors: the operation's lock, and the log for standard output and error. The answer is a pidfd,
or the reason why the process could not be forked.
"""

from __future__ import annotations

import errno
import gc
import importlib
import importlib.util
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from icecore.commands.context import BLAS_THREADS, load_numpy
from icecore.config import every_setting
from icecore.host.kernel import libc
from icecore.host.rpc import packets
from icecore.service.api.workers import Answer, Request
from icecore.store.format import codec

#: Imported before the first fork: what dumps, restores and supervisors use.
_MODULES = (
    "icecore.commands.jobs",
    "icecore.commands.snapshots",
    "icecore.commands.supervise",
    "icecore.dumper.dump",
    "icecore.host.jobs.launch",
    "icecore.host.jobs.mounts",
    "icecore.repository",
    "icecore.restorer.hooks",
    "icecore.restorer.restore",
    "icecore.service.supervision.supervisor",
    "multiprocessing.synchronize",
)
_ENDED = signal.SIGCHLD


def main() -> int:
    """Serve until the socket ends. In a forked process this returns the worker's status."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    libc.restore_environment()
    _load(*_MODULES)
    codec.load()
    list(every_setting())  # fill the cache of types of settings before the forks
    worker = _main_of(sys.argv[2])
    # Collections write to all objects, so without the freeze each fork would copy most pages.
    gc.collect()
    gc.freeze()
    signal.signal(_ENDED, signal.SIG_IGN)  # nobody waits for the processes
    try:
        wanted, descriptors = _serve(control)
    except packets.PeerDied:
        return 0
    return _become(wanted, control, worker, *descriptors)


def _serve(control: socket.socket) -> tuple[Request, list[int]]:
    """Fork for each request. Return in a forked process, with its request.

    Raises:
        PeerDied: The service has ended.
    """
    packets.send(control, msgspec.msgpack.encode(Answer()))
    while True:
        data, descriptors = packets.receive(control)
        if not _fork(control):
            return msgspec.msgpack.decode(data, type=Request), descriptors
        for descriptor in descriptors:
            os.close(descriptor)


def _load(*names: str) -> None:
    """Import modules, without threads of numpy's: a fork would not have them."""
    before = os.environ.pop(BLAS_THREADS, None)
    load_numpy()
    if before is not None:
        os.environ[BLAS_THREADS] = before
    for name in names:
        importlib.import_module(name)


def _main_of(worker: str) -> Callable[[], int]:
    """Return the main function of a module, or of a file."""
    if not worker.endswith(".py"):
        module = importlib.import_module(worker)
    else:
        spec = importlib.util.spec_from_file_location(Path(worker).stem, worker)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    found: Callable[[], int] = module.main
    return found


def _fork(control: socket.socket) -> bool:
    """Fork, and answer. Return whether this is still the zygote."""
    begin, told = os.pipe()
    pidfd = -1
    try:
        pid = os.fork()
        if pid == 0:
            os.close(told)
            told = -1
            # Wait until the pidfd is open: if this process ended earlier, its pid could already
            # belong to another one. If the zygote is killed first, nobody knows of this process.
            if not os.read(begin, 1):
                os._exit(1)
            return False
        pidfd = os.pidfd_open(pid)
        packets.send(control, msgspec.msgpack.encode(Answer()), [pidfd])
        os.write(told, b"\0")
    except OSError as error:  # also where the service has ended
        with suppress(OSError):
            packets.send(control, msgspec.msgpack.encode(Answer(error.errno or errno.EIO)))
    finally:
        for descriptor in (begin, told, pidfd):
            if descriptor >= 0:
                os.close(descriptor)
    return True


def _become(
    wanted: Request, control: socket.socket, worker: Callable[[], int], lock: int, log: int
) -> int:
    """Be the worker of an operation, with nothing that was the zygote's."""
    signal.signal(_ENDED, signal.SIG_DFL)
    control.close()
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for descriptor, number in ((null, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, number)
    os.close(null)
    os.close(log)
    if wanted.descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, wanted.descriptors)
    if wanted.priority is not None:
        with suppress(OSError):  # a security module forbids it
            os.setpriority(os.PRIO_PROCESS, 0, wanted.priority)
    sys.argv[1:] = [os.fsdecode(wanted.directory), str(lock), str(wanted.attempt)]
    return worker()


if __name__ == "__main__":
    sys.exit(main())
