"""Runs commands of the command line, and other Python programs of tests, in forks of one process that
has imported what they need.

Each is a process of its own, with its own descriptors, environment and directory; it is spared the
time in which Python starts and imports, which is most of what a short command takes. Not for what
depends on how an interpreter starts, or on the argument vector in /proc. A new slot of a passphrase
costs little there; `test_keys.test_a_slot_costs_what_it_should` is about the real cost.
"""

from __future__ import annotations

import array
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, Self

import icecore

_ROOT = Path(__file__).parent.parent
_MESSAGE = 1 << 20
#: Of a passphrase: KiB, passes, lanes. The default takes a third of a second at each opening.
CHEAP = (64, 1, 1)
#: What a shell runs in place of a command: hands over its standard streams, and ends as that does.
_CLIENT = """\
import json, os, socket, struct, sys
told, write = os.pipe()
order = {"words": sys.argv[2:], "environment": dict(os.environ), "folder": os.getcwd()}
with socket.socket(fileno=int(sys.argv[1])) as zygote:
    socket.send_fds(zygote, [json.dumps(order).encode()], [1, 2, write, 0])
os.close(write)
with open(told, "rb") as told:
    _, status = struct.unpack("<ii", told.read(8))
sys.exit(status if status >= 0 else 128 - status)
"""
_PID, _STATUS = struct.Struct("<i"), struct.Struct("<i")


