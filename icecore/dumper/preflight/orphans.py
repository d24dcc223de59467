"""Orphans: processes that have device files of the driver open or mapped but no CUDA state. A process
with CUDA state of its own never counts as one.

Orphans are children that were forked from a CUDA process (workers of a DataLoader, of
torch.compile), in which CUDA does not work, and processes that use only NVML. The driver closes
nothing in them. CRIU's plugin dumps device files without checking whose they are, and a restore
replaces them (icecore/host/criu/device_files.c). So no other process may have any.
`icecore.dumper.preflight.gpu_changes` ensures that: by the driver's answer before the window, and by
the driver's threads once all processes are stopped.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from icecore.dumper.observe.gpus import NVML_LIBRARY, GpuInspection
from icecore.dumper.preflight.checks import Refusal
from icecore.errors import DumpFailed, NotFound
from icecore.host.cuda.api import State
from icecore.host.gpu.backend import Backend
from icecore.host.kernel import procfs


def misjudged(inspection: GpuInspection, states: Mapping[int, State]) -> list[Refusal]:
    """Refuse processes whose driver state contradicts their threads.

    Args:
        states: The driver's state for each process of the inspection.
    """
    refusals = [
        Refusal(
            "gpu-state",
            f"process {one.pid} uses CUDA, but this driver version names its threads in a way that icecore does not know",
            "dump it again; if that does not help, report it with the driver's version",
        )
        for one in inspection.orphans
        if states[one.pid] is not State.NOT_CUDA
    ]
    return refusals + [
        Refusal(
            "gpu-state",
            f"process {one.pid} has threads of the driver, but the driver reports no CUDA state for it",
            "dump it again; if that does not help, report it with the driver's version",
        )
        for one in inspection.processes
        if one.threads
        and states[one.pid] is State.NOT_CUDA
        and procfs.exists(one.pid)
        and not procfs.is_zombie(one.pid)
    ]


def left_open(cuda: Mapping[int, Sequence[procfs.Mapping]], backend: Backend) -> list[int]:
    """Find checkpointed processes that still have device files open, as users of NVML do.

    Args:
        cuda: Mappings of the checkpointed processes, by host pid.

    Raises:
        DumpFailed: A process has some but has not loaded NVML, so a restore would take files from it
            that it needs.
    """
    kinds, found = backend.kinds(), []
    for pid, mappings in cuda.items() if kinds else ():
        names = {
            *_open_devices(pid, kinds),
            *(m.path for m in mappings if backend.is_device(m.path)),
        }
        if not names:
            continue
        if not any(NVML_LIBRARY in m.path for m in mappings):
            raise DumpFailed(
                f"the driver's checkpoint has left device files open in process {pid}: {', '.join(sorted(names))}",
                cure="stop other uses of the GPU in that process, and report this with the driver's version",
            )
        found.append(pid)
    return found


def has_device_files(pid: int, backend: Backend) -> bool:
    """Return whether a process has device files of the driver open or mapped."""
    return any(_open_devices(pid, backend.kinds())) or any(
        backend.is_device(m.path) for m in procfs.read_maps(pid)
    )


def _open_devices(pid: int, kinds: Collection[str]) -> Iterator[str]:
    """Yield the path of each open device file of the driver. They are found by device number,
    because they may have been opened in a root that no longer exists.
    """
    folder = Path(f"/proc/{pid}/fd")
    for name in os.listdir(folder):
        with suppress(NotFound), procfs.looking_at(pid):
            about = os.stat(folder / name)
            kind = (
                "c" if stat.S_ISCHR(about.st_mode) else "b" if stat.S_ISBLK(about.st_mode) else ""
            )
            if kind and f"{kind}{os.major(about.st_rdev)}" in kinds:
                yield os.readlink(folder / name)
