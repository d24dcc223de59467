"""The GPUs of a machine and who uses them, through NVML, which initialises nothing on a GPU."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

import msgspec

from icecore.host.cuda.api import DriverMissing
from icecore.host.cuda.driver import EXTRA_CURE
from icecore.text import printable


class Gpu(msgspec.Struct, frozen=True):
    """One GPU. ``minor``: N of /dev/nvidiaN; ``memory`` and ``used`` in bytes; ``mig``: divided
    into instances (MIG).
    """

    uuid: str
    name: str
    memory: int
    minor: int
    used: int = 0
    mig: bool = False


class Inventory(msgspec.Struct, frozen=True):
    """The GPUs and their processes as NVML reports them.

    Attributes:
        driver: Version of the driver, "580.159.03".
        gpus: In NVML's order.
        contexts: pid → UUID of each GPU on which it has a context → bytes that it uses there (of
            the pids that were asked for, where NVML knows them).
        mps: Those pids that reach their GPU through MPS.
    """

    driver: str
    gpus: tuple[Gpu, ...]
    contexts: Mapping[int, Mapping[str, int]] = msgspec.field(default_factory=dict)
    mps: frozenset[int] = frozenset()

    @property
    def branch(self) -> int:
        """Return the driver's branch, such as 580."""
        found = re.match(r"\d+", self.driver)
        return int(found[0]) if found else 0

    def gpu(self, uuid: str) -> Gpu | None:
        """Return the GPU with this UUID."""
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)

    def by_minor(self, minor: int) -> Gpu | None:
        """Return the GPU behind /dev/nvidiaN."""
        return next((gpu for gpu in self.gpus if gpu.minor == minor), None)


def read_inventory(pids: Collection[int] = ()) -> Inventory:
    """Query NVML.

    Args:
        pids: Processes whose use of the GPUs is wanted too.

    Raises:
        DriverMissing: No driver, or no nvidia-ml-py.
    """
    with _nvml() as nvml:
        gpus = []
        contexts: dict[int, dict[str, int]] = {}
        mps: set[int] = set()
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
            gpus.append(
                Gpu(
                    uuid=uuid,
                    name=_text(nvml.nvmlDeviceGetName(handle)),
                    memory=int(memory.total),
                    minor=int(nvml.nvmlDeviceGetMinorNumber(handle)),
                    used=int(memory.used),
                    mig=_mig(nvml, handle),
                )
            )
            if pids:
                for entry in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    if entry.pid in pids:
                        contexts.setdefault(int(entry.pid), {})[uuid] = int(
                            entry.usedGpuMemory or 0
                        )
                mps.update(pid for pid in _mps(nvml, handle) if pid in pids)
        return Inventory(
            _text(nvml.nvmlSystemGetDriverVersion()), tuple(gpus), contexts, frozenset(mps)
        )


@contextmanager
def _nvml() -> Iterator[ModuleType]:
    if importlib.util.find_spec("pynvml") is None:
        raise DriverMissing("nvidia-ml-py is not installed", cure=EXTRA_CURE)
    import pynvml

    nvml: ModuleType = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise DriverMissing(f"NVML cannot be used: {error}", cure=EXTRA_CURE) from error
    try:
        yield nvml
    except nvml.NVMLError as error:
        raise DriverMissing(f"NVML: {error}", cure=EXTRA_CURE) from error
    finally:
        nvml.nvmlShutdown()


def _mig(nvml: ModuleType, handle: object) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:
        return False  # it cannot be divided


def _mps(nvml: ModuleType, handle: object) -> list[int]:
    try:
        return [int(entry.pid) for entry in nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)]
    except (nvml.NVMLError, AttributeError):
        return []  # this driver has no MPS


def _text(value: str | bytes) -> str:
    return printable(os.fsdecode(value))
