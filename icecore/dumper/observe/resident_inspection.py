"""The inspection of a tree's resident device memory before a dump: what a window need not move. It
asks the processes' agents and stops no process.
"""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from icecore.dumper.observe.gpus import GpuInspection
from icecore.errors import NotFound, PreflightRefused
from icecore.host.kernel import limits, procfs
from icecore.host.kernel.trusted import open_directory, require_private
from icecore.host.resident.client import Agent, Keeper, Report, ResidentFailed, State
from icecore.host.resident.copyplan import NOTHING, Foreseen, foresee, pinned_bytes
from icecore.host.resident.gpu import spare_room
from icecore.host.resident.protocol import VARIABLE
from icecore.host.resident.sharing import Taken, share_any

#: Rates, in bytes a second, at which changed memory is copied aside on its GPU (docs/results:
#: 0.4–0.9 TB/s) and over the bus into pinned memory (its target there).
DEVICE_RATE, HOST_RATE = 400e9, 45e9
#: Rate at which the window stores memory that has no room for a copy: a first snapshot of 112 GiB
#: took 9.9 s, for 41 of them (docs/results).
STORE_RATE = 5e9
#: Seconds of the driver's checkpoint and of CRIU that run beside the copying (docs/results: what
#: a window of 0.54 s consists of).
BESIDE_SECONDS = 0.3
#: What the worker's own context takes of each GPU's free memory (docs/results).
_WORKER_BYTES = 500 << 20
#: How long to ask an agent again that does not answer.
_REPORT_SECONDS, _POLL_SECONDS = 2.0, 0.05


class ResidentInspection(msgspec.Struct, frozen=True):
    """The processes of a tree that have resident memory.

    Attributes:
        directory: ``ICECORE_RESIDENT`` in their environment.
        pids: Host pid → pid in the process's own namespace.
        reports: What each agent reports, by host pid.
        outsiders: Processes outside the tree that have memory of it, by the keeper's pids.
        copies: Where copies will go if all of the memory changes and that is found before the
            window.
    """

    directory: str
    pids: Mapping[int, int]
    reports: Mapping[int, Report]
    outsiders: Sequence[int] = ()
    copies: Foreseen = NOTHING

    @property
    def bytes(self) -> int:
        """Bytes that stay in place."""
        return sum(report.counts.resident_bytes for report in self.reports.values())

    @property
    def left(self) -> dict[str, int]:
        """What the preloads left to the driver: the sum of `Counts.left`."""
        total: Counter[str] = Counter()
        for report in self.reports.values():
            total.update(report.counts.left)
        return dict(total)

    @property
    def most_window_seconds(self) -> float:
        """How much longer a window takes if all of the memory has changed. GPUs copy at the same
        time, and memory without room for a copy is stored.
        """
        device, host, left = self.copies
        aside = (
            device.get(one, 0) / DEVICE_RATE + host.get(one, 0) / HOST_RATE
            for one in {*device, *host}
        )
        return max(0.0, max(aside, default=0.0) + left / STORE_RATE - BESIDE_SECONDS)

    def seen_from(self, pid: int) -> Path:
        """Return the path of the directory through a process, valid while the process lives."""
        return Path(f"/proc/{pid}/root{self.directory}")


def inspect_resident(
    gpus: GpuInspection, staging_bytes: int
) -> tuple[GpuInspection, ResidentInspection | None]:
    """Find the GPU processes with resident memory.

    Args:
        staging_bytes: Bytes that are pinned for copies unless the GPUs have ample room.

    Returns:
        ``gpus`` with resident memory deducted, and what was found; None: no process has any.

    Raises:
        PreflightRefused: A process that may have resident memory gives no answer.
    """
    directory, pids, reports = "", {}, {}
    sizes: Counter[str] = Counter()
    refused = []
    for process in gpus.processes:
        try:
            named = resident_directory(process.pid)  # once: a process may change what it shows
            agent = _agent_of(process.pid, named)
            report = None if agent is None else _report(agent)
            if agent is not None and report is None and _kept(process.pid, agent.directory):
                raise ResidentFailed("its agent does not listen", errno.ENOTCONN)
        except NotFound:
            continue  # the process has ended
        except ResidentFailed as error:
            # The driver would lose this memory: it restores into other memory than the keeper's.
            refused.append(
                (
                    "gpu-resident",
                    f"process {process.pid} does not report its resident device memory: {error.message}",
                    "try again",
                )
            )
            continue
        if agent is None or report is None:
            continue
        if not _is_private(agent.directory):
            what = f"process {process.pid} names {named} for its device memory, a directory that other users can write to"
            refused.append(
                (
                    "gpu-resident",
                    what,
                    f"start the job with 'icecore run --gpu', or: chown root {named} && chmod 0700 {named}",
                )
            )
            continue
        if directory and named != directory:
            what = f"the tree's processes use two keepers for their device memory: {directory} and {named}"
            refused.append(
                ("gpu-resident", what, "start all processes of a job with one icecore run")
            )
            continue
        directory, pids[process.pid], reports[process.pid] = named, agent.pid, report
        sizes += _sizes(agent, report)
    if refused:
        raise PreflightRefused(refused)
    if not pids:
        return gpus, None
    limits.raise_descriptor_limit()  # one for each allocation, to compare with other processes'
    less = [
        replace(process, resident=reports[process.pid].counts.resident_bytes)
        if process.pid in reports
        else process
        for process in gpus.processes
    ]
    without = replace(gpus, processes=less)
    copies = _foreseen(without, sizes, staging_bytes)
    return without, ResidentInspection(
        directory, pids, reports, _outsiders(directory, reports), copies
    )


