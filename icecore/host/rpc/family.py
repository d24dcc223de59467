"""Families: worker processes that are forked from one program, each with a socket to the process
that started the program (the *starter*). They are used because the threads of one interpreter would
block each other.

The program loads the libraries before it forks the members. A member does nothing without a
request, and ends when the other end of its socket is closed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from icecore.host.kernel.waiting import readable
from icecore.host.rpc import packets, peer

_PR_SET_PDEATHSIG = 1


class Family:
    """The members, from the starter's side.

    Args:
        module: Program that loads the libraries and calls `serve_each` with the descriptors that
            follow ``word`` in its arguments.
        word: Appears in the command line of all members.
        count: Number of members.

    Attributes:
        sockets: One for each member; whoever uses a socket closes it.
    """

    def __init__(self, module: str, word: str, count: int) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
        theirs = [pair[1].fileno() for pair in pairs]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, word, *map(str, theirs)],
                pass_fds=theirs,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # The program forks once it has loaded the libraries; none of them may have started
                # threads by then.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
        except BaseException:
            for own, _ in pairs:
                own.close()
            raise
        finally:
            for _, end in pairs:
                end.close()
        self.sockets = [own for own, _ in pairs]

    @property
    def pid(self) -> int:
        """The process that forks the members."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process that forked the members still runs; it ends after all of them."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill all members, whatever they are doing; `wait` waits for their end."""
        if self.alive:
            # The process leads a session, and all members are in its process group.
            with suppress(ProcessLookupError):  # another thread has just waited for it
                os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> bool:
        """Wait until all members have ended, which they do once their sockets are closed. After
        ``seconds``, kill those that have not.

        Returns:
            Whether all ended by themselves.
        """
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait(seconds)
            return False
        return True


class FamilyMember(ABC):
    """One member, from the starter's side. Only one thread at a time may use it. Messages are
    msgpack; the member's first message says that it has begun.

    Args:
        control: The socket to the member.
        patience: Seconds that the member may take to answer.
        answers: The type of the member's messages.
    """

    def __init__(self, control: socket.socket, patience: float, answers: Any) -> None:
        # Use the kernel's time-outs: with Python's, each call takes two system calls.
        limit = struct.pack("ll", int(patience), int(patience % 1 * 1e6))
        control.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            control.setsockopt(socket.SOL_SOCKET, option, limit)
        self._control = control
        self._patience = patience
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(answers).decode
        self._begun = False

    @property
    def ready(self) -> bool:
        """Whether a request can be sent: the member, which takes a while to load, has begun, or has
        ended.
        """
        if not self._begun and readable([self.fileno()], 0.0):
            self._begun = True
            try:
                self._begin(self._hear())
            except Exception as error:
                if not isinstance(error.__cause__, packets.PeerDied):
                    raise
                # The member has ended: the first request fails, too.
        return self._begun

    def wait_ready(self) -> None:
        """Wait until the member has begun, or has ended.

        Raises:
            The error that `_failed` returns: The member does not begin.
        """
        if not self._begun:
            readable([self.fileno()], self._patience)
            if not self.ready:
                raise self._failed(None)

    def fileno(self) -> int:
        """Return the descriptor that is readable when the member has sent a message."""
        return self._control.fileno()

    def close(self) -> None:
        """Close the socket, so that the member ends."""
        self._control.close()

    def _begin(self, first: Any) -> None:
        """Take the member's first message."""
        return None

    def _send(self, request: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        try:
            packets.send(self._control, self._encode(request), descriptors)
        except packets.PeerDied as error:
            raise self._failed(error) from error
        except BlockingIOError as error:
            raise self._failed(TimeoutError(*error.args)) from error

    def _ask(self, request: msgspec.Struct, descriptors: Sequence[int] = ()) -> Any:
        self.wait_ready()
        self._send(request, descriptors)
        return self._hear()

    def _hear(self) -> Any:
        try:
            data, _ = packets.receive(self._control)
        except packets.PeerDied as error:
            raise self._failed(error) from error
        except BlockingIOError as error:
            raise self._failed(TimeoutError(*error.args)) from error
        return self._decode(data)

    @abstractmethod
    def _failed(self, error: OSError | None) -> Exception:
        """Return the exception to raise.

        Args:
            error: `packets.PeerDied`: the member has ended. TimeoutError: it does not answer. None:
                it does not begin.
        """


def serve_each(numbers: Sequence[int], serve: Callable[[socket.socket], None]) -> None:
    """Fork a process for each descriptor, and wait until all have ended. Call this before any
    thread starts.

    Args:
        numbers: The descriptors, each the member's end of a socket.
        serve: Answers requests; it raises `packets.PeerDied` when the other end is closed.
    """
    children, parent = [], os.getpid()
    for number in numbers:
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)  # the parent ended before the prctl
            for other in numbers:
                if other != number:
                    os.close(other)
            status = 1
            try:
                with suppress(packets.PeerDied):
                    serve(peer.take_over(number))
                status = 0
            except BaseException:  # noqa: BLE001 - printed; the starter sees that the member ended
                import traceback

                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    for number in numbers:
        os.close(number)
    for child in children:
        os.waitpid(child, 0)
