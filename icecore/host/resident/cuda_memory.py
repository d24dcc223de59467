"""GPU memory through the NVIDIA driver, for the worker. Each GPU has its primary context; one
thread makes its calls, and another those for digests.

Memory is mapped as the processes have it (virtual memory management with POSIX descriptors), so
that nothing moves to be looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np

from icecore.host.cuda.api import DriverMissing
from icecore.host.cuda.driver import EXTRA_CURE, uuid_bytes
from icecore.host.resident import digest, fingerprint
from icecore.host.resident.digest import Digests
from icecore.host.resident.fingerprint import Words
from icecore.host.resident.kernels import CellKernel
from icecore.host.resident.memory import Addresses, MemoryFailed, Piece

STREAMS = 4
_DIGESTS_AT_ONCE = 1024
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE


class Cuda:
    """The driver in this process."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise DriverMissing(
                f"cuda.bindings cannot be imported: {error}", cure=EXTRA_CURE
            ) from error
        self.cu: Any = driver
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> Any:
        """The value of a driver call.

        Raises:
            MemoryFailed: It failed.
        """
        result = getattr(self.cu, name)(*arguments)
        if int(result[0]):
            raise MemoryFailed(
                f"{name}: {self.cu.CUresult(int(result[0])).name} ({int(result[0])})"
            )
        return None if len(result) == 1 else result[1] if len(result) == 2 else result[1:]

    def device(self, uuid: str) -> Any:
        """The device with a UUID."""
        for number in range(self.call("cuDeviceGetCount")):
            device = self.call("cuDeviceGet", number)
            if bytes(
                self.call(
                    "cuDeviceGetUuid_v2"
                    if hasattr(self.cu, "cuDeviceGetUuid_v2")
                    else "cuDeviceGetUuid",
                    device,
                ).bytes
            ) == uuid_bytes(uuid):
                return device
        raise MemoryFailed(f"there is no GPU {uuid}")


class CudaMemory:
    """See `DeviceMemory`.

    Args:
        cuda: The driver.
        device: UUID of the GPU.
    """

    def __init__(self, cuda: Cuda, device: str) -> None:
        self._cuda = cuda
        cu, call = cuda.cu, cuda.call
        self._number = cuda.device(device)
        self._context = call("cuDevicePrimaryCtxRetain", self._number)
        call("cuCtxSetCurrent", self._context)
        attribute = cu.CUdevice_attribute
        self._fingerprint: CellKernel | None = None
        self._digest: CellKernel | None = None
        non_blocking = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._lanes = [
            [call("cuStreamCreate", non_blocking) for _ in range(STREAMS)] for _ in range(2)
        ]
        self._mapped: dict[int, tuple[int, Any]] = {}
        properties = cu.CUmemAllocationProp()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = (
            cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        )
        properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = int(self._number)
        # As the preload asks for it: memory of one kind is restored as that kind.
        rdma = attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        properties.allocFlags.gpuDirectRDMACapable = int(
            bool(call("cuDeviceGetAttribute", rdma, self._number))
        )
        self._properties = properties
        self._descriptor_type = (
            cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        )

    def map(self, descriptor: int, size: int) -> int:
        """See `DeviceMemory`, as the next ones."""
        handle = self._cuda.call(
            "cuMemImportFromShareableHandle", descriptor, self._descriptor_type
        )
        return self._map(handle, size)

    def _map(self, handle: Any, size: int) -> int:
        """Map memory, whose handle is this object's from now on."""
        cu, call = self._cuda.cu, self._cuda.call
        access = cu.CUmemAccessDesc()
        access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = int(self._number)
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        with ExitStack() as undo:
            undo.callback(self._quietly, "cuMemRelease", handle)
            address = call("cuMemAddressReserve", size, 0, cu.CUdeviceptr(0), 0)
            undo.callback(self._quietly, "cuMemAddressFree", address, size)
            call("cuMemMap", address, size, 0, handle, 0)
            undo.callback(self._quietly, "cuMemUnmap", address, size)
            call("cuMemSetAccess", address, size, [access], 1)
            undo.pop_all()
        self._mapped[int(address)] = (size, handle)
        return int(address)

    def _quietly(self, name: str, *arguments: Any) -> None:
        with suppress(MemoryFailed):
            self._cuda.call(name, *arguments)

    def allocate(self, size: int) -> tuple[int, int]:
        """See `DeviceMemory`."""
        handle = self._cuda.call("cuMemCreate", size, self._properties, 0)
        address = self._map(handle, size)
        descriptor = int(
            self._cuda.call("cuMemExportToShareableHandle", handle, self._descriptor_type, 0)
        )
        self._cuda.call("cuMemsetD8Async", address, 0, size, self._lanes[0][0])
        self._cuda.call("cuStreamSynchronize", self._lanes[0][0])
        return address, descriptor

    def unmap(self, address: int) -> None:
        """See `DeviceMemory`."""
        size, handle = self._mapped.pop(address)
        self._cuda.call("cuMemUnmap", address, size)
        self._cuda.call("cuMemRelease", handle)
        self._cuda.call("cuMemAddressFree", address, size)

    def room(self) -> int:
        """See `DeviceMemory`."""
        return int(self._cuda.call("cuMemGetInfo")[0])

    def take(self, size: int) -> int:
        """See `DeviceMemory`."""
        return int(self._cuda.call("cuMemAlloc", size))

    def give(self, address: int) -> None:
        """See `DeviceMemory`."""
        self._cuda.call("cuMemFree", address)

    def pin(self, address: int, size: int) -> None:
        """See `DeviceMemory`."""
        self._cuda.call("cuMemHostRegister", address, size, _PORTABLE)

    def prepare(self) -> None:
        """See `DeviceMemory`."""
        if self._fingerprint is None:
            self._fingerprint = CellKernel(
                self._cuda,
                self._number,
                fingerprint.KERNEL_SOURCE,
                "fingerprint",
                fingerprint.THREADS,
                16,
            )

    def fingerprints(self, cells: Addresses, seed: int) -> Words:
        """See `DeviceMemory`."""
        self.prepare()
        assert self._fingerprint is not None
        return self._fingerprint.run(cells, seed).view(np.uint64)

    def prepare_digests(self) -> None:
        """See `DeviceMemory`."""
        if self._digest is None:
            self._cuda.call("cuCtxSetCurrent", self._context)
            self._digest = CellKernel(
                self._cuda,
                self._number,
                digest.KERNEL_SOURCE,
                "digest",
                digest.THREADS,
                digest.BYTES,
            )
            self._digest.reserve(_DIGESTS_AT_ONCE, digest.BYTES)

    def digests(self, cells: Addresses, key: bytes) -> Digests:
        """See `DeviceMemory`."""
        self.prepare_digests()
        assert self._digest is not None
        return self._digest.run(cells, key)

    def copy(self, pieces: Sequence[Piece]) -> None:
        """See `DeviceMemory`."""
        self.start(pieces, 0)
        self.wait(0)

    def start(self, pieces: Sequence[Piece], lane: int) -> None:
        """See `DeviceMemory`."""
        call, streams = self._cuda.call, self._lanes[lane]
        for piece in pieces:
            call(
                "cuMemcpyAsync", piece.to, piece.source, piece.size, streams[piece.stream % STREAMS]
            )

    def wait(self, lane: int) -> None:
        """See `DeviceMemory`."""
        for stream in self._lanes[lane]:
            self._cuda.call("cuStreamSynchronize", stream)
