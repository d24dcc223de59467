"""Working sets: the latest observation of a snapshot, else of its lineage; never an error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from icecore.restorer import workingset
from icecore.store.format.names import HINTS
from tests.restorer.places import Place, repository_place

LINEAGE = "ab" * 16


@pytest.fixture
def place() -> Iterator[Place]:
    with repository_place() as it:
        yield it


def remember(place: Place, snapshot: str, *cells: tuple[int, int]) -> str:
    return place.run(workingset.remember(place.repository, LINEAGE, snapshot, cells))


def recall(place: Place, snapshot: str, lineage: str = LINEAGE) -> list[tuple[int, int]]:
    return place.run(workingset.recall(place.repository, lineage, snapshot))


def test_what_was_observed_of_a_snapshot_counts_before_what_was_of_others(place: Place) -> None:
    assert recall(place, "one") == []
    remember(place, "one", (1, 4096), (2, 8192))
    remember(place, "two", (3, 4096))
    assert recall(place, "one") == [(1, 4096), (2, 8192)]
    assert recall(place, "two") == [(3, 4096)]
    assert recall(place, "three") == [(3, 4096)], "the latest of the lineage"
    remember(place, "one", (9, 0))
    assert recall(place, "one") == [(9, 0)]
    assert recall(place, "one", "cd" * 16) == []


def test_old_ones_go(place: Place) -> None:
    for number in range(8):
        remember(place, f"s{number}", (number, 0))

    async def names() -> list[str]:
        return [info.name async for info in place.repository.backend.list(HINTS)]

    assert len(place.run(names())) == 3
    assert recall(place, "s7") == [(7, 0)]


def test_a_damaged_one_is_done_without(place: Place) -> None:
    name = remember(place, "one", (1, 4096))
    path = place.root / name
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert recall(place, "one") == []
