"""Checks of a tree's processes, memory and files. As everywhere in preflight, each check refuses only
what was seen to make CRIU's dump, or a restore of it, fail.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import islice

import msgspec

from icecore.dumper.memory.shared import open_shared
from icecore.dumper.observe.files import ghosts
from icecore.dumper.observe.inspection import Inspection, ProcessInspection
from icecore.dumper.observe.outlived import outlived
from icecore.errors import NotFound
from icecore.host.criu.hidden import hides
from icecore.host.criu.libraries import CRIU_LIBRARY
from icecore.host.kernel import libc, limits, oom, procfs
from icecore.host.kernel.kcmp import kcmp
from icecore.host.kernel.pagemap import Pagemap
from icecore.store.format.manifest_rules import MAX_REGIONS

_SCHED_DEADLINE = 6
_USER_END = (1 << 47) - 4096
#: For images whose size is not known beforehand: page tables, core, file and socket images of many
#: processes.
_WORKDIR_SLACK = 64 << 20


class Refusal(msgspec.Struct, frozen=True):
    """A reason to refuse a dump or to warn: the check's stable name, what was found, and the cure."""

    name: str
    message: str
    cure: str


Check = Callable[[Inspection], Sequence[Refusal]]


# -- processes


def traced(found: Inspection) -> list[Refusal]:
    return [
        Refusal(
            "traced",
            f"process {p.pid} is traced by process {p.status.tracer}",
            "detach the debugger (gdb, strace, py-spy) first",
        )
        for p in found.processes
        if p.status.tracer
    ]


def scheduling(found: Inspection) -> list[Refusal]:
    return [
        Refusal(
            "scheduling",
            f"process {p.pid} is scheduled as SCHED_DEADLINE, which CRIU cannot restore",
            f"chrt --other -p 0 {p.pid}",
        )
        for p in found.living
        if _policy(p.pid) == _SCHED_DEADLINE
    ]


def _policy(pid: int) -> int:
    try:
        return os.sched_getscheduler(pid)
    except ProcessLookupError:
        return 0


def namespaces(found: Inspection) -> list[Refusal]:
    """Require that all processes are in the root's namespaces. CRIU cannot dump or restore others."""
    out = []
    root = found.processes[0].namespaces or {}
    for process in found.living:
        theirs = process.namespaces or {}
        nested = sorted(
            kind
            for kind in theirs
            if theirs[kind] != root.get(kind) and not kind.endswith("_for_children")
        )
        nested += ["time"] if theirs.get("time_for_children") != theirs.get("time") else []
        if root.get("mnt") != found.namespaces["mnt"]:
            nested = [
                kind for kind in nested if kind not in ("mnt", "net")
            ]  # CRIU restores those if the tree has a root of its own
        if nested:
            out.append(
                Refusal(
                    "namespaces",
                    f"process {process.pid} has other namespaces ({', '.join(dict.fromkeys(nested))}) than the root of its tree, or made them for its "
                    "children, which CRIU cannot restore",
                    "snapshot the tree below it by itself, or start it without sandboxing",
                )
            )
    if root.get("user") != found.namespaces["user"]:
        out.append(
            Refusal(
                "namespaces",
                f"process {found.root} is in a user namespace of its own, which CRIU cannot dump from outside",
                "start the job without one (no unshare --user, no rootless container)",
            )
        )
    return out


def threads(found: Inspection) -> list[Refusal]:
    """Refuse threads that do not share everything with their process. CRIU examines only the first
    thread of a process, and gives what that thread has to all of them.
    """
    return [
        Refusal(
            "threads",
            f"thread {thread} of process {process.pid} has {what} of its own, and CRIU would give it the process's",
            "do not call unshare(2) or setns(2) in a thread of the program, or do that thread's work in a separate process",
        )
        for process in found.living
        if process.status.threads > 1
        for thread, what in islice(_apart(process), 1)
    ]


def _apart(process: ProcessInspection) -> Iterator[tuple[int, str]]:
    """Yield threads that have something of their own, and what that is."""
    pid = process.pid
    with suppress(NotFound):
        for thread in procfs.threads(pid):
            with suppress(NotFound, ProcessLookupError):
                what = _own(pid, thread, process.namespaces or {}) if thread != pid else ""
                # A process that ends loses its first thread's share first.
                if what and not any(procfs.thread_ends(pid, one) for one in (pid, thread)):
                    yield thread, what


def _own(pid: int, thread: int, namespaces: Mapping[str, int]) -> str:
    """Return what a thread does not share with its process; empty: it shares all."""
    try:
        if kcmp(pid, thread, "files"):
            return "descriptors"
        if kcmp(pid, thread, "fs"):
            return "a working directory"
    except PermissionError:
        pass  # CRIU may not compare either, and says so
    theirs = procfs.thread_namespaces(pid, thread)
    kinds = [kind for kind in theirs if theirs[kind] != namespaces.get(kind)]
    return f"namespaces ({', '.join(kinds)})" if kinds else ""


