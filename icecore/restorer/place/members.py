"""Address spaces that are being filled: the restored processes and the children that they fork
meanwhile.

A placement holds the read lock of its member's map from the lookup of the address until the bytes
are placed and noted as placed; the kernel's events are read and applied under the write lock. So
what an event says (moved, dropped, forked) applies to exactly the placements before it.
"""

from __future__ import annotations

import errno
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from icecore.errors import RestoreFailed
from icecore.host.kernel import userfaultfd
from icecore.host.kernel.userfaultfd import Stop
from icecore.restorer.place.addressmap import AddressMap, MovedPiece
from icecore.restorer.place.locks import MapLock
from icecore.restorer.place.placing import CellState, Move
from icecore.restorer.plan.cells import SpaceCells, page_pieces
from icecore.sizes import BITMAP_BYTES, PAGE
from icecore.store.format.cell import CELL, Bytes

#: Most bytes that one fault on absent memory fills with zero pages.
ZERO_BYTES = 64 * PAGE
#: Most bytes of zero pages that one call places ahead, and of memory that one lookup of gaps
#: covers.
_ZERO_STEP, _ZERO_SPAN = 8 << 20, 1 << 30
_PAUSE = 0.0002
_LONGEST_PAUSE = 0.01
#: How often a placed page may be asked for: each thread that waited for it asks once more, but none
#: forever.
_WAKES = 64
_HOPELESS = 1 << 16
#: How long a placement is retried while the process changes its address space.
_PATIENCE = 60.0


class Outcome(NamedTuple):
    """Why a placement ended, and how many bytes are not registered there."""

    stop: Stop
    unmapped: int


class Placing(Protocol):
    """Puts bytes into a process."""

    def place(self, member: Member, moves: Sequence[Move]) -> list[Outcome]:
        """Place as `icecore.host.kernel.userfaultfd.place` does, one move after the other; the
        caller holds the member's read lock.
        """


class Here:
    """Places from this process's own memory."""

    def place(self, member: Member, moves: Sequence[Move]) -> list[Outcome]:
        """See `Placing`."""
        placed = (userfaultfd.place(member.descriptor, *move) for move in moves)
        return [Outcome(one.stop, one.unmapped) for one in placed]


_HERE = Here()


class Member:
    """One address space.

    Attributes:
        descriptor: This process's duplicate of its userfaultfd.
        keep: The guard's number for its own copy.
        map: Where bytes belong now; read and written under ``lock``.
        missing: A byte for each cell of the family: 1 while it is not placed.
        left: How many of them are 1.
        gone: The process has ended, or everything was placed and the descriptor is closed.
        forked: It is a child that a restored process forked.
        woken: How often a thread waited for a page that had been placed, by address.
    """

    __slots__ = (
        "_count",
        "descriptor",
        "forked",
        "gone",
        "keep",
        "left",
        "lock",
        "map",
        "missing",
        "woken",
    )

    def __init__(self, descriptor: int, keep: int, cells: int) -> None:
        self.descriptor = descriptor
        self.keep = keep
        self.map = AddressMap()
        self.lock = MapLock()
        self.missing = bytearray(b"\1" * cells)
        self.left = cells
        self.gone = False
        self.forked = False
        self.woken: dict[int, int] = {}
        self._count = threading.Lock()

    def dead(self) -> bool:
        """Return whether its process has ended or executes another program. The descriptor must
        stay open meanwhile.
        """
        # There is never memory at address 0: any other answer comes from a process that lives.
        _, error = userfaultfd.zero(self.descriptor, 0, PAGE)
        return error == errno.ESRCH

    def child(self, descriptor: int, keep: int, wiped: Sequence[tuple[int, int]]) -> Member:
        """Return a child that was just forked; the write lock is held. What is missing here is
        missing there, and what is ``wiped`` (original addresses) is zeros there.
        """
        other = Member(descriptor, keep, 0)
        other.map = self.map.copy()
        for start, end in wiped:
            for piece in self.map.locate(start, end - start):
                other.map.remove(piece.current, piece.current + piece.length)
        other.missing = bytearray(self.missing)
        other.left = self.left
        other.forked = True
        return other

    def placed(self, row: int) -> None:
        """Note that a cell is placed. The read lock is held."""
        with self._count:  # two workers may have placed the same cell, one for a page fault
            if self.missing[row]:
                self.missing[row] = 0
                self.left -= 1


