"""Brings device memory to the driver through a file in memory, which CRIU maps where the driver had
left that memory. No page can be read before it is complete.

The file is filled from the beginning of the restore, which needs no process. It consists of huge
pages, while userfaultfd could place only small ones, and unmapping it frees nothing; so the driver,
which unmaps everything at the end, does not do that page by page. What is missing when CRIU holds
the tree is registered with userfaultfd. The driver reads from the lowest address up, and the file
is filled in the same order: where the driver is faster it waits in a page fault. What is complete
is unregistered from the lowest address up.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import groupby, pairwise

import numpy as np

from icecore.errors import NotFound, RestoreFailed
from icecore.events import Progress
from icecore.host.kernel import huge_file, procfs, userfaultfd
from icecore.host.kernel.memory import address_of
from icecore.restorer.fetch.fetcher import Fetcher
from icecore.restorer.fetch.limits import Limits, Spent
from icecore.restorer.fetch.sink import CellSink
from icecore.restorer.fetch.source import Decoder
from icecore.restorer.fetch.spans import hand_out
from icecore.restorer.files.images import FiledMemory, gaps, huge_pages
from icecore.restorer.place.file_table import FileTable
from icecore.restorer.place.members import Member
from icecore.restorer.place.placers import PlacerLost, Placers
from icecore.restorer.place.placing import File, Stored
from icecore.restorer.plan.cells import page_pieces
from icecore.restorer.plan.memory import interleave
from icecore.sizes import BITMAP_BYTES, HUGE_PAGE, PAGE
from icecore.store.backend.base import Backend
from icecore.store.format.cell import data_pages
from icecore.store.runtime.loop import LoopThread

#: Bytes that must be complete before they are unregistered.
_STEP = 64 << 20


class FileUnusable(RestoreFailed):
    """Device memory cannot come through a file: it must come through userfaultfd."""


class _Process:
    """Which parts of a process's mappings are complete. ``lock`` guards the rest."""

    def __init__(self, part: FiledMemory) -> None:
        self.image = part.process
        self.ranges = part.ranges
        self.lock = threading.Lock()
        self.member: Member | None = None
        self._low: list[int] = part.cells.low.tolist()
        self._there = bytearray(len(self._low))
        #: Where the file has no pages: the zero page is mapped there, so that reading takes no
        #: memory.
        self._holes = gaps(huge_pages(part.cells.low, part.cells.high))
        self._front = 0
        self._released = part.ranges[0][0]

    def add(self, rows: Iterable[int]) -> None:
        """Note that cells are complete."""
        with self.lock:
            for row in rows:
                self._there[row] = 1
            if self.member is not None:
                self._release(self.member)

    def attach(self, member: Member) -> None:
        """See `DeviceFile.attach`."""
        start, end = self.ranges[0][0], self.ranges[-1][1]
        mode = userfaultfd.REGISTER_MISSING | userfaultfd.REGISTER_MINOR
        with self.lock:
            self._each(
                member,
                start,
                end,
                lambda uffd, at, size: userfaultfd.register(uffd, at, size, mode),
            )
            for low, high in self._holes:
                self._each(member, low, high, userfaultfd.place_zero)
            self.member = member
            self._release(member)

    def detach(self) -> None:
        """Forget the process: nothing of it waits any more."""
        with self.lock:
            self.member = None

    def _until(self) -> int:
        """Return the address up to which everything is complete. A huge page is not divided."""
        while self._front < len(self._low) and self._there[self._front]:
            self._front += 1
        return (
            self.ranges[-1][1]
            if self._front == len(self._low)
            else self._low[self._front] // HUGE_PAGE * HUGE_PAGE
        )

    def _release(self, member: Member) -> None:
        until = self._until()
        if until - self._released >= _STEP or self._front == len(self._low):
            self._each(member, self._released, until, _give_back)
            self._released = max(until, self._released)

    def _each(
        self, member: Member, start: int, end: int, call: Callable[[int, int, int], object]
    ) -> None:
        """Call (userfaultfd, start, length) for each part of the mappings between two addresses."""
        with member.lock.reading():
            for first, last in self.ranges:
                low, high = max(first, start), min(last, end)
                if low >= high or member.gone:
                    continue
                try:
                    call(member.descriptor, low, high - low)
                except OSError as error:
                    if not member.dead():
                        raise FileUnusable(
                            f"cannot register the device memory of process {self.image} with userfaultfd: {error}"
                        ) from error


