"""One window over all processes of a job that have resident memory. Either all are stopped without
their memory, or all run with it.

While they stand, duplicates of their descriptors are held here, so that not even the keeper's death
loses memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from errno import EALREADY
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from icecore.errors import IcecoreError, NotFound
from icecore.host.resident.client import Agent, Copies, Keeper, Report, ResidentFailed
from icecore.host.resident.protocol import Allocation
from icecore.host.resident.window import Try, may_be_tried_again, tries

T = TypeVar("T")

#: The driver's lock of processes, with its limit in seconds; raises where it failed, and then none
#: is locked.
LockAll = Callable[[Collection[int], float], None]
#: The driver's unlock of processes; raises where it failed.
UnlockAll = Callable[[Collection[int]], None]


class ResidentTree:
    """The processes of a job that have resident memory (a context manager: on exit, stopped
    processes get their memory back).

    Args:
        directory: ``ICECORE_RESIDENT`` of the job, as this machine sees it.
        pids: The job's processes as this machine sees them → as they see themselves.

    Attributes:
        reports: How each process with an agent was when this object was made.
        copying: The processes that make the driver's copies themselves while they stand.
    """

    def __init__(self, directory: Path, pids: Mapping[int, int]) -> None:
        self._keeper = Keeper(directory)
        self._agents = {pid: Agent(directory, own, tracee=pid) for pid, own in pids.items()}
        #: While they stand: what each has, with a descriptor that is this object's.
        self.taken: dict[int, list[tuple[Allocation, int]]] = {}
        self.reports: dict[int, Report] = {}
        self.copying: set[int] = set()
        self._standing: set[int] = set()
        for pid, agent in list(self._agents.items()):
            try:
                self.reports[pid] = agent.report()
            except NotFound:
                del self._agents[pid]

    @property
    def pids(self) -> list[int]:
        """Return those with resident memory."""
        return list(self._agents)

    @property
    def resident_bytes(self) -> int:
        """Return how many bytes a window does not move."""
        return sum(report.counts.resident_bytes for report in self.reports.values())

    def take_away(
        self,
        lock: LockAll,
        unlock: UnlockAll,
        *,
        seconds: float = 20.0,
        lease: float = 30.0,
        copies: Copies | None = None,
    ) -> int:
        """Park all processes and take their memory away; return bytes. The driver's lock is off
        before and after.

        Args:
            lock, unlock: The driver's, for the given processes.
            seconds: After this time it is given up.
            lease: See `Agent.park`.
            copies: See `Agent.unmap`.

        Raises:
            ResidentFailed, LockTimeout: It could not be done; all run.
        """
        last: BaseException | None = None
        for one in tries(seconds):
            try:
                return self._attempt(lock, unlock, one, lease, copies)
            except BaseException as error:
                self._undo()
                if not may_be_tried_again(error):
                    raise
                last = error
        assert last is not None
        raise last

    def ended(self, *, keep: bool) -> None:
        """Note that they were killed while stopped: nobody is left to give memory back to.

        Args:
            keep: The keeper keeps their memory, for a restore; else it is let go of.

        Raises:
            ResidentFailed: It does not let go of all; of the others' it has.
        """
        self._close_duplicates()
        self._standing.clear()
        self._agents.clear()
        self.copying.clear()
        failed: IcecoreError | None = None
        for report in self.reports.values() if not keep else ():
            try:
                self._keeper.forget(report.token)
            except NotFound:
                pass  # what it held went with it
            except IcecoreError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def give_back(self, *, seconds: float = 60.0) -> None:
        """Map the memory of all processes again, and let them run once all have it; the driver's
        lock is off.

        Raises:
            ResidentFailed: A process did not get it; it and all others stand still, and this may be
                called again.
        """
        self._each(lambda pid, agent: self._map(pid, agent, seconds))
        self._each(lambda _, agent: agent.go())
        self._standing.clear()
        self.copying.clear()
        self._close_duplicates()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo()

    # -- within

    def _attempt(
        self, lock: LockAll, unlock: UnlockAll, one: Try, lease: float, copies: Copies | None
    ) -> int:
        if one.patience:
            self._each(lambda pid, agent: self._park(pid, agent, one.left, lease, one.patience))
        lock(self.pids, one.lock)
        try:
            self._each(lambda pid, agent: self._park(pid, agent, one.left, lease))
        finally:
            unlock(self.pids)
        unmapped = self._each(lambda _, agent: agent.unmap(one.left, copies))
        self.copying = {pid for pid, found in unmapped.items() if found.copies}
        for pid, report in self.reports.items():
            self.taken[pid] = self._keeper.take(report.token)
        return sum(found.bytes for found in unmapped.values())

    def _park(
        self, pid: int, agent: Agent, seconds: float, lease: float, patience: float = 0.0
    ) -> None:
        self._standing.add(pid)  # also where there is no answer
        try:
            agent.park(seconds, lease, patience)
        except ResidentFailed as error:
            if (
                error.code == EALREADY
            ):  # its memory is taken away: by somebody else, who gives it back
                self._standing.discard(pid)
            raise

    def _undo(self) -> None:
        """Give each its memory back and let it run, whatever state it is in."""
        for pid in list(self._standing):
            with suppress(IcecoreError):  # it has ended, or its lease brings it back
                self._map(
                    pid, self._agents[pid], 60.0
                )  # nothing to be done where it runs, or is parked only
                self._agents[pid].go()
                self._standing.discard(pid)
        self._close_duplicates()

    def _map(self, pid: int, agent: Agent, seconds: float) -> None:
        try:
            agent.map(seconds=seconds)
        except ResidentFailed:
            if not self.taken.get(pid):
                raise
            agent.map({one.identity: fd for one, fd in self.taken[pid]}, seconds)

    def _each(self, call: Callable[[int, Agent], T]) -> dict[int, T]:
        """Call for all at once; raise the first error once all have answered, preferring one that
        is not EAGAIN.
        """
        if not self._agents:
            return {}
        with ThreadPoolExecutor(len(self._agents), "resident") as pool:
            futures = {pid: pool.submit(call, pid, agent) for pid, agent in self._agents.items()}
        errors = [error for future in futures.values() if (error := future.exception()) is not None]
        if errors:
            raise min(errors, key=may_be_tried_again)
        return {pid: future.result() for pid, future in futures.items()}

    def _close_duplicates(self) -> None:
        for pairs in self.taken.values():
            for _, descriptor in pairs:
                os.close(descriptor)
        self.taken.clear()
