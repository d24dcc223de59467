"""What the manifest records of a tree and its machine: processes, namespaces, and what a restore
requires. Reads /proc and changes nothing.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence

from icecore.dumper.observe.sockets import sockets_of
from icecore.errors import NotFound
from icecore.host.kernel import procfs
from icecore.host.kernel.tcp import parse_end
from icecore.store.format.manifest import Namespaces, Process, Requirements

_LISTEN = "0A"


def describe_processes(images: Mapping[int, int]) -> list[Process]:
    """Return the manifest's processes, root first.

    Args:
        images: Host pid → image id (pid in the tree's own namespace), in tree order.
    """
    out = []
    for pid, image in images.items():
        status = procfs.status(pid)
        alive = not status.zombie
        out.append(
            Process(
                image_id=image,
                pid=pid,
                parent=images.get(status.parent, 0),
                group=images.get(status.group, status.group),
                session=images.get(status.session, status.session),
                threads=status.threads if alive else 0,
                command=procfs.command_line(pid) if alive else [status.name],
                executable=procfs.executable(pid) if alive else "",
                user=status.user,
                alive=alive,
            )
        )
    return out


def describe_namespaces(pid: int) -> Namespaces:
    """Return which namespaces a process does not share with this one."""
    ours, theirs = procfs.namespaces(os.getpid()), procfs.namespaces(pid)
    own = {kind for kind in theirs if theirs[kind] != ours.get(kind)}
    return Namespaces(
        pid="pid" in own,
        ipc="ipc" in own,
        mount="mnt" in own,
        network="external" if "net" in own else "host",
        uts="uts" in own,
    )


def listening_ports(opened: Mapping[int, Sequence[procfs.Descriptor]]) -> list[str]:
    """Return the addresses on which processes listen for TCP, as ``address:port``.

    The kernel walks all its connections each time the table is read, so read it once for each
    network namespace, and only for processes that have such sockets.

    Args:
        opened: The descriptors of each process.
    """
    owners: dict[int, tuple[int, set[int]]] = {}
    for pid, descriptors in opened.items():
        try:
            inodes = {
                s.inode for s in sockets_of(pid, descriptors) if s.protocol in ("TCP", "TCPv6")
            }
            network = procfs.namespaces(pid).get("net", 0) if inodes else 0
        except NotFound:
            continue
        if inodes:
            owners.setdefault(network, (pid, set()))[1].update(inodes)
    out = set()
    for pid, inodes in owners.values():
        for name in ("tcp", "tcp6"):
            try:
                with open(f"/proc/{pid}/net/{name}", encoding="ascii") as file:
                    rows = [line.split() for line in file.readlines()[1:]]
            except FileNotFoundError:
                continue
            out |= {_address(row[1]) for row in rows if row[3] == _LISTEN and int(row[9]) in inodes}
    return sorted(out)


def _address(text: str) -> str:
    """Turn ``0100007F:1F90`` into ``127.0.0.1:8080``."""
    address, port = parse_end(text)
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def thread_ids(pids: Iterable[int]) -> list[int]:
    """Return the ids of all threads of some processes, ascending. A zombie has its own."""
    return sorted(thread for pid in pids for thread in procfs.threads(pid) or [pid])


def describe_requirements(
    criu: Sequence[int], pids: list[int], ports: list[str], devices: list[dict[str, str]]
) -> Requirements:
    """Return what the restoring machine must offer.

    Args:
        pids: Process and thread ids that must be free; empty if the tree has its own pid namespace.
        devices: The GPUs that the tree had.
    """
    return Requirements(
        architecture=platform.machine(),
        kernel=platform.release(),
        criu=".".join(map(str, criu)),
        page_size=os.sysconf("SC_PAGESIZE"),
        cpu=_cpu_features(),
        pids=pids,
        ports=ports,
        devices=devices,
    )


def _cpu_features() -> list[str]:
    """Return the processor's feature flags. A program may have chosen its code by any of them."""
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key.strip() in ("flags", "Features"):
                return sorted(value.split())
    return []
