"""TCP sockets of this network namespace: which the kernel has, and how to end those that belong to no
process any more (/proc/net/tcp; sock_diag(7), SOCK_DESTROY).
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

LISTEN, TIME_WAIT, FIN_WAIT2 = 0x0A, 0x06, 0x05
_NETLINK_SOCK_DIAG, _SOCK_DESTROY = 4, 21
_NLM_F_REQUEST_ACK = 5
#: struct nlmsghdr; struct inet_diag_req_v2 up to its id, and the end of that id (linux/inet_diag.h).
_HEADER, _REQUEST, _ANY = (
    struct.Struct("=IHHII"),
    struct.Struct("=BBBBI"),
    struct.pack("=III", 0, 2**32 - 1, 2**32 - 1),
)
_TABLES = {"tcp": socket.AF_INET, "tcp6": socket.AF_INET6}
_ANSWER_SECONDS = 10.0


@dataclass(frozen=True)
class TcpSocket:
    """A TCP socket.

    Attributes:
        family: AF_INET or AF_INET6.
        state: As the kernel numbers them (include/net/tcp_states.h).
        inode: 0: it belongs to no process.
        local, remote: Address (network byte order) and port.
    """

    family: int
    state: int
    inode: int
    local: tuple[bytes, int]
    remote: tuple[bytes, int]

    @property
    def is_over(self) -> bool:
        """Whether nobody has it, and all that was sent has arrived: what is left of a connection
        only keeps its address from being used again.
        """
        return not self.inode and self.state in (TIME_WAIT, FIN_WAIT2)


def sockets_at(port: int) -> list[TcpSocket]:
    """Return the TCP sockets that have a local port."""
    return [one for one in _all() if one.local[1] == port]


def end(one: TcpSocket) -> bool:
    """End a socket; return whether it is gone. That needs CAP_NET_ADMIN, and a kernel with
    CONFIG_INET_DIAG_DESTROY.
    """
    body = (
        _REQUEST.pack(one.family, socket.IPPROTO_TCP, 0, 0, 1 << one.state)
        + struct.pack(">HH", one.local[1], one.remote[1])
        + one.local[0].ljust(16, b"\0")
        + one.remote[0].ljust(16, b"\0")
        + _ANY
    )
    head = _HEADER.pack(_HEADER.size + len(body), _SOCK_DESTROY, _NLM_F_REQUEST_ACK, 1, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(_ANSWER_SECONDS)
            kernel.send(head + body)
            (error,) = struct.unpack_from("=i", kernel.recv(1 << 16), _HEADER.size)
    except OSError:
        return False
    return -error in (0, 2)  # ENOENT: it was gone already


def _all() -> Iterator[TcpSocket]:
    for name, family in _TABLES.items():
        with suppress(FileNotFoundError), open(f"/proc/net/{name}", encoding="ascii") as file:
            next(file)
            for line in file:
                words = line.split()
                yield TcpSocket(
                    family, int(words[3], 16), int(words[9]), _end(words[1]), _end(words[2])
                )


def _end(text: str) -> tuple[bytes, int]:
    """Parse ``0100007F:1F90``. The kernel prints each 32-bit word in the machine's byte order."""
    host, port = text.split(":")
    raw = bytes.fromhex(host)
    if sys.byteorder == "little":
        raw = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return raw, int(port, 16)
