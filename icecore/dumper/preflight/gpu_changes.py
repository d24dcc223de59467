"""Changes in a tree's use of GPUs between its inspection and the window. Programs may start at
any moment: torch.compile, for example, starts a process that initialises CUDA some seconds after the
job has started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress

from icecore.dumper.observe.gpus import GpuInspection
from icecore.dumper.preflight.orphans import has_device_files
from icecore.errors import DumpFailed, IcecoreError, NotFound
from icecore.host.cuda.api import State
from icecore.host.cuda.threads import has_drivers_threads
from icecore.host.kernel import procfs

_AGAIN = "dump it again"
#: For how long a process that has started to use CUDA is given to end, and how often to look. A run
#: of nvidia-smi takes about a second: since driver 580, NVML initialises CUDA.
_BRIEF_SECONDS, _LOOK_SECONDS = 3.0, 0.02


class GpusChanged(DumpFailed):
    """The tree's use of GPUs changed after the inspection. Another dump may succeed.

    Attributes:
        unclear: The driver reports a state for a process in which it has no threads: most often the
            process is ending.
    """

    unclear = False


def require_still_orphans(inspection: GpuInspection, states: dict[int, State]) -> None:
    """Require that no orphan has started to use CUDA.

    Args:
        states: The driver's state for each process of the inspection. Corrected for those that have
            ended meanwhile.

    Raises:
        GpusChanged: The driver reports a state for one.
    """
    for one in inspection.orphans:
        if states[one.pid] is State.NOT_CUDA:
            continue
        changed = GpusChanged(
            f"process {one.pid} has started to use CUDA since the dump began", cure=_AGAIN
        )
        with suppress(NotFound):
            if has_drivers_threads(one.pid):
                raise changed
        if not procfs.is_over(one.pid):
            changed.unclear = True
            raise changed
        states[one.pid] = State.NOT_CUDA


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
        with suppress(NotFound), procfs.looking_at(pid):  # it may have ended
            # If the driver names its threads differently, they tell nothing about a process whose
            # state the driver was not asked for.
            if has_drivers_threads(pid) or (
                not named and pid not in asked and has_device_files(pid, inspection.backend)
            ):
                raise GpusChanged(
                    f"process {pid} has started to use CUDA since the dump began", cure=_AGAIN
                )


def patiently(check: Callable[[], None]) -> None:
    """Call ``check``, which raises `GpusChanged` if another process uses CUDA, until it passes: give
    such a process a moment to end. The tree runs.

    Raises:
        GpusChanged: It has not ended.
    """
    until = time.monotonic() + _BRIEF_SECONDS
    while True:
        try:
            check()
            return
        except GpusChanged:
            if time.monotonic() > until:
                raise
        time.sleep(_LOOK_SECONDS)


def ended(inspection: GpuInspection) -> set[int]:
    """Return the processes without a context that have ended. They leave nothing to checkpoint."""
    return {one.pid for one in inspection.without_context if procfs.is_over(one.pid)}


def require_no_more_contexts(inspection: GpuInspection) -> None:
    """Require that the processes without a context still have none: with one, a process may share
    memory with another.

    Raises:
        GpusChanged: One has a context now.
        DumpFailed: NVML cannot be queried.
    """
    pids = [one.pid for one in inspection.without_context]
    try:
        found = inspection.backend.inventory(pids).contexts if pids else {}
    except IcecoreError as error:
        raise DumpFailed(error.message, cure=error.cure) from error
    for pid in pids:
        if found.get(pid):
            raise GpusChanged(
                f"process {pid} has started to use a GPU since the dump began", cure=_AGAIN
            )
