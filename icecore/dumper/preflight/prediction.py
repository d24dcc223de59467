"""Predict the window of a GPU job from measured times and rates, with the range in which they lay."""

from __future__ import annotations

from typing import NamedTuple

from icecore.dumper.observe.gpus import GpuInspection
from icecore.dumper.observe.inspection import Inspection
from icecore.dumper.preflight.checks_gpu import predicted_window
from icecore.events import Value


class Seen(NamedTuple):
    """The least, the usual and the most that was measured."""

    least: float
    usual: float
    most: float


#: Seconds of a window apart from copying, for the first GPU process and for each further one. With
#: the driver's time for what it keeps of each process (about 0.6 GB), they add up to the windows in
#: docs/results: 0.28–0.9 s for one process, 1.4–1.7 s for two ranks, 3.0–3.6 s for four.
FIRST, FURTHER = Seen(0.15, 0.25, 0.7), Seen(0.7, 0.95, 1.1)

#: The least that the driver moves of a process, an empty context, whatever NVML reports beside
#: resident memory (H100 and H200, driver 580).
CONTEXT_BYTES = 500 << 20

Rates = tuple[float, float]
#: The usual rates at which the driver moves memory out and in, bytes a second and process
#: (docs/how-to/gpu-jobs.md): by itself, and with its mapping made for it.
USUAL_ALONE: Rates = (2.0e9, 5.0e9)
USUAL_HELPED: Rates = (5.0e9, 7.0e9)
#: The lowest rates that were seen: by itself for one process and for four at once, and with its
#: mapping made for it. The highest are in `icecore.dumper.preflight.checks_gpu`.
SLOWEST_ALONE: Rates = (1.3e9, 3.8e9)
SLOWEST_OF_SEVERAL: Rates = (0.6e9, 3.1e9)
SLOWEST_HELPED: Rates = (2.8e9, 3.0e9)


def predict(found: Inspection) -> dict[str, Value]:
    """Predict how much device memory stays, how much is moved, and how long the window takes for it
    if all that stays has changed.

    Returns:
        The fields of ``dump.preflight`` (docs/reference/events.md); empty if the tree uses no GPU.
    """
    gpus, resident = found.gpus, found.resident
    if gpus is None:
        return {}
    seconds = window_of(found)
    fields: dict[str, Value] = {
        "moved_bytes": gpus.most_bytes,
        "window_seconds": seconds.usual,
        "window_least": seconds.least,
        "window_most": seconds.most,
    }
    if resident is not None:
        fields |= {
            "resident_bytes": resident.bytes,
            "no_room": resident.copies.left,
            "left": dict(resident.left),
        }
    return fields


def window_of(found: Inspection) -> Seen:
    """Return the seconds of the window that GPUs account for; zeros without GPUs."""
    if found.gpus is None:
        return Seen(0.0, 0.0, 0.0)
    some = len(found.gpus.with_memory)
    helped = found.options.populate
    slowest = SLOWEST_HELPED if helped else SLOWEST_ALONE if some == 1 else SLOWEST_OF_SEVERAL
    copies = found.resident.most_window_seconds if found.resident is not None else 0.0
    least, usual, most = (
        first + (some - 1) * further for first, further in zip(FIRST, FURTHER, strict=True)
    )
    return Seen(
        least + predicted_window(found),
        usual + _driver_seconds(found.gpus, USUAL_HELPED if helped else USUAL_ALONE) + copies,
        most + _driver_seconds(found.gpus, slowest) + copies,
    )


def _driver_seconds(gpus: GpuInspection, rates: Rates) -> float:
    """Return the driver's seconds for all processes at once. Processes that NVML does not know count
    as using equal shares.
    """
    unknown = sum(not process.contexts for process in gpus.with_memory)
    most = max((max(process.moved, CONTEXT_BYTES) for process in gpus.with_memory), default=0)
    if unknown:
        most = max(most, gpus.most_bytes // unknown)
    return sum(most / rate for rate in rates)
