"""GPU memory as files on tmpfs, one directory for each GPU, for tests without a GPU. The processes
of the fake libcuda see the same bytes.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from icecore.host.resident import digest
from icecore.host.resident.digest import Digests
from icecore.host.resident.fingerprint import Words, reference
from icecore.host.resident.memory import Addresses, MemoryFailed, Piece
from icecore.sizes import CELL_BYTES as CELL


class FakeMemory:
    """See `DeviceMemory`.

    Args:
        world: The fake driver's directory: ``gpuN`` in it is the GPU with that minor number.
        device: Its UUID.
    """

    def __init__(self, world: Path, device: str) -> None:
        known = json.loads((world / "inventory.json").read_text())
        minors = [gpu["minor"] for gpu in known["gpus"] if gpu["uuid"] == device]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", device).split(",")
        if not minors or device not in visible:
            raise MemoryFailed(f"there is no GPU {device}")
        self._world = world
        self._folder = world / f"gpu{minors[0]}"
        self._mapped: dict[int, mmap.mmap] = {}

    def map(self, descriptor: int, size: int) -> int:
        """See `DeviceMemory`, as the next ones."""
        self._fault("map")
        try:
            mapping = mmap.mmap(descriptor, size)
        except (OSError, ValueError) as error:
            raise MemoryFailed(f"mapping {size} bytes: {error}") from error
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._mapped[address] = mapping
        return address

    def allocate(self, size: int) -> tuple[int, int]:
        """See `DeviceMemory`."""
        self._fault("allocate")
        made = os.open(self._folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(made, 0, size)
            return self.map(made, size), made
        except OSError as error:
            os.close(made)
            what = "out of memory" if error.errno == errno.ENOSPC else str(error)
            raise MemoryFailed(f"allocating {size} bytes: {what}") from error

    def unmap(self, address: int) -> None:
        """See `DeviceMemory`."""
        self._fault("unmap")
        # No view of it is left: an address was taken and let go of.
        self._mapped.pop(address).close()

    def room(self) -> int:
        """See `DeviceMemory`."""
        found = os.statvfs(self._folder)
        return found.f_bavail * found.f_frsize

    def take(self, size: int) -> int:
        """See `DeviceMemory`."""
        address, descriptor = self.allocate(size)
        os.close(descriptor)
        return address

    def give(self, address: int) -> None:
        """See `DeviceMemory`."""
        self.unmap(address)

    def pin(self, address: int, size: int) -> None:
        """See `DeviceMemory`."""

    def prepare(self) -> None:
        """See `DeviceMemory`."""

    def fingerprints(self, cells: Addresses, seed: int) -> Words:
        """See `DeviceMemory`."""
        self._fault("fingerprints")
        found = [reference((ctypes.c_char * CELL).from_address(int(at)), seed) for at in cells]  # type: ignore[arg-type]
        return np.concatenate(found) if found else np.empty((0, 2), np.uint64)

    def copy(self, pieces: Sequence[Piece]) -> None:
        """See `DeviceMemory`."""
        self._fault("copy")
        for piece in pieces:
            ctypes.memmove(piece.to, piece.source, piece.size)

    def start(self, pieces: Sequence[Piece], lane: int) -> None:
        """See `DeviceMemory`."""
        self.copy(pieces)

    def wait(self, lane: int) -> None:
        """See `DeviceMemory`."""

    def prepare_digests(self) -> None:
        """See `DeviceMemory`."""
        self._fault("prepare-digests")

    def digests(self, cells: Addresses, key: bytes) -> Digests:
        """See `DeviceMemory`."""
        self._fault("digests")
        found = [
            digest.reference(memoryview((ctypes.c_char * CELL).from_address(int(at))), key).copy()
            for at in cells
        ]
        if self._asked("digests-wrong"):
            found[0][0, 0] ^= 1
        return np.concatenate(found) if found else np.empty((0, digest.BYTES), np.uint8)

    def _fault(self, call: str) -> None:
        how = self._asked(call)
        if how == "die":
            os._exit(9)
        if how == "slow":
            time.sleep(0.5)
        elif how:
            raise MemoryFailed(f"{call}: {how}")

    def _asked(self, what: str) -> str:
        """What a test asked to go wrong, once: a file ``worker-faults/WHAT`` that says how."""
        path = self._world / "worker-faults" / what
        try:
            how = path.read_text()
            path.unlink()
        except OSError:
            return ""
        return how
