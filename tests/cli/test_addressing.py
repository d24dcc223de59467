"""Names of snapshots: which snapshot each one means."""

from __future__ import annotations

import pytest

from icecore.errors import NotFound, UsageError
from icecore.snapshots.addressing import resolve, shortest
from icecore.store.format.state import SnapshotRecord


def record(identity: str, job: str) -> SnapshotRecord:
    """Return a snapshot's record; ``identity`` is padded with zeros."""
    return SnapshotRecord(
        identity.ljust(32, "0"), job, "lineage", "", 0, "snapshots/x", 1, bytes(32)
    )


RECORDS = [
    record("aa01", "train"),
    record("aa02", "serve"),
    record("ab03", "train"),
    record("ab04", "train"),
    record("cc05", "beef"),
    record("beef", "odd@2"),
    record("dd07", "odd"),
]


@pytest.mark.parametrize(
    ("text", "identity"),
    [
        ("aa01" + "0" * 28, "aa01"),
        ("aa01", "aa01"),
        ("c", "cc05"),
        ("train", "ab04"),
        ("train~0", "ab04"),
        ("train~1", "ab03"),
        ("train~2", "aa01"),
        ("train@1", "aa01"),
        ("train@3", "ab04"),
        ("latest", "dd07"),
        ("latest~1", "beef"),
        ("latest@2", "aa02"),
        ("beef", "cc05"),  # a job's name takes precedence over the beginning of an id
        ("beef0", "beef"),
        ("odd@2", "beef"),  # a whole job name takes precedence over its parts
        ("odd@1", "dd07"),
    ],
)
def test_words(text: str, identity: str) -> None:
    assert resolve(RECORDS, text).snapshot == identity.ljust(32, "0")


@pytest.mark.parametrize(
    "text",
    ["nobody", "train~3", "train@0", "train@4", "ff", "latest~7", "AA01", "aa01~1", "~1", "0" * 33],
)
def test_what_does_not_exist(text: str) -> None:
    with pytest.raises(NotFound):
        resolve(RECORDS, text)


def test_ambiguous_beginnings_say_how_many_digits_are_needed() -> None:
    with pytest.raises(UsageError, match=r"2 snapshots begin with 'aa'.*give 4 digits"):
        resolve(RECORDS, "aa")
    with pytest.raises(UsageError):
        resolve(RECORDS, "")


def test_nothing_is_there() -> None:
    with pytest.raises(NotFound):
        resolve([], "latest")


def test_shortest() -> None:
    assert shortest(RECORDS) == 8
    assert shortest(RECORDS, least=1) == 4
    assert shortest([]) == 8