class Forked:
    """A process that a zygote forked; as the `subprocess.Popen` of it, with pipes at its streams.

    Args:
        told: Where the zygote says its pid, and its status once it has ended.
        stdout, stderr: The own ends of its pipes; None: it has this process's.
    """

    def __init__(self, told: IO[bytes], stdout: IO[Any] | None, stderr: IO[Any] | None) -> None:
        self._told = told
        self.stdout, self.stderr = stdout, stderr
        self.returncode: int | None = None
        (self.pid,) = _PID.unpack(told.read(_PID.size))
        # Whoever has ended is reaped at once, and its pid may be another's. -1: that has happened.
        try:
            self._handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self._handle = -1

    def poll(self) -> int | None:
        """Return the status if it has ended, negative for a signal."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the status.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork", timeout or 0)
            (self.returncode,) = _STATUS.unpack(self._told.read(_STATUS.size))
            self._told.close()
            if self._handle >= 0:
                os.close(self._handle)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        """Return what it writes, once it has ended and its pipes are closed; None of a stream
        without one.

        Raises:
            subprocess.TimeoutExpired: It still runs, or somebody has its pipes.
        """
        found: dict[str, Any] = {}
        streams = {"out": self.stdout, "err": self.stderr}
        readers = [
            threading.Thread(
                target=lambda name=name, stream=stream: found.update({name: stream.read()}),
                daemon=True,
            )
            for name, stream in streams.items()
            if stream is not None and not stream.closed
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired("a fork", timeout or 0)
        self.wait(timeout)
        self._close()
        return found.get("out"), found.get("err")

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None and self._handle >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _close(self) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *about: object) -> None:
        self._close()
        self.wait()


class Zygote:
    """The parent of commands. Used from several threads.

    Args:
        environment: What the interpreter reads of it as it starts; None: this process's.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE)
        self._lock = threading.Lock()
        self.environment = dict(os.environ if environment is None else environment)
        self._inherited = _inherited()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(other.fileno()), icecore.__file__],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                env=self.environment,
            )

    def fits(self, environment: dict[str, str]) -> bool:
        """Whether nothing that an interpreter reads as it starts differs, and nothing that a
        process inherits.
        """
        if _inherited() != self._inherited:
            return False

        def read(all_: dict[str, str]) -> dict[str, str]:
            early = ("PYTHON", "LD_", "LC_", "LANG", "TZ", "OPENBLAS")
            return {name: value for name, value in all_.items() if name.startswith(early)}

        return read(environment) == read(self.environment)

    def start(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        folder: str,
        *,
        code: str = "",
        text: bool = True,
        stderr: bool = True,
    ) -> Forked:
        """Start one command.

        Args:
            words: The words after the program's name.
            environment, folder: Its environment and its directory.
            code: A program that runs in place of the command.
            text: Its pipes are read as text.
            stderr: It has a pipe for its errors; otherwise it has this process's.
        """
        order = {
            "words": list(words),
            "environment": dict(environment),
            "folder": folder,
            "code": code,
        }
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(3 if stderr else 2)]
        told, out, *err = (read for read, _ in pipes)
        writes = [write for _, write in pipes]
        try:
            with self._lock:
                socket.send_fds(
                    self._own,
                    [json.dumps(order).encode()],
                    [writes[1], writes[2] if stderr else 2, writes[0]],
                )
        finally:
            for write in writes:
                os.close(write)

        def opened(end: int) -> IO[Any]:
            # Bytes without a buffer, so that one may wait for a line with select(2).
            return open(end, encoding="utf-8") if text else open(end, "rb", buffering=0)

        return Forked(
            open(told, "rb", buffering=0),
            opened(out),
            opened(err[0]) if err else None,
        )

    def run(
        self, words: list[str], environment: dict[str, str], folder: str, seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """Run one command; as `subprocess.run` with text and captured output.

        Raises:
            subprocess.TimeoutExpired: It was killed.
        """
        started = self.start(words, environment, folder)
        late = threading.Timer(seconds, started.kill)
        late.start()
        try:
            out, err = started.communicate()
        finally:
            over = not late.is_alive()
            late.cancel()
        status = started.wait()
        if over and status == -signal.SIGKILL:
            raise subprocess.TimeoutExpired(words, seconds, out, err)
        return subprocess.CompletedProcess(words, status, out, err)

    def client(self) -> tuple[list[str], int]:
        """Return a command that runs the words after it as `run` does, with its own streams,
        environment and directory, and the descriptor that it has to inherit. It passes no signals
        on.
        """
        descriptor = self._own.fileno()
        return [sys.executable, "-ISs", "-c", _CLIENT, str(descriptor)], descriptor

    def close(self) -> None:
        """End the parent; commands that still run go on."""
        self._own.close()
        self._process.wait(30)


@cache
def shared() -> Zygote:
    """Return one for this process; it ends as this process does."""
    return Zygote()


def program(code: str, *words: str, stderr: bool = True) -> Forked:
    """Start a Python program that imports icecore in a fork, in this process's environment and
    directory, with pipes of bytes. The modules of tests are importable.

    Args:
        code: The program.
        words: What follows in `sys.argv`.
        stderr: It has a pipe for its errors; otherwise it has this process's.
    """
    zygote = shared()
    if zygote.fits(dict(os.environ)):
        return zygote.start(words, os.environ, os.getcwd(), code=code, text=False, stderr=stderr)
    return subprocess.Popen(  # type: ignore[return-value]
        [
            sys.executable,
            "-P",
            "-c",
            f"import sys; sys.path.append({str(_ROOT)!r})\n{code}",
            *words,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if stderr else None,
        bufsize=0,
    )


def _inherited() -> list[str]:
    """Return what a child would have of this process: limits, masks, rights, namespaces, scores."""
    kept = (
        "Umask",
        "Uid",
        "Gid",
        "Groups",
        "SigBlk",
        "SigIgn",
        "Cap",
        "Cpus_allowed",
        "NoNewPrivs",
    )
    found = [
        line for line in Path("/proc/self/status").read_text().split("\n") if line.startswith(kept)
    ]
    found += [Path(f"/proc/self/{name}").read_text() for name in ("limits", "oom_score_adj")]
    return found + [os.readlink(path) for path in sorted(Path("/proc/self/ns").iterdir())]


def _imported() -> None:
    """Import what commands import, without starting a thread."""
    from icecore.commands.context import load_numpy

    load_numpy()
    import icecore.api
    import icecore.cli
    import icecore.dumper.dump
    import icecore.node.doctor
    import icecore.repository
    import icecore.restorer.restore
    import icecore.store.backend.local
    import icecore.store.backend.s3
    import icecore.store.maintenance.check
    import icecore.store.maintenance.gc
    import icecore.store.maintenance.repair
    import icecore.store.replication.replicas
    import icecore.store.snapshot.reader
    from icecore.store.format import slots

    icecore.cli.build_parser()  # imports the modules of all commands
    assert icecore.__file__ == sys.argv[2], "commands have to be of the package that is tested"
    slots.DEFAULT_COST = slots.Cost(*CHEAP)


def serve(control: socket.socket) -> None:
    """Fork for each order until the other end is closed."""
    _imported()
    assert threading.active_count() == 1, "a fork has only the thread that forks"
    gc.freeze()
    ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    tellers: dict[int, int] = {}
    poll = select.poll()
    poll.register(control.fileno(), select.POLLIN)
    poll.register(ended, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if ended in ready:
            with suppress(BlockingIOError):
                os.read(ended, 4096)
            _reap(tellers)
        if control.fileno() in ready:
            order, descriptors = _receive(control)
            if not order:
                return
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                others = [control.fileno(), ended, wake, *tellers.values()]
                _command(json.loads(order), descriptors, others)
            os.write(descriptors[2], _PID.pack(pid))
            tellers[pid] = descriptors[2]
            for descriptor in {*descriptors} - {descriptors[2]}:
                os.close(descriptor)


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    order, descriptors, _, _ = socket.recv_fds(control, _MESSAGE, 4, socket.MSG_CMSG_CLOEXEC)
    return order, list(array.array("i", descriptors))


def _reap(tellers: dict[int, int]) -> None:
    while tellers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with suppress(BrokenPipeError):
            os.write(tellers[pid], _STATUS.pack(os.waitstatus_to_exitcode(status)))
        os.close(tellers.pop(pid))


def _command(order: dict[str, object], descriptors: list[int], own: list[int]) -> None:
    """Be one command; never returns."""
    status, interrupted = 1, False
    try:
        for descriptor in own:
            os.close(descriptor)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(descriptors[0], 1)
        os.dup2(descriptors[1], 2)
        if len(descriptors) > 3:
            os.dup2(descriptors[3], 0)
        for descriptor in descriptors:
            os.close(descriptor)
        # Those of this process stand for what its descriptors were: seekable, or a terminal.
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
        environment = order["environment"]
        assert isinstance(environment, dict)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(str(order["folder"]))
        words = [str(word) for word in order["words"]]  # type: ignore[attr-defined]
        code = str(order.get("code", ""))
        sys.argv = ["-c" if code else "icecore", *words]
        try:
            status = _program(code) if code else _main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except KeyboardInterrupt:
            interrupted = True  # the interpreter ends by the signal, once threads have ended
        threading._shutdown()  # type: ignore[attr-defined]
        import atexit

        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - a fork must not go on as its parent
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        if interrupted:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(status & 0xFF)


def _main() -> int:
    from icecore.cli import main

    return main()


def _program(code: str) -> int:
    sys.path.append(str(_ROOT))
    exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
    return 0


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
