"""Preflight: what would lose or hang the job is found, and refused with its cure, before anything is frozen.

Every check is a function of one ``Look`` (all that was read about the tree and the machine) and returns refusals; a check whose failure kills the job
cannot be overridden.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from icecore.dumper.files import FoundFile, find_files, ghosts
from icecore.dumper.options import DumpOptions
from icecore.errors import NotFound, PreflightRefused
from icecore.host import limits, procfs
from icecore.host.criu import Criu

_CAP_CURE = "run as root with CAP_SYS_ADMIN and CAP_SYS_PTRACE"
_GPU = re.compile(r"/dev/(nvidia|kfd|dri/)")
#: What anon_inode descriptors CRIU 4 can dump.
_KNOWN_ANON = {"[eventfd]", "[eventpoll]", "[signalfd]", "[timerfd]", "inotify", "[fanotify]", "[pidfd]", "bpf-map"}


@dataclass(frozen=True)
class Refusal:
    """One reason not to dump: the check's stable name, what was found, and what cures it."""

    name: str
    message: str
    cure: str


@dataclass(frozen=True)
class ProcessLook:
    """What was read about one process of the tree."""

    pid: int
    status: procfs.Status
    mappings: list[procfs.Mapping]
    descriptors: list[procfs.Descriptor]
    private_bytes: int


@dataclass(frozen=True)
class Look:
    """All that the checks judge.

    Attributes:
        root: Host pid of the tree's root.
        processes: Root first.
        files: Regular files that the tree has open or mapped.
        private_bytes: Resident private anonymous bytes, which stay in place during the window.
        copied_bytes: Resident bytes that CRIU copies while the tree stands still (shared memory, stacks, changed file pages).
        workdir_free: Bytes free where CRIU's images go.
    """

    root: int
    processes: list[ProcessLook]
    files: list[FoundFile]
    private_bytes: int
    copied_bytes: int
    workdir_free: int
    criu: Criu
    options: DumpOptions
    warnings: list[str] = field(default_factory=list)

    @property
    def pids(self) -> list[int]:
        """Host pids, root first."""
        return [p.pid for p in self.processes]


Check = Callable[[Look], Sequence[Refusal]]


def check_target(pid: int) -> list[Refusal]:
    """What can be said of the root process before its tree is read."""
    if pid <= 0 or not procfs.exists(pid):
        raise NotFound(f"there is no process {pid}", cure="'icecore ps' lists the jobs of this node")
    if procfs.is_kernel_thread(pid):
        return [Refusal("kernel-thread", f"{pid} is a thread of the kernel", "name a process")]
    if procfs.is_zombie(pid):
        return [
            Refusal("zombie", f"process {pid} has ended and waits to be reaped", "there is nothing left to snapshot")
        ]
    if pid == 1 or _contains(pid, os.getpid()):
        return [
            Refusal(
                "self",
                f"the tree of {pid} contains icecore itself",
                "snapshot a job that was started apart, with 'icecore run' or setsid",
            )
        ]
    return []


def _contains(root: int, pid: int) -> bool:
    while pid > 1:
        if pid == root:
            return True
        pid = procfs.status(pid).parent
    return False


