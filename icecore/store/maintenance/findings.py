"""Findings of a check: each damage once, and the snapshots that it affects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from icecore.errors import Damaged, IcecoreError, ObjectMissing, StoreDenied, StoreError
from icecore.events import Event, Sink
from icecore.store.backend.base import Foreign


class Damage(msgspec.Struct, frozen=True):
    """One thing that is wrong.

    Attributes:
        kind: Its kind: log entry, snapshot page, manifest, node, nodes, shard, chunk, index
            segment, …
        name: The object, or the chunk's or node's id.
        why: What is wrong, in words.
        snapshots: Snapshots that cannot be restored because of it.
    """

    kind: str
    name: str
    why: str
    snapshots: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.why}"


class Report(msgspec.Struct):
    """What a check found.

    Attributes:
        damages: Everything that is wrong; empty if nothing is.
        lost: Known damage, which affects only quarantined snapshots.
        quarantined: Snapshots recorded as having lost data, and what.
        foreign: Files and objects that do not belong to the repository. They are left alone and do
            no harm.
        failed: Those of ``damages`` that are objects which the store failed to return; they may be
            intact.
        denied: The first refusal, if the store refused to return any object.
        doubtful: Shards that are damaged or missing, or hold a damaged chunk.
        snapshots: Number of listed snapshots.
        objects: Number of objects by kind.
        bytes: Bytes of objects by kind.
        unreached: Objects that nothing reaches and that wait for the collector, with their bytes.
            Not damage.
        chunks: Distinct chunks that are reached.
        read_chunks: Chunks that were decoded and verified.
    """

    damages: list[Damage] = msgspec.field(default_factory=list)
    lost: list[Damage] = msgspec.field(default_factory=list)
    quarantined: dict[str, str] = msgspec.field(default_factory=dict)
    foreign: list[Foreign] = msgspec.field(default_factory=list)
    failed: list[Damage] = msgspec.field(default_factory=list)
    denied: StoreDenied | None = None
    doubtful: set[bytes] = msgspec.field(default_factory=set)
    snapshots: int = 0
    objects: Counter[str] = msgspec.field(default_factory=Counter)
    bytes: Counter[str] = msgspec.field(default_factory=Counter)
    unreached: int = 0
    unreached_bytes: int = 0
    chunks: int = 0
    read_chunks: int = 0

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged except what quarantined snapshots have lost."""
        return not self.damages


class Findings:
    """Collects the report of a check.

    Args:
        emit: Gets a ``check.damage`` event for each damage.

    Attributes:
        report: What was found so far.
    """

    def __init__(self, emit: Sink) -> None:
        self.report = Report()
        self._emit = emit
        self._seen: set[tuple[str, str, str]] = set()

    def note(
        self, error: IcecoreError, kind: str, name: str, snapshots: Sequence[str] = ()
    ) -> None:
        """Record an error as damage of object ``name``, or of what the error names."""
        if isinstance(error, Damaged):
            self.damage(
                error.kind if error.kind != "object" else kind, error.name, error.why, snapshots
            )
        elif isinstance(error, ObjectMissing):
            self.damage(kind, name, "it is missing", snapshots)
        else:
            self.damage(kind, name, str(error), snapshots)
            if isinstance(error, StoreDenied):
                self.report.denied = self.report.denied or error
            if isinstance(error, StoreError):
                self.report.failed.append(Damage(kind, name, str(error), tuple(snapshots)))

    def damage(self, kind: str, name: str, why: str, snapshots: Sequence[str] = ()) -> None:
        """Report damage once."""
        key = (kind, name, why)
        if key not in self._seen:
            self._seen.add(key)
            self.report.damages.append(Damage(kind, name, why, tuple(snapshots)))
            self._emit(Event("check.damage", {"kind": kind, "object": name, "why": why}))

    def affect(self, kind: str, name: str, snapshots: Sequence[str]) -> None:
        """Add snapshots to damage that was reported before."""
        for at, damage in enumerate(self.report.damages):
            if damage.kind == kind and damage.name == name:
                both = tuple(sorted({*damage.snapshots, *snapshots}))
                self.report.damages[at] = Damage(damage.kind, damage.name, damage.why, both)
