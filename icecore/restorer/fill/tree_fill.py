"""The lazily restored memory of a whole tree: its families, the fetcher that fills them, and the
daemon that hears what they wait for. The rule: when this says that everything is resident, every
descriptor is closed and no page is missing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import numpy as np

from icecore.errors import RestoreFailed
from icecore.events import Progress
from icecore.host.kernel.memory import address_of
from icecore.restorer.fetch.fetcher import Fetcher
from icecore.restorer.fetch.limits import Limits, Spent
from icecore.restorer.fetch.sink import CellSink
from icecore.restorer.fetch.source import Decoder
from icecore.restorer.files.images import LazyMemory
from icecore.restorer.fill.daemon import Daemon
from icecore.restorer.fill.device_file import DeviceFile
from icecore.restorer.guard.client import RestoreGuard
from icecore.restorer.place.locks import SharedLock
from icecore.restorer.place.members import Family, Member
from icecore.restorer.place.placers import Placer, Placers
from icecore.restorer.place.placing import CellState, WantedCell
from icecore.restorer.plan.memory import Batch, interleave
from icecore.store.backend.base import Backend
from icecore.store.format.cell import CELL, Records
from icecore.store.runtime.loop import LoopThread

#: What share of all cells is placed before device memory in any case.
_LITTLE = 0.125
_NO_USERFAULTFD = "CRIU handed over no userfaultfd of process {}"


class TreeFill(CellSink):
    """Fills a tree.

    Args:
        guard: Has not started CRIU yet.
        memory: What comes through userfaultfd, by process.
        backend: Where the chunks are.
        decoder: Decodes and verifies them.
        limits: Threads, memory, patience.
        loop: Where the repository lives.
        failed: Told once, from whatever thread, that the tree must die, and why.
        placers: Processes that place; without any this one does it.
        device_file: The device memory that does not come through userfaultfd.
    """

    def __init__(
        self,
        guard: RestoreGuard,
        memory: Sequence[LazyMemory],
        backend: Backend,
        decoder: Decoder,
        limits: Limits,
        loop: LoopThread,
        failed: Callable[[BaseException], None],
        *,
        placers: Placers | None = None,
        device_file: DeviceFile | None = None,
    ) -> None:
        self._failed = failed
        self._device_file = device_file
        self._placers = placers
        families: dict[int, Family] = {}
        self.daemon = Daemon(guard, families, self._urgent, failed)
        self._families: list[Family] = []
        self._first: dict[int, int] = {}
        self._family_of: list[int] = []
        for part in memory:
            family = Family(
                part.process,
                part.cells,
                part.wanted,
                self.daemon.check_unmapped,
                part.wiped,
                part.filed,
            )
            families[part.process] = family
            self._first[part.process] = len(self._family_of)
            self._family_of.extend([len(self._families)] * len(family))
            self._families.append(family)
        self._rows = [(self._first[family.process], len(family)) for family in self._families]
        #: A byte for each cell: whether it is device memory.
        self._device = b"".join(part.device.tobytes() for part in memory)
        #: Rows of it that may still be to come, the last ones first.
        self._device_left = [row for row, device in enumerate(self._device) if device][::-1]
        self._looking = threading.Lock()
        parts = [part.cells.records for part in memory]
        records: Records = np.concatenate(parts) if parts else np.empty(0, CELL)
        self._fetcher = Fetcher(backend, decoder, records, self, limits, loop)
        if placers is not None and self._families:
            self._records = records
            shared = SharedLock(placers.lock, len(self._families))
            self.daemon.share(
                shared, {family.process: number for number, family in enumerate(self._families)}
            )
            placers.begin()
            self._fetcher.hand_out(placers.all, self._through)

    @property
    def spent(self) -> Spent:
        """What the workers did; complete once everything is resident or stopped."""
        return self._fetcher.spent

    @property
    def placers(self) -> int:
        """How many processes place; 0: threads of this one do."""
        return len(self._placers.all) if self._placers is not None else 0

    def listen(self) -> None:
        """From now on CRIU and the kernel are heard."""
        self.daemon.start()

    def start(self, first: Sequence[tuple[int, int]] = ()) -> None:
        """After `listen`: fetch ahead; nothing but faults is served before `open`.

        Args:
            first: (process, cell of it) that are wanted before the others, in that order.
        """
        self._fetcher.start(self._order(first), opened=False, faulting=len(self._families))

    def open(self) -> None:
        """Everything is registered with userfaultfd: place what the plan says.

        Raises:
            RestoreFailed: CRIU handed over no userfaultfd for a process whose memory waits here.
        """
        for family in self._families:
            if len(family) and not family.members:
                raise RestoreFailed(_NO_USERFAULTFD.format(family.process))
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
        if self._placers is not None:
            self._placers.close()
        if self._device_file is not None:
            self._device_file.wait()
        self.daemon.finish()
        self.daemon.wait_for(lambda d: d.complete, seconds)
        self._fetcher.stop()

    def kill_placers(self) -> None:
        """The tree is to die. One that hangs holds the lock that the daemon and the threads may be
        waiting for.
        """
        if self._placers is not None:
            self._placers.kill()

    def stop(self) -> None:
        """End all threads and placers. The tree is dead, or complete."""
        self.kill_placers()
        self._fetcher.stop()
        if self._placers is not None:
            with suppress(RestoreFailed):
                self._placers.close()

    def fail(self, error: BaseException) -> None:
        """Stop filling because of an error from elsewhere."""
        self._fetcher.fail(error)
        if self._device_file is not None:
            self._device_file.fail(error)

    def attach_device_file(self) -> None:
        """CRIU holds the tree, in which nothing has run yet: it may read what is in the file of
        device memory, and waits for the rest.

        Raises:
            RestoreFailed: CRIU handed over no userfaultfd for a process whose memory waits here.
            Whatever has prevented that the file is filled.
        """
        if self._device_file is not None:
            self._device_file.attach(self._member, self._failed)

    def check_device_file(self, pids: Iterable[int]) -> None:
        """The driver has moved everything on; nothing of the tree runs yet.

        Raises:
            FileUnusable: A process would keep the file.
        """
        if self._device_file is not None:
            self._device_file.check_unmapped(pids)
            for family in self._families:
                family.file_unmapped()

    def has_device_memory(self) -> bool:
        """Whether all device memory is there: whoever reads it waits for nothing any more.
        Thread-safe.
        """
        with self._looking:
            while self._device_left and not self.needs(self._device_left[-1]):
                self._device_left.pop()
            return not self._device_left and (self._device_file is None or self._device_file.ended)

    def _member(self, process: int) -> Member:
        for family in self._families:
            if family.process == process and family.members:
                return family.members[0]
        raise RestoreFailed(_NO_USERFAULTFD.format(process))

    def touched(self) -> list[tuple[int, int]]:
        """(process, `Family.address` of the cell) in the order in which the tree first asked for
        them.
        """
        families = {family.process: family for family in self._families}
        return [(process, families[process].address(row)) for process, row in self.daemon.touched]

    def rows_at(self, addresses: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The inverse of `touched`: those (process, cell) that this snapshot has at (process,
        address).
        """
        families = {family.process: family for family in self._families}
        found = []
        for process, address in addresses:
            family = families.get(process)
            row = family.row_at(address) if family is not None else None
            if row is not None:
                found.append((process, row))
        return found

    def _order(self, first: Sequence[tuple[int, int]]) -> list[int]:
        """Device memory before the host's, because the driver moves it on; but little host memory
        first, because the driver needs some of it before.
        """
        early = list(dict.fromkeys(self._first[process] + row for process, row in first))
        taken = set(early)
        device, host = [], []
        for start, count in self._rows:
            rows = [row for row in range(start, start + count) if row not in taken]
            device.append([row for row in rows if self._device[row]])
            host.append([row for row in rows if not self._device[row]])
        kinds = (
            (host, device) if sum(map(len, host)) <= _LITTLE * len(self._device) else (device, host)
        )
        return early + [
            row for parts in kinds for row in interleave([part for part in parts if part])
        ]

    def _urgent(self, family: Family, row: int) -> None:
        self._fetcher.urgent(self._first[family.process] + row)

    def place(self, row: int, data: memoryview) -> None:
        """See `CellSink.place`."""
        number = self._family_of[row]
        self._families[number].fill(row - self._rows[number][0], address_of(data))

    def _through(self, placer: Placer, batches: Sequence[Batch]) -> list[int]:
        """Have a placer deliver a batch, the only one; the rows that it could not have."""
        (batch,) = batches
        rows = [cell.row for cell in batch.cells]
        owners = [
            (number, row - self._rows[number][0])
            for row in rows
            for number in (self._family_of[row],)
        ]
        wanted, pages = [], []
        for cell, (number, own) in zip(batch.cells, owners, strict=True):
            family = self._families[number]
            window, bits = family.window(own)
            target = placer.target(family.members[0])
            wanted.append(
                WantedCell(
                    cell.start, cell.stop, cell.base_start, cell.base_stop, window, number, target
                )
            )
            pages.append(bits)
        answer = placer.deliver(batch, wanted, self._records[rows], b"".join(pages))
        outcomes = list(zip(owners, answer.states, answer.addresses, strict=True))
        for number in {number for number, _ in owners}:
            mine = [(row, state, address) for (n, row), state, address in outcomes if n == number]
            self._families[number].note([(row, state) for row, state, _ in mine])
            # What was in the way.
            self._families[number].fill_all(
                [(row, at) for row, state, at in mine if state is CellState.HELD], placer
            )
        # What could not be had, and what children miss that were born meanwhile.
        return [
            row
            for row, (number, own) in zip(rows, owners, strict=True)
            if self._families[number].misses(own)
        ]

    def failed(self, error: BaseException) -> None:
        """See `CellSink.failed`."""
        self._failed(error)

    def needs(self, row: int) -> bool:
        """See `CellSink.needs`."""
        number = self._family_of[row]
        return self._families[number].misses(row - self._rows[number][0])
