"""Retention policies: what they keep and why, group by group."""

from __future__ import annotations

import datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icecore.errors import UsageError
from icecore.store.format.state import SnapshotRecord
from icecore.store.maintenance.forget import ALL, Decision, Policy, plan

HOUR = 3600 * 10**9
START = int(datetime.datetime(2025, 1, 31, 12, tzinfo=datetime.UTC).timestamp()) * 10**9


def record(
    number: int, at: int, job: str = "job", tags: tuple[str, ...] = (), pinned: bool = False
) -> SnapshotRecord:
    return SnapshotRecord(
        f"{number:032x}",
        job,
        "l",
        "",
        at,
        "snapshots/x",
        1,
        bytes(32),
        tags=list(tags),
        pinned=pinned,
    )


def kept(decisions: list[Decision]) -> list[int]:
    return [int(decision.record.snapshot, 16) for decision in decisions if decision.keep]


def test_last_counts_from_the_newest_in_each_group() -> None:
    records = [
        record(number, START + number * HOUR, job=f"job{number % 2}") for number in range(10)
    ]
    assert kept(plan(records, Policy(last=2))) == [6, 8, 7, 9]
    assert kept(plan(records, Policy(last=2), by=lambda record: "")) == [8, 9]
    assert kept(plan(records, Policy(last=ALL))) == [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]


def test_periods_keep_the_newest_of_each() -> None:
    records = [
        record(number, START - number * 6 * HOUR) for number in range(40)
    ]  # 4 a day for 10 days, the newest is 0
    decisions = plan(records, Policy(daily=3))
    assert kept(decisions) == [
        7,
        3,
        0,
    ]  # 30 January 18:00, 29 January 18:00 … counted back from 31 January 12:00
    assert {reason for decision in decisions for reason in decision.reasons} == {"daily"}
    assert kept(plan(records, Policy(monthly=ALL))) == [0]
    assert kept(plan(records, Policy(weekly=2))) == [19, 0]
    assert kept(plan(records, Policy(yearly=5, last=1))) == [0]
    by_hour = [record(number, START + number * HOUR // 4) for number in range(12)]
    assert kept(plan(by_hour, Policy(hourly=2))) == [7, 11]


def test_what_lost_data_counts_for_nothing_and_stays() -> None:
    records = [record(number, START + number * HOUR) for number in range(4)]
    records[3] = msgspec.structs.replace(records[3], quarantined="3 of its chunks are lost")
    decisions = plan(records, Policy(last=2, within_seconds=3600))
    assert kept(decisions) == [1, 2, 3] and decisions[3].reasons == ["quarantined"]


def test_within_counts_from_the_newest_snapshot_not_from_now() -> None:
    records = [record(number, START + number * HOUR) for number in range(10)]
    assert kept(plan(records, Policy(within_seconds=2 * 3600))) == [7, 8, 9]


def test_tags_and_pins_keep() -> None:
    records = [
        record(0, START, tags=("gold",)),
        record(1, START + 1, pinned=True),
        record(2, START + 2),
        record(3, START + 3),
    ]
    decisions = plan(records, Policy(last=1, tags=frozenset({"gold", "other"})))
    assert [decision.reasons for decision in decisions] == [["tag gold"], ["pinned"], [], ["last"]]


def test_an_empty_or_negative_policy_is_refused() -> None:
    with pytest.raises(UsageError):
        plan([], Policy())
    with pytest.raises(UsageError):
        Policy(daily=-2)
    with pytest.raises(UsageError):
        Policy(within_seconds=-1)


@given(
    st.lists(st.tuples(st.integers(0, 10**18), st.booleans()), max_size=40),
    st.builds(Policy, *[st.integers(-1, 4)] * 6, st.sampled_from([0.0, 3600.0, 1e7])),
)
def test_properties(times: list[tuple[int, bool]], policy: Policy) -> None:
    records = [record(number, at, pinned=pinned) for number, (at, pinned) in enumerate(times)]
    if policy.empty:
        return
    decisions = plan(records, policy)
    assert sorted(decision.record.snapshot for decision in decisions) == sorted(
        record.snapshot for record in records
    )
    if records:
        assert decisions[-1].keep  # any rule keeps the newest
    assert all(decision.keep for decision in decisions if decision.record.pinned)
    # Forgetting is stable: what was kept is kept again when the rest is gone.
    left = [decision.record for decision in decisions if decision.keep]
    assert [decision.record for decision in plan(left, policy) if decision.keep] == left
