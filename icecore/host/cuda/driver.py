"""Checkpoints through the NVIDIA driver. One process initialises CUDA once and makes all calls
(`icecore.host.gpu.helper`).

Uses ``cuda.bindings.driver`` of 13.0 or newer (the extra ``icecore[gpu]``), which lets the
interpreter's lock go during a call, so that threads call for several processes at the same time;
12.8 does not. Driver 570 or newer; pairs of GPUs need 580.
"""

from __future__ import annotations

import ctypes
import importlib.util
import uuid
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from icecore.host.cuda.api import DriverMissing, Placement, State, device_error

EXTRA_CURE = "pip install 'icecore[gpu]', on a machine with the NVIDIA driver"
#: What the driver answers when it is asked for the state of a process that has none: no CUDA
#: process of its own, or one that is not initialised.
_NOT_CUDA = frozenset((1, 3, 4, 100, 304, 801))
_STATES = {0: State.RUNNING, 1: State.LOCKED, 2: State.CHECKPOINTED, 3: State.FAILED}


class Driver:
    """The driver's calls. Creating it initialises CUDA in this process.

    Raises:
        DriverMissing: No driver, no GPU, or no cuda.bindings.
    """

    def __init__(self) -> None:
        self._cuda = _bindings()
        try:
            code = int(self._cuda.cuInit(0)[0])
        except Exception as error:
            # cuda.bindings has an error of its own for a missing libcuda in every version.
            raise DriverMissing(
                f"the NVIDIA driver cannot be used: {error}", cure=EXTRA_CURE
            ) from error
        if code:
            name = self._cuda.CUresult(code).name
            cure = (
                "CUDA needs a /proc of its own pid namespace: run icecore outside of it"
                if code == 304
                else EXTRA_CURE
            )
            raise DriverMissing(f"CUDA cannot be initialised: {name} ({code})", cure=cure)

    def state(self, pid: int) -> State:
        """See `DeviceCheckpoint`."""
        result = self._cuda.cuCheckpointProcessGetState(pid)
        code = int(result[0])
        if code in _NOT_CUDA:
            return State.NOT_CUDA
        if code:
            raise device_error("state", pid, code, self._cuda.CUresult(code).name)
        return _STATES.get(int(result[1]), State.FAILED)

    def lock(self, pid: int, seconds: float) -> None:
        """See `DeviceCheckpoint`."""
        arguments = self._cuda.CUcheckpointLockArgs()
        arguments.timeoutMs = max(1, int(seconds * 1000))
        self._check("lock", pid, self._cuda.cuCheckpointProcessLock(pid, arguments))

    def checkpoint(self, pid: int) -> Placement:
        """See `DeviceCheckpoint`."""
        self._check("checkpoint", pid, self._cuda.cuCheckpointProcessCheckpoint(pid, None))
        return Placement.PROCESS

    def restore(self, pid: int, gpus: Mapping[str, str]) -> None:
        """See `DeviceCheckpoint`."""
        arguments = None
        if gpus:
            pairs = []
            for old, new in gpus.items():
                pair = self._cuda.CUcheckpointGpuPair()
                pair.oldUuid, pair.newUuid = self._uuid(old), self._uuid(new)
                pairs.append(pair)
            arguments = self._cuda.CUcheckpointRestoreArgs()
            arguments.gpuPairs = pairs
            arguments.gpuPairsCount = len(pairs)
        self._check("restore", pid, self._cuda.cuCheckpointProcessRestore(pid, arguments))

    def unlock(self, pid: int) -> None:
        """See `DeviceCheckpoint`."""
        self._check("unlock", pid, self._cuda.cuCheckpointProcessUnlock(pid, None))

    def restore_thread(self, pid: int) -> int:
        """See `DeviceCheckpoint`."""
        return int(
            self._check(
                "restore-thread", pid, self._cuda.cuCheckpointProcessGetRestoreThreadId(pid)
            )
        )

    def _check(self, call: str, pid: int, result: tuple[Any, ...]) -> Any:
        code = int(result[0])
        if code:
            raise device_error(call, pid, code, self._cuda.CUresult(code).name)
        return result[1] if len(result) > 1 else None

    def _uuid(self, text: str) -> Any:
        """``GPU-…`` as a CUuuid, whose bytes can only be written where they lie."""
        made = self._cuda.CUuuid()
        ctypes.memmove(made.getPtr(), uuid_bytes(text), 16)
        return made


def uuid_bytes(text: str) -> bytes:
    """Return the 16 bytes of ``GPU-8-4-4-4-12``."""
    return uuid.UUID(text.removeprefix("GPU-")).bytes


def has_bindings() -> bool:
    """Return whether cuda.bindings is installed, without loading it."""
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


def _bindings() -> ModuleType:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverMissing(
            f"cuda.bindings cannot be imported: {error}", cure=EXTRA_CURE
        ) from error
    module: ModuleType = driver
    if not hasattr(module, "CUcheckpointGpuPair"):
        raise DriverMissing(
            "this cuda.bindings is too old", cure="pip install -U 'cuda-bindings>=13'"
        )
    return module
