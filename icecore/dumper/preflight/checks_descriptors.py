"""Checks of a tree's descriptors and sockets: what CRIU cannot dump, or would lose; see
`icecore.dumper.preflight.checks` for the form of a check.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from icecore.dumper.observe import asynchronous_io
from icecore.dumper.observe.inspection import Inspection, ProcessInspection, mount_ids
from icecore.dumper.observe.sockets import UnixSocket, kernel_refuses_options, owner, unix_sockets
from icecore.dumper.observe.unaccepted import await_accepted
from icecore.dumper.preflight.checks import Refusal, in_hosts
from icecore.host.criu.program import SOCKETS_PLUGIN, has_plugin
from icecore.host.kernel import libc, procfs

#: /dev/nvidiaN and /dev/nvidiactl (Linux's list of allocated devices). Resident memory that the
#: keeper passed on may have been opened in a root that no longer exists, and then has no path below
#: /dev.
_NVIDIA_MAJOR = 195
_NVIDIA = re.compile(r"/dev/nvidia")
_OTHER_GPU = re.compile(r"/dev/(kfd|dri/)")
#: The anon_inode descriptors that CRIU 4 can dump (bpf-map: if it was built with libbpf).
_KNOWN_ANON = {
    "[eventfd]",
    "[eventpoll]",
    "[signalfd]",
    "[timerfd]",
    "inotify",
    "[fanotify]",
    "[pidfd]",
    "bpf-map",
}
#: The character devices that it can dump: memory (null, zero, random, …), terminals, serial lines,
#: pseudo-terminals.
_KNOWN_MAJORS = {1, 4, 5, *range(136, 144), 188, 204}
#: Connections that are named, each with a search for its other end.
_MOST_NAMED = 8
_TUN, _AUTOFS = (10, 200), (10, 235)
_PROTOCOLS = {
    "TCP",
    "TCPv6",
    "UDP",
    "UDPv6",
    "UDP-Lite",
    "UDPLITEv6",
    "RAW",
    "RAWv6",
    "PACKET",
    "UNIX",
    "UNIX-STREAM",
    "NETLINK",
}
_WITHOUT_OPTIONS = {"UNIX", "UNIX-STREAM", "NETLINK"}


# -- descriptors


def io_uring(found: Inspection) -> list[Refusal]:
    users = [
        p.pid
        for p in found.processes
        if any("[io_uring]" in m.path for m in p.mappings)
        or any("[io_uring]" in d.target for d in p.descriptors)
    ]
    if not users:
        return []
    return [
        Refusal(
            "io_uring",
            f"CRIU cannot dump io_uring, which {'processes' if len(users) > 1 else 'process'} {', '.join(map(str, users))} uses",
            "start the job without --io-uring ('icecore run', run.io_uring in the configuration)"
            if found.run is not None
            else "start the job with 'icecore run', which denies it io_uring, or after 'sysctl -w kernel.io_uring_disabled=2'",
        )
    ]


def direct_requests(found: Inspection) -> list[Refusal]:
    return [
        Refusal("asynchronous-io", asynchronous_io.unseen(process.pid, path), asynchronous_io.CURE)
        for process in found.processes
        if asynchronous_io.has_ring(process.mappings)
        and (path := asynchronous_io.direct_file(process.descriptors))
    ]


def leases(found: Inspection) -> list[Refusal]:
    """Refuse write leases. A dump reads the file, which breaks the lease: the holder gets SIGIO, which
    ends it by default.
    """
    return [
        Refusal(
            "lease",
            f"process {process.pid} holds a write lease on {descriptor.target} (F_SETLEASE in fcntl(2)), which reading the file would break",
            "have the job give up the lease first",
        )
        for process in found.processes
        for descriptor in process.descriptors
        if any(lock.split()[1:4:2] == ["LEASE", "WRITE"] for lock in descriptor.locks)
    ]


def gpus(found: Inspection) -> list[Refusal]:
    """Refuse GPUs that only a plugin of CRIU can dump, unless that plugin is there."""
    out = []
    for process in found.processes:
        names = {
            d.target
            for d in process.descriptors
            if stat.S_ISCHR(d.mode) and _OTHER_GPU.match(d.target)
        }
        names |= {m.path for m in process.mappings if _OTHER_GPU.match(m.path)}
        if names and not has_plugin(found.options.criu_plugins, "amdgpu"):
            out.append(
                Refusal(
                    "gpu",
                    f"process {process.pid} uses a GPU that is not NVIDIA's ({', '.join(sorted(names)[:3])})",
                    "for an AMD GPU: install CRIU's amdgpu plugin and name its directory with --criu-plugins; otherwise stop using the device",
                )
            )
    return out


def devices(found: Inspection) -> list[Refusal]:
    out = []
    drivers = found.gpus
    cuda = (
        {process.pid for process in (*drivers.processes, *drivers.orphans)}
        if drivers is not None
        else set()
    )
    for process, descriptor in _all_descriptors(found):
        device = (process.devices or {}).get(descriptor.number)
        if (
            device is None
            or _NVIDIA.match(descriptor.target)
            or _OTHER_GPU.match(descriptor.target)
        ):
            continue  # they have checks of their own
        if drivers is not None and drivers.backend.is_device(descriptor.target):
            continue
        if device[0] == _NVIDIA_MAJOR and process.pid in cuda:
            continue
        known = device[0] in _KNOWN_MAJORS or device == _AUTOFS
        known = known or (device == _TUN and not in_hosts(found, "net"))
        if not known or stat.S_ISBLK(descriptor.mode):
            out.append(
                Refusal(
                    "device",
                    f"descriptor {descriptor.number} of process {process.pid} is the device {descriptor.target}, which CRIU cannot dump",
                    "close it before the dump",
                )
            )
    return out


def descriptors(found: Inspection) -> list[Refusal]:
    out = []
    for process, descriptor in _all_descriptors(found):
        kind = (
            descriptor.target.removeprefix("anon_inode:")
            if descriptor.target.startswith("anon_inode:")
            else ""
        )
        if kind and kind not in _KNOWN_ANON and "[io_uring]" not in kind:
            out.append(
                Refusal(
                    "descriptor",
                    f"descriptor {descriptor.number} of process {process.pid} is {descriptor.target}, which CRIU cannot dump",
                    "close it, or start the program without what opens it",
                )
            )
    return out


def _all_descriptors(found: Inspection) -> Iterator[tuple[ProcessInspection, procfs.Descriptor]]:
    return (
        (process, descriptor) for process in found.processes for descriptor in process.descriptors
    )


def pidfds(found: Inspection) -> list[Refusal]:
    inside = {*found.pids, -1}  # -1: the process has ended
    out = []
    for process, descriptor in _all_descriptors(found):
        if descriptor.target != "anon_inode:[pidfd]":
            continue
        about = _pidfd(process.pid, descriptor.number)
        if about not in inside:
            out.append(
                Refusal(
                    "pidfd",
                    f"descriptor {descriptor.number} of process {process.pid} refers to process {about}, which is not in its tree",
                    "close it, or snapshot the tree that holds both",
                )
            )
    return out


def _pidfd(pid: int, number: int) -> int:
    try:
        with open(f"/proc/{pid}/fdinfo/{number}", encoding="ascii") as file:
            found = re.search(r"^Pid:\s*(-?\d+)$", file.read(), re.MULTILINE)
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return int(found[1]) if found else -1


def queues(found: Inspection) -> list[Refusal]:
    """Refuse open POSIX message queues."""
    return [
        Refusal(
            "message-queue",
            f"descriptor {descriptor.number} of process {process.pid} is the POSIX message queue {descriptor.target}, which CRIU cannot dump",
            "close it before the dump, or have the program use System V message queues (msgget)",
        )
        for process, descriptor in _queues(found)
    ]


def _queues(found: Inspection) -> Iterator[tuple[ProcessInspection, procfs.Descriptor]]:
    """Yield each open POSIX message queue. Each ipc namespace has a file system for its queues, which
    mq_open(2) uses even if it is not mounted anywhere.
    """
    kinds: dict[int, bool] = {}
    for process, descriptor in _all_descriptors(found):
        if not stat.S_ISREG(descriptor.mode):
            continue
        if descriptor.device not in kinds:
            path = f"/proc/{process.pid}/fd/{descriptor.number}"
            with suppress(OSError):  # closed since
                kinds[descriptor.device] = libc.file_system(path) == libc.MQUEUE
        if kinds.get(descriptor.device):
            yield process, descriptor


def mounts(found: Inspection) -> list[Refusal]:
    """Refuse files on mounts that the tree does not see: CRIU finds files by mount and path."""
    seen: dict[int, set[int]] = {}
    queues = {(process.pid, descriptor.mount) for process, descriptor in _queues(found)}
    out = []
    for process in found.living:
        namespace = (process.namespaces or {}).get("mnt", 0)
        if namespace not in seen:
            seen[namespace] = (
                mount_ids(os.getpid()) if namespace == found.namespaces["mnt"] else set()
            )
        try:
            # A process that was chrooted sees only part of its namespace.
            seen[namespace] |= mount_ids(process.pid)
        except OSError:
            continue  # it has ended (one that is just ending has no namespaces: EINVAL)
        # Memory from another process (resident memory, after a restore) was opened in that process's
        # mounts. It is closed before CRIU looks.
        passing = (
            "descriptor "
            if found.resident is not None and process.pid in found.resident.pids
            else "\0"
        )
        hidden = [
            what
            for what, mount in (process.mounts or {}).items()
            if mount not in seen[namespace]
            and (process.pid, mount) not in queues
            and not what.startswith(passing)
        ]
        if hidden:
            out.append(
                Refusal(
                    "mount",
                    f"process {process.pid} uses files on mounts that it does not see: {'; '.join(hidden[:3])}",
                    "have it close or reopen them"
                    + (
                        ""
                        if found.run is not None and found.run.isolation.root
                        else "; or start the job with 'icecore run --root private' if it needs its own mounts"
                    ),
                )
            )
    return out


# -- sockets


def protocols(found: Inspection) -> list[Refusal]:
    out = []
    for process in found.processes:
        for one in process.sockets:
            if one.protocol and one.protocol not in _PROTOCOLS:
                out.append(
                    Refusal(
                        "socket",
                        f"descriptor {one.descriptor} of process {process.pid} is a socket of protocol {one.protocol}, which CRIU cannot dump",
                        "GODEBUG=multipathtcp=0 makes Go programs use plain TCP"
                        if one.protocol.startswith("MPTCP")
                        else "close it before the dump",
                    )
                )
    return out


def internet(found: Inspection) -> list[Refusal]:
    if found.criu.version >= (4, 2):
        return []
    affected = _PROTOCOLS - _WITHOUT_OPTIONS
    users = [p.pid for p in found.processes if any(s.protocol in affected for s in p.sockets)]
    if not users or not kernel_refuses_options():
        return []
    version = ".".join(map(str, found.criu.version))
    return [
        Refusal(
            "internet-sockets",
            f"CRIU {version} cannot dump internet sockets on this kernel (Linux 6.16 and newer refuse an option that it reads), and "
            f"{'processes' if len(users) > 1 else 'process'} {', '.join(map(str, users[:5]))} {'have' if len(users) > 1 else 'has'} some",
            "install CRIU 4.2 or newer: tools/install-criu --suite sid",
        )
    ]


def unaccepted(found: Inspection) -> list[Refusal]:
    """Refuse connections that CRIU cannot dump because the tree does not accept them soon."""
    left = await_accepted(found.root, tcp=found.options.connections == "keep")
    return [
        Refusal("unaccepted", f"{one.message}, and CRIU cannot dump it", one.cure)
        for one in left[:_MOST_NAMED]
    ]


def unix_peers(found: Inspection) -> list[Refusal]:
    """Refuse connections to unix sockets outside the tree where CRIU's plugin for them was not
    built, except datagram sockets that are connected to a named one.
    """
    if SOCKETS_PLUGIN.exists():
        return []
    return [
        Refusal(
            "unix-peer",
            f"{_leads_out(pid, descriptor, who)}, and {SOCKETS_PLUGIN.name} was not built, with which CRIU dumps such sockets",
            "install a C compiler, then icecore once more",
        )
        for pid, descriptor, who in islice(_outside_peers(found), _MOST_NAMED)
    ]


def closed_peers(found: Inspection) -> list[Refusal]:
    """Warn of connections to unix sockets outside the tree: a restored job finds them closed. The
    clients that a server has accepted are expected to come again, so they are not named.
    """
    if not SOCKETS_PLUGIN.exists():
        return []
    return [
        Refusal(
            "unix-peer",
            f"{_leads_out(pid, descriptor, who)}: after a restore, this connection is closed",
            "have the job connect again when it finds a connection closed",
        )
        for pid, descriptor, who in islice(_outside_peers(found, accepted=False), _MOST_NAMED)
    ]


def _leads_out(pid: int, descriptor: int, who: str) -> str:
    return f"descriptor {descriptor} of process {pid} is a unix socket that is connected to {who or 'a socket'} outside its tree"


def _outside_peers(found: Inspection, *, accepted: bool = True) -> Iterator[tuple[int, int, str]]:
    """Yield process, descriptor and the peer's process of each connection out of the tree that CRIU
    does not restore.

    Args:
        accepted: Yield those, too, that a listening socket of the tree has accepted.
    """
    ours = {
        one.inode: (p.pid, one.descriptor) for p in found.processes for one in p.sockets if one.unix
    }
    if not ours or not in_hosts(found, "net"):
        return
    try:
        known = unix_sockets()
    except OSError:
        return  # a kernel without unix_diag: CRIU needs it too and reports it
    for inode, (pid, descriptor) in ours.items():
        own = known.get(inode)
        peer = own.peer if own is not None else 0
        if not peer or peer in ours or _datagram_to_name(known.get(peer)):
            continue
        if own is not None and own.named and own.kind != socket.SOCK_DGRAM and not accepted:
            continue
        who = owner(peer)
        if found.resident is not None and pid in found.resident.pids and "icecore-keeper" in who:
            continue  # the preload's socket, which the preload closes before the window
        yield pid, descriptor, who


def _datagram_to_name(peer: UnixSocket | None) -> bool:
    return peer is not None and peer.kind == socket.SOCK_DGRAM and peer.named


# -- warnings


def lost_requests(found: Inspection) -> list[Refusal]:
    """Warn of rings without direct I/O: requests to poll or to flush may still be in flight."""
    return [
        Refusal(
            "asynchronous-io",
            f"process {process.pid} uses Linux's asynchronous I/O (io_setup): a restored job waits forever for polls and flushes that were in flight",
            "turn it off in the program's configuration, unless the program only reads and writes with it",
        )
        for process in found.processes
        if asynchronous_io.has_ring(process.mappings)
        and not asynchronous_io.direct_file(process.descriptors)
    ]


def loose_pipes(found: Inspection) -> list[Refusal]:
    """Warn of pipes with only one end in the tree: the other end is missing after a restore."""
    ends: dict[str, set[int]] = {}
    users: dict[str, tuple[int, int]] = {}
    for process, descriptor in _all_descriptors(found):
        if descriptor.target.startswith("pipe:["):
            access = descriptor.flags & os.O_ACCMODE
            ends.setdefault(descriptor.target, set()).update(
                (0, 1) if access == os.O_RDWR else (access,)
            )
            users.setdefault(descriptor.target, (process.pid, descriptor.number))
    out = []
    for pipe, kinds in ends.items():
        if len(kinds) == 1:
            pid, number = users[pipe]
            after = (
                "reading from it will return end of file"
                if kinds == {os.O_RDONLY}
                else "writing to it will raise SIGPIPE"
            )
            out.append(
                Refusal(
                    "pipe",
                    f"the other end of descriptor {number} of process {pid} is outside its tree: after a restore, {after}",
                    "start the job with 'icecore run', or with its output in files"
                    if found.run is None
                    else "have the job open files instead of pipes that lead outside of it",
                )
            )
    return out
