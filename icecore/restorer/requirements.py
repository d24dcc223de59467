"""Checks what a snapshot requires of this machine, before anything is started. Nothing is changed
here: ``--dry-run`` is this and nothing else.
"""

from __future__ import annotations

import ipaddress
import os
import platform
import re
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from icecore import units
from icecore.errors import Damaged, MissingTool, NotFound, RestoreRefused
from icecore.host.criu.program import Criu
from icecore.host.criu.shared_images import can_fill_shared
from icecore.host.gpu.backend import find_backend
from icecore.host.jobs import temporary
from icecore.host.jobs.job import Job
from icecore.host.jobs.namespaces import RunRecord
from icecore.host.kernel import limits, procfs, userfaultfd
from icecore.restorer.files.beside import find_conflicts
from icecore.restorer.files.copies import Copies, plan_copies
from icecore.restorer.files.data import NO_DATA, Content, handled_files, plan_data
from icecore.restorer.files.jobfiles import Inode, inode_of
from icecore.restorer.files.plan import FilePlan, plan_files
from icecore.restorer.files.surroundings import plan_surroundings
from icecore.restorer.gpu import gpus
from icecore.restorer.gpu.gpus import GpuPlan
from icecore.restorer.options import RestoreOptions
from icecore.restorer.owner import owner_of
from icecore.sizes import CELL_BYTES, PAGE
from icecore.store.format.archive import ARCHIVE, container_title
from icecore.store.format.cell import NODE_CELLS, Records, data_pages
from icecore.store.format.contract import CUDA, RESIDENT, read_gpus, resident_bytes
from icecore.store.format.data import (
    MAX_TABLE,
    DataDirectory,
    Entry,
    data_spaces,
    decode_entries,
    is_data,
    overlap,
    read_data,
)
from icecore.store.format.manifest import NODE_REF, Manifest, OpenFile, Space
from icecore.store.format.surroundings import read_surroundings
from icecore.text import printable

#: The CELL records of a space, by region.
Maps = Callable[[Space], Sequence[Records]]
#: The content of a space that has at most so many bytes.
Contents = Callable[[Space, int], bytearray]

#: CPU flags that are instructions a program may have chosen its code by; the others describe the
#: kernel or the host.
_INSTRUCTIONS = re.compile(
    r"sse|ssse|avx|amx|bmi|fma|f16c|aes|vaes|sha|gfni|pclmul|vpclmul|movbe|popcnt|adx|rdrand|rdseed|abm|lzcnt|clflush"
    r"|clwb|fsgsbase|xsave|rtm|hle|cx16|cx8|fxsr|mmx|pku|asimd|sve|atomics|crc32|pmull|fphp|lrcpc|dcpop|bf16|i8mm|paca|pacg"
)
#: How long init may take to reap a process that has ended.
_DEAD_SECONDS = 5.0
#: Files that are named in a warning each.
_SHOWN = 8
_NODE_BYTES = NODE_CELLS * CELL_BYTES
_LEAST_KERNEL = (5, 11)  # userfaultfd as CRIU and the daemon use it


@dataclass(frozen=True)
class Requirement:
    """One thing that the machine must offer.

    Attributes:
        name: For programs: ``container``, ``architecture``, ``criu``, ``cpu``, ``kernel``, ``pid``, ``port``,
            ``file``, ``holder`` (another process has a file open), ``data``, ``tmp``, ``memory``, ``space``,
            ``userfaultfd``, ``gpu``, ``gpu-driver``, ``gpu-memory``, ``device``.
        met: Whether it does.
        message: What was found.
        cure: What can be done if it does not.
        hard: Whether the restore is refused; False: only a warning.
    """

    name: str
    met: bool
    message: str
    cure: str = ""
    hard: bool = True


