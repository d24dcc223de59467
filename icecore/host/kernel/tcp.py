"""TCP sockets of this network namespace: list them (/proc/net/tcp), and destroy one (sock_diag(7),
SOCK_DESTROY).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from contextlib import suppress

import msgspec

LISTEN, TIME_WAIT, FIN_WAIT2 = 0x0A, 0x06, 0x05
_LEFT_OVER = frozenset((TIME_WAIT, FIN_WAIT2))
_NETLINK_SOCK_DIAG = 4
_BY_FAMILY, _DESTROY = 20, 21
_NLM_F_REQUEST, _NLM_F_ACK = 1, 4
_NLMSG_ERROR = 2
#: struct nlmsghdr, and struct inet_diag_req_v2 up to its id (linux/inet_diag.h).
_HEADER, _REQUEST = struct.Struct("=IHHII"), struct.Struct("=BBBBI")
#: struct inet_diag_sockid: ports and addresses, interface, cookie.
_ID = struct.Struct("=4s16s16sI8s")
_NO_COOKIE, _ALL_STATES = b"\xff" * 8, 0xFFFFFFFF
#: struct inet_diag_msg: its id follows four bytes, of which the second is the state; the last word
#: is the inode.
_ID_AT, _INODE_AT = 4, 4 + _ID.size + 16
_TABLES = {"tcp": socket.AF_INET, "tcp6": socket.AF_INET6}
_ANSWER_SECONDS = 10.0

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class TcpSocket(msgspec.Struct, frozen=True):
    """A TCP socket.

    Attributes:
        family: AF_INET or AF_INET6.
        state: The kernel's number (include/net/tcp_states.h).
        inode: 0 if no process has it.
        local, remote: Address and port.
    """

    family: int
    state: int
    inode: int
    local: tuple[Address, int]
    remote: tuple[Address, int]

    @property
    def is_leftover(self) -> bool:
        """Whether no process has the socket and its peer has acknowledged everything. It only keeps
        its address from being reused.
        """
        return not self.inode and self.state in _LEFT_OVER


def list_sockets() -> list[TcpSocket]:
    """Return all TCP sockets."""
    found = []
    for name, family in _TABLES.items():
        with suppress(FileNotFoundError), open(f"/proc/net/{name}", encoding="ascii") as file:
            next(file)
            for line in file:
                words = line.split()
                local, remote = parse_end(words[1]), parse_end(words[2])
                found.append(TcpSocket(family, int(words[3], 16), int(words[9]), local, remote))
    return found


def parse_end(text: str) -> tuple[Address, int]:
    """Parse ``0100007F:1F90`` as address and port. The kernel prints each 32-bit word in the
    machine's byte order.
    """
    host, port = text.split(":")
    raw = bytes.fromhex(host)
    if sys.byteorder == "little":
        raw = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return ipaddress.ip_address(raw), int(port, 16)


def destroy_leftover(one: TcpSocket) -> None:
    """Destroy a socket if it is still a leftover. The kernel is first asked for its cookie, which
    then identifies it, so that no other socket at the same addresses is destroyed.

    Raises:
        OSError: It cannot be destroyed. This requires CAP_NET_ADMIN and a kernel with
            CONFIG_INET_DIAG_DESTROY.
    """
    ports = struct.pack(">HH", one.local[1], one.remote[1])
    ends = [end.packed.ljust(16, b"\0") for end, _ in (one.local, one.remote)]
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_ANSWER_SECONDS)
        try:
            found = _ask(kernel, _BY_FAMILY, one.family, _ID.pack(ports, *ends, 0, _NO_COOKIE))
        except FileNotFoundError:
            return  # it is gone
        (inode,) = struct.unpack_from("=I", found, _INODE_AT)
        if found[1] not in _LEFT_OVER or inode:
            return
        with suppress(FileNotFoundError):
            _ask(kernel, _DESTROY, one.family, found[_ID_AT : _ID_AT + _ID.size])


def _ask(kernel: socket.socket, kind: int, family: int, identity: bytes) -> bytes:
    """Send a request for one socket; return the answer's body, empty for an acknowledgement."""
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, _ALL_STATES) + identity
    flags = _NLM_F_REQUEST | (_NLM_F_ACK if kind == _DESTROY else 0)
    kernel.send(_HEADER.pack(_HEADER.size + len(body), kind, flags, 1, 0) + body)
    data = kernel.recv(1 << 16)
    _, answer, _, _, _ = _HEADER.unpack_from(data)
    if answer != _NLMSG_ERROR:
        return data[_HEADER.size :]
    (error,) = struct.unpack_from("=i", data, _HEADER.size)
    if error:
        raise OSError(-error, os.strerror(-error))
    return b""
