"""Checks the entries of the log."""

from __future__ import annotations

from collections.abc import Sequence

from icecore.errors import Damaged, IcecoreError, ObjectMissing, RollbackDetected
from icecore.store.format.gaps import between, gap_of
from icecore.store.format.names import LOG, log_generation, log_name
from icecore.store.format.state import ENTRY_KIND
from icecore.store.log.entries import FAR, KEPT_ENTRIES, PLANTED, Entry, anchor_before
from icecore.store.log.repository import StoredRepository
from icecore.store.maintenance import relog
from icecore.store.maintenance.findings import Findings

#: Of a run of missing entries, at most so many are named.
_HOLE = 64


class LogCheck:
    """Checks the log of a repository."""

    def __init__(self, repository: StoredRepository, findings: Findings) -> None:
        self._repository = repository
        self._backend = repository.backend
        self._findings = findings

    async def run(self) -> Entry | None:
        """Check that every log entry, from the newest on, is readable and is the one that its
        successor refers to; return the newest readable one.
        """
        log = self._repository.log
        try:
            newest: Entry | None = await log.newest()
        except (Damaged, RollbackDetected) as error:
            condition = await relog.look(log)
            for name, why in relog.lost(condition):
                self._findings.damage(ENTRY_KIND.title, name, why)
            newest = condition.base
            if condition.whole or newest is None:
                self._findings.note(error, ENTRY_KIND.title, LOG)
        sizes = {info.name: info.size async for info in self._backend.list(LOG)}
        self._findings.report.objects["log"] = len(sizes)
        self._findings.report.bytes["log"] = sum(sizes.values())
        listed = [generation for generation in map(log_generation, sizes) if generation is not None]
        known = max(newest.generation if newest is not None else 0, log.watermark.load().generation)
        for generation in listed:
            if generation > known + FAR:
                self._findings.damage(ENTRY_KIND.title, log_name(generation), PLANTED)
        if newest is not None:
            await self._older(
                newest,
                sorted(
                    (generation for generation in listed if generation < newest.generation),
                    reverse=True,
                ),
            )
        return newest

    async def _older(self, newest: Entry, listed: Sequence[int]) -> None:
        """Check the entries before the newest, except those that a repair recorded as lost."""
        noted = newest.state.gaps
        following, wanted = newest.generation, newest.state.predecessor
        for generation in listed:
            if gap_of(noted, generation) is not None:
                continue
            await self._absent(following, generation, newest)
            gap = gap_of(noted, generation + 1)
            expected = (
                wanted if generation + 1 == following else gap.base if gap is not None else b""
            )
            following, wanted = generation, b""
            try:
                entry = await self._repository.log.read(generation)
            except IcecoreError as error:
                if not isinstance(error, ObjectMissing) or not await self._trimmed(
                    generation, newest.generation
                ):
                    self._findings.note(error, ENTRY_KIND.title, log_name(generation))
                continue
            if expected and expected != entry.digest:
                self._findings.damage(
                    ENTRY_KIND.title,
                    log_name(generation),
                    "it is not the one that its successor follows",
                )
            wanted = entry.state.predecessor

    async def _absent(self, following: int, generation: int, newest: Entry) -> None:
        """Report absent entries between two listed ones."""
        if following - generation == 1:
            return
        for first, last in between(newest.state.gaps, generation + 1, following - 1):
            if last - first >= _HOLE or not await self._trimmed(last, newest.generation):
                for lost in range(last, max(first - 1, last - _HOLE), -1):
                    self._findings.damage(ENTRY_KIND.title, log_name(lost), "it is missing")

    async def _trimmed(self, generation: int, newest: int) -> bool:
        """Return whether an entry is missing because of a trim: everything older is missing as
        well, or a trim is under way, which has taken its anchor.
        """
        left = {other async for other in self._repository.log.generations()}
        return min(left) > generation or (
            generation <= newest - KEPT_ENTRIES and anchor_before(generation) not in left
        )
