"""Preflight: find and refuse what would lose or hang the job, or make its snapshot useless, before
anything is frozen. Each refusal comes with a cure.

Every check is a function of one `Inspection` and returns refusals, none of which can be overridden.
A finding that may matter only after a restore is a warning.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from icecore.dumper.observe.inspection import Inspection
from icecore.dumper.observe.outlived import outlived
from icecore.dumper.preflight import checks, checks_descriptors, checks_gpu
from icecore.dumper.preflight.checks import Check, Refusal
from icecore.errors import NotFound, PreflightRefused
from icecore.host.kernel import limits, procfs

#: Modules and programs of icecore that hold jobs, or work for a process that does.
_OWN_MODULES = frozenset(
    {"icecore.dumper.freeze.guard_process", "icecore.host.gpu.helper", "icecore.host.gpu.worker"}
)
_PROGRAMS = frozenset({"icecore-keeper"})
_RESTORE_GUARD = str(Path(checks.__file__).parents[2] / "restorer" / "guard" / "guard_process.py")
_CAP_CURE = "run as root with {}; in a container: --cap-add or --privileged"

CHECKS: tuple[Check, ...] = (
    checks.traced,
    checks.scheduling,
    checks.namespaces,
    checks.main_threads,
    checks.threads,
    checks.proc,
    checks.foreign_limits,
    checks.pipes,
    checks.guard_pages,
    checks.system_v,
    checks_descriptors.io_uring,
    checks_descriptors.direct_requests,
    checks_descriptors.leases,
    checks_descriptors.gpus,
    checks_descriptors.devices,
    checks_descriptors.descriptors,
    checks_descriptors.pidfds,
    checks_descriptors.queues,
    checks_descriptors.mounts,
    checks_descriptors.protocols,
    checks_descriptors.internet,
    checks_descriptors.unaccepted,
    checks_descriptors.unix_peers,
    checks.deleted,
    checks.file_budget,
    checks.huge_files,
    checks.workdir,
    checks.mappings,
    checks_gpu.driver,
    checks_gpu.plugin,
    checks_gpu.managed,
    checks_gpu.ipc,
    checks_gpu.shared,
    checks_gpu.mps,
    checks_gpu.mig,
    checks_gpu.transports,
    checks_gpu.sharing,
    checks_gpu.memory,
    checks_gpu.window,
)

WARNINGS: tuple[Check, ...] = (
    checks_descriptors.loose_pipes,
    checks_descriptors.closed_peers,
    checks_descriptors.lost_requests,
    checks.message_queues,
    checks_gpu.nvml,
)


def check_target(pid: int) -> list[Refusal]:
    """Return the refusals that are known before the tree is read.

    Raises:
        NotFound: The process does not exist.
    """
    if pid <= 0 or not procfs.exists(pid):
        raise NotFound(
            f"there is no process {pid}", cure="'icecore ps' lists the jobs of this node"
        )
    missing = _missing_capabilities()
    if missing:
        names = ", ".join(sorted(missing))
        return [Refusal("capabilities", f"{names} missing", _CAP_CURE.format(names))]
    if procfs.is_kernel_thread(pid):
        return [Refusal("kernel-thread", f"{pid} is a thread of the kernel", "name a process")]
    if procfs.is_zombie(pid):
        if outlived([pid]):
            return [checks.main_thread_ended(pid)]
        return [
            Refusal(
                "zombie",
                f"process {pid} has ended and waits to be reaped",
                "there is nothing left to snapshot",
            )
        ]
    leader = _thread_group(pid)
    if leader != pid:
        return [
            Refusal("thread", f"{pid} is a thread of process {leader}", f"name process {leader}")
        ]
    if pid == 1:
        message = "process 1 is the init of this machine, or of the container that icecore runs in"
        return [
            Refusal(
                "init",
                message,
                "start the job with 'icecore run', or name the descendant process to snapshot",
            )
        ]
    if _contains(pid, os.getpid()):
        return [
            Refusal(
                "self",
                f"the tree of {pid} contains icecore itself",
                "snapshot a job that was started apart, with 'icecore run' or setsid",
            )
        ]
    return [refusal for member in procfs.tree(pid) for refusal in _check_member(member)]


def _check_member(pid: int) -> list[Refusal]:
    """Refuse a process that icecore may not inspect or that must not stand still."""
    with suppress(NotFound):  # it has ended
        try:
            with procfs.looking_at(pid):
                os.readlink(f"/proc/{pid}/ns/user")
        except PermissionError:
            cure = "run icecore with at least the capabilities of that process: as root on the machine, or in a container with --privileged"
            message = f"icecore may not inspect process {pid}, which has capabilities that icecore lacks, or is in an outer user namespace"
            return [Refusal("access", message, cure)]
        if is_part_of_icecore(procfs.command_line(pid)):
            message = f"process {pid} belongs to icecore itself: another dump or restore, or a job's device memory, depends on it"
            return [
                Refusal(
                    "icecore",
                    message,
                    "name the job itself, or try again after that dump or restore ('icecore ps' lists the jobs)",
                )
            ]
    return []


def is_part_of_icecore(command: Sequence[str]) -> bool:
    """Return whether a command line is that of a guard, a helper or a keeper, on which other
    processes depend.
    """
    if not command:
        return False
    named = command[command.index("-m") + 1] if "-m" in command[:-1] else ""
    return (
        named in _OWN_MODULES
        or os.path.basename(command[0]) in _PROGRAMS
        or _RESTORE_GUARD in command[:7]
    )


def _missing_capabilities() -> set[str]:
    have = limits.capabilities()
    missing = {"CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_CHECKPOINT_RESTORE"} - have
    if "CAP_SYS_ADMIN" in have:
        missing.discard("CAP_CHECKPOINT_RESTORE")
    return missing


def _thread_group(pid: int) -> int:
    return int(procfs.status_fields(pid)["Tgid"][0])


def _contains(root: int, pid: int) -> bool:
    while pid > 1:
        if pid == root:
            return True
        pid = procfs.status(pid).parent
    return False


def refuse(found: Inspection) -> list[Refusal]:
    """Return every refusal of every check, in their order."""
    return [refusal for check in CHECKS for refusal in check(found)]


def require(found: Inspection) -> None:
    """Raise `PreflightRefused` with all refusals if there are any."""
    refusals = refuse(found)
    if refusals:
        raise PreflightRefused([(r.name, r.message, r.cure) for r in refusals])


def warn(found: Inspection) -> list[Refusal]:
    """Return what does not prevent a dump but may matter after a restore."""
    return [warning for check in WARNINGS for warning in check(found)]
