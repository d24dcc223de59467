"""The dumper's side of its guard (`icecore.dumper.freeze.guard_process`): it has the guard start
CRIU, freeze the tree, and release it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from icecore.errors import DumpFailed
from icecore.host.criu.page_server import Connection
from icecore.host.kernel import frozen
from icecore.host.kernel.waiting import readable
from icecore.host.rpc import packets

#: How much longer than the dumper the guard waits before it ends the window.
_GRACE_SECONDS = 1.0
_END_SECONDS = 60.0
_GPU_END_SECONDS = 900.0
_START_SECONDS = 30.0


class GuardLost(DumpFailed):
    """The guard process died. The tree thaws, because the page-server socket closes with it."""


class DumpGuard:
    """The dumper's side: starts the guard process, without waiting for it, and talks to it.

    Args:
        workdir: Directory on tmpfs for CRIU's images. The guard removes it if the dumper dies
            before ``release``.
        lock: Descriptor that marks ``workdir`` as in use (`icecore.host.workdir`); the guard and
            CRIU inherit it. -1: none.
    """

    def __init__(self, workdir: str, *, lock: int = -1) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_START_SECONDS)  # for what is sent
        self._socket = ours
        self._life, life = os.pipe()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "icecore.dumper.freeze.guard_process",
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
        self._group: Path | None = None
        self._oom_score: int | None = None

    @property
    def pid(self) -> int:
        """Process id of the guard."""
        return self._process.pid

    def wait_ready(self) -> int:
        """Wait until the guard process has started. `prepare` and `start` do so, too.

        Returns:
            Its ``oom_score_adj``, which CRIU and the GPU helper inherit.

        Raises:
            DumpFailed: It has ended, or takes too long.
        """
        if self._oom_score is None:
            self._oom_score = int(str(self._expect("ready", _START_SECONDS)["oom_score"]))
        return self._oom_score

    def _send(self, order: Mapping[str, object], *passed: socket.socket) -> None:
        try:
            packets.tell(self._socket, order, [end.fileno() for end in passed])
        except OSError as error:
            self.hang_up()
            raise GuardLost(f"the dump's guard process ended unexpectedly: {error}") from error

    def _receive(self, timeout: float) -> dict[str, object]:
        try:
            return packets.hear(self._socket, timeout)[0]
        except packets.PeerDied:
            raise GuardLost("the dump's guard process ended unexpectedly") from None
        except TimeoutError:
            raise DumpFailed(f"CRIU's guard gave no answer for {timeout:.0f} s") from None

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
        group: Path | None = None,
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
            group: The cgroup that CRIU freezes until it has stopped every thread; the guard and
                `release` thaw it, should CRIU not come to that. None: none.

        Returns:
            None if CRIU waits; its exit status if it has ended.

        Raises:
            DumpFailed: The guard gives no answer in time, or CRIU cannot be started.
        """
        self.wait_ready()
        ours, theirs = socket.socketpair()
        with self._lock:
            self._pages = ours
        try:
            with theirs:
                order = {
                    "prepare": list(command),
                    "hidden": str(hidden) if hidden else None,
                    "group": str(group) if group else None,
                }
                self._group = group
                self._send(order, theirs, *([] if devices is None else [devices]))
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
        self._send({"go": True, "limit": None if limit is None else limit + _GRACE_SECONDS})

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
        self.wait_ready()
        if self._pages is None:
            self.ended(_START_SECONDS)  # the guard does not answer before
        self._send({"start": list(command)}, control)
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
        if self._oom_score is None:
            self._process.kill()  # it has not started anything
        with contextlib.suppress(GuardLost):
            self._send({"release": True})
        self._socket.close()
        if self._life < 0:
            return
        try:
            ended = readable([self._life], self.end_seconds)
        finally:
            os.close(self._life)
            self._life = -1
            if self._group is not None:
                frozen.thaw(self._group)  # the guard may have been killed
        if not ended:
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
    ready = readable([pages.fileno(), control.fileno()], seconds)
    if not ready:
        raise DumpFailed(f"CRIU did not begin within {seconds:.0f} s")
    return control.fileno() not in ready
