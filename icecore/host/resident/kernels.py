"""GPU kernels whose blocks take one cell each, compiled by NVRTC for the GPU present. Everything is
compiled and loaded before the first launch in a window.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from icecore.host.cuda.api import DriverMissing
from icecore.host.resident.memory import Addresses, MemoryFailed

if TYPE_CHECKING:
    from icecore.host.resident.cuda_memory import Cuda

_LARGEST_LAUNCH = 1 << 20  # cells
_compiling = threading.Lock()


def compiled(source: str, architecture: str) -> bytes:
    """CUDA C++ for ``sm_90`` or the like; compiled once, however many GPUs ask at the same time.

    Raises:
        DriverMissing: There is no NVRTC.
        MemoryFailed: It does not compile.
    """
    with _compiling:
        return _compiled(source, architecture)


@functools.cache
def _compiled(source: str, architecture: str) -> bytes:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise DriverMissing(f"cuda.bindings cannot be imported: {error}") from error

    def check(result: Any) -> Any:
        if int(result[0]):
            raise MemoryFailed(f"NVRTC: {result[0]}")
        return result[1] if len(result) > 1 else None

    try:
        program = check(nvrtc.nvrtcCreateProgram(source.encode(), b"cells.cu", 0, [], []))
    except RuntimeError as error:  # the bindings' own, where there is no library
        raise DriverMissing(
            f"NVRTC cannot be loaded: {error}", cure="pip install 'nvidia-cuda-nvrtc>=13,<14'"
        ) from error
    result = nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture={architecture}".encode()])
    if int(result[0]):
        text = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, text)
        raise MemoryFailed(f"NVRTC: {text.decode(errors='replace')}")
    cubin: bytes = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin


class CellKernel:
    """``name<<<cells, threads>>>(addresses, value, out)``; its calls are made by one thread, in
    which the GPU's context is current.

    Args:
        cuda: The driver.
        device: The GPU's number.
        source, name, threads: The kernel.
        out_bytes: What it writes for each cell; zeroed before.
    """

    def __init__(
        self, cuda: Cuda, device: Any, source: str, name: str, threads: int, out_bytes: int
    ) -> None:
        self._cuda, self._threads, self._out_bytes = cuda, threads, out_bytes
        call, attribute = cuda.call, cuda.cu.CUdevice_attribute
        major, minor = (
            call(
                "cuDeviceGetAttribute",
                getattr(attribute, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{part}"),
                device,
            )
            for part in ("MAJOR", "MINOR")
        )
        self._cubin = np.frombuffer(
            compiled(source, f"sm_{major}{minor}"), np.uint8
        )  # one for all GPUs of a kind
        self._function = call(
            "cuModuleGetFunction", call("cuModuleLoadData", self._cubin.ctypes.data), name.encode()
        )
        self._stream = call("cuStreamCreate", cuda.cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        #: Device memory for arguments and results; it grows, because freeing some would wait for
        #: all copies that are under way.
        self._room = (0, 0)

    def reserve(self, cells: int, head: int = 0) -> None:
        """Have device memory for so many cells, and so many bytes of a value, now rather than when
        there may be none left.
        """
        self._have(head + 8 * cells, self._out_bytes * cells)

    def run(self, cells: Addresses, value: int | bytes) -> npt.NDArray[np.uint8]:
        """u8[n, out_bytes].

        Args:
            cells: u64[n]: their addresses.
            value: A number, or bytes of which the kernel gets the address (a multiple of 8 of
                them).
        """
        call, stream = self._cuda.call, self._stream
        found = np.zeros((len(cells), self._out_bytes), np.uint8)
        head = (
            np.frombuffer(value, np.uint64) if isinstance(value, bytes) else np.empty(0, np.uint64)
        )
        for first in range(0, len(cells), _LARGEST_LAUNCH):
            given = np.concatenate([head, cells[first : first + _LARGEST_LAUNCH]])
            some = len(given) - len(head)
            places, out = self._have(given.nbytes, self._out_bytes * some)
            call("cuMemcpyHtoDAsync", places, given.ctypes.data, given.nbytes, stream)
            call("cuMemsetD8Async", out, 0, self._out_bytes * some, stream)
            numbers = (places + head.nbytes, places if isinstance(value, bytes) else value, out)
            values = [ctypes.c_uint64(number) for number in numbers]
            pointers = (ctypes.c_void_p * 3)(*map(ctypes.addressof, values))
            call(
                "cuLaunchKernel",
                self._function,
                some,
                1,
                1,
                self._threads,
                1,
                1,
                0,
                stream,
                ctypes.addressof(pointers),
                0,
            )
            call(
                "cuMemcpyDtoHAsync", found[first:].ctypes.data, out, self._out_bytes * some, stream
            )
            call("cuStreamSynchronize", stream)
        return found

    def _have(self, given: int, results: int) -> tuple[int, int]:
        """Device memory for both."""
        size = (given + 255) // 256 * 256 + results
        had, address = self._room
        if had < size:
            if address:
                self._cuda.call("cuMemFree", address)
            self._room = (0, 0)
            address = int(self._cuda.call("cuMemAlloc", size))
            self._room = (size, address)
        return address, address + (given + 255) // 256 * 256
