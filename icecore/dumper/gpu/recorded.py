"""Records of the GPU processes for a manifest (`icecore.store.format.contract`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from icecore.dumper.observe.gpus import GpuInspection
from icecore.store.format.contract import Device, GpuProcess, Gpus, encode_device


def record_gpus(
    inspection: GpuInspection,
    pids: Sequence[int],
    temporary: Mapping[int, list[tuple[int, int]]],
    images: Mapping[int, int],
) -> Gpus | None:
    """Return what a restore needs to know of the driver's memory; None if no process has any.

    Args:
        pids: Host pids of the processes with CUDA state.
        temporary: By host pid: see `GpuProcess.temporary`.
        images: Host pid → image id.
    """
    if not pids:
        return None
    used = {process.pid: process for process in inspection.processes}
    processes = {
        images[pid]: GpuProcess(
            list(used[pid].opened), dict(used[pid].contexts), temporary.get(pid, [])
        )
        for pid in pids
    }
    inventory = inspection.inventory
    return Gpus(inventory.driver if inventory is not None else "", processes)


def record_devices(inspection: GpuInspection) -> list[dict[str, str]]:
    """Return the GPUs that the processes had, for the manifest's requirements."""
    inventory = inspection.inventory
    if inventory is None:
        return []
    opened = {uuid for process in inspection.processes for uuid in process.opened}
    used = {uuid for process in inspection.processes for uuid in process.contexts}
    return [
        encode_device(
            Device(
                gpu.uuid,
                gpu.name,
                gpu.memory,
                used=gpu.uuid in used or not used,
                driver=inventory.driver,
            )
        )
        for gpu in inventory.gpus
        if gpu.uuid in opened
    ]
