"""Chooses the GPU of this machine that each process of a snapshot gets. A GPU is replaced only by
one of the same type with at least as much memory. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from icecore.errors import RestoreRefused
from icecore.host.cuda.inventory import Gpu, Inventory
from icecore.store.format.contract import Device, read_devices, read_gpus
from icecore.store.format.manifest import Manifest

#: The first driver that restores onto other GPUs.
_PAIRS_DRIVER = 580


class GpuPlan(msgspec.Struct, frozen=True):
    """What the driver is asked to restore.

    Attributes:
        processes: Image id → pairs of UUIDs, old → new; empty: the same GPUs as before.
        used: UUIDs of this machine's GPUs that the driver needs: those on which the processes get
            contexts, and those that replace others.
    """

    processes: Mapping[int, Mapping[str, str]]
    used: frozenset[str] = frozenset()


def assign(old: Sequence[Device], here: Sequence[Gpu], wanted: Mapping[str, str]) -> dict[str, str]:
    """Return old UUID → new UUID for every GPU that the job had open; the driver requires all of
    them, also unused ones.

    GPUs in ``wanted`` are mapped as it says. The others stay the same if possible, or get one that
    is free, used ones first.

    Args:
        wanted: The value of ``--gpu-map``: UUIDs, their beginnings, or numbers (old ones in the
            snapshot's order, new ones in this machine's).

    Raises:
        RestoreRefused: There is no such mapping.
    """
    new = {gpu.uuid: gpu for gpu in here}
    out: dict[str, str] = {}
    for left, right in wanted.items():
        source = _named(left, [gpu.uuid for gpu in old], "the snapshot")
        target = _named(right, list(new), "this machine")
        if source in out or target in out.values():
            raise RestoreRefused(
                f"--gpu-map names {left if source in out else right} twice",
                cure="name every GPU once",
            )
        why = _unfit(next(gpu for gpu in old if gpu.uuid == source), new[target])
        if why:
            raise RestoreRefused(
                f"--gpu-map {left}={right}: {why}", cure=_fitting(source, old, here)
            )
        out[source] = target
    rest = sorted((gpu for gpu in old if gpu.uuid not in out), key=lambda gpu: not gpu.used)
    for gpu in rest:
        if gpu.uuid in new and gpu.uuid not in out.values():
            out[gpu.uuid] = gpu.uuid
    for gpu in rest:
        if gpu.uuid not in out:
            free = [one for one in here if one.uuid not in out.values() and not _unfit(gpu, one)]
            if not free:
                raise RestoreRefused(
                    f"there is no GPU for {gpu.uuid} ({gpu.name}, {gpu.memory >> 20} MiB), which the job {'used' if gpu.used else 'had open'}",
                    cure=f"restore on a machine with {len(old)} GPUs of that type"
                    + (
                        ""
                        if gpu.used
                        else "; start jobs that need fewer GPUs with CUDA_VISIBLE_DEVICES"
                    ),
                )
            out[gpu.uuid] = free[0].uuid
    return out


def _named(text: str, uuids: Sequence[str], where: str) -> str:
    if text.isdecimal() and int(text) < len(uuids):
        return uuids[int(text)]
    found = [
        uuid
        for uuid in uuids
        if uuid == text
        or (text and uuid.removeprefix("GPU-").startswith(text.removeprefix("GPU-")))
    ]
    if len(found) != 1:
        raise RestoreRefused(
            f"--gpu-map: {text!r} names {'several GPUs' if found else 'no GPU'} of {where}",
            cure=f"there are {', '.join(uuids) or 'none'}",
        )
    return found[0]


def _unfit(old: Gpu | Device, new: Gpu) -> str:
    """Return why the new GPU cannot replace the old one; empty: it can."""
    if new.name != old.name:
        return f"{new.uuid} is a {new.name}, {old.name} is needed"
    if new.memory < old.memory:
        return f"{new.uuid} has {new.memory >> 20} MiB, {old.memory >> 20} MiB are needed"
    return "it is divided (MIG)" if new.mig else ""


def _fitting(uuid: str, old: Sequence[Device], here: Sequence[Gpu]) -> str:
    source = next(gpu for gpu in old if gpu.uuid == uuid)
    fitting = [gpu.uuid for gpu in here if not _unfit(source, gpu)]
    return f"{', '.join(fitting)} would do" if fitting else "no GPU of this machine would do"


def plan(manifest: Manifest, here: Inventory, wanted: Mapping[str, str]) -> GpuPlan:
    """Choose the GPUs of every process.

    Raises:
        RestoreRefused: There is no such choice.
        Damaged: The manifest makes no sense.
    """
    recorded = read_gpus(manifest)
    if recorded is None:
        return GpuPlan({})
    chosen = assign(read_devices(manifest), here.gpus, wanted)
    moved = any(source != target for source, target in chosen.items())
    if moved and here.branch < _PAIRS_DRIVER:
        raise RestoreRefused(
            f"driver {here.driver} cannot restore onto other GPUs than {', '.join(chosen)}",
            cure=f"install driver {_PAIRS_DRIVER} or newer",
        )
    pairs = {
        image: {uuid: chosen[uuid] for uuid in process.gpus if uuid in chosen} if moved else {}
        for image, process in recorded.processes.items()
    }
    used = {
        chosen.get(uuid, uuid)
        for process in recorded.processes.values()
        for uuid in process.contexts
    }
    named = {uuid for own in pairs.values() for uuid in own.values()}
    return GpuPlan(pairs, frozenset(used | named))


def needs(manifest: Manifest, here: Inventory, chosen: GpuPlan) -> Iterator[tuple[Gpu, int]]:
    """Yield each GPU of this machine, and the bytes that the job will use on it."""
    recorded = read_gpus(manifest)
    used: Counter[str] = Counter()
    for process in recorded.processes.values() if recorded is not None else ():
        used.update(process.contexts)
    pairs: dict[str, str] = {}
    for own in chosen.processes.values():
        pairs |= own
    for uuid, size in used.items():
        gpu = here.gpu(pairs.get(uuid, uuid))
        if gpu is not None:
            yield gpu, size
