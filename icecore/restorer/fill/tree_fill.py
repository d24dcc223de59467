"""Fills the memory of a whole tree: its families, the fetcher that fills them, and the daemon that
answers their page faults. Once `TreeFill.complete` returns no page is missing, and every descriptor
is closed.
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

#: If the host's cells are at most this share of all, they are placed before device memory.
_LITTLE = 0.125
_NO_USERFAULTFD = "CRIU handed over no userfaultfd of process {}"


class TreeFill(CellSink):
    """Fills a tree.

    Args:
        guard: It has not started CRIU yet.
        memory: What comes through userfaultfd, by process.
        backend: Holds the chunks.
        decoder: Decodes and verifies them.
        limits: Threads, memory, patience.
        loop: Where the repository lives.
        failed: Called once, in any thread, with why the tree must die.
        placers: Processes that place; None: threads do.
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
        #: Place zero pages: a thread for each process with device memory that comes through
        #: userfaultfd.
        self._zeros = [
            threading.Thread(
                target=self._place_zeros, args=(family, part.driver), name="zeros", daemon=True
            )
            for part, family in zip(memory, self._families, strict=True)
            if part.driver
        ]
        self._over = threading.Event()
        #: A byte for each cell: whether it is device memory.
        self._device = b"".join(part.device.tobytes() for part in memory)
        #: Its rows that may still be missing, the last ones first.
        self._device_left = [row for row, device in enumerate(self._device) if device][::-1]
        self._looking = threading.Lock()
        parts = [part.cells.records for part in memory]
        records: Records = np.concatenate(parts) if parts else np.empty(0, CELL)
        self._fetcher = Fetcher(backend, decoder, records, self, limits, loop)
        if placers is not None and self._families:
            self._records = records
            self.daemon.share(SharedLock(placers.lock, len(records)), self._first)
            placers.begin()
            self._fetcher.hand_out(placers.all, self._through)

    @property
    def spent(self) -> Spent:
        """What the workers have done; complete once everything is loaded or stopped."""
        return self._fetcher.spent

    @property
    def placers(self) -> int:
        """How many processes place; 0: threads do."""
        return len(self._placers.all) if self._placers is not None else 0

    def listen(self) -> None:
        """Start to hear CRIU and the kernel."""
        self.daemon.start()

    def start(self, first: Sequence[tuple[int, int]] = ()) -> None:
        """Start to fetch, after `listen`; only page faults are answered before `open`.

        Args:
            first: (process, cell of it) that are wanted before the others, in that order.
        """
        self._fetcher.start(self._order(first), opened=False, faulting=len(self._families))

    def open(self) -> None:
        """Start to place: everything is registered with userfaultfd.

        Raises:
            RestoreFailed: CRIU handed over no userfaultfd for a process whose memory waits here.
        """
        for family in self._families:
            if len(family) and not family.members:
                raise RestoreFailed(_NO_USERFAULTFD.format(family.process))
        self._fetcher.open()

    def complete(self, progress: Progress, seconds: float | None = None) -> None:
        """Wait until everything is loaded and every descriptor is closed.

        Args:
            progress: Called, now and then, with the bytes that were placed, of all.

        Raises:
            Whatever prevents it.
        """
        self._fetcher.progress = progress
        self._fetcher.wait(seconds)
        if self._placers is not None:
            self._placers.close()
        if self._device_file is not None:
            self._device_file.wait()
        self._end_zeros()
        self.daemon.finish()
        self.daemon.wait_for(lambda d: d.complete, seconds)
        self._fetcher.stop()

    def kill_placers(self) -> None:
        """Kill the placers of a tree that is to die: one that hangs would hold the lock that the
        daemon and the threads may be waiting for.
        """
        if self._placers is not None:
            self._placers.kill()

    def stop(self) -> None:
        """End all threads and placers of a tree that is dead or complete."""
        self.kill_placers()
        self._end_zeros()
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
        """Let the tree, which CRIU holds and in which nothing has run yet, read what is in the file
        of device memory, and wait for the rest.

        Raises:
            RestoreFailed: CRIU handed over no userfaultfd for a process whose memory waits here.
            Whatever has prevented filling the file.
        """
        if self._device_file is not None:
            self._device_file.attach(self._member, self._failed)

    def start_zeros(self) -> None:
        """Start to place zero pages where device memory has no pages to place. The driver, which runs
        next, reads all of this memory. Each page fault makes it wait, and fills only a few pages.
        """
        for thread in self._zeros:
            thread.start()

    def _place_zeros(self, family: Family, ranges: Sequence[tuple[int, int]]) -> None:
        try:
            for start, end in ranges:
                family.place_zeros(start, end, self._over.is_set)
        except Exception as error:  # noqa: BLE001 - as the restore's other threads
            self._failed(error)

    def _end_zeros(self) -> None:
        self._over.set()
        for thread in self._zeros:
            if thread.ident is not None:
                thread.join()

    def check_device_file(self, pids: Iterable[int]) -> None:
        """Check that the driver has unmapped the file, before anything of the tree runs.

        Raises:
            FileUnusable: A process still maps the file.
        """
        if self._device_file is not None:
            self._device_file.check_unmapped(pids)
            for family in self._families:
                family.file_unmapped()

    def has_device_memory(self) -> bool:
        """Return whether all device memory is loaded, so that reading it causes no page fault.
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
        """Return (process, `Family.address` of the cell) in the order of the first page faults."""
        families = {family.process: family for family in self._families}
        return [(process, families[process].address(row)) for process, row in self.daemon.touched]

    def rows_at(self, addresses: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the inverse of `touched`: (process, cell) for each (process, address) that this
        snapshot has.
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
        """Return the order of all rows: device memory before the host's, because the driver moves
        it on; but little host memory comes first, because the driver needs some of it.
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
        """Have a placer deliver a single batch; return the rows that it could not deliver."""
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
                    cell.start, cell.stop, cell.base_start, cell.base_stop, window, cell.row, target
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
        # What could not be read, and what children miss that were forked meanwhile.
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