@dataclass(frozen=True)
class Requirements:
    """The outcome of all checks.

    Attributes:
        checks: Every check that was made.
        files: What will be done to the open files.
        copies: Which of them are the instance's own copies.
        gpus: The GPUs that the job gets; None: it used none, or cannot get them here.
        contents: Where the content of files in data directories lies, by path.
        shared: Files to which the restored job and running processes both write: their sizes may
            change at any time.
    """

    checks: list[Requirement]
    files: FilePlan
    copies: Copies
    gpus: GpuPlan | None = None
    shared: frozenset[str] = frozenset()
    contents: Mapping[str, Content] = field(default_factory=dict)

    @property
    def failed(self) -> list[Requirement]:
        """What prevents a restore."""
        return [check for check in self.checks if not check.met and check.hard]

    @property
    def warnings(self) -> list[Requirement]:
        """What may make it fail."""
        return [check for check in self.checks if not check.met and not check.hard]

    def require(self) -> None:
        """Raise `RestoreRefused`, with all reasons and cures, if anything prevents the restore."""
        if self.failed:
            cures = dict.fromkeys(check.cure for check in self.failed if check.cure)
            raise RestoreRefused(
                "this machine does not meet what the snapshot requires: "
                + "; ".join(c.message for c in self.failed),
                cure="; ".join(cures),
            )


def check_requirements(
    manifest: Manifest,
    options: RestoreOptions,
    criu: Criu,
    workdir: str,
    own_files: frozenset[str] = frozenset(),
    records: Maps | None = None,
    run: RunRecord | None = None,
    read: Contents | None = None,
    others: Sequence[Job] = (),
) -> Requirements:
    """Compare what a snapshot requires with this machine.

    Args:
        manifest: The snapshot's.
        options: How it would be restored.
        criu: The CRIU that would do it.
        workdir: Where the image files would lie.
        own_files: Open files that the new instance gets anew (its logs): they are not checked.
        records: Reads the map of a space, if the manifest alone cannot show that there is room;
            None: assume the worst case.
        run: How `icecore run` started the job; None: it did not.
        read: Reads a space as bytes; only snapshots with data directories need it.
        others: The jobs of this node.
    """
    copies = plan_copies(manifest, options, run, own_files)
    skip = own_files | set(copies.paths)
    # What the instance has for itself is made anew, whatever becomes of other files.
    private = run.tmp if run is not None else []
    directories = [one for one in read_data(manifest) if one.path not in private]
    active = options.files in ("auto", "restore") and not copies.directory
    tables = _tables(manifest, directories, read) if directories and active else {}
    handled = handled_files(manifest, tables) - skip
    # The files of a job with a private root lie on the same host mounts, except for file systems of
    # its own (/dev/shm, /proc).
    around = read_surroundings(manifest)
    files = plan_files(
        manifest,
        options.files,
        root=options.root,
        skip=skip | handled,
        verify=options.verify_files,
        programs=around.programs if around is not None else None,
    )
    files = files.joined(copies.plan).joined(
        plan_surroundings(
            around,
            options.files,
            root=options.root,
            is_own=run.is_own if run is not None else lambda path: path in own_files,
        )
    )
    data = NO_DATA
    if tables:
        data = plan_data(
            manifest,
            directories,
            tables,
            root=options.root,
            owner=owner_of(manifest, run),
            taken={one.file.path for one in files.actions}
            | {folder.path for folder in files.folders}
            | {
                path
                for file in manifest.files
                if file.policy == "content"
                for path in _names_of(file)
            },
            handled=handled,
        )
    conflicts = find_conflicts(
        manifest,
        [*files.actions, *data.present],
        options.files,
        root=options.root,
        skip=skip,
        directory=copies.directory,
        copies=run is not None,
    )
    shared = frozenset(conflict.file for conflict in conflicts if conflict.shared)
    if options.files == "leave":
        files = _with_grown(files, manifest, shared, options.root)
    files = files.joined(data.files)
    of_gpus, gpu_plan = _gpus(manifest, options)
    checks = [
        *_container(manifest),
        *_machine(manifest, criu),
        *of_gpus,
        *_names(manifest),
        *_room(manifest, workdir, records),
        *_own_temporary(manifest, run, workdir, criu),
        *_data(directories, options, active=active, others=others),
        *_left(data.left),
        *(Requirement("file", False, f"{p.path}: {p.message}", p.cure) for p in files.problems),
        *(
            Requirement("holder", False, f"{c.path}: {c.message}", c.cure, hard=c.hard)
            for c in conflicts
        ),
    ]
    return Requirements(checks, files, copies, gpu_plan, shared, data.contents)


def _names_of(file: OpenFile) -> list[str]:
    return [file.path, *file.links]


