"""The form of a chunk is the cheapest for the objective, is kept for similar chunks, and is rarely
tried again.
"""

from __future__ import annotations

import pytest

from icecore.sizes import CELL_PAGES, PAGE
from icecore.store.format import codec
from icecore.store.runtime.pool import SAMPLE_BYTES, Scratch
from icecore.store.snapshot.trial import Estimate, Habit, Objective, sample, surprising, trial
from tests.store.images import make_data


def view(kind: str, pages: int = CELL_PAGES, seed: int = 0) -> memoryview:
    return memoryview(make_data(kind, pages, seed))


@pytest.mark.parametrize("link", [0.05e9, 0.7e9, 20e9])
def test_incompressible_bytes_stay_raw(link: float) -> None:
    assert trial(sample(view("random")), Scratch(), Objective(link)).choice.codec == codec.RAW


def test_a_slow_link_wants_fewer_bytes() -> None:
    slow, fast = (
        trial(sample(view("float32")), Scratch(), Objective(link, 2)) for link in (0.005e9, 20e9)
    )
    assert slow.ratio < 0.95
    assert fast.choice.codec == codec.RAW


def test_weights_are_shuffled() -> None:
    estimate = trial(sample(view("bfloat16")), Scratch(), Objective(0.02e9, 2))
    assert codec.name(estimate.choice.codec).startswith(("shuffle", "bitshuffle"))
    assert estimate.ratio < 0.8


@pytest.mark.parametrize("kind", ["heap", "text", "zero"])
def test_the_estimate_is_near_the_truth(kind: str) -> None:
    data = view(kind)
    estimate = trial(sample(data), Scratch(), Objective(0.1e9, 2))
    _, parts = codec.encode(data, estimate.choice)
    assert estimate.ratio < 0.6
    assert not surprising(estimate, len(data), sum(len(part) for part in parts))


def test_samples() -> None:
    assert len(sample(view("heap"))) == SAMPLE_BYTES
    for pages in (1, 15, 16):
        data = view("heap", pages)
        assert sample(data) is data
    pages = memoryview(b"".join(bytes([page]) * PAGE for page in range(CELL_PAGES)))
    chosen = [sample(pages)[at] for at in range(0, SAMPLE_BYTES, PAGE)]
    assert chosen[:2] == [0, 1]
    assert chosen[-2:] == [254, 255]


class Trials:
    """Counts trials; each takes no time and gives the same answer."""

    def __init__(self, number: int) -> None:
        self.count = 0
        self.number = number

    def __call__(self, scratch: Scratch) -> Estimate:
        self.count += 1
        return Estimate(codec.Choice(self.number), 0.5, 1.0)


def test_a_choice_is_kept_for_alike_chunks_and_tried_again_ever_later() -> None:
    habit, scratch, trials = Habit(), Scratch(), Trials(codec.LZ4)
    seen = []
    for _ in range(600):
        habit.choose(1, view("heap", 16), scratch, trials)
        seen.append(trials.count)
    assert seen[0] == 1
    assert seen[8:10] == [1, 2]
    assert 5 <= seen[-1] <= 10


def test_other_data_and_other_regions_get_their_own_trial() -> None:
    habit, scratch, trials = Habit(), Scratch(), Trials(codec.LZ4)
    for region, kind in ((1, "heap"), (1, "random"), (2, "heap"), (2, "random"), (1, "heap")):
        habit.choose(region, view(kind, 16), scratch, trials)
    assert trials.count == 4


def test_a_surprise_brings_the_next_trial_forward() -> None:
    habit, scratch, trials = Habit(), Scratch(), Trials(codec.LZ4)
    for _ in range(3):
        estimate = habit.choose(1, view("heap", 16), scratch, trials)
    assert trials.count == 1
    assert surprising(estimate, 100, 90)
    habit.surprised(1)
    habit.choose(1, view("heap", 16), scratch, trials)
    assert trials.count == 2


def test_trials_take_a_small_share_however_many_regions_there_are() -> None:
    """20 000 regions of a page each: after the first few, similar ones elsewhere in the stream
    decide.
    """
    habit, scratch, objective = Habit(), Scratch(), Objective()
    count = 0

    def measure(scratch: Scratch) -> Estimate:
        nonlocal count
        count += 1
        return trial(data, scratch, objective)

    data = view("heap", 1)
    for region in range(2000):
        habit.choose(region, data, scratch, measure)
    assert count < 1000
