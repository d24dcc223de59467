"""The look at a tree's resident device memory before a dump: what a window need not move; rule: the processes' agents are asked, nobody is stopped."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from icecore.dumper.gpus import GpuLook
from icecore.errors import NotFound
from icecore.host import procfs
from icecore.host.resident.client import Agent, Keeper, Report, ResidentFailed
from icecore.host.resident.protocol import VARIABLE
from icecore.host.resident.sharing import Taken, share_any

#: What a window takes beside the copies of what changed: parking, the driver's checkpoint and restore of what is left, CRIU (docs/resident.md).
WINDOW_SECONDS = 1.0
#: Bytes a second at which changed cells are copied at the least.
COPY_RATE = 45e9


@dataclass(frozen=True)
class ResidentLook:
    """The processes of a tree that have resident memory.

    Attributes:
        directory: ``ICECORE_RESIDENT`` as they have it.
        pids: Each, as this machine sees it → as it sees itself.
        reports: How each is.
        outsiders: Processes that are not in the tree, as the keeper sees them, and have memory of it.
    """

    directory: str
    pids: Mapping[int, int]
    reports: Mapping[int, Report]
    outsiders: Sequence[int] = ()

    @property
    def bytes(self) -> int:
        """What stays where it is."""
        return sum(report.counts.resident_bytes for report in self.reports.values())

    @property
    def most_window_seconds(self) -> float:
        """How long a window will take if all of it has changed, of what is resident alone."""
        return WINDOW_SECONDS + self.bytes / COPY_RATE

    def seen_from(self, pid: int) -> Path:
        """The directory through a process, as long as that lives."""
        return Path(f"/proc/{pid}/root{self.directory}")


def look_at_resident(gpus: GpuLook) -> tuple[GpuLook, ResidentLook | None]:
    """Which of the GPU processes have resident memory, and the look at GPUs with that taken off."""
    directory, pids, reports = "", {}, {}
    for process in gpus.processes:
        named = resident_directory(process.pid)
        if not named or (directory and named != directory):
            continue  # one tree, one directory: what is elsewhere goes through the driver
        with suppress(NotFound, ResidentFailed, OSError):
            own = procfs.status(process.pid).own_pid
            report = Agent(Path(f"/proc/{process.pid}/root{named}"), own, tracee=process.pid).report()
            directory, pids[process.pid], reports[process.pid] = named, own, report
    if not pids:
        return gpus, None
    less = [
        replace(process, resident=reports[process.pid].counts.resident_bytes) if process.pid in reports else process
        for process in gpus.processes
    ]
    return replace(gpus, processes=less), ResidentLook(directory, pids, reports, _outsiders(directory, reports))


def _outsiders(directory: str, reports: Mapping[int, Report]) -> list[int]:
    """Of the processes with the same keeper, those that have memory of the tree's and are not in it."""
    tokens = {report.token for report in reports.values()}
    keeper, found = Keeper(Path(f"/proc/{next(iter(reports))}/root{directory}")), []
    with suppress(NotFound, ResidentFailed), ExitStack() as stack:

        def take(token: bytes) -> list[Taken]:
            pairs = keeper.take(token)
            for _, descriptor in pairs:
                stack.callback(os.close, descriptor)
            return pairs

        others = [one for one in keeper.processes() if one.alive and one.allocations and one.token not in tokens]
        own = [pair for token in tokens for pair in take(token)] if others else []
        found = [one.pid for one in others if share_any(own, take(one.token))]
    return found


def resident_directory(pid: int) -> str:
    """What a process was started with; "": nothing."""
    try:
        words: Sequence[bytes] = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    start = VARIABLE.encode() + b"="
    found = next((os.fsdecode(word[len(start) :]) for word in words if word.startswith(start)), "")
    return found if found.startswith("/") else ""