def _tables(
    manifest: Manifest, directories: Sequence[DataDirectory], read: Contents | None
) -> dict[str, list[Entry]]:
    """Return the entries of each data directory."""
    assert read is not None, "a snapshot with data directories was opened without its reader"
    found = {}
    for one in directories:
        table, content = data_spaces(manifest, one.path)
        found[one.path] = decode_entries(read(table, MAX_TABLE), one.path, content.size)
    return found


def _left(paths: Sequence[str]) -> Iterator[Requirement]:
    """Say which files do not get attributes back that give rights to programs."""
    for path in paths[:_SHOWN]:
        message = f"{path} had capabilities, which a restore gives back to files of root alone"
        yield Requirement("data", False, message, hard=False)
    if len(paths) > _SHOWN:
        message = f"{len(paths) - _SHOWN} more files had capabilities"
        yield Requirement("data", False, message, hard=False)


def _own_temporary(
    manifest: Manifest, run: RunRecord | None, workdir: str, criu: Criu
) -> Iterator[Requirement]:
    """Say what the job gets for itself, and check that CRIU finds its own files beside it."""
    if run is None or not run.tmp:
        return
    for one in read_data(manifest):
        if one.path in run.tmp:
            size = f"{one.entries} entries, {units.size(one.bytes)}"
            yield Requirement("tmp", True, f"the job gets its own {one.path}: {size}")
    hidden = temporary.hidden_from_criu(run.tmp, workdir, criu.path) if run.own_view else None
    if hidden is not None:
        yield Requirement("tmp", False, *hidden)


def _data(
    directories: Sequence[DataDirectory],
    options: RestoreOptions,
    *,
    active: bool,
    others: Sequence[Job],
) -> Iterator[Requirement]:
    """Check that no running job has the data directories that would be changed."""
    for one in directories if not active else ():
        message = f"the data directory {one.path} stays as it is, with --files {options.files}"
        if options.files in ("auto", "restore"):
            message = f"the data directory {one.path} stays as it is, with --files-to"
        yield Requirement("data", False, message, hard=False)
    for one in directories if active else ():
        users = [
            job.name
            for job in others
            if any(overlap(one.path, path) for path in job.description.data) and job.alive
        ]
        if users:
            yield Requirement(
                "data",
                False,
                f"job {', '.join(users)} runs, and has the data directory {one.path}",
                "end it first, or use --files leave, which leaves files and data as they are",
                hard=options.files == "auto",
            )


def _container(manifest: Manifest) -> list[Requirement]:
    """Refuse what only a container engine can restore: the mounts of the container are its own."""
    if ARCHIVE not in manifest.extra:
        return []
    message = f"it is the checkpoint of a container, {printable(container_title(manifest))}"
    cure = (
        "'icecore export' writes the archive again, for 'podman container restore --import'"
        " or for an image of CRI-O"
    )
    return [Requirement("container", False, message, cure)]


def _with_grown(files: FilePlan, manifest: Manifest, shared: Set[str], root: str) -> FilePlan:
    """Return the plan without the problem of a shared file that only grew: CRIU does not check its
    size.
    """
    grown: dict[str, Inode] = {}
    for file in manifest.files:
        if file.path not in shared:
            continue
        with suppress(OSError):
            now = os.stat(root + file.path, follow_symlinks=False)
            if stat.S_ISREG(now.st_mode) and now.st_uid == file.user and now.st_size > file.size:
                grown[file.path] = inode_of(now)
    problems = [problem for problem in files.problems if problem.path not in grown]
    return replace(files, problems=problems, untouched=files.untouched | frozenset(grown.values()))


