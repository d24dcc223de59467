"""Starts helper processes of a command: modules with a function `main`.

A new interpreter takes 0.1 to 0.6 s to start and to import what a helper needs. A command that has
imported most of it can begin a *fork server*: a process with one thread that forks the helpers,
which begin at once and share the command's memory. `start` starts a new interpreter, with the same
result.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import NoReturn, Self

from icecore.host.kernel import procfs
from icecore.host.kernel.waiting import readable
from icecore.host.rpc import packets, peer

#: What the fork server may take to fork.
_FORK_SECONDS = 20.0
#: For `start`: numpy's linear algebra library, which no program here uses, starts threads that spin
#: for a while.
QUIET = {"OPENBLAS_NUM_THREADS": "1"}


class Forked:
    """A process that the fork server has forked. It does what is used of `subprocess.Popen`.

    Attributes:
        pid: No other process gets it while the fork server lives, which reaps nothing.
    """

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        weakref.finalize(self, os.close, pidfd)

    def poll(self) -> int | None:
        """Return 0 if it has ended, with whatever status; None: it runs."""
        return 0 if readable([self._pidfd], 0.0) else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; return 0, whatever its status is.

        Raises:
            subprocess.TimeoutExpired: It still runs after ``timeout`` seconds.
        """
        if not readable([self._pidfd], timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return 0

    def kill(self) -> None:
        """Kill it."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


Process = subprocess.Popen[bytes] | Forked
#: Starts a module's `main`: see `start`.
Start = Callable[[str, Sequence[str], Mapping[str, int], Mapping[str, str]], Process]


def start(
    module: str,
    words: Sequence[str],
    descriptors: Mapping[str, int],
    environment: Mapping[str, str],
) -> Process:
    """Start a module's `main` in a new interpreter and a session of its own. Its standard input and
    output are /dev/null.

    Args:
        module: Its name.
        words: The arguments (``sys.argv[1:]``). Those that are keys of ``descriptors`` are replaced
            by the descriptor's number in the process.
        descriptors: Those that the process inherits.
        environment: Variables in addition to those of this process.

    Raises:
        OSError: The process cannot be started.
    """
    numbers = {word: str(number) for word, number in descriptors.items()}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *[numbers.get(word, word) for word in words]],
        pass_fds=list(descriptors.values()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **environment},
        start_new_session=True,
    )


class ForkServer:
    """A fork server (a context manager: leaving it ends the server; what it has forked lives on).

    It forks from this process as it was when this object was made. If this process had threads by
    then, which a fork would lack, there is no server.
    """

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        if procfs.status(os.getpid()).threads != 1:
            return
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_FORK_SECONDS)
        self._lock = threading.Lock()
        with theirs:
            self.pid = os.fork()
            if self.pid == 0:
                _be_server(theirs)

    def start(
        self,
        module: str,
        words: Sequence[str],
        descriptors: Mapping[str, int],
        environment: Mapping[str, str],
    ) -> Process:
        """Fork for a module, or start an interpreter if there is no server; see `start`.

        Raises:
            OSError: The process cannot be started.
        """
        if self._control is not None:
            with suppress(OSError):  # the server has ended, or cannot fork
                return self._fork(self._control, module, words, descriptors, environment)
        return start(module, words, descriptors, environment)

    def _fork(
        self,
        control: socket.socket,
        module: str,
        words: Sequence[str],
        descriptors: Mapping[str, int],
        environment: Mapping[str, str],
    ) -> Forked:
        request = {
            "module": module,
            "words": list(words),
            "names": list(descriptors),
            "environment": {**os.environ, **environment},
            "limit": resource.getrlimit(resource.RLIMIT_NOFILE),
        }
        with self._lock:
            packets.tell(control, request, list(descriptors.values()))
            about, _, received = packets.hear(control)
        if "error" in about:
            raise OSError(about["error"], os.strerror(about["error"]))
        return Forked(about["pid"], received[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)


def _be_server(control: socket.socket) -> NoReturn:
    """Serve, in the forked process. This never returns to what the command was doing."""
    try:
        _leave_command(control)
        # Collections write to all objects, so that each fork would copy most pages.
        gc.freeze()
        with suppress(packets.PeerDied):
            _serve(control)
        os._exit(0)
    finally:
        os._exit(1)


def _leave_command(control: socket.socket) -> None:
    """Give up what belongs to the command: terminal, signals, descriptors."""
    gc.disable()
    os.setsid()
    peer.ignore_signals()
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    threading.excepthook = threading.__excepthook__
    # Objects of the command still have the numbers of these descriptors and may close them. So the
    # numbers stay in use.
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (2, null, control.fileno()):
            with suppress(OSError):  # that of the listing itself
                os.fstat(int(name))
                os.dup2(null, int(name), inheritable=int(name) < 2)
    os.close(null)


def _serve(control: socket.socket) -> None:
    """Fork for each request.

    Raises:
        PeerDied: The command has ended, or needs no more processes.
    """
    control.settimeout(None)
    while True:
        request, _, descriptors = packets.hear(control)
        pidfd = -1
        try:
            pid = os.fork()
            if pid == 0:
                _be_program(control, request, descriptors)
            pidfd = os.pidfd_open(pid)  # nobody has reaped it
            packets.tell(control, {"pid": pid}, [pidfd])
        except packets.PeerDied:
            raise
        except OSError as error:
            packets.tell(control, {"error": error.errno})
        finally:
            for descriptor in (pidfd, *descriptors):
                if descriptor >= 0:
                    os.close(descriptor)


def _be_program(
    control: socket.socket, request: Mapping[str, object], descriptors: Sequence[int]
) -> NoReturn:
    """Be the process of a module, and end with its status."""
    status = 1
    try:
        control.close()
        os.setsid()
        module, words, names = request["module"], request["words"], request["names"]
        environment, limit = request["environment"], request["limit"]
        assert isinstance(module, str) and isinstance(words, list) and isinstance(names, list)
        assert isinstance(environment, dict) and isinstance(limit, list)
        with suppress(ValueError, OSError):  # it keeps the one that it has
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit[0], limit[1]))
        os.environ.clear()
        os.environ.update(environment)
        numbers = dict(zip(names, map(str, descriptors), strict=True))
        sys.argv[:] = [module, *(numbers.get(word, word) for word in map(str, words))]
        gc.enable()
        importlib.import_module(module).main()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - as an interpreter would
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)