def _is_private(directory: Path) -> bool:
    """Return whether only root or this user can create files in a directory that a process names. A
    keeper may be started there.
    """
    try:
        found = open_directory(directory)
    except OSError:
        return False
    try:
        require_private(found, directory)
    except PermissionError:
        return False
    finally:
        os.close(found)
    return True


def _sizes(agent: Agent, report: Report) -> Counter[str]:
    """Return the process's bytes by GPU; all under no GPU if its agent gives no answer."""
    try:
        sizes: Counter[str] = Counter()
        for one in agent.allocations():
            sizes[one.device] += 0 if one.imported else one.size
        return sizes
    except (NotFound, ResidentFailed):
        return Counter({"": report.counts.resident_bytes})


def _foreseen(gpus: GpuInspection, sizes: Mapping[str, int], staging_bytes: int) -> Foreseen:
    """Predict where copies go as `icecore.dumper.gpu.resident.Resident.prepare` plans them for a
    first snapshot, with the free memory that NVML reports.
    """
    known = {gpu.uuid: gpu for gpu in gpus.inventory.gpus} if gpus.inventory is not None else {}
    spare = {
        one: spare_room(known[one].memory - known[one].used - _WORKER_BYTES)
        for one in sizes
        if one in known
    }
    reserved = limits.at_most_a_third(staging_bytes)
    available = max(0, limits.memory_available() - 2 * gpus.most_bytes - reserved)
    host = pinned_bytes(
        sizes,
        spare,
        wanted=sizes,
        likely=sum(sizes.values()),
        staging=staging_bytes,
        available=available,
    )
    return foresee(sizes, spare, host)


def _outsiders(directory: str, reports: Mapping[int, Report]) -> list[int]:
    """Find processes of the same keeper that are outside the tree and have memory of it.

    Raises:
        PreflightRefused: The keeper gives no answer.
    """
    tokens = {report.token for report in reports.values()}
    keeper, found = Keeper(Path(f"/proc/{next(iter(reports))}/root{directory}")), []
    with (
        suppress(NotFound),
        ExitStack() as stack,
    ):  # NotFound: a keeper that has died is replaced and receives everything again

        def take(token: bytes) -> list[Taken]:
            pairs = keeper.take(token)
            for _, descriptor in pairs:
                stack.callback(os.close, descriptor)
            return pairs

        try:
            others = [
                one
                for one in keeper.processes()
                if one.alive and one.allocations and one.token not in tokens
            ]
            own = [pair for token in tokens for pair in take(token)] if others else []
            found = [one.pid for one in others if share_any(own, take(one.token))]
        except ResidentFailed as error:
            what = f"the keeper does not report which other processes have device memory of the tree: {error.message}"
            raise PreflightRefused([("gpu-outside", what, error.cure or "try again")]) from error
    return found


def has_mapped(pid: int) -> bool:
    """Return whether a process has resident memory that was not taken away, or may soon have some
    because it has an agent.

    Raises:
        NotFound: The process has ended.
        ResidentFailed: Its agent gives no answer.
    """
    agent = _agent_of(pid, resident_directory(pid))
    if agent is None:
        return False
    report = _report(agent, hand_over=False)
    return _kept(pid, agent.directory) if report is None else report.state != State.UNMAPPED


def _kept(pid: int, directory: Path) -> bool:
    """Return whether a process whose agent gives no answer has allocated resident memory. It may not
    have handed that over to the keeper yet.
    """
    try:
        return any(one.alive and one.pid == pid for one in Keeper(directory).processes())
    except NotFound:
        return False


def _agent_of(pid: int, named: str) -> Agent | None:
    """Return the agent that a process may have; None: it was started without the preload.

    Raises:
        NotFound: The process has ended.
    """
    if not named:
        return None
    return Agent(Path(f"/proc/{pid}/root{named}"), procfs.status(pid).own_pid, tracee=pid)


def _report(agent: Agent, *, hand_over: bool = True) -> Report | None:
    """Return an agent's report; None: there is no agent.

    Args:
        hand_over: As for `Agent.report`.

    Raises:
        ResidentFailed: The agent gives no answer.
    """
    end = time.monotonic() + _REPORT_SECONDS
    while True:
        try:
            return agent.report(hand_over=hand_over)
        except NotFound:
            # If there is a socket, the agent may soon listen again, or the socket belongs to an
            # earlier process with this pid.
            if time.monotonic() > end or not agent.exists:
                return None
        except ResidentFailed:
            if time.monotonic() > end:
                raise
        time.sleep(_POLL_SECONDS)


def resident_directory(pid: int) -> str:
    """Return the keeper's directory that a process was started with; "": none."""
    try:
        words: Sequence[bytes] = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    start = VARIABLE.encode() + b"="
    found = next((os.fsdecode(word[len(start) :]) for word in words if word.startswith(start)), "")
    return found if found.startswith("/") else ""
