"""Addresses on which a job listens for TCP: whether they are free, and which processes have them.

If a listener does not set SO_REUSEADDR, its closed connections hold the address for a minute
(TIME_WAIT), for example after the job was killed. They belong to no process, and a restore removes
them (`remove_leftovers`).
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

import msgspec

from icecore.errors import Damaged, NotFound, RestoreRefused
from icecore.host.kernel import procfs, tcp
from icecore.restorer.requirements.outcome import Requirement
from icecore.text import printable

_CURE = "end the process that listens there; jobs of 'icecore run --network private' have ports of their own"
_WAIT = "try again in a minute"
#: How many processes a message names.
_NAMED = 3


class _Held(msgspec.Struct, frozen=True):
    """An address that is not free.

    Attributes:
        text: As in the manifest.
        sockets: What is in the way.
    """

    text: str
    sockets: Sequence[tcp.TcpSocket]

    @property
    def leftover(self) -> bool:
        return bool(self.sockets) and all(one.is_leftover for one in self.sockets)


def check_ports(ports: Iterable[str], *, name: bool = True) -> Requirement:
    """Check that all addresses, ``address:port``, are free or held by closed connections alone.

    Args:
        name: Name the processes that have one. Only root may learn that of other users' processes.

    Raises:
        Damaged: An address is malformed.
    """
    held = _held(ports)
    others = [one for one in held if not one.leftover]
    if not others:
        return Requirement(
            "port",
            True,
            f"closed connections still hold {_list(held)}; the restore removes them"
            if held
            else "all ports are free",
        )
    inodes = {found.inode for one in others for found in one.sockets}
    where = f"the job listens on {_list(others)}"
    if not inodes:
        what = f"{where}, which is not available here"
        return Requirement("port", False, what, "restore it where this address exists")
    if not any(inodes):
        what = f"{where}, where connections are still being closed"
        return Requirement("port", False, what, _WAIT)
    who = _processes(inodes - {0}) if name else []
    named = f": {', '.join(who)}" if who else ""
    return Requirement("port", False, f"{where}, where a socket is open already{named}", _CURE)


def remove_leftovers(ports: Iterable[str]) -> None:
    """Remove closed connections that hold addresses on which the job listens.

    Raises:
        RestoreRefused: They cannot be removed, or another process has the address.
    """
    for one in _held(ports):
        why = ": this kernel may lack tcp_diag"
        if one.leftover:
            try:
                for found in one.sockets:
                    tcp.destroy_leftover(found)
            except OSError as error:
                why = f": {error.strerror or error}"
        for left in _held([one.text]):
            if not left.leftover:
                refused = check_ports([left.text], name=False)
                if refused.met:
                    continue  # it has become free
                raise RestoreRefused(refused.message, cure=refused.cure)
            raise RestoreRefused(
                f"the job listens on {_list([left])}, which closed connections still hold{why}",
                cure=_WAIT,
            )


def _held(ports: Iterable[str]) -> list[_Held]:
    found = []
    sockets: list[tcp.TcpSocket] | None = None
    for text in dict.fromkeys(ports):
        address, port = _parse(text)
        only6 = address.version == 6 and getattr(address, "ipv4_mapped", None) is None
        free = _can_listen(address, port, only6=only6)
        dual = free and only6 and address.is_unspecified
        if free and not (dual and not _can_listen(address, port, only6=False)):
            continue
        if sockets is None:
            sockets = tcp.list_sockets()
        one = _Held(text, [s for s in sockets if s.local[1] == port and _meet(address, s)])
        # A listener on :: need not accept IPv4: what has the port there may be another's.
        if not free or one.leftover:
            found.append(one)
    return found


def _meet(address: tcp.Address, found: tcp.TcpSocket) -> bool:
    """Return whether a socket's local address may conflict with this one."""
    ours, theirs = _plain(address), _plain(found.local[0])
    if ours.version == theirs.version:
        return ours == theirs or ours.is_unspecified or theirs.is_unspecified
    return (ours if ours.version == 6 else theirs).is_unspecified  # it may accept IPv4 as well


def _plain(address: tcp.Address) -> tcp.Address:
    """Return an IPv4-mapped address as the IPv4 address."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _can_listen(address: tcp.Address, port: int, *, only6: bool) -> bool:
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # Closed connections do not matter if their listener set this, too.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(only6))
            probe.bind((str(address), port))
            probe.listen(1)
    except (OSError, OverflowError):  # no such port
        return False
    return True


def _parse(text: str) -> tuple[tcp.Address, int]:
    host, _, port = text.rpartition(":")
    try:
        if "%" in host:  # an interface's name, which a dump never writes
            raise ValueError(host)
        return ipaddress.ip_address(host.strip("[]")), int(port)
    except ValueError as error:
        raise Damaged(
            "manifest", "requirements", f"{printable(text)} is not an address and port"
        ) from error


def _processes(inodes: Collection[int]) -> list[str]:
    """Name processes that have these sockets, as far as this process sees them."""
    names: list[str] = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()) if inodes else ():
        if len(names) == _NAMED:
            break
        with suppress(NotFound, OSError):
            if any(
                one.target.startswith("socket:[") and one.inode in inodes
                for one in procfs.descriptors(pid)
            ):
                names.append(f"process {pid} ({printable(procfs.status(pid).name)})")
    return names


def _list(held: Sequence[_Held]) -> str:
    return ", ".join(printable(one.text) for one in held)
