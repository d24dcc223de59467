"""Device memory through the NVIDIA driver and NVRTC, for the worker; rule: each GPU has its primary context, whose calls one thread makes.

Memory is mapped as the processes have it (virtual memory management with POSIX descriptors), so that nothing moves to be looked at.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from icecore.host.cuda.api import DriverMissing
from icecore.host.cuda.driver import EXTRA_CURE, uuid_bytes
from icecore.host.resident.fingerprint import KERNEL_SOURCE, THREADS, Words
from icecore.host.resident.memory import Addresses, MemoryFailed, Piece

STREAMS = 4
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
_LARGEST_LAUNCH = 1 << 20  # cells


class Cuda:
    """The driver in this process, and the kernel for each kind of GPU."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver, nvrtc
        except ImportError as error:
            raise DriverMissing(f"cuda.bindings cannot be imported: {error}", cure=EXTRA_CURE) from error
        self.cu: Any = driver
        self._nvrtc: Any = nvrtc
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> Any:
        """The value of a driver call.

        Raises:
            MemoryFailed: It failed.
        """
        result = getattr(self.cu, name)(*arguments)
        if int(result[0]):
            raise MemoryFailed(f"{name}: {self.cu.CUresult(int(result[0])).name} ({int(result[0])})")
        return None if len(result) == 1 else result[1] if len(result) == 2 else result[1:]

    def device(self, uuid: str) -> Any:
        """The device with a UUID."""
        for number in range(self.call("cuDeviceGetCount")):
            device = self.call("cuDeviceGet", number)
            if bytes(self.call("cuDeviceGetUuid_v2" if hasattr(self.cu, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid", device).bytes) == uuid_bytes(uuid):
                return device
        raise MemoryFailed(f"there is no GPU {uuid}")

    def kernel(self, architecture: str) -> bytes:
        """The fingerprint's kernel for ``sm_90`` or the like."""
        nvrtc = self._nvrtc

        def check(result: Any) -> Any:
            if int(result[0]):
                raise MemoryFailed(f"NVRTC: {result[0]}")
            return result[1] if len(result) > 1 else None

        try:
            program = check(nvrtc.nvrtcCreateProgram(KERNEL_SOURCE.encode(), b"fingerprint.cu", 0, [], []))
        except RuntimeError as error:  # the bindings' own, where there is no library
            raise DriverMissing(f"NVRTC cannot be loaded: {error}", cure="pip install 'nvidia-cuda-nvrtc>=13,<14'") from error
        result = nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture={architecture}".encode()])
        if int(result[0]):
            text = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
            nvrtc.nvrtcGetProgramLog(program, text)
            raise MemoryFailed(f"NVRTC: {text.decode(errors='replace')}")
        cubin: bytes = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
        check(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin


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
        self._function: Any = None
        non_blocking = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._streams = [call("cuStreamCreate", non_blocking) for _ in range(STREAMS)]
        self._mapped: dict[int, tuple[int, Any]] = {}
        properties = cu.CUmemAllocationProp()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = int(self._number)
        # As the preload asks for it: memory of one kind is restored as that kind.
        rdma = attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        properties.allocFlags.gpuDirectRDMACapable = int(bool(call("cuDeviceGetAttribute", rdma, self._number)))
        self._properties = properties
        self._descriptor_type = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def map(self, descriptor: int, size: int) -> int:
        """See `DeviceMemory`, as the next ones."""
        handle = self._cuda.call("cuMemImportFromShareableHandle", descriptor, self._descriptor_type)
        return self._map(handle, size)

    def _map(self, handle: Any, size: int) -> int:
        cu, call = self._cuda.cu, self._cuda.call
        address = None
        try:
            address = call("cuMemAddressReserve", size, 0, cu.CUdeviceptr(0), 0)
            call("cuMemMap", address, size, 0, handle, 0)
        except MemoryFailed:
            if address is not None:
                with suppress(MemoryFailed):
                    call("cuMemAddressFree", address, size)
            with suppress(MemoryFailed):
                call("cuMemRelease", handle)
            raise
        self._mapped[int(address)] = (size, handle)
        access = cu.CUmemAccessDesc()
        access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = int(self._number)
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call("cuMemSetAccess", address, size, [access], 1)
        return int(address)

    def allocate(self, size: int) -> tuple[int, int]:
        """See `DeviceMemory`."""
        handle = self._cuda.call("cuMemCreate", size, self._properties, 0)
        address = self._map(handle, size)
        descriptor = int(self._cuda.call("cuMemExportToShareableHandle", handle, self._descriptor_type, 0))
        self._cuda.call("cuMemsetD8Async", address, 0, size, self._streams[0])
        self._cuda.call("cuStreamSynchronize", self._streams[0])
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

    def unpin(self, address: int) -> None:
        """See `DeviceMemory`."""
        self._cuda.call("cuMemHostUnregister", address)

    def prepare(self) -> None:
        """See `DeviceMemory`."""
        if self._function is not None:
            return
        attribute, call = self._cuda.cu.CUdevice_attribute, self._cuda.call
        major, minor = (
            call("cuDeviceGetAttribute", getattr(attribute, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{part}"), self._number)
            for part in ("MAJOR", "MINOR")
        )
        self._cubin = np.frombuffer(self._cuda.kernel(f"sm_{major}{minor}"), np.uint8)
        module = call("cuModuleLoadData", self._cubin.ctypes.data)
        self._function = call("cuModuleGetFunction", module, b"fingerprint")

    def fingerprints(self, cells: Addresses, seed: int) -> Words:
        """See `DeviceMemory`."""
        self.prepare()
        call, stream = self._cuda.call, self._streams[0]
        found = np.zeros((len(cells), 2), np.uint64)
        for first in range(0, len(cells), _LARGEST_LAUNCH):
            some = np.ascontiguousarray(cells[first : first + _LARGEST_LAUNCH], np.uint64)
            places = self.take(some.nbytes)
            out = self.take(16 * len(some))
            try:
                call("cuMemcpyHtoDAsync", places, some.ctypes.data, some.nbytes, stream)
                call("cuMemsetD8Async", out, 0, 16 * len(some), stream)
                values = (ctypes.c_uint64(places), ctypes.c_uint64(seed), ctypes.c_uint64(out))
                pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))
                call("cuLaunchKernel", self._function, len(some), 1, 1, THREADS, 1, 1, 0, stream, ctypes.addressof(pointers), 0)
                call("cuMemcpyDtoHAsync", found[first:].ctypes.data, out, 16 * len(some), stream)
                call("cuStreamSynchronize", stream)
            finally:
                self.give(places)
                self.give(out)
        return found

    def copy(self, pieces: Sequence[Piece]) -> None:
        """See `DeviceMemory`."""
        call, streams = self._cuda.call, self._streams
        for piece in pieces:
            call("cuMemcpyAsync", piece.to, piece.source, piece.size, streams[piece.stream % STREAMS])
        for stream in streams:
            call("cuStreamSynchronize", stream)