class Family:
    """One process of the snapshot and the members that have its memory.

    Args:
        process: CRIU's id of the process.
        cells: Its cells with pages that come through userfaultfd, in address order.
        wanted: u1[n, 32], those pages.
        unregistered: Called where the kernel refuses a page; raises if memory is mapped there.
        wiped: Ranges (start, end) that a forked child finds empty (MADV_WIPEONFORK).
        filed: Ranges (start, end) that come from a file (`icecore.restorer.fill.device_file`),
            whose page faults the file answers.
    """

    def __init__(
        self,
        process: int,
        cells: SpaceCells,
        wanted: Bytes,
        unregistered: Callable[[Family, Member, int], None],
        wiped: Sequence[tuple[int, int]] = (),
        filed: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.process = process
        self.wiped = wiped
        self._filed = filed
        self.members: tuple[Member, ...] = ()
        self.registered = False
        self._unregistered = unregistered
        self._base: list[int] = cells.base.tolist()
        self._low: list[int] = cells.low.tolist()
        self._high: list[int] = cells.high.tolist()
        self._data = cells.records["data"].tobytes()
        self._wanted = wanted.tobytes()
        self._adding = threading.Lock()

    @classmethod
    def empty(cls, process: int, unregistered: Callable[[Family, Member, int], None]) -> Family:
        """Return a process without cells: all its lazy memory is absent."""
        nothing = np.empty(0, np.uint64)
        cells = SpaceCells(np.empty(0, CELL), nothing, nothing, nothing)
        return cls(process, cells, np.empty((0, BITMAP_BYTES), np.uint8), unregistered)

    def __len__(self) -> int:
        return len(self._base)

    def add(self, member: Member) -> None:
        """Add a member; a forked child under its parent's write lock."""
        with self._adding:
            self.members = (*self.members, member)

    def remove(self, member: Member) -> None:
        """Remove a child that has ended; it is ``gone``."""
        with self._adding:
            self.members = tuple(other for other in self.members if other is not member)

    def address(self, row: int) -> int:
        """Return the first address in a cell's window that lies in its region: it names the cell
        among snapshots of the process.
        """
        return self._low[row]

    def misses(self, row: int) -> bool:
        """Return whether a cell is missing in any member."""
        return not self.members or any(m.missing[row] and not m.gone for m in self.members)

    def row_at(self, original: int) -> int | None:
        """Return the cell whose window holds an original address: windows are ascending and
        disjoint (`icecore.restorer.plan.cells.space_cells`).
        """
        row = bisect_right(self._low, original) - 1
        return row if row >= 0 and original < self._high[row] else None

    def rows_in(self, start: int, end: int) -> range:
        """Return the cells with original addresses between ``start`` and ``end``."""
        first = bisect_right(self._high, start)
        return range(first, max(first, bisect_left(self._low, end)))

    def wants(self, row: int, original: int) -> bool:
        """Return whether the page at an original address in a cell's window is to be placed."""
        page = (original - self._base[row]) // PAGE
        return bool(self._wanted[32 * row + page // 8] >> (page % 8) & 1)

    def filed_at(self, original: int) -> bool:
        """Return whether the memory at an original address comes from a file."""
        return any(start <= original < end for start, end in self._filed)

    def file_unmapped(self) -> None:
        """Forget what came from a file, which is no longer mapped: from now on other memory may be
        there.
        """
        for member in self.members:
            with member.lock.writing():
                for start, end in self._filed:
                    member.map.remove(start, end)
        self._filed = ()

    def absent_from(self, original: int) -> int:
        """Return how many bytes from an original address on, up to ``ZERO_BYTES``, have no page to
        place.
        """
        length = 0
        row = bisect_right(self._low, original) - 1
        while length < ZERO_BYTES:
            at = original + length
            if row >= 0 and at < self._high[row]:
                if self.wants(row, at):
                    break
                length += PAGE
            elif row + 1 < len(self._low) and at >= self._low[row + 1]:
                row += 1
            else:
                length += PAGE
        return length

    def gaps(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges (start, end) without a page to place between two original addresses."""
        rows = self.rows_in(start, end)
        base = np.array(self._base[rows.start : rows.stop], np.int64)
        bits = np.frombuffer(
            self._wanted, np.uint8, BITMAP_BYTES * len(rows), BITMAP_BYTES * rows.start
        )
        row, page = np.nonzero(
            np.unpackbits(bits.reshape(-1, BITMAP_BYTES), axis=1, bitorder="little")
        )
        pages = (base[row] - start) // PAGE + page
        there = np.zeros((end - start) // PAGE, np.bool_)
        there[pages[(pages >= 0) & (pages < len(there))]] = True
        edges = np.flatnonzero(np.diff(there, prepend=True, append=True)) * PAGE + start
        return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))

    # -- placing

    def place_zeros(self, start: int, end: int, stop: Callable[[], bool]) -> None:
        """Place zero pages in the restored process where there is no page to place between two
        original addresses. The process then causes no page faults there.

        Page faults remain where memory has been moved or dropped. They also remain from where this
        call finds the address space changing up to ``end``.

        Args:
            stop: Whether to give up.
        """
        if not self.members:  # CRIU registered none of its memory
            return
        member = self.members[0]
        for first in range(start, end, _ZERO_SPAN):
            if stop():
                return
            for low, high in self.gaps(first, min(end, first + _ZERO_SPAN)):
                if not self._place_zeros(member, low, high, stop):
                    return

    def _place_zeros(self, member: Member, at: int, end: int, stop: Callable[[], bool]) -> bool:
        """Place zero pages in a gap. Return False to give up."""
        step, skip = _ZERO_STEP, PAGE
        while at < end:
            if stop():
                return False
            with member.lock.reading():
                length = min(step, end - at)
                if member.gone:
                    return False
                if member.map.locate(at, length) != [MovedPiece(at, at, length)]:
                    return True
                done, error = userfaultfd.zero(member.descriptor, at, length)
            at += done
            if error == 0:
                step, skip = _ZERO_STEP, PAGE
            elif error == errno.EEXIST:  # a page fault brought some pages
                at, skip = at + skip, min(2 * skip, ZERO_BYTES)
            elif error == errno.ENOENT:  # the range is not in one mapping
                if length == PAGE:
                    return True
                step = length // 2 // PAGE * PAGE
            elif error != errno.EAGAIN or not done:  # else something stopped it there: ask again
                return False
        return True

    def fill(self, row: int, source: int, placing: Placing = _HERE) -> None:
        """Place one cell in all members that miss it, also in those that are forked meanwhile.

        Args:
            row: The cell.
            source: Address of its verified bytes in the process that places.
            placing: Places.

        Raises:
            RestoreFailed: It could not be placed.
        """
        pieces = self._pieces(row)
        while todo := [m for m in self.members if m.missing[row] and not m.gone]:
            for member in todo:
                self._fill_member(member, row, source, pieces, placing)
            # Only a page fault asks before everything is registered; then the whole cell is placed
            # again.
            if not self.registered:
                return

    def fill_all(self, rows: Sequence[tuple[int, int]], placing: Placing) -> None:
        """Place those of several cells that a member misses, with one call for each member unless
        its address space changes. As `fill` for each (row, source).
        """
        rows = [(row, source) for row, source in rows if self.misses(row)]
        for member in self.members if rows else ():
            with member.lock.reading():
                wanted = [
                    (row, source) for row, source in rows if member.missing[row] and not member.gone
                ]
                moves = [
                    self._moves(member, row, source, self._pieces(row)) for row, source in wanted
                ]
                outcomes = (
                    placing.place(member, [move for some in moves for move in some])
                    if wanted
                    else []
                )
                after = 0
                for (row, _), some in zip(wanted, moves, strict=True):
                    at, after = after, after + len(some)
                    if all(o.stop is Stop.DONE and not o.unmapped for o in outcomes[at:after]):
                        member.placed(row)
        for row, source in rows:
            self.fill(row, source, placing)

    def note(self, rows: Sequence[tuple[int, CellState]]) -> None:
        """Note what a placer did with cells of the restored process, the first member."""
        member = self.members[0]
        with member.lock.reading():
            for row, state in rows:
                if state is CellState.PLACED:
                    member.placed(row)
                elif state is CellState.DEAD:
                    member.gone = True

    def window(self, row: int) -> tuple[int, bytes]:
        """Return the address of a cell's window, and a bitmap (32 bytes) of the pages to place."""
        return self._base[row], self._wanted[32 * row : 32 * row + 32]

    def _pieces(self, row: int) -> list[tuple[int, int, int]]:
        return page_pieces(
            self._data[32 * row : 32 * row + 32], self._wanted[32 * row : 32 * row + 32]
        )

    def _fill_member(
        self,
        member: Member,
        row: int,
        source: int,
        pieces: list[tuple[int, int, int]],
        placing: Placing,
    ) -> None:
        pause, tries = _PAUSE, 0
        give_up = time.monotonic() + _PATIENCE
        while True:
            registered = self.registered
            with member.lock.reading():
                if member.gone or not member.missing[row]:
                    return
                stop, unmapped = self._place(member, row, source, pieces, placing)
                if stop is Stop.DONE and not unmapped:
                    member.placed(row)
                    return
                if stop is Stop.DEAD:
                    member.gone = True
                    return
            if stop is Stop.DONE:
                if not registered:
                    return
                # A pending event may explain it. Without one the process has no such memory, or it
                # has and would find zeros there.
                tries += 1
                if tries > 3:
                    for at in unmapped:
                        self._unregistered(self, member, at)
                    with member.lock.reading():
                        member.placed(row)
                    return
            if time.monotonic() > give_up:
                raise RestoreFailed(
                    f"process {self.process} has kept its address space changing for {_PATIENCE:.0f} s"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _moves(
        self, member: Member, row: int, source: int, pieces: list[tuple[int, int, int]]
    ) -> list[Move]:
        """Return where the pieces of a cell belong now. The read lock is held."""
        base = self._base[row]
        return [
            Move(piece.current, source + position + piece.original - base - offset, piece.length)
            for offset, position, length in pieces
            for piece in member.map.locate(base + offset, length)
        ]

    def _place(
        self,
        member: Member,
        row: int,
        source: int,
        pieces: list[tuple[int, int, int]],
        placing: Placing,
    ) -> tuple[Stop, list[int]]:
        """Try once; return why it ended, and where pages are not registered."""
        moves = self._moves(member, row, source, pieces)
        outcomes = placing.place(member, moves) if moves else []
        for outcome in outcomes:
            if outcome.stop is not Stop.DONE:
                return outcome.stop, []
        return Stop.DONE, [
            move.destination for move, o in zip(moves, outcomes, strict=True) if o.unmapped
        ]

    def wake(self, member: Member, address: int) -> None:
        """Wake a thread that waits for a page that was placed before. A child that still does not
        find the page had it wiped at its fork, by an madvise after the snapshot: it gets zeros. The
        read lock is held.

        Raises:
            RestoreFailed: The page is missing in a process in which it was placed.
        """
        member.woken[address] = member.woken.get(address, 0) + 1
        if member.forked and member.woken[address] > _WAKES:
            # Changes nothing if the page is there.
            userfaultfd.place_zero(member.descriptor, address, PAGE)
        elif member.woken[address] > _HOPELESS:
            raise RestoreFailed(
                f"process {self.process} lost the page at {address:#x} that was placed in it"
            )
        try:
            userfaultfd.wake(member.descriptor, address, PAGE)
        except OSError:
            pass  # the process has ended

    def fill_zero(self, member: Member, address: int) -> bool:
        """Fill the page at a current address, and absent ones after it, with zeros.

        Returns:
            Whether it is done; False: the address space is changing, and the caller must try again
            once its events are read.
        """
        with member.lock.reading():
            if member.gone:
                return True
            original = member.map.original(address)
            if original is None:
                length = min(ZERO_BYTES, member.map.next_mapped(address) - address)
            elif (length := self.absent_from(original)) > 0:
                length = member.map.locate(original, length)[0].length
            else:
                return False  # the map changed since the fault: it holds a page again
            done, _ = userfaultfd.zero(member.descriptor, address, length)
            if done:
                return True
            # The range leaves the VMA, or some of it is there already; only the first page is
            # waited for.
            placed = userfaultfd.place_zero(member.descriptor, address, PAGE)
            if placed.stop is Stop.DEAD:
                member.gone = True
            elif placed.stop is Stop.DONE and placed.present:
                userfaultfd.wake(member.descriptor, address, PAGE)
            return placed.stop is not Stop.CHANGED
