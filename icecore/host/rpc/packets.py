"""Send and receive whole messages with descriptors over SOCK_SEQPACKET sockets.

One thread receives from a socket, any thread may send. A received descriptor is close-on-exec. A
message that is longer than `PACKET` travels in a memfd. This module uses the standard library only,
because processes that must start fast load it.
"""

from __future__ import annotations

import array
import errno
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence

from icecore.host.kernel.waiting import readable

TYPE_CHECKING = False  # importing typing is slow
if TYPE_CHECKING:
    from typing import Any

#: Bytes that go in one packet. A socket has room for 208 KiB (net.core.wmem_default).
PACKET = 1 << 17
#: Most descriptors of one message: the kernel's bound (SCM_MAX_FD), less one for a memfd.
MOST_DESCRIPTORS = 252
_ROOM = socket.CMSG_SPACE(4 * (MOST_DESCRIPTORS + 1))
#: Stands for a message in a memfd, which is the last descriptor. No JSON or msgpack object begins
#: with it.
_SPILLED = b"\0memfd"


class PeerDied(ConnectionError):
    """The peer has ended, or closed its end of the socket."""


class DescriptorsLost(OSError):
    """This process has no room for the descriptors of a message; all of them are closed.

    Attributes:
        data: The message; empty if it was in one of them.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(errno.EMFILE, os.strerror(errno.EMFILE))
        self.data = data


def send(peer: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send a message.

    Raises:
        PeerDied: The peer does not receive it.
        TimeoutError: It does not fit into the socket within the socket's time-out.
    """
    if len(data) > PACKET:
        spilled = to_memory(data)
        try:
            send(peer, _SPILLED, [*descriptors, spilled])
        finally:
            os.close(spilled)
        return
    try:
        if descriptors:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
            peer.sendmsg([data], [rights])
        else:
            peer.send(data)
    except ConnectionError as error:
        raise PeerDied(*error.args) from error


def receive(peer: socket.socket, seconds: float | None = None) -> tuple[bytes, list[int]]:
    """Return the next message and its descriptors, which the caller closes.

    Args:
        seconds: Time to wait; None: the socket's time-out.

    Raises:
        PeerDied: No more messages will arrive.
        TimeoutError: No message arrived in time.
        DescriptorsLost: Its descriptors did not arrive.
    """
    if seconds is not None and not readable([peer.fileno()], seconds):
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    try:
        data, ancillary, flags, _ = peer.recvmsg(PACKET, _ROOM, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError as error:
        raise PeerDied(*error.args) from error
    descriptors = _descriptors(ancillary) if ancillary else []
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        for descriptor in descriptors:
            os.close(descriptor)
        if flags & socket.MSG_TRUNC:
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        raise DescriptorsLost(b"" if data == _SPILLED else data)
    if not data:
        raise PeerDied(errno.ECONNRESET, "the other end is closed")
    if data == _SPILLED:
        spilled = descriptors.pop()
        try:
            return bytes(from_memory(spilled)), descriptors
        finally:
            os.close(spilled)
    return data, descriptors


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(content[: len(content) - len(content) % found.itemsize])
    return found.tolist()


def tell(
    peer: socket.socket,
    about: Mapping[str, object],
    descriptors: Sequence[int] = (),
    data: bytes = b"",
) -> None:
    """Send a JSON object and bytes after it. Raises as `send`."""
    send(peer, json.dumps(about).encode() + (b"\0" + data if data else b""), descriptors)


def hear(
    peer: socket.socket,
    seconds: float | None = None,
    decode: Callable[[bytes], Any] = json.loads,
) -> tuple[dict[str, Any], bytes, list[int]]:
    """Return a message of the peer: the object, the bytes after it, and the descriptors, which the
    caller closes. Arguments and errors as of `receive`; ``decode`` parses the JSON.
    """
    packet, descriptors = receive(peer, seconds)
    text, _, data = packet.partition(b"\0")
    return decode(text), data, descriptors


def to_memory(data: bytes | memoryview) -> int:
    """Return a memfd with these bytes, which the caller closes."""
    made = os.memfd_create("icecore-message", os.MFD_CLOEXEC)
    with open(made, "wb", closefd=False, buffering=0) as file:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]
    return made


def from_memory(descriptor: int) -> bytearray:
    """Return the bytes of a memfd, which the caller still owns.

    Raises:
        ValueError: It was truncated meanwhile.
    """
    data = bytearray(os.fstat(descriptor).st_size)
    view, done = memoryview(data), 0
    while done < len(data):
        got = os.preadv(descriptor, [view[done:]], done)
        if got == 0:
            raise ValueError("a memfd that was cut off")
        done += got
    return data
