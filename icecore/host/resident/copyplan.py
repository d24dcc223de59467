"""Plan which changed cells are copied where within the window. The planning is pure: it touches no
device, and reports what does not fit.

A copy on the device runs at its memory's speed, one to pinned host memory at the bus's, twenty to
forty times slower: spare device memory is filled first, with what lies in the longest runs, so that
few copies move much.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from icecore.sizes import CELL_BYTES as CELL

#: No copy is larger, so that streams share the work evenly.
LARGEST = 64 << 20
#: Most bytes of pinned memory through which copies on one device pass on their way to storage.
THROUGH = 256 << 20


class To(Enum):
    """Where a copy goes."""

    DEVICE = "device"
    HOST = "host"


class Copy(msgspec.Struct, frozen=True):
    """A run of changed cells.

    Attributes:
        allocation: Its identity.
        offset, size: Bytes within it.
        to: Spare memory of the same device, or pinned host memory.
        place: Bytes from the start of that.
        stream: Which of the streams carries it.
    """

    allocation: int
    offset: int
    size: int
    to: To
    place: int
    stream: int


class CopyPlan(msgspec.Struct, frozen=True):
    """All copies of one device, and what there was no room for: ``(allocation, offset, size)``."""

    copies: list[Copy]
    left: list[tuple[int, int, int]]


def runs(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return ``(first cell, cells)`` of every run of set entries."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return [
        (int(first), int(end - first)) for first, end in zip(edges[::2], edges[1::2], strict=True)
    ]


def divide(cells: int, short: Mapping[str, int]) -> dict[str, int]:
    """Each device's part of the host's cells: what it is short of, or its share of that where there
    are too few; what is left over evenly.

    Args:
        cells: How many there are.
        short: By device, how many of its changed cells have no room on it.
    """
    total = sum(short.values())
    parts = {
        device: some if total <= cells else some * cells // total for device, some in short.items()
    }
    left = cells - sum(parts.values())
    return {device: part + left // len(parts) for device, part in parts.items()}


def pinned_bytes(
    sizes: Mapping[str, int],
    spare: Mapping[str, int],
    *,
    wanted: Mapping[str, int],
    likely: int,
    staging: int,
    available: int,
    growing: bool = True,
) -> int:
    """Return how many bytes of host memory are pinned for copies.

    Args:
        sizes: By device, bytes of its allocations.
        spare: By device, bytes of its memory that copies may take.
        wanted: By device, how many of its bytes are likely to change.
        likely: How many are on all devices together, at the most.
        staging: Bytes that may need room unexpectedly. They are pinned if a device has too little
            room beyond what is expected to need it.
        available: Bytes of the host's memory that may be taken at all.
        growing: Whether the job may allocate more before the window, or change what is not known to
            change. If so, all of its allocations are expected to need room.
    """
    short = min(likely, sum(max(0, size - spare.get(device, 0)) for device, size in wanted.items()))
    expected = sizes if growing else wanted
    beyond = min((spare.get(device, 0) - size for device, size in expected.items()), default=0)
    # Each free byte that the job takes adds one byte to copy, and takes half a byte of spare room.
    needed = (3 if growing else 1) * staging - beyond
    reserve = max(min(staging, needed), min(staging, THROUGH * len(sizes)))
    return max(min(reserve, sum(sizes.values()), available // 4), min(short, available // 2))


class Foreseen(NamedTuple):
    """Where copies will go if all of some memory has changed: bytes by device, on it and in the
    host's memory, and those for which there is no room.
    """

    device: Mapping[str, int]
    host: Mapping[str, int]
    left: int


NOTHING = Foreseen({}, {}, 0)


def foresee(sizes: Mapping[str, int], spare: Mapping[str, int], host: int) -> Foreseen:
    """Predict what the plans of all devices will come to.

    Args:
        sizes, spare: As for `pinned_bytes`, whose answer is ``host``.
    """
    if not sizes:
        return NOTHING
    device = {one: min(size, spare.get(one, 0)) for one, size in sizes.items()}
    short = {one: size - device[one] for one, size in sizes.items()}
    parts = divide(host // CELL, {one: -(-some // CELL) for one, some in short.items()})
    there = {one: min(some, parts[one] * CELL) for one, some in short.items()}
    return Foreseen(device, there, sum(short.values()) - sum(there.values()))


def plan_copies(
    masks: Mapping[int, npt.NDArray[np.bool_]], *, device_room: int, host_room: int, streams: int
) -> CopyPlan:
    """Place every changed cell of a device's allocations.

    Args:
        masks: By allocation, which of its cells changed.
        device_room: Bytes of spare memory on the device.
        host_room: Bytes of pinned memory.
        streams: How many carry copies at once; each place gets all of them.
    """
    pieces = [
        (allocation, at * CELL, min(LARGEST, (first + cells - at) * CELL))
        for allocation, mask in masks.items()
        for first, cells in runs(mask)
        for at in range(first, first + cells, LARGEST // CELL)
    ]
    pieces.sort(key=lambda piece: -piece[2])
    copies: list[Copy] = []
    left: list[tuple[int, int, int]] = []
    rooms = {To.DEVICE: device_room, To.HOST: host_room}
    used = dict.fromkeys(To, 0)
    loads = {to: [0] * streams for to in To}
    for allocation, offset, size in pieces:
        while size:
            to = next((to for to in To if rooms[to] - used[to] >= CELL), None)
            if to is None:
                left.append((allocation, offset, size))
                break
            some = min(size, (rooms[to] - used[to]) // CELL * CELL)
            stream = loads[to].index(min(loads[to]))
            copies.append(Copy(allocation, offset, some, to, used[to], stream))
            used[to] += some
            loads[to][stream] += some
            offset, size = offset + some, size - some
    return CopyPlan(copies, left)
