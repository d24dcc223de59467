"""Decides which snapshots a retention policy keeps, and why. Pure: records in, decisions out;
nothing is removed here.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence

import msgspec

from icecore.errors import UsageError
from icecore.store.format.state import SnapshotRecord

#: No bound, as a number of any rule.
ALL = -1

_NS = 1_000_000_000

Bucket = Callable[[datetime.datetime], tuple[int, ...]]

_PERIODS: dict[str, Bucket] = {
    "hourly": lambda at: (at.year, at.month, at.day, at.hour),
    "daily": lambda at: (at.year, at.month, at.day),
    "weekly": lambda at: tuple(at.isocalendar()[:2]),
    "monthly": lambda at: (at.year, at.month),
    "yearly": lambda at: (at.year,),
}


class Policy(msgspec.Struct, frozen=True):
    """What to keep. A snapshot stays if any rule keeps it; times are UTC.

    Attributes:
        last: The newest so many.
        hourly: The newest of each hour that has snapshots, for the newest so many such hours;
            likewise daily, weekly, monthly, yearly.
        within_seconds: All that are at most this much older than the newest.
        tags: All with one of these tags.

    Numbers are 0 for none and ``ALL`` for no bound. Pinned snapshots are always kept. So are
    quarantined ones, which do not count towards any rule: a replica may restore what they lost, and
    an intact snapshot must not be removed in their favour.
    """

    last: int = 0
    hourly: int = 0
    daily: int = 0
    weekly: int = 0
    monthly: int = 0
    yearly: int = 0
    within_seconds: float = 0.0
    tags: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in ("last", *_PERIODS):
            if getattr(self, name) < ALL:
                raise UsageError(
                    f"keep-{name} is {getattr(self, name)}", cure="use a number, or -1 for all"
                )
        if self.within_seconds < 0:
            raise UsageError("keep-within is negative")

    @property
    def empty(self) -> bool:
        """Whether it keeps nothing except pinned snapshots."""
        return not (
            self.last
            or self.within_seconds
            or self.tags
            or any(getattr(self, name) for name in _PERIODS)
        )


class Decision(msgspec.Struct, frozen=True):
    """The decision about a snapshot; ``reasons`` says why it is kept, and is empty if it is not."""

    record: SnapshotRecord
    reasons: list[str] = msgspec.field(default_factory=list)

    @property
    def keep(self) -> bool:
        """Whether it is kept."""
        return bool(self.reasons)


def plan(
    records: Iterable[SnapshotRecord],
    policy: Policy,
    *,
    by: Callable[[SnapshotRecord], str] = lambda record: record.job,
) -> list[Decision]:
    """Apply ``policy`` to each group of snapshots separately.

    Args:
        records: The snapshots to consider.
        by: The key that groups them; by default, the job.

    Returns:
        A decision for each record, group by group, oldest first.

    Raises:
        UsageError: The policy would keep nothing.
    """
    if policy.empty:
        raise UsageError(
            "this policy keeps nothing",
            cure="give at least one of --keep-last/hourly/daily/weekly/monthly/yearly/within/tag",
        )
    groups: dict[str, list[SnapshotRecord]] = {}
    for record in records:
        groups.setdefault(by(record), []).append(record)
    return [decision for name in sorted(groups) for decision in _group(groups[name], policy)]


def _group(records: Sequence[SnapshotRecord], policy: Policy) -> list[Decision]:
    by_age = sorted(records, key=lambda record: (record.created_ns, record.snapshot), reverse=True)
    newest_first = [record for record in by_age if not record.quarantined]
    reasons: dict[str, list[str]] = {
        record.snapshot: ["quarantined"] if record.quarantined else [] for record in by_age
    }
    for number, record in enumerate(newest_first):
        if policy.last == ALL or number < policy.last:
            reasons[record.snapshot].append("last")
    for name, bucket in _PERIODS.items():
        bound = getattr(policy, name)
        seen: set[tuple[int, ...]] = set()
        for record in newest_first:
            at = bucket(datetime.datetime.fromtimestamp(record.created_ns / _NS, datetime.UTC))
            if at not in seen and (bound == ALL or len(seen) < bound):
                seen.add(at)
                reasons[record.snapshot].append(name)
    for record in newest_first:
        if (
            policy.within_seconds
            and newest_first[0].created_ns - record.created_ns <= policy.within_seconds * _NS
        ):
            reasons[record.snapshot].append("within")
        reasons[record.snapshot].extend(f"tag {tag}" for tag in record.tags if tag in policy.tags)
    for record in by_age:
        if record.pinned:
            reasons[record.snapshot].append("pinned")
    return [Decision(record, reasons[record.snapshot]) for record in reversed(by_age)]
