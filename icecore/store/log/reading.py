"""Reading the log: which entry is the newest, and whether it continues what this client has seen.

Nothing here writes, except the client's own watermark.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from icecore.errors import (
    Damaged,
    ObjectExists,
    ObjectMissing,
    RollbackDetected,
    StoreDenied,
    StoreError,
    StoreFull,
)
from icecore.events import Event, Sink, discard
from icecore.store.backend.base import Backend
from icecore.store.format import gaps
from icecore.store.format.envelope import HEADER_BYTES
from icecore.store.format.names import LAST_GENERATION, LOG, log_generation, log_name
from icecore.store.format.state import (
    ENTRY_KIND,
    REMEMBERED,
    Gap,
    LogState,
    decode_entry,
    entry_digest,
)
from icecore.store.log import entries
from icecore.store.log.entries import FAR, PLANTED, Entry, continues, may_be_trimmed, step_back
from icecore.store.log.watermark import Seen, Watermark

_TRIES = 5
BACKOFF_SECONDS = 0.005
#: Time after a listing during which `LogReader.again` does not list again.
_LISTED_SECONDS = 5.0


class LogReader:
    """Reads the log of one repository, and proves that it continues what this client has seen.

    Args:
        watermark: Where the newest generation seen is remembered.

    Attributes:
        emit: Gets an event for an entry that this client has seen and that a repair found lost.
        watermark: The argument.
    """

    def __init__(self, backend: Backend, key: bytes, *, watermark: Watermark | None = None) -> None:
        self.emit: Sink = discard
        self.watermark = watermark or Watermark()
        self._backend = backend
        self._key = key
        self._known: Entry | None = None
        #: The newest entry known to be part of the log: ``_known``, or the one before it; and when
        #: that was established, on a clock that includes sleep.
        self._proven: Entry | None = None
        self._proven_at = 0.0
        self._listed_at = 0.0
        #: Generations that are listed but planted.
        self._planted: set[int] = set()

    @property
    def known(self) -> LogState | None:
        """The newest state that this object has seen; others may have changed it since."""
        return self._known.state if self._known else None

    async def read(self, generation: int) -> Entry:
        """Return the entry of ``generation``.

        Raises:
            ObjectMissing: It has not been written, or has been trimmed.
            Damaged: It is not what was written.
        """
        name = log_name(generation)
        data = await self._backend.get(name, limit=ENTRY_KIND.object_limit)
        return Entry(decode_entry(name, generation, data, self._key), entry_digest(data))

    async def generations(self) -> AsyncIterator[int]:
        """Yield the generations that have an entry, newest first, as a listing shows them."""
        async for info in self._backend.list(LOG):
            generation = log_generation(info.name)
            if generation is not None:
                yield generation

    async def newest(self, *, prove: bool = True) -> Entry:
        """Return the newest entry: a listing says where to begin, and the first absent generation
        says where to end.

        Args:
            prove: Look for that generation. Otherwise, return the newest entry that the listing
                showed, for callers that discover a newer one by themselves: because they create the
                next entry, or because what they seek is not in this one.

        Raises:
            RollbackDetected: It is older than, or different from, what this client has already
                seen.
            Damaged: An entry is damaged, or there is none.
        """
        listed_at = now()
        seen = self.watermark.load()
        entry = await self._start(seen)
        while seen.generation:
            missing = await self._follows(entry, seen)
            if missing is None:
                break
            entry = await self._beyond(entry, missing)
        if prove:
            last = await self._end(entry)
            if last is None:
                return await self.newest()
            entry = last
        self._keep(entry)
        self._listed_at = listed_at
        return entry

    async def again(self) -> Entry:
        """Return the newest entry as ``newest`` does, for callers that only read, and do so often.

        For some seconds after a listing, it reads on from the newest entry that it knows, which is
        one request if there is no newer one. Until the next listing, it does not find the entries
        with which a repair has continued the log behind lost ones.
        """
        entry = self._proven
        if entry is None or now() - self._listed_at > _LISTED_SECONDS:
            return await self.newest()
        seen = self.watermark.load()
        last = await self._end(entry)
        if last is None or last.generation < seen.generation:
            return await self.newest()
        if seen.generation and await self._follows(last, seen) is not None:
            return await self.newest()
        self._keep(last)
        return last

    async def _start(self, seen: Seen) -> Entry:
        """Return the newest entry in a listing, or the entry seen before if the listing shows only
        older ones.

        Raises:
            RollbackDetected: The entry seen before is gone, and no newer one is listed.
            Damaged: The entry is damaged, or there is none, or it is listed but cannot be read.
        """
        hint = 0
        for _ in range(_TRIES):
            before, listed = hint, await self._listed()
            hint = max(listed, seen.generation)
            if hint == 0:
                raise Damaged(ENTRY_KIND.title, LOG, "there is no entry at all")
            if hint == before:
                break
            try:
                return await self.read(hint)
            except ObjectMissing:
                pass  # trimmed, or withdrawn, between listing and read: the next listing differs
            except Damaged:
                if await self._pass_over(hint, seen):
                    continue
                if await self._listed() <= hint:
                    raise
                # A repair has continued the log behind it since the listing.
        if hint == seen.generation:
            raise RollbackDetected(
                f"the repository in {self._backend.where} ends at generation {listed}, but this client has already seen {hint}",
                cure=self.cure_of_rollback,
            )
        raise Damaged(ENTRY_KIND.title, log_name(hint), "it is listed, but cannot be read")

    async def _pass_over(self, hint: int, seen: Seen) -> bool:
        """Omit names planted beyond the log from listings from now on; return whether there are
        any.

        Args:
            hint: The newest listed generation, whose entry cannot be read.
        """
        if hint <= seen.generation + FAR:
            return False
        unreadable: list[int] = []
        base = seen.generation
        async for generation in self.generations():
            if generation <= seen.generation:
                break
            try:
                await self.read(generation)
            except Damaged:
                unreadable.append(generation)
            except ObjectMissing:
                continue
            else:
                base = generation
                break
        planted = {
            generation for generation in unreadable if generation > base + FAR
        } - self._planted
        self._planted |= planted
        for generation in sorted(planted):
            self.emit(Event("log.planted", {"object": log_name(generation), "error": PLANTED}))
        return bool(planted)

    async def _end(self, entry: Entry) -> Entry | None:
        """Return the last of the entries that follow ``entry`` without a gap; None if a repair has
        continued the log behind a damaged one.
        """
        while True:
            if entry.generation == LAST_GENERATION:
                return entry
            try:
                following = await self.read(entry.generation + 1)
            except ObjectMissing:
                return entry
            except Damaged:
                if await self._listed() <= entry.generation + 1:
                    raise
                return None
            if following.state.predecessor != entry.digest:
                raise Damaged(
                    ENTRY_KIND.title,
                    log_name(following.generation),
                    "it does not follow the entry before it",
                )
            entry = following

    async def continues(self, entry: Entry) -> None:
        """Check that ``entry`` continues what this client has seen, unless that is newer.

        Raises:
            RollbackDetected: It continues another log, or an entry that would prove it is absent.
        """
        seen = self.watermark.load()
        if 0 < seen.generation <= entry.generation:
            missing = await self._follows(entry, seen)
            if missing is not None:
                raise self._absent(entry, missing)

    async def _follows(self, entry: Entry, seen: Seen) -> int | None:
        """Check that ``entry`` continues the log of which this client has seen an entry.

        An entry refers to its predecessor and its anchor by their digests, and repeats the random
        transaction ids of the generations before it. So going back takes one read for 512
        generations, or for 31 at worst. It skips the gaps that the newest entry records
        (`icecore.store.format.gaps`).

        Returns:
            None if it does, or if what would prove it may have been trimmed. Otherwise the
            generation of an entry that is absent although ``entry`` is not new enough for it to
            have been trimmed.

        Raises:
            RollbackDetected: It continues another log.
            Damaged: Too many entries are damaged to tell.
        """
        newest, lost = entry.generation, entry.state.gaps
        noted = gaps.gap_of(lost, seen.generation) is not None
        if (
            not noted
            and may_be_trimmed(seen.generation, newest)
            and await self._digest(seen.generation) is None
        ):
            return None  # no remaining entry refers to it
        while entry.generation > seen.generation:
            at = gaps.step(lost, entry.generation, step_back(entry, seen.generation))
            if at < seen.generation:
                self._over_gap(entry, seen, lost, newest)
                return None
            try:
                before = await self.read(at)
            except ObjectMissing:
                if not may_be_trimmed(at, newest):
                    return at
                # The trim may have left the entry seen before until last.
                held = None if noted else await self._digest(seen.generation)
                if held is not None and held.hex() != seen.digest:
                    raise self._other(seen) from None
                return None
            except Damaged:
                above = await self._above(max(at, entry.generation - REMEMBERED), entry.generation)
                if above is None:
                    if (
                        entry.generation - 1 == seen.generation
                        and entry.state.predecessor.hex() == seen.digest
                    ):
                        return None
                    raise
                before = above
            gap = gaps.gap_of(lost, before.generation + 1)
            follows = (
                gap.base == before.digest
                if gap is not None and gap.last + 1 == entry.generation
                else continues(entry, before)
            )
            if not follows:
                raise self._other(seen)
            entry = before
        if entry.digest.hex() != seen.digest:
            raise self._other(seen)
        return None

    def _over_gap(self, entry: Entry, seen: Seen, lost: Sequence[Gap], newest: int) -> None:
        """Accept, with a warning, that the entry seen before is recorded as lost: only a holder of
        the key can record that.

        Args:
            entry: The entry after the gap. It still refers to the last entry of the gap, unless it
                is the repair's own.

        Raises:
            RollbackDetected: It refers to another entry than the one seen before.
        """
        gap = gaps.gap_of(lost, seen.generation)
        if (
            gap is not None
            and gap.last == seen.generation
            and entry.state.predecessor != (gap.base or bytes(32))
        ):
            if entry.state.predecessor.hex() != seen.digest:
                raise self._other(seen)
            return
        error = f"a repair found generation {seen.generation}, which this client has seen, to be lost: changes that only that entry held are gone"
        self.emit(
            Event("log.repaired", {"seen": seen.generation, "continued": newest, "error": error})
        )

    async def _beyond(self, entry: Entry, missing: int) -> Entry:
        """Return an entry newer than ``entry``, because a trim deleted the one of generation
        ``missing`` while the log was read.

        Raises:
            RollbackDetected: No entry is new enough for such a trim: the entry is withheld, or was
                deleted.
        """
        newer = await self._end(entry) or entry
        if not may_be_trimmed(missing, newer.generation):
            listed = await self._listed()
            if listed > newer.generation:
                try:
                    newer = await self.read(listed)
                except ObjectMissing:
                    pass
        if newer.generation == entry.generation:
            raise self._absent(entry, missing)
        return newer

    @property
    def cure_of_rollback(self) -> str:
        """What a person can do if the log does not continue what this client has seen."""
        return (
            "find out who restored an old part of it, or withholds a part, before you write to it;"
            f" 'icecore trust {self._backend.where}' shows what is known and what is there, and can accept it;"
            " where storage has lost its newest entries, 'icecore repair --accept-rollback' continues from what is there"
        )

    def _absent(self, entry: Entry, missing: int) -> RollbackDetected:
        return RollbackDetected(
            f"log entry {missing} of the repository in {self._backend.where} is absent, although the log ends at generation {entry.generation} and"
            f" its newest {entries.KEPT_ENTRIES} entries are kept: it cannot be shown to continue what this client has seen",
            cure=self.cure_of_rollback,
        )

    async def _above(self, low: int, high: int) -> Entry | None:
        """Return the oldest readable entry between two generations."""
        for generation in range(low + 1, high):
            try:
                return await self.read(generation)
            except (Damaged, ObjectMissing):
                continue
        return None

    def _other(self, seen: Seen) -> RollbackDetected:
        return RollbackDetected(
            f"generation {seen.generation} of the repository in {self._backend.where} is not the one that this client has seen",
            cure=self.cure_of_rollback,
        )

    async def _listed(self) -> int:
        async for generation in self.generations():
            if generation not in self._planted:
                return generation
        return 0

    def accept(self, entry: Entry, *, instead_of: Seen) -> None:
        """Accept ``entry`` as the newest although it does not continue what this client has seen.

        Only for a repair by this client, which knows why it moves the log back.

        Args:
            instead_of: The watermark when the repair began.

        Raises:
            RollbackDetected: This client has seen something else since.
        """
        self.watermark.accept(Seen(entry.generation, entry.digest.hex()), instead_of=instead_of)
        self._known = self._proven = entry
        self._proven_at = now()

    def _keep(self, entry: Entry) -> None:
        self._known = self._proven = entry
        self._proven_at = now()
        self.watermark.save(Seen(entry.generation, entry.digest.hex()))

    async def _digest(self, generation: int) -> bytes | None:
        """Return the digest in the entry of ``generation``; None if there is no such entry."""
        header = bytearray(HEADER_BYTES)
        name = log_name(generation)
        try:
            await self._patiently(lambda: self._backend.get_into(name, 0, memoryview(header)))
        except ObjectMissing:
            return None
        return entry_digest(bytes(header))

    async def _patiently(self, call: Callable[[], Awaitable[None]]) -> None:
        """Repeat ``call`` while it fails transiently; it may have taken effect each time.

        Raises:
            StoreFull, StoreDenied: It never took effect.
            StoreError: It may have taken effect.
        """
        tries = 0
        while True:
            try:
                return await call()
            except (ObjectExists, ObjectMissing):
                raise
            except (StoreFull, StoreDenied) as error:
                if tries:
                    raise StoreError(error.message, cure=error.cure) from error
                raise
            except StoreError:
                tries += 1
                if tries == _TRIES:
                    raise
                await asyncio.sleep(random.uniform(0, BACKOFF_SECONDS * 2**tries))


def now() -> float:
    """Return a monotonic time in seconds that includes the machine's sleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
