"""The addresses on which a job listens for TCP: whether they are free here, and who has them if not.

A connection whose listener did not set SO_REUSEADDR keeps the address for a minute after both ends
have been closed (TIME_WAIT), as when the job was killed. Such remains, which belong to no process,
do not stand in the way of a restore, which ends them (`free`).
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from contextlib import suppress

from icecore.errors import Damaged, NotFound, RestoreRefused
from icecore.host.kernel import procfs, tcp
from icecore.restorer.requirements.outcome import Requirement
from icecore.text import printable

_CURE = "end the process that listens there; jobs of 'icecore run --network private' have ports of their own"
_WAIT = "try again in a minute"


def check_ports(ports: Sequence[str]) -> Requirement:
    """Check that all addresses, ``address:port``, are free or can be made so.

    Raises:
        Damaged: An address makes no sense.
    """
    listened: list[str] = []
    lingering: list[str] = []
    for port in ports:
        if not _can_listen(port):
            (lingering if _only_remains(port) else listened).append(port)
    if listened:
        who = dict.fromkeys(name for port in listened for name in _who(port))
        return Requirement(
            "port",
            False,
            f"the job listens on {', '.join(listened)}, "
            + (f"which {', '.join(who)} has" if who else "which is not free here"),
            _CURE,
        )
    if lingering:
        return Requirement(
            "port",
            True,
            f"connections that are closed already are left on {', '.join(lingering)}; the restore ends them",
        )
    return Requirement("port", True, "all ports are free")


def free(ports: Sequence[str]) -> None:
    """End what is left of closed connections on addresses that the job listens on.

    Raises:
        RestoreRefused: This kernel does not end them.
    """
    for port in ports:
        if _can_listen(port):
            continue
        for one in _in_the_way(port):
            if one.is_over:
                tcp.end(one)
        if not _can_listen(port):
            raise RestoreRefused(
                f"the job listens on {port}, where connections that are closed already are left",
                cure=_WAIT,
            )


def _only_remains(port: str) -> bool:
    found = _in_the_way(port)
    return bool(found) and all(one.is_over for one in found)


def _in_the_way(port: str) -> list[tcp.TcpSocket]:
    """Return the sockets that have the port at this address, or at all addresses."""
    _, address, number = _parse(port)
    if address.is_unspecified:
        return tcp.sockets_at(number)
    found = []
    for one in tcp.sockets_at(number):
        local = ipaddress.ip_address(one.local[0])
        mapped = local.ipv4_mapped if isinstance(local, ipaddress.IPv6Address) else None
        if local.is_unspecified or address in (local, mapped):
            found.append(one)
    return found


def _who(port: str) -> list[str]:
    """Name the processes that have the sockets in the way, as far as this process sees them."""
    inodes = {one.inode for one in _in_the_way(port) if one.inode}
    names = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()) if inodes else ():
        with suppress(NotFound, OSError):
            if any(
                one.target.startswith("socket:[") and one.inode in inodes
                for one in procfs.descriptors(pid)
            ):
                names.append(f"process {pid} ({printable(procfs.status(pid).name)})")
    return names


def _parse(
    port: str,
) -> tuple[socket.AddressFamily, ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    text, _, number = port.rpartition(":")
    try:
        address, parsed = ipaddress.ip_address(text.strip("[]")), int(number)
    except ValueError as error:
        raise Damaged(
            "manifest", "requirements", f"{printable(port)} is not an address and port"
        ) from error
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    return family, address, parsed


def _can_listen(port: str) -> bool:
    family, address, number = _parse(port)
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # Connections that linger do not matter if their listener set this, too.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((str(address), number))
            probe.listen(1)
    except (OSError, OverflowError):  # no such port
        return False
    return True
