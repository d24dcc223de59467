"""Checks processor, kernel, CRIU, process ids and ports."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterator

from icecore.errors import NotFound
from icecore.host.criu.program import Criu
from icecore.host.kernel import limits, procfs, userfaultfd
from icecore.restorer.requirements.outcome import Requirement
from icecore.restorer.requirements.ports import check_ports
from icecore.store.format.contract import CUDA, RESIDENT
from icecore.store.format.manifest import Manifest

#: CPU flags that are instructions a program may have chosen its code by; the others describe the
#: kernel or the host.
_INSTRUCTIONS = re.compile(
    r"sse|ssse|avx|amx|bmi|fma|f16c|aes|vaes|sha|gfni|pclmul|vpclmul|movbe|popcnt|adx|rdrand|rdseed|abm|lzcnt|clflush"
    r"|clwb|fsgsbase|xsave|rtm|hle|cx16|cx8|fxsr|mmx|pku|asimd|sve|atomics|crc32|pmull|fphp|lrcpc|dcpop|bf16|i8mm|paca|pacg"
)
#: How long init may take to reap a process that has ended.
_DEAD_SECONDS = 5.0
#: How long to wait for other short-lived processes that have such a pid by chance.
_SHORT_SECONDS = 0.5
_LEAST_KERNEL = (5, 11)  # userfaultfd as CRIU and the daemon use it


def check_machine(manifest: Manifest, criu: Criu) -> Iterator[Requirement]:
    """Check architecture, CRIU, kernel and processor."""
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


def check_names(manifest: Manifest, *, name: bool) -> Iterator[Requirement]:
    """Check the pids and ports of the job.

    Args:
        name: Name the processes that have a port.
    """
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
        yield check_ports(manifest.requirements.ports, name=name)


def _taken(pids: list[int]) -> list[int]:
    """Return the pids that are in use. Wait a moment for processes that are about to end, or have
    ended and are not reaped yet, as after a job was killed.
    """
    began = time.monotonic()
    while taken := [pid for pid in pids if procfs.exists(pid)]:
        patience = _DEAD_SECONDS if all(map(_dead, taken)) else _SHORT_SECONDS
        if time.monotonic() > began + patience:
            break
        time.sleep(0.05)
    return taken


def _dead(pid: int) -> bool:
    try:
        return procfs.status(pid).zombie
    except NotFound:
        return True
