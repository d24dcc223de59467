"""The inspection of a tree's GPU processes before a dump: which processes have the driver's devices
open, and what for. Reads /proc and NVML, and asks no process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from icecore.dumper.observe.sockets import Socket, connected_outside
from icecore.errors import MissingTool, NotFound
from icecore.host.cuda import nccl
from icecore.host.cuda.inventory import Inventory
from icecore.host.cuda.threads import has_drivers_threads
from icecore.host.gpu.backend import Backend
from icecore.host.kernel import procfs

#: Device memory that the driver maps for itself through nvidia-uvm lies below this address; managed
#: memory lies above.
_DRIVERS_OWN = 1 << 36
_IPC = "/dev/shm/cuda.shm."
#: Parts of the paths of libraries.
_CUDA_LIBRARY, NVML_LIBRARY = "/libcuda.so.", "/libnvidia-ml.so."


class GpuProcess(msgspec.Struct, frozen=True):
    """A process that has device files of the driver open or mapped.

    Attributes:
        opened: UUIDs of the GPUs whose device files it has: all that CUDA may see, used or not.
        contexts: UUIDs of the GPUs on which it has a context, as far as NVML knows → bytes that it
            uses there.
        settings: The ``NCCL_…`` variables that it was started with.
        communicates: NCCL is loaded and there are TCP sockets, as for every NCCL communicator.
        outside: It communicates, and one of these sockets is connected to a process of this machine
            outside the tree.
        passes_descriptors: One of its NCCL communicators shares device memory through cuMem.
        managed: Bytes of managed memory (UVM) that it has mapped.
        ipc: It shares memory or events through CUDA's legacy IPC.
        mps: It reaches its GPU through MPS.
        resident: Bytes of device memory that a window does not move
            (`icecore.dumper.observe.resident_inspection`).
        threads: The driver has threads in it, as in every process with CUDA state.
        nvml: It has loaded NVML but not CUDA.
    """

    pid: int
    opened: tuple[str, ...] = ()
    contexts: Mapping[str, int] = msgspec.field(default_factory=dict)
    settings: Mapping[str, str] = msgspec.field(default_factory=dict)
    communicates: bool = False
    outside: bool = False
    passes_descriptors: bool = False
    managed: int = 0
    ipc: bool = False
    mps: bool = False
    resident: int = 0
    threads: bool = True
    nvml: bool = False

    @property
    def moved(self) -> int:
        """Bytes that the driver moves in a window, as far as NVML knows the process's use."""
        return max(0, sum(self.contexts.values()) - self.resident)


class GpuInspection(msgspec.Struct, frozen=True):
    """The processes of a tree that have device files of the driver.

    Attributes:
        processes: Those with CUDA state.
        inventory: The machine's inventory; None: it cannot be read.
        problem: Why not, and the cure.
        orphans: Those without CUDA state: children that were forked from a CUDA process, and
            processes that use only NVML.
    """

    backend: Backend
    processes: Sequence[GpuProcess]
    inventory: Inventory | None = None
    problem: tuple[str, str] = ("", "")
    orphans: Sequence[GpuProcess] = ()

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that the tree uses according to NVML and that a window moves."""
        return sum(p.moved for p in self.processes)

    @property
    def without_context(self) -> Sequence[GpuProcess]:
        """Processes that have initialised CUDA but have no context on any GPU, and so no device
        memory, such as the process that starts the compilers of torch.compile. Empty if NVML knows
        no process of the tree (in another pid namespace).
        """
        if not any(p.contexts for p in self.processes):
            return []
        return [p for p in self.processes if not p.contexts]

    @property
    def with_memory(self) -> Sequence[GpuProcess]:
        """Processes that may have device memory: all but `without_context`."""
        none = self.without_context
        return [p for p in self.processes if p not in none]

    @property
    def most_bytes(self) -> int:
        """The upper bound of `device_bytes`: for processes that NVML does not know (in another pid
        namespace), count everything that is used on their GPUs.
        """
        unknown = {uuid for p in self.with_memory if not p.contexts for uuid in p.opened}
        used = {gpu.uuid: gpu.used for gpu in self.inventory.gpus} if self.inventory else {}
        resident = sum(p.resident for p in self.processes if not p.contexts)
        return max(self.device_bytes, sum(used.get(uuid, 0) for uuid in unknown) - resident)


def inspect_gpus(
    backend: Backend,
    processes: Sequence[
        tuple[int, Sequence[procfs.Mapping], Sequence[procfs.Descriptor], Sequence[Socket]]
    ],
) -> GpuInspection | None:
    """Find the processes that have device files of the driver; return None if there are none.

    Args:
        processes: Pid, mappings, descriptors and sockets of each process.
    """
    nodes = {
        pid: {d.target for d in descriptors if backend.is_device(d.target)}
        | {m.path for m in mappings if backend.is_device(m.path)}
        for pid, mappings, descriptors, _ in processes
    }
    if not any(nodes.values()):
        return None
    problem, inventory = ("", ""), None
    try:
        inventory = backend.inventory([pid for pid, found in nodes.items() if found])
    except MissingTool as error:
        problem = (error.message, error.cure)
    found = []
    inodes = {s.inode for *_, sockets in processes for s in sockets}
    for pid, mappings, descriptors, sockets in processes:
        if not nodes[pid]:
            continue
        own = {s.inode for s in sockets if s.protocol in ("TCP", "TCPv6")}
        communicates = bool(own) and any(nccl.is_library(m.path) for m in mappings)
        minors = sorted(
            {minor for path in nodes[pid] if (minor := backend.minor(path)) is not None}
        )
        gpus = [inventory.by_minor(minor) for minor in minors] if inventory else []
        settings: dict[str, str] = {}
        with suppress(NotFound):
            settings = nccl.settings_of(pid)
        found.append(
            GpuProcess(
                pid,
                opened=tuple(gpu.uuid for gpu in gpus if gpu is not None),
                contexts=inventory.contexts.get(pid, {}) if inventory else {},
                settings=settings,
                communicates=communicates,
                outside=communicates and connected_outside(pid, own, inodes),
                passes_descriptors=nccl.passes_descriptors(
                    pid, {s.inode for s in sockets if s.unix}
                ),
                managed=sum(m.length for m in mappings if _is_managed(m, backend)),
                ipc=any(m.path.startswith(_IPC) for m in mappings)
                or any(d.target.startswith(_IPC) for d in descriptors),
                mps=inventory is not None and pid in inventory.mps,
                threads=_has_threads(pid),
                nvml=_maps(mappings, NVML_LIBRARY) and not _maps(mappings, _CUDA_LIBRARY),
            )
        )
    # If a driver names its threads differently, no process seems to have any. Then all may have CUDA
    # state until the driver is asked.
    known = any(one.threads for one in found)
    orphans = [
        one for one in found if not one.contexts and (one.nvml or (known and not one.threads))
    ]
    return GpuInspection(
        backend, [one for one in found if one not in orphans], inventory, problem, orphans
    )


def _has_threads(pid: int) -> bool:
    with suppress(NotFound):
        return has_drivers_threads(pid)
    return False


def _maps(mappings: Sequence[procfs.Mapping], library: str) -> bool:
    return any(library in m.path for m in mappings)


def _is_managed(mapping: procfs.Mapping, backend: Backend) -> bool:
    """Return whether nvidia-uvm maps managed memory here, at an offset equal to its address. The
    driver maps its own memory so too, but at low addresses.
    """
    return (
        mapping.path == f"{backend.devices}-uvm" and mapping.offset == mapping.start >= _DRIVERS_OWN
    )
