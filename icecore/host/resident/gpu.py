"""One GPU in the worker: memory mapped from others, memory allocated for them, spare memory, and
copies between these and the host region. Every shortage of memory is reported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from icecore.host.resident.copyplan import To, plan_copies
from icecore.host.resident.memory import Addresses, DeviceMemory, MemoryFailed, Piece
from icecore.sizes import CELL_BYTES as CELL

#: What `Gpu.stage` answers for a cell for which there was no room; else the place in the host
#: region, or, from here on, in spare device memory.
NOWHERE, ON_DEVICE = -1, 1 << 62
#: The number of the spare memory.
SPARE = -1
_STREAMS = 4
#: Of the device's free memory what copies may take, and what is left in any case.
_SHARE, _LEFT = 0.5, 256 << 20


def spare_room(free: int) -> int:
    """Bytes of device memory that copies may take where so much is free: the job goes on while they
    are there.
    """
    return max(0, int(free * _SHARE) - _LEFT) // CELL * CELL


class Gpu:
    """One GPU: its memory, and what is mapped of the jobs'. All but the constructor and digests is
    called by its thread.
    """

    def __init__(self, connect: Callable[[], DeviceMemory], host: Callable[[], int]) -> None:
        self._connect = connect
        self._host = host
        self._memory: DeviceMemory | None = None
        self._held: dict[int, tuple[int, int]] = {}
        self._spare: tuple[int, int] | None = None

    @property
    def memory(self) -> DeviceMemory:
        """Connected when first needed."""
        if self._memory is None:
            self._memory = self._connect()
        return self._memory

    def begin(self, fingerprints: bool) -> int:
        """Free bytes."""
        if fingerprints:
            self.memory.prepare()
        return self.memory.room()

    def pin(self, size: int) -> None:
        """Pin the host region, for all GPUs."""
        self.memory.pin(self._host(), size)

    def map(self, handles: Sequence[int], sizes: Sequence[int], descriptors: Sequence[int]) -> None:
        """Map what descriptors hold, under numbers of the client's."""
        for handle, size, descriptor in zip(handles, sizes, descriptors, strict=True):
            self._held[handle] = (self.memory.map(descriptor, size), size)

    def allocate(self, handles: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """New memory; descriptors."""
        made: list[int] = []
        try:
            for handle, size in zip(handles, sizes, strict=True):
                address, descriptor = self.memory.allocate(size)
                self._held[handle] = (address, size)
                made.append(descriptor)
        except BaseException:
            for descriptor in made:
                os.close(descriptor)
            raise
        return made

    def fingerprints(self, handles: Sequence[int], seed: int) -> npt.NDArray[np.uint64]:
        """Of all cells of these, one after the other."""
        areas = [self._area(handle) for handle in handles]
        cells = [np.arange(at, at + size, CELL, dtype=np.uint64) for at, size in areas]
        addresses: Addresses = np.concatenate(cells) if cells else np.empty(0, np.uint64)
        return self.memory.fingerprints(addresses, seed)

    def stage(
        self,
        handles: Sequence[int],
        mask: npt.NDArray[np.bool_],
        host_at: int,
        host_size: int,
        spare_size: int,
    ) -> npt.NDArray[np.int64]:
        """Copy the masked cells of these to where there is room, with so much spare device memory
        at most; for each such cell its place.
        """
        counts = [self._held[handle][1] // CELL for handle in handles]
        bounds = np.cumsum([0, *counts])
        wanted = int(mask.sum()) * CELL
        room = min(wanted, spare_size, spare_room(self.memory.room()))
        spare = self._take(room)
        masks = {handle: mask[bounds[i] : bounds[i + 1]] for i, handle in enumerate(handles)}
        plan = plan_copies(masks, device_room=spare[1], host_room=host_size, streams=_STREAMS)
        place = np.full(len(mask), NOWHERE, np.int64)
        first = dict(zip(handles, bounds.tolist(), strict=False))
        pieces = []
        for copy in plan.copies:
            base, code = (
                (spare[0], ON_DEVICE) if copy.to is To.DEVICE else (self._host() + host_at, host_at)
            )
            pieces.append(
                Piece(
                    base + copy.place,
                    self._held[copy.allocation][0] + copy.offset,
                    copy.size,
                    copy.stream,
                )
            )
            row = first[copy.allocation] + copy.offset // CELL
            cells = copy.size // CELL
            place[row : row + cells] = code + copy.place + CELL * np.arange(cells)
        self.memory.copy(pieces)
        return place[mask]

    def _take(self, room: int) -> tuple[int, int]:
        """Spare device memory; less where the device has it only in pieces, or somebody else was
        faster.
        """
        self._give()
        while room:
            try:
                self._spare = (self.memory.take(room), room)
                return self._spare
            except MemoryFailed:
                room = room // 2 // CELL * CELL
        return (0, 0)

    def _give(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            self.memory.give(spare[0])

    def fetch(self, cells: Sequence[tuple[int, int]], places: Sequence[int]) -> None:
        """Copy cells to places of the host region: (number or `SPARE`, offset) each."""
        host = self._host()
        self.memory.copy(
            _joined(
                [
                    (host + place, self._area(handle)[0] + offset)
                    for (handle, offset), place in zip(cells, places, strict=True)
                ]
            )
        )

    def place(self, cells: Sequence[tuple[int, int]], places: Sequence[int], lane: int) -> None:
        """Begin the reverse of `fetch`."""
        host = self._host()
        moves = [
            (self._area(handle)[0] + offset, host + place)
            for (handle, offset), place in zip(cells, places, strict=True)
        ]
        self.memory.start(_joined(moves), lane)

    def digests(self, cells: Sequence[tuple[int, int]], key: bytes) -> str:
        """Of cells, (number, offset) each, in hexadecimal digits. Called by a thread of its own."""
        addresses = np.array(
            [self._held[handle][0] + offset for handle, offset in cells], np.uint64
        )
        return self.memory.digests(addresses, key).tobytes().hex()

    def _area(self, handle: int) -> tuple[int, int]:
        if handle != SPARE:
            return self._held[handle]
        if self._spare is None:
            raise MemoryFailed("there is no spare memory")
        return self._spare

    def release(self, handles: Sequence[int], spare: bool) -> None:
        """Let go of these, and of the spare memory; of all that can be let go of."""
        failed: MemoryFailed | None = None
        for handle in handles:
            found = self._held.pop(handle, None)
            if found is not None:
                try:
                    self.memory.unmap(found[0])
                except MemoryFailed as error:
                    failed = failed or error
        if spare:
            self._give()
        if failed is not None:
            raise failed


def _joined(cells: Sequence[tuple[int, int]]) -> list[Piece]:
    """Copies of cells, (to, from) each: neighbours in one piece, pieces over the streams."""
    runs: list[tuple[int, int, int]] = []
    for to, source in cells:
        if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (to, source):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + CELL)
        else:
            runs.append((to, source, CELL))
    return [Piece(*run, number % _STREAMS) for number, run in enumerate(runs)]
