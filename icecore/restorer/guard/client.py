"""The restorer's side of its guard process (`icecore.restorer.guard.guard_process`): it has the
guard start CRIU, hears of CRIU's tasks, and asks for events. One thread receives; any thread may
send.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from icecore.errors import RestoreFailed
from icecore.host.rpc import packets
from icecore.restorer.guard import guard_process

#: For what is sent: the guard takes its requests at once.
_SEND_SECONDS = 300.0
MORE_DESCRIPTORS = "raise the hard limit on open files (ulimit -Hn)"


class GuardLost(RestoreFailed):
    """The guard process itself died."""


class Message(msgspec.Struct, frozen=True):
    """A message of the guard.

    Attributes:
        say: ``ready``, ``started`` (CRIU runs), ``task`` (a process and its userfaultfd),
            ``restored`` (CRIU built the tree), ``ended`` (CRIU ended), ``exited`` (a process of the
            tree ended), ``events``, ``shared`` (CRIU made shared memory) or ``killed``.
        about: The fields of the message.
        data: The raw events of ``events``.
        descriptors: Descriptors that came with it; the receiver closes them.
    """

    say: str
    about: dict[str, object]
    data: bytes
    descriptors: list[int]

    def number(self, field: str) -> int:
        """Return a field that is a number."""
        value = self.about[field]
        if not isinstance(value, int):
            raise GuardLost(f"the restore's guard said {self.about}")
        return value


class RestoreGuard:
    """A running guard process.

    Args:
        workdir: CRIU's working directory on tmpfs.
        temporary: The directory that the guard removes after it has killed the tree because the
            restorer died.
        lock: Descriptor that the guard inherits; it marks ``temporary`` as in use
            (`icecore.host.workdir`). -1: there is none.
    """

    def __init__(self, workdir: str, temporary: str, *, lock: int = -1) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_SEND_SECONDS)
        script = str(Path(guard_process.__file__))
        with theirs, open(os.path.join(workdir, "guard.output"), "wb") as output:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    "-X",
                    "utf8",
                    script,
                    str(theirs.fileno()),
                    workdir,
                    temporary,
                    str(lock),
                ],
                pass_fds=[theirs.fileno(), *([lock] if lock >= 0 else [])],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._socket = ours
        self._waiting: deque[Message] = deque()

    @property
    def pid(self) -> int:
        """The guard's process id: the tree's processes are its descendants."""
        return self._process.pid

    def fileno(self) -> int:
        """Return the socket's descriptor, to be polled for messages."""
        return self._socket.fileno()

    def run(
        self,
        argv: Sequence[str],
        descriptors: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start CRIU. It inherits ``descriptors`` under the same numbers, and gets ``environment``
        beside the guard's.
        """
        own = dict(environment or {})
        self._send(
            {"do": "run", "argv": list(argv), "numbers": list(descriptors), "environment": own},
            descriptors,
        )

    def share(self, listener: socket.socket) -> None:
        """Have the guard open each object of shared memory that CRIU reports on this socket; the
        guard says ``shared`` for each.
        """
        self._send({"do": "share"}, [listener.fileno()])

    def undo_with(self, argv: Sequence[str], journal: Path) -> None:
        """Name the command that undoes what the restore does to files. It runs when the tree was
        killed and ``journal`` is still there.
        """
        self._send({"do": "undo", "argv": list(argv), "journal": str(journal)})

    def kill(self) -> None:
        """Ask the guard to kill CRIU and the tree; it says ``killed`` when nothing is left."""
        self._send({"do": "kill"})

    def release(self, *, stay: bool) -> None:
        """Release the tree, whose memory is complete: the guard closes its descriptors, and the
        tree lives whatever happens to this process.

        Args:
            stay: Remain the tree's parent and report how its processes end.
        """
        self._send({"do": "release", "stay": stay})

    def close_descriptor(self, keep: int) -> None:
        """Close the guard's copy of one userfaultfd, whose memory is complete or whose process has
        ended.
        """
        self._send({"do": "close", "keep": keep})

    def read_events(self, keep: int, seconds: float) -> Message:
        """Have the guard read the events of a descriptor; `receive` returns other messages that
        come before the answer.

        The caller holds the write lock of the address map of the descriptor.
        """
        self._send({"do": "read", "keep": keep})
        while True:
            message = self._receive(seconds)
            if message.say == "events" and message.about["keep"] == keep:
                return message
            self._waiting.append(message)

    def receive(self, seconds: float) -> Message | None:
        """Return the next message; None: none came in that time."""
        if self._waiting:
            return self._waiting.popleft()
        try:
            return self._receive(seconds)
        except TimeoutError:
            return None

    def waiting(self) -> bool:
        """Return whether `receive` has a message that polling the socket does not show."""
        return bool(self._waiting)

    def end(self, seconds: float) -> None:
        """Close the socket and wait for the guard's end. Before `release` this kills the tree."""
        self._socket.close()
        for message in self._waiting:
            for descriptor in message.descriptors:
                os.close(descriptor)
        self._waiting.clear()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise RestoreFailed(
                f"the restore's guard {self.pid} has not ended within {seconds:.0f} s",
                cure="list its children with 'ps'",
            ) from None

    def _send(self, request: dict[str, object], descriptors: Sequence[int] = ()) -> None:
        try:
            packets.tell(self._socket, request, descriptors)
        except OSError as error:
            raise GuardLost(f"the restore's guard process died: {error}") from error

    def _receive(self, seconds: float) -> Message:
        try:
            about, data, descriptors = packets.hear(self._socket, seconds)
        except TimeoutError:
            raise
        except packets.DescriptorsLost:
            # Their processes are unknown now, and would never get their memory.
            raise RestoreFailed(
                "this process cannot receive a descriptor of another process: too many open files",
                cure=MORE_DESCRIPTORS,
            ) from None
        except OSError as error:
            raise GuardLost(f"the restore's guard process died: {error}") from error
        return Message(about["say"], about, data, descriptors)
