"""The inspection of a running tree before a dump: read everything that preflight judges, once,
without stopping or changing anything.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterable, Sequence

import msgspec

from icecore.dumper.observe.files import FoundFile, Opened, find_files
from icecore.dumper.observe.gpus import GpuInspection, inspect_gpus
from icecore.dumper.observe.resident_inspection import ResidentInspection, inspect_resident
from icecore.dumper.observe.sockets import Socket, sockets_of
from icecore.dumper.options import DumpOptions
from icecore.errors import NotFound
from icecore.host.criu.program import Criu
from icecore.host.gpu.backend import find_backend
from icecore.host.jobs.namespaces import RunRecord
from icecore.host.kernel import limits, procfs

_SIZES = ("RssAnon", "VmLck", "HugetlbPages")
#: How /proc names memory that CRIU writes into its images: shared anonymous memory, memfds, System
#: V shared memory.
SHARED_MEMORY = ("/dev/zero", "/memfd:", "/SYSV")


class ProcessInspection(msgspec.Struct, frozen=True):
    """What was read about one process of the tree. Memory is in bytes.

    Attributes:
        private_bytes: Private anonymous memory in RAM (RssAnon).
        copied_bytes: Private memory that CRIU must copy, because it is locked or on huge pages of
            hugetlbfs.
        devices: Descriptor → (major, minor) of devices.
        mounts: Descriptor, "exe" or "cwd" → mount id.
        namespaces: By kind, as in /proc/PID/ns.
    """

    pid: int
    status: procfs.Status
    mappings: list[procfs.Mapping]
    descriptors: list[procfs.Descriptor]
    private_bytes: int = 0
    copied_bytes: int = 0
    sockets: tuple[Socket, ...] = ()
    devices: dict[int, tuple[int, int]] | None = None
    mounts: dict[str, int] | None = None
    namespaces: dict[str, int] | None = None


class Inspection(msgspec.Struct, frozen=True):
    """Everything that the checks judge.

    Attributes:
        root: Host pid of the tree's root.
        processes: Root first.
        files: Regular files that the tree has open or mapped.
        private_bytes: Bytes of private anonymous memory in RAM, which stay in place during the
            window.
        copied_bytes: Bytes that CRIU copies while the tree stands still: shared, locked and hugetlb
            memory.
        workdir_free: Bytes free where CRIU's images go.
        namespaces: This process's namespaces, by kind.
        gpus: The tree's processes that use an NVIDIA GPU; None: none.
        resident: Those of them with resident device memory; None: none.
        run: How `icecore run` started the job; None: it did not. A cure must not be to do what was
            done.
        maps: Has read the mappings of the tree, so it reads them again quickly.
    """

    root: int
    processes: list[ProcessInspection]
    files: list[FoundFile]
    private_bytes: int
    copied_bytes: int
    workdir_free: int
    namespaces: dict[str, int]
    criu: Criu
    options: DumpOptions
    gpus: GpuInspection | None = None
    resident: ResidentInspection | None = None
    run: RunRecord | None = None
    maps: procfs.MapsReader = msgspec.field(default_factory=procfs.MapsReader)

    @property
    def pids(self) -> list[int]:
        """Host pids, root first."""
        return [p.pid for p in self.processes]

    @property
    def living(self) -> list[ProcessInspection]:
        """All processes except zombies."""
        return [p for p in self.processes if not p.status.zombie]


def inspect_tree(
    pid: int, criu: Criu, workdir: str, options: DumpOptions, run: RunRecord | None = None
) -> Inspection:
    """Read everything that the checks need.

    Args:
        pid: Host pid of the tree's root.
        criu: The CRIU that would dump it.
        workdir: Where CRIU's images would go.
        options: How it would be dumped.
        run: How `icecore run` started the job; None: it did not.

    Raises:
        NotFound: The process has ended.
    """
    processes, maps, looked_ns = [], procfs.MapsReader(), time.time_ns()
    for member in procfs.tree(pid):
        try:
            with procfs.looking_at(member):
                processes.append(_process(member, maps))
        except NotFound:
            if member == pid:
                raise NotFound(f"there is no process {pid}") from None
            continue  # it has ended
    gpus = inspect_gpus(
        find_backend(), [(p.pid, p.mappings, p.descriptors, p.sockets) for p in processes]
    )
    resident = None
    if gpus is not None:
        gpus, resident = inspect_resident(gpus, options.staging_bytes)
    return Inspection(
        root=pid,
        processes=processes,
        files=find_files(
            {p.pid: Opened(p.descriptors, p.mappings) for p in processes if not p.status.zombie},
            options,
            looked_ns,
        ),
        private_bytes=sum(p.private_bytes for p in processes),
        copied_bytes=sum(p.copied_bytes for p in processes) + _shared_bytes(processes),
        workdir_free=limits.free_space(workdir),
        namespaces=procfs.namespaces(os.getpid()),
        criu=criu,
        options=options,
        gpus=gpus,
        resident=resident,
        run=run,
        maps=maps,
    )


def _process(pid: int, maps: procfs.MapsReader) -> ProcessInspection:
    status = procfs.status(pid)
    if status.zombie:
        return ProcessInspection(pid, status, [], [])
    descriptors = procfs.descriptors(pid)
    sizes = {
        name: int(words[0]) * 1024
        for name, words in procfs.status_fields(pid).items()
        if name in _SIZES
    }
    return ProcessInspection(
        pid,
        status,
        maps.read(pid),
        descriptors,
        private_bytes=sizes.get("RssAnon", 0),
        copied_bytes=sizes.get("VmLck", 0) + sizes.get("HugetlbPages", 0),
        sockets=tuple(sockets_of(pid, descriptors)),
        devices=dict(_devices(descriptors)),
        mounts=dict(_mounts(pid, descriptors)),
        namespaces=procfs.namespaces(pid),
    )


def _devices(descriptors: Sequence[procfs.Descriptor]) -> Iterable[tuple[int, tuple[int, int]]]:
    for descriptor in descriptors:
        if stat.S_ISCHR(descriptor.mode) or stat.S_ISBLK(descriptor.mode):
            device = descriptor.special
            yield descriptor.number, (os.major(device), os.minor(device))


def _mounts(pid: int, descriptors: Sequence[procfs.Descriptor]) -> Iterable[tuple[str, int]]:
    """Yield the mount id of everything that has a path, including the program and the working
    directory. Memory that only looks like a file has none.
    """
    for descriptor in descriptors:
        if descriptor.target.startswith("/") and not descriptor.target.startswith(SHARED_MEMORY):
            yield f"descriptor {descriptor.number}, {descriptor.target}", descriptor.mount
    for name in ("exe", "cwd"):
        try:
            own = os.open(f"/proc/{pid}/{name}", os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            with open(f"/proc/self/fdinfo/{own}", encoding="ascii") as file:
                found = re.search(r"^mnt_id:\s*(\d+)$", file.read(), re.MULTILINE)
            if found:
                what = "program" if name == "exe" else "working directory"
                yield f"its {what}, {os.readlink(f'/proc/{pid}/{name}')}", int(found[1])
        finally:
            os.close(own)


def _shared_bytes(processes: Sequence[ProcessInspection]) -> int:
    """Return the bytes of shared memory, each object counted once. Files on tmpfs (/dev/shm) are
    files, not memory.
    """
    reach: dict[tuple[int, int], str] = {}
    for process in processes:
        for mapping in process.mappings:
            if mapping.path.startswith(SHARED_MEMORY):
                key = (os.makedev(*mapping.device), mapping.inode)
                reach.setdefault(
                    key, f"/proc/{process.pid}/map_files/{mapping.start:x}-{mapping.end:x}"
                )
        for descriptor in process.descriptors:
            if descriptor.target.startswith("/memfd:"):
                reach.setdefault(
                    (descriptor.device, descriptor.inode),
                    f"/proc/{process.pid}/fd/{descriptor.number}",
                )
    total = 0
    for path in reach.values():
        try:
            total += os.stat(path).st_blocks * 512
        except OSError:
            continue  # closed or unmapped since
    return total


def mount_ids(pid: int) -> set[int]:
    """Return the ids of the mounts that a process sees."""
    return {mount.id for mount in procfs.mounts(pid)}
