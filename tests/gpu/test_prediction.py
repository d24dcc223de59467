"""How long a window is said to be, against the windows that were measured (docs/results)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from icecore.dumper.observe.gpus import GpuInspection, GpuProcess
from icecore.dumper.observe.inspection import Inspection
from icecore.dumper.observe.resident_inspection import ResidentInspection
from icecore.dumper.options import DumpOptions
from icecore.dumper.preflight import checks_gpu, prediction
from icecore.dumper.preflight.prediction import Seen, window_of
from icecore.host.cuda.inventory import Gpu, Inventory
from icecore.host.gpu.backend import Backend
from icecore.host.resident.client import Report, State
from icecore.host.resident.copyplan import NOTHING, Foreseen, foresee, pinned_bytes
from icecore.host.resident.gpu import spare_room
from icecore.host.resident.protocol import Counts

MIB, GIB, GB = 1 << 20, 1 << 30, 10**9
#: What the driver has of each process that uses a GPU, its context among it.
KEPT = 575_000_000


def tree(
    *moved: int, resident: int = 0, copies: Foreseen | None = None, populate: bool = True
) -> Inspection:
    """A tree of which the driver moves so much of each process."""
    processes = [
        GpuProcess(pid, contexts={f"GPU-{pid}": size + resident}, resident=resident)
        for pid, size in enumerate(moved, 1)
    ]
    reports = {
        p.pid: Report(State.RUNNING, b"", Counts(resident_bytes=resident)) for p in processes
    }
    look = (
        ResidentInspection(
            "/r", {p.pid: p.pid for p in processes}, reports, copies=copies or NOTHING
        )
        if resident
        else None
    )
    return Inspection(
        1,
        [],
        [],
        0,
        0,
        0,
        {},
        SimpleNamespace(),
        DumpOptions(populate=populate),
        GpuInspection(Backend("/dev/nvidia"), processes),
        look,
    )  # type: ignore[arg-type]


def holds(predicted: Seen, *measured: float) -> None:
    assert predicted.least < predicted.usual < predicted.most
    for seconds in measured:
        assert predicted.least <= seconds * 1.1 and seconds <= predicted.most * 1.1
    assert predicted.usual == pytest.approx(sum(measured) / len(measured), rel=0.4)


@pytest.mark.parametrize(
    ("ranks", "windows"),
    [(1, [0.35, 0.36, 0.39, 0.41]), (2, [1.4, 1.6, 1.7]), (4, [3.0, 3.4, 3.6])],
)
def test_windows_of_resident_memory(ranks: int, windows: list[float]) -> None:
    """Of which next to nothing changed."""
    holds(window_of(tree(*[KEPT] * ranks, resident=16 * GIB)), *windows)


def test_windows_through_the_driver() -> None:
    holds(window_of(tree(4 * GIB + KEPT)), 2.6)
    holds(window_of(tree(*[4 * GIB + KEPT] * 4)), 5.4)
    holds(window_of(tree(16 * GIB + KEPT)), 5.75, 6.17, 6.62)
    holds(window_of(tree(*[8 * GIB + KEPT] * 2)), 3.63, 3.68, 3.87, 4.27)
    slow, fast = window_of(tree(64 * GIB, populate=False)), window_of(tree(64 * GIB))
    assert slow.usual > fast.usual
    # 2 and 5 GB/s, as the driver alone has.
    assert slow.usual == pytest.approx(prediction.FIRST.usual + 64 * GIB / 2e9 + 64 * GIB / 5e9)
    assert slow.least == pytest.approx(
        prediction.FIRST.least + checks_gpu.predicted_window(tree(64 * GIB, populate=False))
    )


def test_a_first_snapshot_with_and_without_room() -> None:
    """docs/results: 13 of 112 GiB had room on the GPU, 58 in the host's memory."""
    for size, host, windows, left in (
        (64 * GIB, 100 * GIB, [1.08, 1.19], 0),
        (112 * GIB, 116 * GIB, [9.9], 41),
    ):
        sizes = {"GPU-1": size}
        spare = {"GPU-1": spare_room(139 * GIB - size)}
        room = pinned_bytes(
            sizes, spare, wanted=sizes, likely=size, staging=2 * GIB, available=host
        )
        copies = foresee(sizes, spare, room)
        assert sum(copies.device.values()) + sum(copies.host.values()) + copies.left == size
        assert round(copies.left / GIB) == left
        holds(window_of(tree(KEPT, resident=size, copies=copies)), *windows)


