"""What NVML tells becomes an inventory; the library itself stands for the driver's, for no machine
here has one.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from icecore.host.cuda.api import DriverMissing
from icecore.host.cuda.inventory import read_inventory


class _Error(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Two GPUs, the first divided, the second used by two processes, one of them through MPS;
    strings as bytes, as old versions give them.
    """
    module = ModuleType("pynvml")
    module.__spec__ = SimpleNamespace()  # type: ignore[assignment]

    def mig(handle: int) -> tuple[int, int]:
        if handle:
            raise _Error("not supported")
        return 1, 1

    vars(module).update(
        NVMLError=_Error,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: b"580.159.03",
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=100 + handle, used=handle),
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}".encode(),
        nvmlDeviceGetName=lambda handle: "NVIDIA H200",
        nvmlDeviceGetMinorNumber=lambda handle: 1 - handle,
        nvmlDeviceGetMigMode=mig,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [
            SimpleNamespace(pid=pid, usedGpuMemory=used)
            for pid, used in ((5, 40), (6, None), (7, 1))
            if handle
        ],
        nvmlDeviceGetMPSComputeRunningProcesses=lambda handle: (
            [SimpleNamespace(pid=6)] if handle else []
        ),
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_the_inventory(nvml: ModuleType) -> None:
    found = read_inventory([5, 6])
    assert found.branch == 580 and [(gpu.name, gpu.memory, gpu.mig) for gpu in found.gpus] == [
        ("NVIDIA H200", 100, True),
        ("NVIDIA H200", 101, False),
    ]
    assert found.by_minor(0) is found.gpu("GPU-1") and found.gpu("GPU-2") is None
    assert found.contexts == {5: {"GPU-1": 40}, 6: {"GPU-1": 0}} and found.mps == {6}


def test_no_driver(nvml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise _Error("driver not loaded")

    monkeypatch.setattr(nvml, "nvmlInit", fail)
    with pytest.raises(DriverMissing, match="driver not loaded"):
        read_inventory()