def _give_back(descriptor: int, start: int, length: int) -> None:
    try:
        userfaultfd.unregister(descriptor, start, length)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the driver has unmapped it already
            raise


class DeviceFile(CellSink):
    """Fills the file of a restore.

    Args:
        memory: What goes into it.
        size: Bytes of the file.
        backend: Holds the chunks.
        decoder: Decodes and verifies them.
        limits: Threads, memory, patience.
        loop: Where the repository lives.
        placers: Processes that fill it, which have not begun; this object closes them. None:
            threads fill it.

    Attributes:
        descriptor: Of the file, for CRIU.
        placers: How many processes fill it.

    Raises:
        FileUnusable: The file cannot be made.
    """

    def __init__(
        self,
        memory: Sequence[FiledMemory],
        size: int,
        backend: Backend,
        decoder: Decoder,
        limits: Limits,
        loop: LoopThread,
        *,
        placers: Placers | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._failed: Callable[[BaseException], None] | None = None
        self._placers = placers
        self.placers = len(placers.all) if placers is not None else 0
        self._processes = [_Process(part) for part in memory]
        first = np.cumsum([0, *(len(part.cells) for part in memory)])
        order = np.array(
            interleave(
                [
                    list(range(*bounds))
                    for bounds in pairwise(first.tolist())
                    if bounds[0] < bounds[1]
                ]
                or [[]]
            ),
            np.int64,
        )
        owner = np.searchsorted(first, order, "right") - 1
        #: For each row of the table the number of its process, and of the cell in that.
        self._owner, self._own = owner.tolist(), (order - first[owner]).tolist()
        records = np.concatenate([part.cells.records for part in memory])[order]
        wanted = np.concatenate([part.wanted for part in memory])[order]
        position = np.concatenate([part.position for part in memory])[order]
        self._table = FileTable(records, wanted, position)
        self._data, self._pages, self._position = (
            records["data"].tobytes(),
            wanted.tobytes(),
            position.tolist(),
        )
        self._patience = limits.stall
        try:
            self.descriptor = huge_file.create(size)
        except OSError as error:
            raise FileUnusable(f"cannot make the file for device memory: {error}") from error
        try:
            self._mapped: mmap.mmap | None = mmap.mmap(self.descriptor, size)
        except OSError as error:
            os.close(self.descriptor)
            raise FileUnusable(f"cannot map the file for device memory: {error}") from error
        self._mapped.madvise(mmap.MADV_DONTDUMP)
        with memoryview(self._mapped) as view:
            self._address = address_of(view)
        self._fetcher = Fetcher(backend, decoder, records, self, limits, loop)
        self._handed = Spent()
        self._running, self._ended = threading.Lock(), threading.Event()
        try:
            if placers is not None:
                self._open(placers, size)
        except BaseException:
            self.close()
            raise

    def _open(self, placers: Placers, size: int) -> None:
        """Hand the file to the placers."""
        placers.begin()
        table = self._table.share()
        try:
            for placer in placers.all:
                with suppress(PlacerLost):  # raised again by the first request
                    placer.open_file(File(size, len(self._table)), self.descriptor, table)
        finally:
            os.close(table)

    @property
    def spent(self) -> Spent:
        """What the workers have done; complete once `run` has ended."""
        both = Spent()
        for one in (self._handed, self._fetcher.spent):
            both.add(one)
        return both

    def run(self, progress: Progress) -> None:
        """Fill the file; to be called once, in any thread.

        Raises:
            Whatever prevents it.
        """
        rows: Sequence[int] = range(len(self._table))
        with self._running:
            try:
                if self._placers is not None:
                    # Nothing waits for it yet: more threads would only delay this interpreter,
                    # which writes images and starts CRIU.
                    rows = self._hand_out(self._placers, progress)
                else:
                    self._fetcher.progress = progress
                # This process delivers what the placers could not: it has other replicas, and
                # errors with a name.
                self._fetcher.start(rows)
                self._fetcher.wait()
            except BaseException as error:
                self._fetcher.fail(error)
                raise
        self._fetcher.stop()
        self._ended.set()
        self._end_placers()

    def _hand_out(self, placers: Placers, progress: Progress) -> list[int]:
        """Have placers fill it; return the rows that they could not deliver."""
        spent, total = self._handed, int(data_pages(self._table.records).sum()) * PAGE

        def came(first: int, answer: Stored) -> None:
            rows = [first + number for number, there in enumerate(answer.there) if there]
            self._there(rows)
            spent.stored += answer.size
            spent.sink += answer.seconds
            spent.cells += len(rows)
            spent.produced += int(data_pages(self._table.records[rows]).sum()) * PAGE
            progress(spent.produced, total)

        left = hand_out(
            placers.all, len(self._table), came, lambda: self._failure is not None, self._patience
        )
        spent.redone = len(left)
        return left

    @property
    def ended(self) -> bool:
        """Whether the file is complete, or never will be."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until the file is complete; then none of it is registered any more.

        Raises:
            Whatever prevents it.
        """
        self._ended.wait()
        if self._failure is not None:
            raise self._failure

    def attach(
        self, member: Callable[[int], Member], failed: Callable[[BaseException], None]
    ) -> None:
        """Let the processes read what is complete, and wait for the rest. CRIU holds the tree and
        has mapped the file.

        Args:
            member: CRIU's id of a process → its address space.
            failed: Called once, in any thread, with why the tree must die.

        Raises:
            Whatever went wrong before.
        """
        with self._lock:
            self._failed = failed
            if self._failure is not None:
                raise self._failure
        for process in self._processes:
            process.attach(member(process.image))

    def _end_placers(self) -> None:
        if self._placers is not None:
            # One may have been killed: what it did not do has been done since.
            with suppress(RestoreFailed):
                self._placers.close()

    def check_unmapped(self, pids: Iterable[int]) -> None:
        """Check that no process maps the file any more: the driver has moved on what was in it, and
        nothing runs yet.

        Raises:
            FileUnusable: A process still maps it.
        """
        own = os.fstat(self.descriptor)
        for pid in pids:
            with suppress(NotFound):
                if any(
                    m.inode == own.st_ino
                    and m.device == (os.major(own.st_dev), os.minor(own.st_dev))
                    for m in procfs.read_maps(pid)
                ):
                    raise FileUnusable(
                        f"the driver has not unmapped all device memory of process {pid}"
                    )
        for process in self._processes:
            process.detach()

    def never(self, error: BaseException) -> None:
        """Note that `run` is not called or did not end: who waits raises the error, unless the file
        is complete.
        """
        if not self.ended:
            self.failed(error)

    def fail(self, error: BaseException) -> None:
        """Stop filling because of an error from elsewhere."""
        with self._lock:
            self._failed = None
        self._fetcher.fail(error)

    def close(self) -> None:
        """Free the memory, as far as no process maps it. May be called twice."""
        self.fail(RestoreFailed("the restore was given up"))  # no effect once it is complete
        with self._running:
            self._fetcher.stop()
        with self._lock:
            mapped, self._mapped = self._mapped, None
        if mapped is not None:
            self._end_placers()
            mapped.close()
            os.ftruncate(self.descriptor, 0)  # CRIU has it open until CRIU ends
            os.close(self.descriptor)

    def failed(self, error: BaseException) -> None:
        """See `CellSink.failed`."""
        with self._lock:
            self._failure, failed = error, self._failed
        self._ended.set()
        if failed is not None:
            failed(error)

    def _there(self, rows: Iterable[int]) -> None:
        """Note that rows of the table are complete."""
        for number, some in groupby(rows, self._owner.__getitem__):
            self._processes[number].add([self._own[row] for row in some])

    def place(self, row: int, data: memoryview) -> None:
        """Put a cell's wanted pages into the file; see `CellSink.place`."""
        source, to, bits = (
            address_of(data),
            self._address + self._position[row],
            slice(BITMAP_BYTES * row, BITMAP_BYTES * (row + 1)),
        )
        for offset, position, length in page_pieces(self._data[bits], self._pages[bits]):
            ctypes.memmove(to + offset, source + position, length)
        self._there([row])
