"""Texts for people about events and figures that tests cannot produce."""

from __future__ import annotations

import json

import pytest

from icecore.commands.event_text import describe, left_words
from icecore.events import Event
from icecore.host.resident.protocol import Counts
from icecore.store.format.contract import RESIDENT, left_to_driver
from icecore.store.format.manifest import Space
from tests.recorded import manifest_with

MIB = 1 << 20


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (Counts(resident=3, resident_bytes=9 * MIB, allocations=12), ""),
        (
            Counts(small=2, small_bytes=5 * MIB, pool=1, pool_bytes=40 * MIB),
            "45.0 MiB with the driver: 40.0 MiB in pools, 5.0 MiB in small allocations",
        ),
        (
            Counts(managed_bytes=MIB, foreign_bytes=2 * MIB),
            "3.0 MiB with the driver: 1.0 MiB of managed memory, 2.0 MiB of other kinds",
        ),
        (Counts(captured=3, ipc_exports=2), "3 allocated in stream captures; 2 shared by CUDA IPC"),
    ],
)
def test_what_is_left_to_the_driver(counts: Counts, words: str) -> None:
    assert left_words(counts.left) == words
    assert all(counts.left.values()), "zeros are left out"


def test_what_snapshots_say_of_it() -> None:
    """The record is informative only, so invalid content is ignored."""

    def left(text: str | None, *images: str) -> dict[str, int]:
        return left_to_driver(
            manifest_with(
                {} if text is None else {RESIDENT: text},
                spaces=[Space("device", image, 0, []) for image in images],
            )
        )

    def record(*processes: dict[str, object]) -> str:
        known = {"token": "0" * 32, "allocations": []}
        every = {str(image): {**known, **own} for image, own in enumerate(processes, 1)}
        return json.dumps({"directory": "/d", "processes": every})

    both = record({"left": {"small_bytes": 2}}, {"left": {"small_bytes": 3, "captured": 1}})
    assert left(both, "1", "2") == {"small_bytes": 5, "captured": 1}
    older = record({})
    assert (
        left(None)
        == left(older, "1")
        == left("[]")
        == left("{")
        == left(record({"left": [1]}), "1")
        == {}
    )


def test_a_window_without_room() -> None:
    looked = {
        "state": "end",
        "seconds": 0.02,
        "moved_bytes": 650 * MIB,
        "window_seconds": 9.9,
        "window_least": 9.0,
        "window_most": 10.5,
    }
    first, *others = describe(Event("dump.preflight", dict(looked)))
    assert [first.split("  ", 2)[2], *others] == [
        "device memory: 650 MiB will be moved",
        "  a window of about 9.90 s (9.00 s to 10.50 s)",
    ]
    resident = {"resident_bytes": 112 << 30, "no_room": 41 << 30, "left": {"pool_bytes": MIB}}
    first, *others = describe(Event("dump.preflight", {**looked, **resident}))
    assert [first.split("  ", 2)[2], *others] == [
        "device memory: 112 GiB stay on GPUs, 650 MiB will be moved",
        "  a window of about 9.90 s (9.00 s to 10.50 s), if all resident memory has changed; 41.0 GiB have no room for a copy on the GPU",
        "  1.0 MiB with the driver: 1.0 MiB in pools",
    ]
    predicted = {"window_seconds": 0.6, "window_least": 0.5, "window_most": 0.9, "no_room": 0}
    assert describe(Event("dump.predicted", dict(predicted))) == [
        "a window of about 600.0 ms (500.0 ms to 900.0 ms), by what changed in device memory so far"
    ]
    [line] = describe(Event("dump.predicted", {**predicted, "no_room": 2 << 30}))
    assert line.endswith("so far; 2.0 GiB have no room for a copy on the GPU")