def test_little_is_pinned_where_the_gpu_has_ample_room() -> None:
    def pinned(size: int, spare: int, **other: Any) -> int:
        sizes, there = {"a": size, "b": MIB}, {"a": spare, "b": 60 * GIB}
        fixed = {"wanted": sizes, "likely": size, "staging": 2 * GIB, "available": 100 * GIB}
        return pinned_bytes(sizes, there, **(fixed | other))

    assert pinned(20 * GIB, 58 * GIB) == 512 * MIB  # for two GPUs
    assert pinned(20 * GIB, 26 * GIB) == 512 * MIB
    assert pinned(20 * GIB, 25 * GIB) == 1 * GIB
    assert pinned(20 * GIB, 24 * GIB) == 2 * GIB
    assert pinned(20 * GIB, 10 * GIB) == 10 * GIB
    assert pinned(20 * GIB, 58 * GIB, staging=100 * MIB) == 100 * MIB
    assert pinned(100 * MIB, 58 * GIB) == 101 * MIB
    assert pinned(20 * GIB, 58 * GIB, available=400 * MIB) == 100 * MIB

    def of_pool(changes: int, **other: Any) -> int:
        """A pool that was allocated in advance, most of which is at rest."""
        wanted = {"a": changes, "b": 0}
        return pinned(100 * GIB, 17 * GIB, wanted=wanted, likely=changes, **other)

    assert of_pool(14 * GIB) == 2 * GIB  # the job may also allocate more
    assert of_pool(14 * GIB, growing=False) == 512 * MIB
    assert of_pool(16 * GIB, growing=False) == 1 * GIB
    assert of_pool(17 * GIB, growing=False) == 2 * GIB
    assert of_pool(20 * GIB, growing=False) == 3 * GIB


def test_each_gpu_has_its_own_room() -> None:
    copies = foresee({"a": 10 * GIB, "b": 4 * GIB, "c": GIB}, {"a": 2 * GIB, "b": 4 * GIB}, 6 * GIB)
    assert copies.device == {"a": 2 * GIB, "b": 4 * GIB, "c": 0}
    assert sum(copies.host.values()) <= 6 * GIB and copies.left == 9 * GIB - sum(
        copies.host.values()
    )
    assert copies.host["b"] == 0 and 0 < copies.host["c"] < GIB
    assert foresee({}, {}, GIB) == ({}, {}, 0)
    # GPUs copy at the same time, beside the driver; what has no room is stored by all together.
    one = tree(KEPT, resident=GIB, copies=Foreseen({}, {"a": 45 * GB}, 0)).resident
    two = tree(
        KEPT, resident=GIB, copies=Foreseen({"a": 40 * GB}, {"a": 45 * GB, "b": 45 * GB}, 5 * GB)
    ).resident
    assert one is not None and two is not None
    assert (one.most_window_seconds, two.most_window_seconds) == (
        pytest.approx(0.7),
        pytest.approx(1.8),
    )


def test_processes_that_nvml_does_not_know() -> None:
    """In a container all that is used on their GPUs may be theirs."""
    found = tree(0)
    gpus = GpuInspection(
        Backend("/dev/nvidia"),
        [GpuProcess(1, opened=("GPU-1",))],
        Inventory("580.1", (Gpu("GPU-1", "H200", 143 * GB, 0, used=20 * GB),)),
    )
    assert window_of(replace(found, gpus=gpus)).usual > 20 / 5 + 20 / 7
    assert window_of(replace(found, gpus=None)) == (0, 0, 0)
