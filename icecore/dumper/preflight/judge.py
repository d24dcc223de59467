"""Preflight: what would lose or hang the job, or make its snapshot useless, is found and refused
with its cure before anything is frozen.

Every check is a function of one `Inspection` and returns refusals. None can be overridden. What only may
matter after a restore is a warning.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from icecore.dumper.observe.inspection import Inspection
from icecore.dumper.preflight import checks, checks_descriptors, checks_gpu
from icecore.dumper.preflight.checks import Check, Refusal
from icecore.errors import NotFound, PreflightRefused
from icecore.host.kernel import limits, procfs

#: Modules and programs of icecore's that hold jobs, or work for who does.
_OWN_MODULES = frozenset(
    {"icecore.dumper.freeze.guard", "icecore.host.gpu.helper", "icecore.host.gpu.worker"}
)
_PROGRAMS = frozenset({"icecore-keeper"})
_RESTORE_GUARD = str(Path(checks.__file__).parents[2] / "restorer" / "guard" / "guard_process.py")
_CAP_CURE = "run as root with CAP_SYS_ADMIN and CAP_SYS_PTRACE"

CHECKS: tuple[Check, ...] = (
    checks.traced,
    checks.scheduling,
    checks.namespaces,
    checks.pipes,
    checks.guard_pages,
    checks.system_v,
    checks_descriptors.io_uring,
    checks_descriptors.gpus,
    checks_descriptors.devices,
    checks_descriptors.descriptors,
    checks_descriptors.pidfds,
    checks_descriptors.mounts,
    checks_descriptors.protocols,
    checks_descriptors.internet,
    checks_descriptors.unix_peers,
    checks.deleted,
    checks.file_budget,
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
    checks.message_queues,
    checks_gpu.nvml,
)


def check_target(pid: int) -> list[Refusal]:
    """What can be said before the tree is read.

    Raises:
        NotFound: There is no such process.
    """
    if pid <= 0 or not procfs.exists(pid):
        raise NotFound(
            f"there is no process {pid}", cure="'icecore ps' lists the jobs of this node"
        )
    missing = _missing_capabilities()
    if missing:
        return [Refusal("capabilities", f"{', '.join(sorted(missing))} missing", _CAP_CURE)]
    if procfs.is_kernel_thread(pid):
        return [Refusal("kernel-thread", f"{pid} is a thread of the kernel", "name a process")]
    if procfs.is_zombie(pid):
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
    """What keeps a process from being looked at, or from standing still."""
    with suppress(NotFound):  # it has ended
        try:
            os.readlink(f"/proc/{pid}/ns/user")
        except PermissionError:
            cure = "run icecore with at least the capabilities of that process: as root on the machine, or in a container with --privileged"
            message = f"icecore may not look at process {pid}, which has capabilities that icecore lacks, or is in an outer user namespace"
            return [Refusal("access", message, cure)]
        except FileNotFoundError:
            return []
        if is_part_of_icecore(procfs.command_line(pid)):
            message = f"process {pid} is a part of icecore itself: another dump or restore, or a job's device memory, would wait for it"
            return [
                Refusal(
                    "icecore",
                    message,
                    "name the job itself, or try again once that dump or restore is done ('icecore ps' lists the jobs)",
                )
            ]
    return []


def is_part_of_icecore(command: Sequence[str]) -> bool:
    """Whether a command line is that of a process which others wait for: a guard, a helper, a
    keeper.
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
    """Every refusal of every check, in their order."""
    return [refusal for check in CHECKS for refusal in check(found)]


def require(found: Inspection) -> None:
    """Raise `PreflightRefused` with all refusals if there are any."""
    refusals = refuse(found)
    if refusals:
        raise PreflightRefused([(r.name, r.message, r.cure) for r in refusals])


def warn(found: Inspection) -> list[Refusal]:
    """What does not keep a dump from being taken, but may matter to who restores it."""
    return [warning for check in WARNINGS for warning in check(found)]