def look(pid: int, criu: Criu, workdir: str, options: DumpOptions) -> Look:
    """Read all that the checks need; nothing is stopped."""
    processes = []
    for member in procfs.tree(pid):
        try:
            status = procfs.status(member)
            if status.zombie:
                processes.append(ProcessLook(member, status, [], [], 0))
                continue
            mappings = procfs.read_maps(member)
            processes.append(ProcessLook(member, status, mappings, procfs.descriptors(member), _private(member)))
        except (NotFound, FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    private = sum(p.private_bytes for p in processes)
    resident = sum(p.status.resident for p in processes)
    return Look(
        root=pid,
        processes=processes,
        files=find_files([p.pid for p in processes if not p.status.zombie], options),
        private_bytes=private,
        copied_bytes=_copied(processes, resident, private),
        workdir_free=limits.free_space(workdir),
        criu=criu,
        options=options,
    )


def _private(pid: int) -> int:
    """Resident private anonymous bytes of a process (RssAnon)."""
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def _copied(processes: Sequence[ProcessLook], resident: int, private: int) -> int:
    """An upper bound of what CRIU copies: shared memory once (RssShmem is counted per process; the file-backed rest is not copied)."""
    shared = 0
    for process in processes:
        try:
            with open(f"/proc/{process.pid}/status", encoding="ascii", errors="replace") as file:
                for line in file:
                    if line.startswith("RssShmem:"):
                        shared += int(line.split()[1]) * 1024
        except FileNotFoundError:
            continue
    return min(shared, max(0, resident - private))


def refuse(found: Look) -> list[Refusal]:
    """Every refusal of every check, in their order."""
    return [refusal for check in CHECKS for refusal in check(found)]


def require(found: Look) -> None:
    """Raise `PreflightRefused` with all refusals if there are any."""
    refusals = refuse(found)
    if refusals:
        raise PreflightRefused([(r.name, r.message, r.cure) for r in refusals])


def _capabilities(found: Look) -> list[Refusal]:
    have = limits.capabilities()
    missing = {"CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_CHECKPOINT_RESTORE"} - have
    if "CAP_SYS_ADMIN" in have:
        missing.discard("CAP_CHECKPOINT_RESTORE")
    return [Refusal("capabilities", f"{', '.join(sorted(missing))} missing", _CAP_CURE)] if missing else []


def _traced(found: Look) -> list[Refusal]:
    return [
        Refusal(
            "traced",
            f"process {p.pid} is traced by process {p.status.tracer}",
            "detach the debugger (gdb, strace, py-spy) first",
        )
        for p in found.processes
        if p.status.tracer
    ]


def _pipes(found: Look) -> list[Refusal]:
    need, have = limits.pipe_need(found.private_bytes), limits.descriptor_limit()
    if need <= have:
        return []
    return [
        Refusal(
            "pipes",
            f"CRIU needs {need} descriptors to hold {found.private_bytes >> 20} MiB in pipes of {limits.pipe_max_size() >> 10} KiB, the limit is {have}",
            "sysctl -w fs.pipe-max-size=134217728",
        )
    ]


def _io_uring(found: Look) -> list[Refusal]:
    users = [
        p.pid
        for p in found.processes
        if any("[io_uring]" in m.path for m in p.mappings) or any("[io_uring]" in d.target for d in p.descriptors)
    ]
    if not users:
        return []
    return [
        Refusal(
            "io_uring",
            f"CRIU cannot dump io_uring, which {'processes' if len(users) > 1 else 'process'} {', '.join(map(str, users))} uses",
            "start the job with io_uring off: 'sysctl -w kernel.io_uring_disabled=2', or UV_USE_IO_URING=0 (Node.js), USE_LIBUV=0 (PyTorch)",
        )
    ]


def _devices(found: Look) -> list[Refusal]:
    out = []
    for process in found.processes:
        names = {d.target for d in process.descriptors if stat.S_ISCHR(d.mode) and _GPU.match(d.target)}
        names |= {m.path for m in process.mappings if _GPU.match(m.path)}
        if names:
            out.append(
                Refusal(
                    "gpu",
                    f"process {process.pid} uses a GPU ({', '.join(sorted(names)[:3])})",
                    "GPU state is not captured by this version: stop using the device, or wait for it",
                )
            )
    return out


def _descriptors(found: Look) -> list[Refusal]:
    out = []
    for process in found.processes:
        for descriptor in process.descriptors:
            kind = descriptor.target.removeprefix("anon_inode:") if descriptor.target.startswith("anon_inode:") else ""
            if kind and kind not in _KNOWN_ANON and "[io_uring]" not in kind:
                out.append(
                    Refusal(
                        "descriptor",
                        f"descriptor {descriptor.number} of process {process.pid} is {descriptor.target}, which CRIU cannot dump",
                        "close it, or start the program without what opens it",
                    )
                )
    return out


def _hugetlb(found: Look) -> list[Refusal]:
    return [
        Refusal("hugetlb", f"process {p.pid} maps hugetlbfs memory ({m.path})", "use transparent huge pages instead")
        for p in found.processes
        for m in p.mappings
        if m.path.startswith("/anon_hugepage") or "/hugepages/" in m.path
    ]


def _deleted(found: Look) -> list[Refusal]:
    limit = found.options.ghost_limit
    return [
        Refusal(
            "deleted-file",
            f"{f.about.path} was deleted but is open and has {f.about.size >> 20} MiB, over the limit of {limit >> 20} MiB",
            f"raise --ghost-limit to at least {f.about.size}",
        )
        for f in ghosts(found.files)
        if f.about.size > limit
    ]


def _file_budget(found: Look) -> list[Refusal]:
    total = sum(f.about.size for f in found.files if f.about.policy == "content")
    if total <= found.options.file_budget:
        return []
    largest = max((f for f in found.files if f.about.policy == "content"), key=lambda f: f.about.size)
    return [
        Refusal(
            "file-budget",
            f"the tree has {total >> 20} MiB of files open for writing, the largest {largest.about.path}; more than the budget of "
            f"{found.options.file_budget >> 20} MiB to read while it stands still",
            "raise --file-budget, or leave the files out with --files check",
        )
    ]


def _workdir(found: Look) -> list[Refusal]:
    need = found.copied_bytes + sum(f.about.size for f in ghosts(found.files)) + (64 << 20)
    if need <= found.workdir_free:
        return []
    return [
        Refusal(
            "workdir",
            f"CRIU will write about {need >> 20} MiB (shared memory, stacks, deleted files), but only {found.workdir_free >> 20} MiB are free",
            "name a larger --workdir (tmpfs keeps the window short), or enlarge it: mount -o remount,size=… /dev/shm",
        )
    ]


CHECKS: tuple[Check, ...] = (
    _capabilities,
    _traced,
    _pipes,
    _io_uring,
    _devices,
    _descriptors,
    _hugetlb,
    _deleted,
    _file_budget,
    _workdir,
)
