"""Changes in a tree's use of GPUs between its inspection and the window. Programs start at any
moment: torch.compile, say, starts a process some seconds after the job that initialises CUDA.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress

from icecore.dumper.observe.gpus import GpuInspection
from icecore.dumper.preflight.orphans import has_device_files
from icecore.errors import DumpFailed, IcecoreError, NotFound
from icecore.host.cuda.api import State
from icecore.host.cuda.threads import has_drivers_threads
from icecore.host.kernel import procfs

_AGAIN = "dump it again"


class GpusChanged(DumpFailed):
    """The tree's use of GPUs changed after the inspection. Another dump may succeed."""


def require_still_orphans(inspection: GpuInspection, states: Mapping[int, State]) -> None:
    """Require that the driver knows no CUDA state of orphans.

    Args:
        states: The driver's state for each process of the inspection.

    Raises:
        GpusChanged: It knows one.
    """
    for one in inspection.orphans:
        if states[one.pid] is not State.NOT_CUDA:
            raise GpusChanged(
                f"process {one.pid} has started to use CUDA since the check, or this driver version names its threads in a way that icecore does not know",
                cure=f"{_AGAIN}; if that does not help, report it with the driver's version",
            )


def require_no_others(root: int, inspection: GpuInspection, cuda: Collection[int]) -> None:
    """Require that only processes that the dump checkpoints have CUDA state. The answer is final
    only once the tree is stopped.

    Args:
        root: Host pid of the tree's root.
        inspection: What was read before the window.
        cuda: The processes that the dump checkpoints.

    Raises:
        GpusChanged: Another process may have CUDA state.
    """
    asked = {one.pid for one in (*inspection.processes, *inspection.orphans)}
    named = any(one.threads for one in inspection.processes)
    for pid in procfs.tree(root):
        if pid in cuda:
            continue
        with suppress(NotFound, FileNotFoundError, ProcessLookupError):  # it has ended
            # If the driver names its threads differently, they tell nothing about a process whose
            # state the driver was not asked for.
            if has_drivers_threads(pid) or (
                not named and pid not in asked and has_device_files(pid, inspection.backend)
            ):
                raise GpusChanged(
                    f"process {pid} has started to use CUDA since the dump began", cure=_AGAIN
                )


def require_no_more_contexts(inspection: GpuInspection) -> None:
    """Require that the processes without a context still have none: with one, a process may share
    memory with another.

    Raises:
        GpusChanged: One has a context now.
        DumpFailed: NVML does not say.
    """
    none = [one.pid for one in inspection.without_context]
    try:
        found = inspection.backend.inventory(none).contexts if none else {}
    except IcecoreError as error:
        raise DumpFailed(error.message, cure=error.cure) from error
    for pid in none:
        if found.get(pid):
            raise GpusChanged(
                f"process {pid} has started to use a GPU since the dump began", cure=_AGAIN
            )
