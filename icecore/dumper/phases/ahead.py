"""The part of the prepare phase that uses the processor: scan and store the running job's memory, and
fault in memory for the window, within the bound on CPU time.
"""

from __future__ import annotations

from collections.abc import Sequence

from icecore.config.kinds import LEAST_CPU_SHARE
from icecore.dumper.memory.background import in_background
from icecore.dumper.memory.budget import CpuBudget
from icecore.dumper.memory.precopy import PreCopied
from icecore.dumper.memory.precopy import pre_copy as pre_copy_process
from icecore.dumper.memory.shared import SharedMemory
from icecore.dumper.observe.inspection import Inspection
from icecore.dumper.options import DumpOptions
from icecore.dumper.phases.request import Request
from icecore.dumper.storing import Storing
from icecore.events import phase
from icecore.host.kernel import cpu

#: Bytes of staging before the window: while the job runs, waiting for it does no harm.
PRE_COPY_STAGING = 128 << 20
_PRE_COPY_BYTES = 256 << 20
#: Share of the private memory to prefault as staging when the parent does not tell how much
#: changes.
_GUESS = 0.125
#: Least share of the cores for the work in the background, even if none is idle.
_LEAST_CPU = 0.125


def look_ahead(
    options: DumpOptions,
    found: Inspection,
    shared: Sequence[SharedMemory],
    budget: CpuBudget,
) -> cpu.Activity | None:
    """Measure what runs, and bound the CPU time of background work from now on. There is no bound
    if the dump is asked to end the job, because the machine may soon be gone, too.

    Returns:
        What runs; None: not measured, because there is too little memory for pre-copy.
    """
    if options.background_cpu:
        budget.bound(max(options.background_cpu, LEAST_CPU_SHARE) * cpu.usable_cores())
    if not _is_much(options, found, shared):
        return None
    activity = cpu.look_at([process.pid for process in found.processes])
    if not options.background_cpu:
        budget.bound(max(activity.idle, _LEAST_CPU * cpu.usable_cores()))
    return activity


def _is_much(options: DumpOptions, found: Inspection, shared: Sequence[SharedMemory]) -> bool:
    size = found.private_bytes + sum(memory.used for memory in shared)
    return options.pre_copy == "on" or size >= _PRE_COPY_BYTES


def pre_copy(
    request: Request,
    found: Inspection,
    storing: Storing,
    shared: Sequence[SharedMemory],
    activity: cpu.Activity | None,
) -> dict[int, PreCopied]:
    """Pre-copy every process that is large enough, and shared memory.

    Returns:
        What was learnt, by pid in the tree's own namespace (the image id).
    """
    if activity is None or request.options.pre_copy == "off":
        return {}
    out = {}
    parent, context = storing.parent, storing.context
    size = found.private_bytes + sum(memory.used for memory in shared)
    with (
        phase(request.emit, "dump.precopy") as running,
        context.staging.limited(PRE_COPY_STAGING),
    ):
        advance = running.counter(size)
        for number, process in enumerate(found.processes):
            if process.status.zombie or process.private_bytes < (1 << 20):
                continue
            image = process.status.own_pid
            before = parent.space("process", str(image)) if parent else None
            learnt = pre_copy_process(
                process.pid,
                number % context.streams,
                before,
                context,
                busy=process.pid in activity.busy,
                advance=advance,
            )
            if learnt is not None:
                out[image] = learnt
                running.bytes += learnt.scanned
        busy = bool(activity.busy)
        learned = [*out.values()]
        for memory in shared:
            memory.pre_copy(len(found.processes), parent, context, advance, busy)
            running.bytes += sum(c.scanned for c in memory.copied.values())
            learned += memory.copied.values()
        running.fields |= {
            "changed": sum(c.changed for c in learned),
            "stored": sum(c.stored for c in learned),
            "cores": context.budget.cores,
        }
    return out


def reserve(
    found: Inspection, storing: Storing, copied: Sequence[PreCopied], shared: int, threads: int
) -> None:
    """Prefault as much staging as the window will probably fill, judged by what changed since the
    parent. Without pre-copy nothing is known, so all memory that is read in place counts.

    Args:
        shared: Bytes of shared memory that is read in place.
    """
    if copied and storing.parent_id:
        guess = sum(c.changed for c in copied)
    elif copied:
        left = sum(c.left for c in copied)
        guess = left + int(max(0, found.private_bytes + shared - left) * _GUESS)
    else:
        guess = found.private_bytes + shared
    if found.gpus is not None:
        # Pre-copy does not see device memory: assume that as much changes as did in the parent.
        parent = storing.parent
        guess += min(
            found.gpus.most_bytes,
            parent.manifest.sizes.changed if parent else found.gpus.most_bytes,
        )
    staging = storing.staging
    slots = min(staging.capacity, guess // (1 << 20) + 3 * threads)
    in_background(lambda: staging.reserve(slots, storing.budget.pause), storing.stop)