def _gpus(manifest: Manifest, options: RestoreOptions) -> tuple[list[Requirement], GpuPlan | None]:
    """Check the driver, the type and number of GPUs, and the room on them."""
    recorded = read_gpus(manifest)
    if recorded is None:
        if options.gpu_map:
            return [
                Requirement(
                    "gpu",
                    False,
                    "the snapshot's job used no GPU, but there is a --gpu-map",
                    "leave out --gpu-map",
                )
            ], None
        return [], None
    try:
        here = find_backend().inventory()
    except MissingTool as error:
        return [
            Requirement("gpu-driver", False, f"the job used GPUs: {error.message}", error.cure)
        ], None
    driver = recorded.driver
    # The job's own part of the driver (libcuda) is in its memory, and works only with a kernel
    # module of the same version.
    checks = [
        Requirement(
            "gpu-driver",
            here.driver == driver,
            f"the job ran with NVIDIA driver {driver}, this machine has {here.driver}",
            f"install driver {driver}",
        )
    ]
    try:
        plan = gpus.plan(manifest, here, options.gpu_map)
    except RestoreRefused as error:
        return [*checks, Requirement("gpu", False, error.message, error.cure)], None
    moved = {old: new for own in plan.processes.values() for old, new in own.items() if old != new}
    words = ", ".join(f"{old} → {new}" for old, new in moved.items())
    checks.append(
        Requirement("gpu", True, f"the GPUs of the job are available: {words or 'the same ones'}")
    )
    for gpu, size in (
        gpus.needs(manifest, here, plan) if not options.from_resident else ()
    ):  # it has what it needs
        free = gpu.memory - gpu.used
        checks.append(
            Requirement(
                "gpu-memory",
                free >= size,
                f"{size >> 20} MiB are needed on {gpu.uuid}, {free >> 20} MiB are free",
                "end what uses it, or name another GPU with --gpu-map",
                hard=False,
            )
        )
    return checks, plan


def _machine(manifest: Manifest, criu: Criu) -> Iterator[Requirement]:
    wanted = manifest.requirements
    here = platform.machine()
    yield Requirement(
        "architecture",
        here == wanted.architecture and os.sysconf("SC_PAGESIZE") == wanted.page_size,
        f"{wanted.architecture} with pages of {wanted.page_size} bytes is needed, this is {here}",
        "restore it on a machine of that architecture",
    )
    needed = tuple(int(number) for number in re.findall(r"\d+", wanted.criu)[:3])
    yield Requirement(
        "criu",
        criu.version >= needed,
        f"CRIU {wanted.criu} took the snapshot, this one is {'.'.join(map(str, criu.version))}",
        f"install CRIU {wanted.criu} or newer (tools/install-criu)",
    )
    kernel = tuple(int(number) for number in re.findall(r"\d+", wanted.kernel)[:2])
    older = limits.kernel_version() < kernel
    yield Requirement(
        "kernel",
        not older,
        f"the job ran on Linux {wanted.kernel}, this is {os.uname().release}"
        + (": older, it may lack what the job uses" if older else ""),
        "restore it on the same kernel or a newer one",
        hard=limits.kernel_version() < _LEAST_KERNEL,
    )
    missing = sorted(flag for flag in set(wanted.cpu) - _cpu_flags() if _INSTRUCTIONS.match(flag))
    yield Requirement(
        "cpu",
        not missing,
        f"this CPU lacks {', '.join(missing) or 'nothing'} of the one that the job ran on",
        "restore it on a CPU of the same or a later generation",
    )
    try:
        os.close(userfaultfd.create())
        yield Requirement("userfaultfd", True, "userfaultfd works")
    except OSError as error:
        yield Requirement(
            "userfaultfd",
            False,
            f"userfaultfd is not available: {error.strerror}",
            "run as root with CAP_SYS_PTRACE; a container must allow the system call",
        )
    unknown = {device.get("kind", "") for device in wanted.devices} - {CUDA}
    if unknown or (
        RESIDENT not in manifest.extra and any(space.kind == "device" for space in manifest.spaces)
    ):
        yield Requirement(
            "device",
            False,
            "the snapshot holds device memory of a kind that this icecore does not know",
            "use a newer icecore",
        )


def _cpu_flags() -> set[str]:
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key.strip() in ("flags", "Features"):
                return set(value.split())
    return set()


def _names(manifest: Manifest) -> Iterator[Requirement]:
    """Check the pids and ports of the job."""
    if not manifest.namespaces.pid:
        taken = _taken(manifest.requirements.pids)
        yield Requirement(
            "pid",
            not taken,
            f"process or thread ids {', '.join(map(str, taken[:5]))} are in use"
            if taken
            else "all process ids are free",
            "wait until the processes that have them end; jobs of 'icecore run --pid private' have process ids of their own",
        )
    if manifest.namespaces.network == "host":
        busy = [port for port in manifest.requirements.ports if not _can_listen(port)]
        yield Requirement(
            "port",
            not busy,
            f"the job listens on {', '.join(busy)}, where another process listens already"
            if busy
            else "all ports are free",
            "end the process that listens there; jobs of 'icecore run --network private' have ports of their own",
        )


