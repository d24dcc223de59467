"""What the kernel tells of a process's sockets: their protocol, and where unix sockets lead. Reads
/proc and sock_diag, and changes nothing.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from icecore.host.kernel import procfs

_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST, _NLM_F_DUMP = 1, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
#: struct unix_diag_req, unix_diag_msg and nlattr (linux/unix_diag.h, sock_diag(7)).
_REQUEST = struct.Struct("=BBHIIIII")
_MESSAGE = struct.Struct("=BBBBIII")
_ATTRIBUTE = struct.Struct("=HH")
_SHOW_NAME, _SHOW_PEER, _SHOW_ICONS, _SHOW_RQLEN = 1, 4, 8, 16
_NAME, _PEER, _ICONS, _RQLEN = 0, 2, 3, 4
_ALL_STATES = 0xFFFFFFFF
_SO_PASSCRED, _SO_PASSSEC = 16, 34
#: TCP_ESTABLISHED and TCP_LISTEN, as /proc/net/tcp has them.
_ESTABLISHED, _LISTEN = "01", "0A"


class Socket(msgspec.Struct, frozen=True):
    """A socket of a process. ``protocol`` is the kernel's name: "TCP", "UDPv6", "UNIX-STREAM",
    "NETLINK", …; empty if the kernel names none.
    """

    descriptor: int
    inode: int
    protocol: str

    @property
    def unix(self) -> bool:
        """Whether it is a unix socket."""
        return self.protocol.startswith("UNIX")


class UnixSocket(msgspec.Struct, frozen=True):
    """A unix socket of this network namespace.

    Attributes:
        kind: SOCK_ type.
        peer: Inode of its peer; 0: it has none, or its connection is not accepted yet.
        named: Whether it has a name.
        clients: For a listening socket, the inodes of clients whose connections are not accepted
            yet; 0: the client has closed its socket.
        unread: Bytes of buffers with data that it has sent and the peer has not read. For a
            listening socket, the backlog of listen(2).
    """

    kind: int
    peer: int
    named: bool
    clients: tuple[int, ...] = ()
    unread: int = 0


def sockets_of(pid: int, descriptors: Sequence[procfs.Descriptor]) -> list[Socket]:
    """Return the sockets among a process's descriptors."""
    found = []
    for descriptor in descriptors:
        if not descriptor.target.startswith("socket:["):
            continue
        try:
            name = os.getxattr(f"/proc/{pid}/fd/{descriptor.number}", "system.sockprotoname")
        except OSError:
            name = b""  # closed since
        found.append(
            Socket(descriptor.number, descriptor.inode, name.rstrip(b"\0").decode(errors="replace"))
        )
    return found


def unix_sockets() -> dict[int, UnixSocket]:
    """Return all unix sockets of this network namespace, by inode.

    Raises:
        OSError: The kernel has no sock_diag for them.
    """
    found: dict[int, UnixSocket] = {}
    show = _SHOW_NAME | _SHOW_PEER | _SHOW_ICONS | _SHOW_RQLEN
    body = _REQUEST.pack(socket.AF_UNIX, 0, 0, _ALL_STATES, 0, show, 0, 0)
    head = _HEADER.pack(
        _HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST | _NLM_F_DUMP, 1, 0
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as kernel:  # NETLINK_SOCK_DIAG
        kernel.settimeout(10)
        kernel.send(head + body)
        while True:
            data = kernel.recv(1 << 20)
            at = 0
            while at < len(data):
                length, kind, _, _, _ = _HEADER.unpack_from(data, at)
                if kind == _NLMSG_DONE:
                    return found
                if kind == _NLMSG_ERROR:
                    (number,) = struct.unpack_from("=i", data, at + _HEADER.size)
                    raise OSError(-number, f"sock_diag: {os.strerror(-number)}")
                inode, about = _unix_socket(data[at + _HEADER.size : at + length])
                found[inode] = about
                at += -(-length // 4) * 4


def _unix_socket(data: bytes) -> tuple[int, UnixSocket]:
    _, kind, _, _, inode, _, _ = _MESSAGE.unpack_from(data)
    peer, named, clients, unread, at = 0, False, tuple[int, ...](), 0, _MESSAGE.size
    while at + _ATTRIBUTE.size <= len(data):
        length, attribute = _ATTRIBUTE.unpack_from(data, at)
        value = data[at + _ATTRIBUTE.size : at + length]
        if attribute == _PEER:
            (peer,) = struct.unpack("=I", value)
        elif attribute == _NAME:
            named = bool(value)
        elif attribute == _ICONS:
            clients = struct.unpack(f"={len(value) // 4}I", value)
        elif attribute == _RQLEN:
            _, unread = struct.unpack("=II", value)
        at += max(-(-length // 4) * 4, _ATTRIBUTE.size)
    return inode, UnixSocket(kind, peer, named, clients, unread)


def connected_outside(pid: int, own: Collection[int], tree: Collection[int]) -> bool:
    """Return whether TCP connections of a process end in its network namespace but outside its tree.

    Args:
        own: Inodes of its TCP sockets.
        tree: Inodes of all sockets of its tree.
    """
    ends: dict[tuple[str, str], int] = {}
    for words in _tcp_table(pid):
        if words[3] == _ESTABLISHED:
            ends[_end(words[1]), _end(words[2])] = int(words[9])
    return any(
        inode in own and (there, here) in ends and ends[there, here] not in tree
        for (here, there), inode in ends.items()
    )


def tcp_queues(pid: int) -> dict[int, int]:
    """Return the ports, by inode, of listening TCP sockets with connections that are not accepted
    yet, in a process's network namespace.
    """
    return {
        int(words[9]): int(words[1].rpartition(":")[2], 16)
        for words in _tcp_table(pid)
        if words[3] == _LISTEN and int(words[4].rpartition(":")[2], 16)
    }


def _tcp_table(pid: int) -> Iterator[list[str]]:
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                yield line.split()


def _end(word: str) -> str:
    """Return address and port, with an IPv4 address written alike in both tables. In the IPv6 table
    it is ::ffff:a.b.c.d, in words of the machine's byte order.
    """
    return word.removeprefix("0000000000000000FFFF0000")


def owner(inode: int) -> str:
    """Return the process that has a socket open, as "PID (name)"; empty if none is found."""
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            for number in os.listdir(f"/proc/{entry}/fd"):
                if os.readlink(f"/proc/{entry}/fd/{number}") == f"socket:[{inode}]":
                    return f"{entry} ({procfs.status(int(entry)).name})"
        except OSError:
            continue  # it has ended or closed the socket
    return ""


def kernel_refuses_options() -> bool:
    """Return whether internet sockets refuse options that CRIU before 4.2 reads from every socket
    (Linux 6.16 and newer).
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for option in (_SO_PASSCRED, _SO_PASSSEC):
            try:
                probe.getsockopt(socket.SOL_SOCKET, option)
            except OSError:
                return True
    return False
