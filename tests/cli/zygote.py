"""Runs commands of the command line in forks of one process that has imported what they need.

Each command is a process of its own, with its own descriptors, environment and directory; it is
spared the time in which Python starts and imports, which is most of what a short command takes. Not
for what depends on how an interpreter starts. A new slot of a passphrase costs little there;
`test_keys.test_a_slot_costs_what_it_should` is about the real cost.
"""

from __future__ import annotations

import array
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import icecore

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


class Zygote:
    """The parent of commands; one a test session. Used from several threads."""

    def __init__(self) -> None:
        self._own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE)
        self._lock = threading.Lock()
        self.environment = dict(os.environ)
        self._inherited = _inherited()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(other.fileno()), icecore.__file__],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
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

    def run(
        self, words: list[str], environment: dict[str, str], folder: str, seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """Run one command; as `subprocess.run` with text and captured output.

        Raises:
            subprocess.TimeoutExpired: It was killed.
        """
        order = json.dumps({"words": words, "environment": environment, "folder": folder})
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(3)]
        try:
            with self._lock:
                socket.send_fds(self._own, [order.encode()], [write for _, write in pipes])
        finally:
            for _, write in pipes:
                os.close(write)
        out, err, told = (open(read, "rb") for read, _ in pipes)  # noqa: SIM115 - closed below
        with out, err, told:
            (pid,) = _PID.unpack(told.read(_PID.size))
            late = threading.Timer(seconds, _kill, [pid])
            late.start()
            try:
                found: dict[str, bytes] = {}
                reader = threading.Thread(target=lambda: found.update(err=err.read()))
                reader.start()
                found["out"] = out.read()
                reader.join()
                (status,) = _STATUS.unpack(told.read(_STATUS.size))
            finally:
                over = not late.is_alive()
                late.cancel()
        if over and status == -signal.SIGKILL:
            raise subprocess.TimeoutExpired(words, seconds, found["out"], found["err"])
        texts = (data.decode().replace("\r\n", "\n") for data in (found["out"], found["err"]))
        return subprocess.CompletedProcess(words, status, *texts)

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


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


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

    icecore.cli.build_parser()  # imports the modules of all commands
    assert icecore.__file__ == sys.argv[2], "commands have to be of the package that is tested"
    from icecore.store.format.slots import Cost

    Cost.__init__.__defaults__ = CHEAP


def serve(control: socket.socket) -> None:
    """Fork for each order until the other end is closed."""
    _imported()
    assert threading.active_count() == 1, "a fork has only the thread that forks"
    gc.freeze()
    ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    tellers: dict[int, int] = {}
    import select

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
                _command(json.loads(order), descriptors, [control.fileno(), ended, wake])
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
    status = 1
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
        sys.argv = ["icecore", *words]
        from icecore.cli import main

        try:
            status = main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
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
        os._exit(status & 0xFF)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
