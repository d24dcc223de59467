"""GPU memory as the worker uses it: mapped, fingerprinted, copied. Addresses of all kinds are plain
numbers, and a call returns when its work is done.

Two back ends: the driver (`icecore.host.resident.cuda_memory`), and one whose device memory is
files (`icecore.host.resident.fake_memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from icecore.host.resident.digest import Digests
from icecore.host.resident.fingerprint import Words

Addresses = npt.NDArray[np.uint64]


class Piece(msgspec.Struct, frozen=True):
    """One copy: bytes from an address to another, of device memory or of pinned host memory;
    ``stream``: pieces of another one may go at the same time.
    """

    to: int
    source: int
    size: int
    stream: int = 0


class DeviceMemory(Protocol):
    """The memory of one GPU; called by one thread, but for two calls.

    All raise `icecore.host.resident.memory.MemoryFailed` for what the driver answers.
    """

    def map(self, descriptor: int, size: int) -> int:
        """Map the memory of a descriptor (which the caller still owns) and return its address."""

    def allocate(self, size: int) -> tuple[int, int]:
        """Allocate zeroed, mapped memory that can be exported; return its address and a descriptor,
        which the caller closes.
        """

    def unmap(self, address: int) -> None:
        """Release what `map` or `allocate` returned; other holders of a descriptor keep the memory."""

    def room(self) -> int:
        """Return the free bytes of the device."""

    def take(self, size: int) -> int:
        """Allocate memory for copies and return its address."""

    def give(self, address: int) -> None:
        """Release what `take` returned."""

    def pin(self, address: int, size: int) -> None:
        """Pin host memory for fast copies."""

    def prepare(self) -> None:
        """Prepare everything that `fingerprints` needs, so that it is quick."""

    def fingerprints(self, cells: Addresses, seed: int) -> Words:
        """u64[n, 2]: of the cells at these addresses (`icecore.host.resident.fingerprint`)."""

    def copy(self, pieces: Sequence[Piece]) -> None:
        """Make copies, and return when all are done."""

    def start(self, pieces: Sequence[Piece], lane: int) -> None:
        """Begin copies; `wait` for the lane (0 or 1) before it is used again."""

    def wait(self, lane: int) -> None:
        """Wait until all copies of a lane are done."""

    def prepare_digests(self) -> None:
        """Have all ready that `digests` needs. Another thread than the other calls' makes these
        two.
        """

    def digests(self, cells: Addresses, key: bytes) -> Digests:
        """u8[n, 32]: of the cells at these addresses (`icecore.host.resident.digest`)."""


class MemoryFailed(Exception):
    """A call failed; the text says which, and what the driver answered."""
