"""The lazily restored memory of a whole tree: its families, the fetcher that fills them, and the daemon that hears what
they wait for. The rule: when this says that everything is resident, every descriptor is closed and no page is missing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from icecore.errors import RestoreFailed
from icecore.events import Progress
from icecore.restorer.daemon import Daemon
from icecore.restorer.fetch import Decoder, Fetcher, Limits, Spent
from icecore.restorer.guard import Guard
from icecore.restorer.images import LazyMemory
from icecore.restorer.members import Family
from icecore.restorer.plan import interleave
from icecore.store.backend import Backend
from icecore.store.cell import CELL, Records
from icecore.store.loop import LoopThread


class Filling:
    """Fills a tree.

    Args:
        guard: Has not started CRIU yet.
        memory: What comes through userfaultfd, by process.
        backend: Where the chunks are.
        decoder: Decodes and verifies them.
        limits: Threads, memory, patience.
        loop: Where the repository lives.
        failed: Told once, from whatever thread, that the tree must die, and why.
    """

    def __init__(
        self,
        guard: Guard,
        memory: Sequence[LazyMemory],
        backend: Backend,
        decoder: Decoder,
        limits: Limits,
        loop: LoopThread,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._failed = failed
        families: dict[int, Family] = {}
        self.daemon = Daemon(guard, families, self._urgent, failed)
        self._families: list[Family] = []
        self._first: dict[int, int] = {}
        self._family_of: list[int] = []
        for part in memory:
            family = Family(part.process, part.cells, part.wanted, self.daemon.check_unmapped, part.wiped)
            families[part.process] = family
            self._first[part.process] = len(self._family_of)
            self._family_of.extend([len(self._families)] * len(family))
            self._families.append(family)
        self._rows = [(self._first[family.process], len(family)) for family in self._families]
        #: Process → set once its device memory is resident; for those that have none, too.
        self.device_resident: dict[int, threading.Event] = {part.process: threading.Event() for part in memory}
        self._device = {part.process: set(np.flatnonzero(part.device).tolist()) for part in memory}
        self._device_left = {process: set(rows) for process, rows in self._device.items()}
        self._counting = threading.Lock()
        for process, rows in self._device.items():
            if not rows:
                self.device_resident[process].set()
        parts = [part.cells.records for part in memory]
        records: Records = np.concatenate(parts) if parts else np.empty(0, CELL)
        self._fetcher = Fetcher(
            backend, decoder, records, self._place, limits, loop, needed=self._needed, failed=failed
        )

    @property
    def spent(self) -> Spent:
        """What the workers did; complete once everything is resident or stopped."""
        return self._fetcher.spent

    def start(self, first: Sequence[tuple[int, int]] = ()) -> None:
        """Listen, and fetch ahead; nothing but faults is served before `open`.

        Args:
            first: (process, cell of it) that are wanted before the others, in that order.
        """
        self.daemon.start()
        self._fetcher.start(self._order(first), opened=False)

    def open(self) -> None:
        """Everything is registered with userfaultfd: place what the plan says.

        Raises:
            RestoreFailed: CRIU handed over no userfaultfd for a process whose memory waits here.
        """
        for family in self._families:
            if len(family) and not family.members:
                raise RestoreFailed(f"CRIU handed over no userfaultfd of process {family.process}")
        self._fetcher.open()

    def complete(self, progress: Progress, seconds: float | None = None) -> None:
        """Wait until everything is resident and every descriptor is closed.

        Args:
            progress: Told, now and then, of the bytes that were placed, of all.

        Raises:
            Whatever prevents it.
        """
        self._fetcher.progress = progress
        self._fetcher.wait(seconds)
        self.daemon.finish()
        self.daemon.wait_for(lambda d: d.complete, seconds)
        self._fetcher.stop()

    def stop(self) -> None:
        """End all threads. The tree is dead, or complete."""
        self._fetcher.stop()

    def fail(self, error: BaseException) -> None:
        """Stop filling because of an error from elsewhere."""
        self._fetcher.fail(error)

    def touched(self) -> list[tuple[int, int]]:
        """(process, `Family.address` of the cell) in the order in which the tree first asked for them."""
        families = {family.process: family for family in self._families}
        return [(process, families[process].address(row)) for process, row in self.daemon.touched]

    def rows_at(self, addresses: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The inverse of `touched`: those (process, cell) that this snapshot has at (process, address)."""
        families = {family.process: family for family in self._families}
        found = []
        for process, address in addresses:
            family = families.get(process)
            row = family.row_at(address) if family is not None else None
            if row is not None:
                found.append((process, row))
        return found

    def _order(self, first: Sequence[tuple[int, int]]) -> list[int]:
        early = list(dict.fromkeys(self._first[process] + row for process, row in first))
        taken = set(early)
        device, host = [], []
        for family, (start, count) in zip(self._families, self._rows, strict=True):
            own = self._device[family.process]
            device.append([start + row for row in sorted(own) if start + row not in taken])
            host.append([row for row in range(start, start + count) if row not in taken and row - start not in own])
        # The driver moves device memory on while the rest is still being fetched.
        return early + [row for parts in (device, host) for row in interleave([part for part in parts if part])]

    def _urgent(self, family: Family, row: int) -> None:
        self._fetcher.urgent(self._first[family.process] + row)

    def _place(self, row: int, data: memoryview) -> None:
        number = self._family_of[row]
        family, own = self._families[number], row - self._rows[number][0]
        family.fill(own, data)
        left = self._device_left[family.process]
        if own in left and not family.misses(own):
            with self._counting:
                left.discard(own)
                if not left:
                    self.device_resident[family.process].set()

    def _needed(self, row: int) -> bool:
        number = self._family_of[row]
        return self._families[number].misses(row - self._rows[number][0])
