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

CRIU freezes the cgroup of the job while it stops the threads, and thaws it. Should it be killed in
between, the guard thaws the cgroup, and so does the dumper.

The guard also holds CRIU's pipes, so that CRIU need not free their pages before it lets the tree go.
CRIU and the guard both hold the writing end of a pipe, so the dumper knows when both have ended,
even if the guard was killed.

With GPU processes the guard also starts the helper that makes the driver's calls
(`icecore.host.gpu.helper`). The helper is the guard's child, so it outlives a dumper that is killed.
It holds the same pipe, so the dumper waits for its end too. It undoes its calls by itself.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from icecore.dumper.freeze.waiting_criu import WaitingCriu
from icecore.host.kernel import oom
from icecore.host.kernel.pipes import HeldPipes, make_room
from icecore.host.rpc import packets, peer

#: Nice value of CRIU and of the scan in the window.
WINDOW_PRIORITY = -15
#: For a CRIU that was told to end: it may have to give the memory of GPUs back first.
LAST_SECONDS = 120.0


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
            packets.tell(self.control, message)
        except OSError:
            self.dumper_alive = False

    def serve(self, oom_score: int) -> None:
        released = False
        self.say(event="ready", oom_score=oom_score)
        while self.dumper_alive and not released:
            try:
                request, _, descriptors = packets.hear(self.control)
            except packets.PeerDied:
                self.dumper_alive = False
                break
            if request.get("release"):
                released = True
            elif "prepare" in request:
                self.prepare(
                    request["prepare"],
                    request["hidden"],
                    request["group"],
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
                # As of `icecore.host.gpu.client.QUIET`, whose import would cost more than it saves.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )
        except OSError as error:
            self.say(event="failed", error=f"{command[0]}: {error.strerror}")
            return
        self.started.append(started)
        self.say(event="started", pid=started.pid)

    def prepare(
        self,
        command: list[str],
        hidden: str | None,
        group: str | None,
        ends: list[socket.socket],
    ) -> None:
        try:
            self.waiting = WaitingCriu(
                command,
                ends[0],
                ends[1] if len(ends) > 1 else None,
                self.life,
                hidden,
                self.lock,
                Path(group) if group else None,
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
        watch = _Watch(waiting, limit, self.control)
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
    """Waits for descriptors; hangs up on CRIU once ``limit`` seconds have passed or the dumper has
    ended, and kills it if that does not end it: it may wait for ever for a process that was killed
    meanwhile. Its parasite ends by itself then, and the tree goes on.
    """

    def __init__(self, waiting: WaitingCriu, limit: float | None, control: socket.socket) -> None:
        self._waiting = waiting
        self._control = control
        self._end = None if limit is None else time.monotonic() + limit
        self._hung_up = False

    def wait(self, descriptor: int) -> None:
        """Wait until ``descriptor`` can be read."""
        while True:
            left = None if self._end is None else max(0.0, self._end - time.monotonic())
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if not self._hung_up:
                poll.register(self._control, 0)  # only for its end
            found = poll.poll(None if left is None else left * 1000)
            if descriptor in dict(found):
                return
            if self._hung_up:
                self._end = None
                self._waiting.criu.kill()
            else:
                self._hung_up = True
                self._end = time.monotonic() + LAST_SECONDS
                self._waiting.hang_up()


def main() -> None:
    """Run the guard process: ``guard_process CONTROL_FD LIFE_FD LOCK_FD WORKDIR``."""
    peer.ignore_signals()
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
    control, life, lock = map(int, sys.argv[1:4])
    _Server(peer.take_over(control, life, lock), life, lock, sys.argv[4]).serve(reached)


if __name__ == "__main__":
    main()