def _taken(pids: list[int]) -> list[int]:
    """Return the pids that are in use. Wait a moment for processes that have ended and were not yet
    reaped, as after a job was killed.
    """
    end = time.monotonic() + _DEAD_SECONDS
    while taken := [pid for pid in pids if procfs.exists(pid)]:
        if time.monotonic() > end or not all(map(_dead, taken)):
            break
        time.sleep(0.05)
    return taken


def _dead(pid: int) -> bool:
    try:
        return procfs.status(pid).zombie
    except NotFound:
        return True


def _can_listen(address: str) -> bool:
    text, _, number = address.rpartition(":")
    try:
        parsed, port = ipaddress.ip_address(text.strip("[]")), int(number)
    except ValueError as error:
        raise Damaged(
            "manifest", "requirements", f"{printable(address)} is not an address and port"
        ) from error
    host, family = str(parsed), socket.AF_INET6 if parsed.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # CRIU fails only if another socket listens; connections that linger do not matter.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((host, port))
            probe.listen(1)
    except (OSError, OverflowError):  # no such port
        return False
    return True


def _room(manifest: Manifest, workdir: str, records: Maps | None) -> Iterator[Requirement]:
    """Check memory for the tree. For a while CRIU's images lie in memory too, with all pages that
    cannot come later, which then exist twice.
    """
    data = sum(_data_bytes(space, records) for space in manifest.spaces if is_data(space))
    memory = max(0, manifest.sizes.logical - resident_bytes(manifest) - data)
    images = sum(space.size for space in manifest.spaces if space.kind == "image")
    pages = min(memory, sum(_most_pages(space) for space in manifest.spaces))
    available, space = limits.memory_available(), limits.free_space(workdir)
    if (
        pages
        and records is not None
        and (available < memory + images + pages or space < images + pages)
    ):
        pages = sum(_pages(space, records) for space in manifest.spaces if _most_pages(space))
    images += pages
    needed = memory + images
    yield Requirement(
        "memory",
        available >= needed,
        f"the job needs {needed >> 20} MiB of memory, {available >> 20} MiB are available",
        "free memory, or restore on a larger machine",
    )
    yield Requirement(
        "space",
        space >= images,
        f"CRIU's image files take {images >> 20} MiB in {workdir} ({pages >> 20} of them shared and other memory that CRIU copies), "
        f"where {space >> 20} MiB are free",
        "name another directory on tmpfs as workdir",
    )


def _data_bytes(space: Space, records: Maps | None) -> int:
    """Return the bytes of a space of a data directory that count in ``sizes.logical``."""
    if records is None:
        return 0
    return sum(int(data_pages(part).sum()) for part in records(space)) * PAGE


def _in_images(space: Space) -> list[bool]:
    """Return for each region of a space whether its pages go into CRIU's page images
    (`icecore.restorer.files.images`). Sealed shared memory does, too, but the manifest does not tell
    which is sealed; the restore compares its pages with the room before it starts CRIU.
    """
    if space.kind == "process":
        return [not region.lazy and region.kind != "device" for region in space.regions]
    return [space.kind == "shared" and not can_fill_shared()] * len(space.regions)


def _most_pages(space: Space) -> int:
    """Return an upper bound of the bytes in page images: everything that has a node in the map."""
    nodes, wanted = np.frombuffer(space.nodes, NODE_REF), np.array(_in_images(space), np.bool_)
    nodes = nodes[wanted[nodes["region"]]]
    origin, start, length = (
        np.array([(r.origin, r.start, r.length) for r in space.regions], np.int64)
        .reshape(-1, 3)[nodes["region"]]
        .T
    )
    first = origin + nodes["group"].astype(np.int64) * _NODE_BYTES
    return int(
        np.maximum(
            0, np.minimum(first + _NODE_BYTES, start + length) - np.maximum(first, start)
        ).sum()
    )


def _pages(space: Space, records: Maps) -> int:
    """Return the bytes in page images; pages of zeros take no room."""
    return (
        sum(
            int(data_pages(part).sum())
            for part, wanted in zip(records(space), _in_images(space), strict=True)
            if wanted
        )
        * PAGE
    )
