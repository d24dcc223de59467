"""The guard: a small process that runs CRIU for the dumper, outlives the window, and cleans up if
the dumper dies.

The guard runs in a session of its own, so that no terminal signal for the dumper reaches CRIU in the
middle of a dump. The dumper talks to it over a socket pair, one JSON object a message. The guard
starts CRIU before the window and lets it go on in the window (`waiting_criu.py`).

The socket to CRIU's page server passes through the guard to CRIU, and only the dumper holds its
other end. CRIU keeps the tree frozen until that socket closes, so a dumper that dies, however it
dies, thaws the tree. CRIU reacts to a hang-up at any time, also to one that came before it served.
The guard then waits for CRIU's end and removes the working directory. It hangs up by itself if a
dumper that lives but does not run (for example, stopped by a terminal) holds the tree for too long.

The guard also holds CRIU's pipes, so that CRIU need not free their pages before it lets the tree go.
CRIU and the guard both hold the writing end of a pipe, so the dumper knows when both have ended,
even if the guard was killed.

With GPU processes the guard also starts the helper that makes the driver's calls
(`icecore.host.gpu.helper`). The helper is the guard's child, so it outlives a dumper that is killed.
It holds the same pipe, so the dumper waits for its end too. It undoes its calls by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from icecore.dumper.freeze.waiting_criu import WaitingCriu
from icecore.errors import DumpFailed
from icecore.host.criu.page_server import Connection
from icecore.host.kernel import oom
from icecore.host.kernel.pipes import HeldPipes, make_room
from icecore.host.kernel.waiting import readable

#: Nice value of CRIU and of the scan in the window.
WINDOW_PRIORITY = -15

_MESSAGE = 1 << 20
#: How much longer than the dumper the guard waits before it ends the window.
_GRACE_SECONDS = 1.0
_END_SECONDS = 60.0
_GPU_END_SECONDS = 900.0
_START_SECONDS = 30.0


class GuardLost(DumpFailed):
    """The guard process died. The tree thaws, because the page-server socket closes with it."""


class DumpGuard:
    """The dumper's side: starts the guard process and talks to it.

    Args:
        workdir: Directory on tmpfs for CRIU's images. The guard removes it if the dumper dies
            before ``release``.
        lock: Descriptor that marks ``workdir`` as in use (`icecore.host.workdir`); the guard and
            CRIU inherit it. -1: none.
        start_timeout: Seconds the guard process may take to start.
    """

    def __init__(self, workdir: str, *, lock: int = -1, start_timeout: float = 30.0) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self._life, life = os.pipe()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "icecore.dumper.freeze.guard",
                str(theirs.fileno()),
                str(life),
                str(lock),
                workdir,
            ],
            pass_fds=[theirs.fileno(), life, *([lock] if lock >= 0 else [])],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        os.close(life)
        self._pages: socket.socket | None = None
        self._streamed = False
        #: CRIU's exit status; None while it holds the tree.
        self._status: int | None = 0
        #: How long `release` waits. Moving device memory back takes longer than anything CRIU does.
        self.end_seconds = _END_SECONDS
        self._lock = threading.Lock()
        try:
            ready = self._expect("ready", start_timeout)
            #: The ``oom_score_adj`` of the guard, which CRIU and the GPU helper inherit.
            self.oom_score = int(str(ready["oom_score"]))
        except BaseException:
            self.release()
            raise

    @property
    def pid(self) -> int:
        """Process id of the guard."""
        return self._process.pid

    def _receive(self, timeout: float) -> dict[str, object]:
        self._socket.settimeout(timeout)
        try:
            message = self._socket.recv(_MESSAGE)
        except TimeoutError:
            raise DumpFailed(f"CRIU's guard gave no answer for {timeout:.0f} s") from None
        except ConnectionResetError:
            message = b""  # the guard ended and left a message unread
        if not message:
            raise GuardLost("the dump's guard process ended unexpectedly")
        reply: dict[str, object] = json.loads(message)
        return reply

    def _expect(self, name: str, timeout: float) -> dict[str, object]:
        reply = self._receive(timeout)
        if reply.get("event") != name:
            raise DumpFailed(f"CRIU ended early with status {reply.get('status')}")
        return reply

    def prepare(
        self,
        command: Sequence[str],
        timeout: float,
        *,
        hidden: Path | None = None,
        devices: socket.socket | None = None,
    ) -> int | None:
        """Start ``command`` (``criu dump …``) and return once it waits for `go`. It has touched
        nothing of the tree by then, and without `go` it ends with the guard.

        Args:
            command: Argument vector; ``{pages}`` and ``{status}`` are replaced by descriptor
                numbers, ``{hold}`` by the path of CRIU's action script.
            timeout: Seconds to wait.
            hidden: Empty file in which CRIU notes what it was kept from seeing
                (`icecore.host.criu.hidden`); None: it sees everything.
            devices: The end of its plugin for GPU processes (`icecore.host.cuda.holder`); None: no
                GPU processes.

        Returns:
            None if CRIU waits; its exit status if it has ended.

        Raises:
            DumpFailed: The guard gives no answer in time, or CRIU cannot be started.
        """
        ours, theirs = socket.socketpair()
        with self._lock:
            self._pages = ours
        try:
            order = {"prepare": list(command), "hidden": str(hidden) if hidden else None}
            passed = [end.fileno() for end in (theirs, devices) if end is not None]
            socket.send_fds(self._socket, [json.dumps(order).encode()], passed)
        except OSError as error:
            self.hang_up()
            raise GuardLost(f"the dump's guard process ended unexpectedly: {error}") from error
        finally:
            theirs.close()
        try:
            reply = self._receive(timeout)
        except BaseException:
            self.hang_up()
            raise
        if reply.get("event") == "prepared":
            return None
        self.hang_up()
        if "error" in reply:
            raise DumpFailed(
                f"CRIU cannot be started: {reply['error']}", cure="run tools/install-criu"
            )
        return int(str(reply.get("status", -1)))

    def go(self, limit: float | None) -> None:
        """Let the CRIU that `prepare` started freeze the tree.

        Args:
            limit: Seconds from now after which the tree must run again whatever this process does;
                None: no limit.

        Raises:
            DumpFailed: The page-server connection was hung up before.
        """
        self.pages()
        order = {"go": True, "limit": None if limit is None else limit + _GRACE_SECONDS}
        try:
            self._socket.send(json.dumps(order).encode())
        except OSError as error:
            self.hang_up()
            raise GuardLost(f"the dump's guard process ended unexpectedly: {error}") from error

    def frozen(self, timeout: float, *, streamed: bool = False) -> int | None:
        """Wait, after `go`, until CRIU serves. The tree then stands still until ``thaw``.

        Args:
            timeout: Seconds to wait. Then the page socket closes, and CRIU thaws the tree as soon
                as it gets there.
            streamed: CRIU does not serve but streams; the tree is frozen once the stream's first
                byte can be read.

        Returns:
            None if the tree is frozen; CRIU's exit status if it ended before it served (the tree
            runs on).

        Raises:
            DumpFailed: No answer in time.
        """
        pages = self.pages()
        self._streamed = streamed
        try:
            if streamed and _wait_for_stream(pages, self._socket, timeout):
                self._status = None
                return None
            reply = self._receive(timeout)
        except BaseException:
            self.hang_up()
            raise
        if reply.get("event") == "serving":
            self._status = None
            return None
        self.hang_up()
        return int(str(reply.get("status", -1)))

    def start(self, command: Sequence[str], control: socket.socket) -> None:
        """Start another program as a child of the guard. It outlives this process, and `release`
        waits for its end.

        Args:
            command: ``{control}`` and ``{life}`` are replaced by descriptor numbers.
            control: The descriptor for ``{control}``.

        Raises:
            DumpFailed: The program cannot be started.
        """
        if self._pages is None:
            self.ended(_START_SECONDS)  # the guard does not answer before
        try:
            socket.send_fds(
                self._socket, [json.dumps({"start": list(command)}).encode()], [control.fileno()]
            )
        except OSError as error:
            raise GuardLost(f"the dump's guard process ended unexpectedly: {error}") from error
        self.end_seconds = _GPU_END_SECONDS
        reply = self._receive(_START_SECONDS)
        if reply.get("event") != "started":
            raise DumpFailed(f"{command[0]} cannot be started: {reply.get('error')}")

    def hang_up(self) -> None:
        """Close the page-server socket: CRIU thaws the tree."""
        with self._lock:
            if self._pages is not None:
                self._pages.close()
                self._pages = None

    def confirm(self, version: tuple[int, ...], timeout: float) -> None:
        """Have CRIU (of ``version``) confirm that it held the tree until now; ``thaw`` follows.

        Raises:
            DumpFailed: CRIU did not hold it.
        """
        connection = Connection(self.pages(), version)
        if not self._streamed:
            connection.finish(timeout)
            return
        try:
            connection.confirm()
        except OSError as error:
            raise DumpFailed(f"CRIU did not wait for the end of the window: {error}") from error

    def pages(self) -> socket.socket:
        """Return the page-server connection.

        Raises:
            DumpFailed: It was hung up, so the tree runs.
        """
        with self._lock:
            pages = self._pages
        if pages is None:
            raise DumpFailed("the tree was let go before the end of the window")
        return pages

    def thaw(self, timeout: float) -> int:
        """Hang up and wait for CRIU's end.

        Returns:
            CRIU's exit status.
        """
        self.hang_up()
        return self.ended(timeout)

    def ended(self, timeout: float) -> int:
        """Wait for CRIU's end after a hang-up.

        Returns:
            CRIU's exit status.
        """
        if self._status is None:
            self._status = int(str(self._expect("ended", timeout)["status"]))
        return self._status

    def release(self) -> None:
        """End the guard and wait until CRIU has ended too. The caller removes the working directory.
        May be called twice.
        """
        self.hang_up()
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps({"release": True}).encode())
        self._socket.close()
        if self._life < 0:
            return
        try:
            end = select.poll()
            end.register(self._life, select.POLLIN)
            ready = end.poll(self.end_seconds * 1000)
        finally:
            os.close(self._life)
            self._life = -1
        if not ready:
            raise DumpFailed(
                f"CRIU or the GPU helper (under guard {self._process.pid}) has not ended in time; killing it now could lose the job, so it is left alone",
                cure="check the job's state with 'ps' and at CRIU's log",
            )
        self._process.wait(_END_SECONDS)


def _wait_for_stream(pages: socket.socket, control: socket.socket, seconds: float) -> bool:
    """Wait until CRIU streams or the guard has a message.

    A tree whose memory is streamed stands still from the first byte of the stream until the end of
    the stream is answered.

    Returns:
        Whether CRIU streams.

    Raises:
        DumpFailed: Neither happened in time.
    """
    poll = select.poll()
    poll.register(pages, select.POLLIN)
    poll.register(control, select.POLLIN)
    ready = {number for number, _ in poll.poll(seconds * 1000)}
    if not ready:
        raise DumpFailed(f"CRIU did not begin within {seconds:.0f} s")
    return control.fileno() not in ready


class _Server:
    """The guard's own loop: runs one CRIU at a time, until the dumper releases the guard or dies."""

    def __init__(self, control: socket.socket, life: int, lock: int, workdir: str) -> None:
        self.control = control
        self.life = life
        self.lock = lock
        self.workdir = workdir
        self.dumper_alive = True
        self.waiting: WaitingCriu | None = None
        self.started: list[subprocess.Popen[bytes]] = []

    def say(self, **message: object) -> None:
        try:
            self.control.send(json.dumps(message).encode())
        except OSError:
            self.dumper_alive = False

    def serve(self, oom_score: int) -> None:
        released = False
        self.say(event="ready", oom_score=oom_score)
        while self.dumper_alive and not released:
            try:
                message, descriptors, _, _ = socket.recv_fds(self.control, _MESSAGE, 2)
            except ConnectionResetError:
                message = b""  # the dumper died and left an answer unread
            if not message:
                self.dumper_alive = False
                break
            request = json.loads(message)
            if request.get("release"):
                released = True
            elif "prepare" in request:
                self.prepare(
                    request["prepare"],
                    request["hidden"],
                    [socket.socket(fileno=number) for number in descriptors],
                )
            elif "go" in request:
                self.go(request["limit"])
            elif "start" in request:
                with socket.socket(fileno=descriptors[0]) as control:
                    self.start(request["start"], control)
        self.drop()
        if not released:
            shutil.rmtree(self.workdir, ignore_errors=True)

    def start(self, command: list[str], control: socket.socket) -> None:
        numbers = {"{control}": str(control.fileno()), "{life}": str(self.life)}
        try:
            started = subprocess.Popen(
                [numbers.get(word, word) for word in command],
                pass_fds=[control.fileno(), self.life],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        except OSError as error:
            self.say(event="failed", error=f"{command[0]}: {error.strerror}")
            return
        self.started.append(started)
        self.say(event="started", pid=started.pid)

    def prepare(self, command: list[str], hidden: str | None, ends: list[socket.socket]) -> None:
        try:
            self.waiting = WaitingCriu(
                command, ends[0], ends[1] if len(ends) > 1 else None, self.life, hidden, self.lock
            )
        except OSError as error:
            self.say(event="ended", status=-1, error=f"{command[0]}: {error.strerror}")
            return
        if self.waiting.arrives(self.control):
            self.say(event="prepared")
        else:
            self.say(event="ended", status=self.drop())

    def drop(self) -> int:
        """End the waiting CRIU, if any; return its exit status."""
        waiting, self.waiting = self.waiting, None
        return -1 if waiting is None else waiting.drop()

    def go(self, limit: float | None) -> None:
        waiting, self.waiting = self.waiting, None
        if waiting is None:
            self.say(event="ended", status=-1)
            return
        watch = _Watch(waiting, limit)
        waiting.go()
        watch.wait(waiting.status)
        served = os.read(waiting.status, 1) == b"\0"
        held = None
        if served:
            self.say(event="serving")
            held = HeldPipes(waiting.criu.pid)
        ended = os.pidfd_open(waiting.criu.pid)
        watch.wait(ended)
        os.close(ended)
        self.say(event="ended", status=waiting.end())
        if held is not None:
            held.release()


class _Watch:
    """Waits for descriptors; hangs up on CRIU once ``limit`` seconds have passed."""

    def __init__(self, waiting: WaitingCriu, limit: float | None) -> None:
        self._waiting = waiting
        self._end = None if limit is None else time.monotonic() + limit

    def wait(self, descriptor: int) -> None:
        """Wait until ``descriptor`` can be read."""
        while True:
            left = None if self._end is None else max(0.0, self._end - time.monotonic())
            if readable([descriptor], left):
                return
            self._end = None
            self._waiting.hang_up()


def main() -> None:
    """Run the guard process: ``guard CONTROL_FD LIFE_FD LOCK_FD WORKDIR``."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    # CRIU works while the job stands still, so it takes precedence over other work of the machine,
    # where that is permitted.
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, WINDOW_PRIORITY)
    # CRIU keeps references to private memory in pipes and needs many descriptors, so it inherits the
    # highest limit.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    make_room()
    # CRIU inherits this: the OOM killer must not choose it while its parasite is in the job.
    reached = oom.protect()
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    for descriptor in map(int, sys.argv[2:4]):
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
    _Server(control, int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]).serve(reached)


if __name__ == "__main__":
    main()
