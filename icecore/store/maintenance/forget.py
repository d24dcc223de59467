"""Which snapshots a retention policy keeps, and why. Pure: a list of records in, a list of
decisions out; nothing is removed here.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from icecore.errors import UsageError
from icecore.store.format.state import SnapshotRecord

#: Keep without a bound, as a number of any kind.
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


@dataclass(frozen=True)
class Policy:
    """What to keep. The rules add up: a snapshot stays if any of them keeps it; times are UTC.

    Attributes:
        last: The newest so many.
        hourly: Of each hour that has snapshots the newest, for the newest so many such hours;
            likewise the others.
        within_seconds: All that are at most so much older than the newest.
        tags: All with one of these tags.

    Numbers are 0 for none and ``ALL`` for no bound. Pinned snapshots are always kept; so are those
    in quarantine, which count for nothing else: what they lost may come back from a replica, and a
    sound snapshot must not go in their stead.
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
        """Whether it keeps nothing but pinned snapshots."""
        return not (
            self.last
            or self.within_seconds
            or self.tags
            or any(getattr(self, name) for name in _PERIODS)
        )


@dataclass(frozen=True)
class Decision:
    """What becomes of a snapshot; ``reasons`` says why it is kept, and is empty if it is not."""

    record: SnapshotRecord
    reasons: list[str] = field(default_factory=list)

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
    """Apply ``policy`` to each group of snapshots by itself.

    Args:
        records: The snapshots in question.
        by: What makes a group; the job unless said otherwise.

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