def main_threads(found: Inspection) -> list[Refusal]:
    """Refuse processes whose main thread has ended while others run: CRIU dumps no such zombies."""
    zombies = [p.pid for p in found.processes if p.status.zombie]
    return [main_thread_ended(pid) for pid in outlived(zombies)]


def main_thread_ended(pid: int) -> Refusal:
    """Return the refusal of a process without its main thread."""
    return Refusal(
        "main-thread",
        f"the main thread of process {pid} has ended (pthread_exit) while other threads run, and CRIU cannot dump such a process",
        "have the main thread wait for the others (pthread_join), or take the snapshot once that process has ended",
    )


def proc(found: Inspection) -> list[Refusal]:
    """Refuse a tree for whose pid namespace CRIU would have to mount a /proc, by a process that may
    not (criu/pie/parasite.c, get_proc_fd).
    """
    root = found.processes[0]
    if in_hosts(found, "pid") or root.status.zombie or "CAP_SYS_ADMIN" in _capabilities(root.pid):
        return []
    try:
        os.readlink(f"/proc/{root.pid}/root/proc/self")
    except FileNotFoundError:
        return []  # of a namespace in which this process has no pid: its own
    except OSError:
        pass
    return [
        Refusal(
            "proc",
            f"process {root.pid} has a pid namespace of its own but sees the /proc of another one, and may not mount its own",
            "start the job with 'icecore run --user', or with a /proc of its own (unshare --pid --fork --mount-proc)",
        )
    ]


def _capabilities(pid: int) -> frozenset[str]:
    try:
        return limits.capabilities(pid)
    except NotFound:
        return frozenset()


def foreign_limits(found: Inspection) -> list[Refusal]:
    """Refuse processes of other users, whose limits CRIU cannot read without CAP_SYS_RESOURCE, if
    the library that reads them from /proc was not built (icecore/host/criu/limits.c).
    """
    if CRIU_LIBRARY.exists() or "CAP_SYS_RESOURCE" in limits.capabilities():
        return []
    return [
        Refusal(
            "limits",
            f"CRIU may not read the limits of process {p.pid}, which is of user {p.status.user}: CAP_SYS_RESOURCE is missing",
            f"install gcc, then reinstall icecore, which then reads them elsewhere; or {oom.CURE}",
        )
        for p in found.living
        if p.status.user != os.geteuid()
    ]


# -- memory


def pipes(found: Inspection) -> list[Refusal]:
    held = _held_in_pipes(found)
    need, have = limits.pipe_need(held, len(found.living)), limits.descriptor_limit()
    if need <= have or found.options.memory == "streamed":
        return []
    return [
        Refusal(
            "pipes",
            f"CRIU needs {need} descriptors to hold {held >> 20} MiB in pipes of {limits.pipe_capacity() >> 10} KiB, the limit is {have}",
            "sysctl -w fs.pipe-max-size=134217728, or raise the limit (ulimit -Hn); if neither is possible, --memory streamed takes longer but needs neither",
        )
    ]


def _held_in_pipes(found: Inspection) -> int:
    """Return an upper bound on the bytes of private memory that CRIU takes into pipes."""
    if not hides(found.criu):
        # By then, device memory is in the processes.
        return found.private_bytes + (found.gpus.most_bytes if found.gpus else 0)
    seen = (
        sum(m.length for m in p.mappings if m.private and not (m.anonymous or m.holds_private_data))
        for p in found.living
    )
    return sum(min(p.private_bytes, size) for p, size in zip(found.living, seen, strict=True))


def guard_pages(found: Inspection) -> list[Refusal]:
    """Refuse guard pages with CRIU before 4.2, which restores plain memory in their place."""
    if found.criu.keeps_guard_pages(limits.kernel_version()):
        return []
    out = []
    for process in found.living:
        try:
            with Pagemap(process.pid) as pagemap:
                guards = pagemap.guards(0, _USER_END)
        except NotFound:
            continue  # it has ended
        if len(guards):
            out.append(
                Refusal(
                    "guard-pages",
                    f"process {process.pid} has guard pages (MADV_GUARD_INSTALL), at {int(guards['start'][0]):#x} first, which CRIU before 4.2 would lose",
                    "install CRIU 4.2 or newer as well (tools/install-criu --suite sid)",
                )
            )
    return out


def system_v(found: Inspection) -> list[Refusal]:
    if not in_hosts(found, "ipc"):
        return []
    return [
        Refusal(
            "system-v",
            f"process {p.pid} maps System V shared memory of the host, which does not belong to the job",
            "start the job with 'icecore run --ipc private', which gives it an ipc namespace of its own",
        )
        for p in found.living
        if any(m.path.startswith("/SYSV") for m in p.mappings)
    ]


