"""Checks the driver, the type and number of GPUs, and the room on them."""

from __future__ import annotations

from icecore.errors import MissingTool, RestoreRefused
from icecore.host.gpu.backend import find_backend
from icecore.restorer.gpu import gpus
from icecore.restorer.gpu.gpus import GpuPlan
from icecore.restorer.options import RestoreOptions
from icecore.restorer.requirements.outcome import Requirement
from icecore.store.format.contract import read_gpus
from icecore.store.format.manifest import Manifest


def check_gpus(
    manifest: Manifest, options: RestoreOptions
) -> tuple[list[Requirement], GpuPlan | None]:
    """Return the checks, and the GPUs that the job gets; None: it used none, or cannot get them."""
    recorded = read_gpus(manifest)
    if recorded is None:
        if options.gpu_map:
            return [
                Requirement(
                    "gpu",
                    False,
                    "the snapshot's job used no GPU, but there is a --gpu-map",
                    "leave out --gpu-map",
                )
            ], None
        return [], None
    try:
        here = find_backend().inventory()
    except MissingTool as error:
        return [
            Requirement("gpu-driver", False, f"the job used GPUs: {error.message}", error.cure)
        ], None
    driver = recorded.driver
    # The job's own part of the driver (libcuda) is in its memory, and works only with a kernel
    # module of the same version.
    checks = [
        Requirement(
            "gpu-driver",
            here.driver == driver,
            f"the job ran with NVIDIA driver {driver}, this machine has {here.driver}",
            f"install driver {driver}",
        )
    ]
    try:
        plan = gpus.plan(manifest, here, options.gpu_map)
    except RestoreRefused as error:
        return [*checks, Requirement("gpu", False, error.message, error.cure)], None
    moved = {old: new for own in plan.processes.values() for old, new in own.items() if old != new}
    words = ", ".join(f"{old} → {new}" for old, new in moved.items())
    checks.append(
        Requirement("gpu", True, f"the GPUs of the job are available: {words or 'the same ones'}")
    )
    for gpu, size in (
        gpus.needs(manifest, here, plan) if not options.from_resident else ()
    ):  # it has what it needs
        free = gpu.memory - gpu.used
        checks.append(
            Requirement(
                "gpu-memory",
                free >= size,
                f"{size >> 20} MiB are needed on {gpu.uuid}, {free >> 20} MiB are free",
                "end what uses it, or name another GPU with --gpu-map",
                hard=False,
            )
        )
    return checks, plan
