"""Checks of a tree's GPU processes: refuse what the driver can checkpoint but not restore, before the
driver is asked to; see `icecore.dumper.preflight.checks`.

docs/how-to/gpu-jobs.md tells how each case is found and what was seen to happen without the check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from icecore.dumper.observe.gpus import GpuInspection, GpuProcess
from icecore.dumper.observe.inspection import Inspection
from icecore.dumper.preflight.checks import Refusal
from icecore.host.cuda import holder, nccl
from icecore.host.cuda.driver import EXTRA_CURE, has_bindings
from icecore.host.cuda.inventory import Inventory
from icecore.host.kernel import limits

LEAST_DRIVER = 570
#: The first driver that restores what is shared through CUDA's legacy IPC.
_IPC_DRIVER = 610
#: The highest rates at which the driver was seen to move memory out and in, bytes a second and
#: process (docs/how-to/gpu-jobs.md): by itself, and with its mapping made for it.
_ALONE_RATES, _HELPED_RATES = (2.4e9, 6.9e9), (5.7e9, 8.5e9)
_GIB = 1 << 30


def driver(found: Inspection) -> list[Refusal]:
    """Require a driver that can checkpoint, and the bindings to call it."""
    if found.gpus is None:
        return []
    inventory, (problem, cure) = found.gpus.inventory, found.gpus.problem
    if inventory is None:
        return [
            Refusal(
                "gpu-driver",
                f"the tree uses a GPU that cannot be inspected: {problem}",
                cure,
            )
        ]
    if inventory.branch < LEAST_DRIVER:
        return [
            Refusal(
                "gpu-driver",
                f"NVIDIA driver {inventory.driver} cannot checkpoint processes",
                f"install driver {LEAST_DRIVER} or newer",
            )
        ]
    if found.gpus.backend.world is None and not has_bindings():
        return [
            Refusal(
                "gpu-driver",
                "cuda.bindings, which makes the driver's calls, is not installed",
                EXTRA_CURE,
            )
        ]
    return []


def plugin(found: Inspection) -> list[Refusal]:
    """Require the plugin with which CRIU holds the tree while the driver works."""
    return (
        []
        if found.gpus is None or holder.PLUGIN.exists()
        else [Refusal("gpu-plugin", *holder.LACK)]
    )


def _each(
    name: str, applies: Callable[[GpuProcess, Inventory], bool], message: str, cure: str
) -> Callable[[Inspection], list[Refusal]]:
    """Make a check that judges one process at a time; its message has ``{pid}``."""

    def check(found: Inspection) -> list[Refusal]:
        gpus = found.gpus
        if gpus is None or gpus.inventory is None:
            return []
        return [
            Refusal(name, message.format(pid=p.pid), cure)
            for p in gpus.processes
            if applies(p, gpus.inventory)
        ]

    return check


managed = _each(
    "gpu-managed",
    lambda process, _: process.managed > 0,
    "process {pid} has managed memory (cudaMallocManaged), which the driver cannot checkpoint",
    "have the program use cudaMalloc (paged optimizers and RMM's managed pools off)",
)


def ipc(found: Inspection) -> list[Refusal]:
    """Refuse memory and events that the driver shares by CUDA IPC. Under the preload, this is only
    memory that stays with the driver.
    """
    gpus = found.gpus
    if gpus is None or gpus.inventory is None or gpus.inventory.branch >= _IPC_DRIVER:
        return []
    reports = found.resident.reports if found.resident is not None else {}
    return [
        Refusal(
            "gpu-ipc",
            f"process {process.pid} shares device memory or events by CUDA IPC, which this driver can checkpoint but not restore",
            (
                "start it again if an older icecore started it, or have it share no memory that stays with the driver (allocations below 2 MiB, pools)"
                if process.pid in reports
                else "start the job with 'icecore run --gpu', which handles CUDA IPC itself"
            )
            + f", or install driver {_IPC_DRIVER} or newer",
        )
        for process in gpus.processes
        if process.ipc
    ]


def shared(found: Inspection) -> list[Refusal]:
    """Refuse several GPU processes that may share device memory by CUDA IPC, on one GPU or across
    GPUs. The importer shows no sign of it and is lost. A process without a context shares nothing.

    For processes under the preload it is known that none exported or opened memory of the driver's;
    windows take away what else they share.
    """
    gpus = found.gpus
    if (
        gpus is None
        or gpus.inventory is None
        or gpus.inventory.branch >= _IPC_DRIVER
        or found.options.gpu_shared
    ):
        return []
    reports = found.resident.reports if found.resident is not None else {}
    pids = [p.pid for p in gpus.with_memory]
    if len(pids) < 2 or all(pid in reports and not reports[pid].counts.ipc_exports for pid in pids):
        return []
    return [
        Refusal(
            "gpu-shared",
            f"processes {', '.join(map(str, pids))} use GPUs and may share device memory by CUDA IPC, which cannot be detected "
            "and which this driver cannot restore",
            (
                "start it without CUDA IPC"
                if all(pid in reports for pid in pids)
                else "start the job with 'icecore run --gpu', which tracks what they share; or, if they share none"
            )
            + " (vLLM: --disable-custom-all-reduce)"
            + ("" if all(pid in reports for pid in pids) else ", declare it with --gpu-shared")
            + f"; or install driver {_IPC_DRIVER} or newer",
        )
    ]


mps = _each(
    "gpu-mps",
    lambda process, _: process.mps,
    "process {pid} uses its GPU through MPS, which the driver cannot checkpoint",
    "end the MPS daemon (echo quit | nvidia-cuda-mps-control) and start the job again",
)
mig = _each(
    "gpu-mig",
    lambda process, inventory: any(
        gpu.mig for gpu in inventory.gpus if gpu.uuid in (process.contexts or process.opened)
    ),
    "process {pid} uses a GPU that is divided (MIG), which the driver cannot checkpoint",
    "use whole GPUs: nvidia-smi -mig 0",
)


def transports(found: Inspection) -> list[Refusal]:
    """Refuse NCCL transports that the driver cannot restore: between processes, in the tree or beside
    it, or between GPUs of one process. If all ranks are under the preload, the window takes away
    what they share through cuMem.
    """
    if found.gpus is None:
        return []
    # torchrun's agent has NCCL loaded and has connections, but it has no context and is not a rank.
    ranks = [p for p in found.gpus.with_memory if p.communicates]
    if len(ranks) < 2 and not any(len(p.contexts) > 1 or p.outside for p in ranks):
        return []
    known = found.resident.reports if found.resident is not None else {}
    parked = all(p.pid in known and known[p.pid].version >= nccl.PARKED_SINCE for p in ranks)
    refusals = [refusal for process in ranks for refusal in _unsafe(process, parked)]
    return refusals + [
        Refusal(
            "gpu-nccl",
            f"process {p.pid} has a communicator whose device memory did not come through the preload and would stay mapped",
            "start the job with NCCL_P2P_DISABLE=1 in its environment",
        )
        for p in ranks
        if parked
        and p.passes_descriptors
        and not nccl.without_peers(p.settings)
        and not known[p.pid].counts.handles
    ]


def sharing(found: Inspection) -> list[Refusal]:
    """Refuse shared memory that no window can take away, and memory that processes outside the tree
    share.
    """
    if found.resident is None:
        return []
    refusals = []
    for pid, report in found.resident.reports.items():
        if report.counts.multicast:
            refusals.append(
                Refusal(
                    "gpu-multicast",
                    f"process {pid} has had a multicast object (NVLS), which no window can take away and the driver does not restore",
                    "start the job with NCCL_NVLS_ENABLE=0 (the default of 'icecore run --gpu'); "
                    "PyTorch's symmetric memory requires TORCH_SYMM_MEM_DISABLE_MULTICAST=1",
                )
            )
        if report.counts.unparkable:
            refusals.append(
                Refusal(
                    "gpu-sharing",
                    f"process {pid} has shared host memory of the driver's, or fabric memory, which no window can take away and the driver does not restore",
                    "start the job with NCCL_CUMEM_HOST_ENABLE=0 and NCCL_MNNVL_ENABLE=0 (the default of 'icecore run --gpu')",
                )
            )
    if found.resident.outsiders:
        refusals.append(
            Refusal(
                "gpu-outside",
                f"processes outside the tree have device memory of it: {', '.join(map(str, found.resident.outsiders))}",
                "take the snapshot of the tree that holds all ranks",
            )
        )
    return refusals


def _unsafe(process: GpuProcess, parked: bool) -> Iterator[Refusal]:
    wrong = nccl.lacking(process.settings, parked=parked)
    if wrong:
        yield Refusal(
            "gpu-nccl",
            f"process {process.pid} uses NCCL with {', '.join(one.what for one in wrong)}: the driver can checkpoint that, but not restore it",
            f"start the job with {', '.join(one.cure for one in wrong)} (the default of 'icecore run --gpu')",
        )


def memory(found: Inspection) -> list[Refusal]:
    """Refuse a checkpoint for which the host lacks memory: it moves all device memory there."""
    gpus = found.gpus
    if gpus is None or gpus.most_bytes <= (available := limits.memory_available()):
        return []
    return [
        Refusal(
            "gpu-memory",
            f"{gpus.most_bytes / _GIB:.1f} GiB of device memory will be moved to the host, where {available / _GIB:.1f} GiB are free",
            "free host memory, or have the job use less device memory",
        )
    ]


def _least_window(gpus: GpuInspection, *, helped: bool) -> float:
    slowest = max((p.moved for p in gpus.processes), default=0)
    return sum(slowest / rate for rate in (_HELPED_RATES if helped else _ALONE_RATES))


def predicted_window(found: Inspection) -> float:
    """Return the least seconds in which a window moves and copies memory, if all of it changed.
    `icecore.dumper.preflight.prediction` adds the rest.
    """
    if found.gpus is None:
        return 0.0
    return _least_window(found.gpus, helped=found.options.populate) + (
        found.resident.most_window_seconds if found.resident is not None else 0.0
    )


def window(found: Inspection) -> list[Refusal]:
    """Refuse a window that the driver alone exceeds, by the least time that it takes."""
    if found.gpus is None or found.options.stop:
        return []
    slowest = max((p.moved for p in found.gpus.processes), default=0)
    seconds = _least_window(found.gpus, helped=found.options.populate)
    if seconds <= found.options.max_window:
        return []
    return [
        Refusal(
            "gpu-window",
            f"the driver alone takes at least {seconds:.0f} s to move {slowest / _GIB:.1f} GiB of device memory out and in, longer than the window of "
            f"{found.options.max_window:g} s",
            f"raise --max-window to {2 * seconds:.0f}",
        )
    ]


def nvml(found: Inspection) -> list[Refusal]:
    """Warn of users of NVML: its handles are kernel objects and end with the process."""
    return [
        Refusal(
            "nvml",
            f"process {p.pid} uses NVML: after a restore, its NVML calls fail until it calls nvmlShutdown and nvmlInit again",
            "have it initialise NVML for each reading, or initialise it again after an error",
        )
        for p in (found.gpus.orphans if found.gpus is not None else ())
        if p.nvml
    ]
