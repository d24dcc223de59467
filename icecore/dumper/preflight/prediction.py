"""How long the window of a GPU job will be; its rule: what is said is what was measured, with the
range in which that lay.
"""

from __future__ import annotations

from typing import NamedTuple

from icecore.dumper.observe.gpus import GpuInspection
from icecore.dumper.observe.inspection import Inspection
from icecore.dumper.preflight.checks_gpu import predicted_window
from icecore.events import Value


class Seen(NamedTuple):
    """The least, the usual and the most that was seen of something."""

    least: float
    usual: float
    most: float


#: Seconds of a window beside what is copied, and for each GPU process more. With the driver's part
#: of some 0.65 GB that it keeps of each, that makes the windows of docs/resident.md: 0.5–1.0 s of
#: one process, 1.4–1.7 of two ranks, 3.0–3.6 of four.
FIRST, FURTHER = Seen(0.3, 0.4, 0.7), Seen(0.7, 0.8, 0.9)

#: A context with nothing in it, whatever NVML says that is left of a process beside its resident
#: memory (H100 and H200, driver 580).
CONTEXT_BYTES = 500 << 20

Rates = tuple[float, float]
#: What the driver usually moves out and in, bytes a second and process (docs/gpu.md): by itself,
#: and with its mapping made for it.
USUAL_ALONE: Rates = (2.0e9, 5.0e9)
USUAL_HELPED: Rates = (5.0e9, 7.0e9)
#: The slowest that it was seen to be: by itself, one process and four at once, and with its mapping
#: made for it. The fastest: `icecore.dumper.preflight.checks_gpu`.
SLOWEST_ALONE: Rates = (1.3e9, 3.8e9)
SLOWEST_OF_SEVERAL: Rates = (0.6e9, 3.1e9)
SLOWEST_HELPED: Rates = (2.8e9, 3.0e9)


def predict(found: Inspection) -> dict[str, Value]:
    """What preflight says of device memory: how much stays, how much is moved, and how long the
    window will be on that account if all of what stays changed.

    Returns:
        The fields of ``dump.preflight`` (docs/events.md); none where the tree uses no GPU.
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
    """Seconds, as far as GPUs decide; nothing where there are none."""
    if found.gpus is None:
        return Seen(0.0, 0.0, 0.0)
    some, helped = len(found.gpus.processes), found.options.populate
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
    """Processes at the same time; those that NVML does not know are taken to use as much each."""
    unknown = sum(not process.contexts for process in gpus.processes)
    most = max((max(process.moved, CONTEXT_BYTES) for process in gpus.processes), default=0)
    if unknown:
        most = max(most, gpus.most_bytes // unknown)
    return sum(most / rate for rate in rates)