def in_hosts(found: Inspection, kind: str) -> bool:
    return (found.processes[0].namespaces or {}).get(kind) == found.namespaces[kind]


# -- files


def deleted(found: Inspection) -> list[Refusal]:
    limit = found.options.ghost_limit
    return [
        Refusal(
            "deleted-file",
            f"{f.about.path} was deleted, is still open and has {f.about.size >> 20} MiB, over the limit of {limit >> 20} MiB",
            f"raise --ghost-limit to at least {f.about.size}",
        )
        for f in ghosts(found.files)
        if f.about.size > limit
    ]


def file_budget(found: Inspection) -> list[Refusal]:
    # Of the others, the times show whether they change after they are stored (`prepare`).
    read = [
        file
        for file in found.files
        if file.about.policy == "content"
        and (found.options.pre_copy == "off" or file.mapped_writable)
    ]
    total = sum(file.about.size for file in read)
    if total <= found.options.file_budget:
        return []
    largest = max(read, key=lambda file: file.about.size).about.path
    return [Refusal(*over_budget(total, found.options.file_budget, largest))]


def over_budget(size: int, most: int, largest: str) -> tuple[str, str, str]:
    """Return the refusal of a window that would read ``size`` bytes of files: name, message, cure."""
    return (
        "file-budget",
        f"the window would read {size >> 20} MiB of the job's open files, the"
        f" largest {largest}; the budget is {most >> 20} MiB",
        "raise --file-budget, or leave the files out with --files check",
    )


def huge_files(found: Inspection) -> list[Refusal]:
    """Refuse files on a mounted hugetlbfs that the job can write to. CRIU omits their content, and
    a restore could not write it: hugetlbfs does not support write(2).
    """
    return [
        Refusal(
            "huge-file",
            f"{file.about.path} lies on hugetlbfs and is open for writing or deleted, and a snapshot would not contain its content",
            "have the job use huge pages without a file: mmap(2) with MAP_HUGETLB, or memfd_create(2) with MFD_HUGETLB",
        )
        for file in found.files
        if (file.about.writable or file.deleted) and _on_huge_pages(file.reach)
    ]


def _on_huge_pages(path: str) -> bool:
    try:
        return libc.file_system(path) == libc.HUGETLBFS
    except OSError:
        return False  # closed or unmapped since


def workdir(found: Inspection) -> list[Refusal]:
    need = found.copied_bytes + sum(f.about.size for f in ghosts(found.files)) + _WORKDIR_SLACK
    if need > found.workdir_free and found.options.memory != "streamed" and hides(found.criu):
        with ExitStack() as stack:  # CRIU does not write what icecore reads in place
            need -= open_shared(found.processes, stack).used
    if need <= found.workdir_free:
        return []
    return [
        Refusal(
            "workdir",
            f"CRIU will write about {need >> 20} MiB (shared and locked memory, deleted files), but only {found.workdir_free >> 20} MiB are free",
            "name a larger --workdir (tmpfs keeps the window short), or enlarge it: mount -o remount,size=… /dev/shm",
        )
    ]


def mappings(found: Inspection) -> list[Refusal]:
    """Refuse more mappings than a manifest records, before the window and not after it. The limit
    keeps a forged manifest from filling memory.
    """
    count = sum(len(process.mappings) for process in found.processes)
    if count <= MAX_REGIONS:
        return []
    return [
        Refusal(
            "mappings",
            f"the tree has {count} memory mappings, and a snapshot records at most {MAX_REGIONS}",
            "snapshot parts of the tree as jobs of their own, or have the job merge its mappings (fewer guard pages and protection changes)",
        )
    ]


# -- warnings


def message_queues(found: Inspection) -> list[Refusal]:
    if not in_hosts(found, "ipc"):
        return []
    try:
        with open("/proc/sysvipc/msg", encoding="ascii") as file:
            rows = [line.split() for line in file.readlines()[1:]]
    except FileNotFoundError:
        return []
    pids = set(found.pids)

    def used(pid: str, at: str) -> bool:
        """Return whether this process used the queue, and not an earlier one with its pid. Queues
        record whole seconds.
        """
        with suppress(NotFound):
            return int(pid) in pids and int(at) + 2 > procfs.began(int(pid))
        return False

    return [
        Refusal(
            "message-queue",
            f"the tree uses the host's System V message queue {row[1]}, which is not part of its snapshot",
            "start the job with 'icecore run --ipc private', which gives it an ipc namespace of its own",
        )
        for row in rows
        if used(row[5], row[11]) or used(row[6], row[12])
    ]
