"""The transaction log. The state is its newest entry, and whoever creates generation + 1 has
changed the state; no locks and no clocks decide anything.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

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
from icecore.store.format.envelope import HEADER_BYTES, Sealed
from icecore.store.format.names import LAST_GENERATION, LOG, log_generation, log_name
from icecore.store.format.state import (
    ENTRY_KIND,
    REMEMBERED,
    Anchor,
    Gap,
    LogState,
    Written,
    decode_entry,
    encode_entry,
    entry_digest,
)
from icecore.store.log.catalog import Pages
from icecore.store.log.watermark import Seen, Watermark

#: A transaction's change: from a state to the next. It may be called again with a newer state, so
#: it must not remember what it saw. If it raises an error, the transaction ends and nothing
#: changes.
Change = Callable[[LogState, Pages], Awaitable[LogState]]

#: Entries that ``trim`` leaves: a listing may be this many generations old and still lead to the
#: newest entry.
KEPT_ENTRIES = 1024
_TRIM_EVERY = KEPT_ENTRIES // 2
#: One in so many generations is an anchor: it is trimmed before everything that follows it.
ANCHOR_EVERY = 512
#: What was seen of the log longer ago than this may have been trimmed, so it is checked before
#: anything is built on it. This costs requests and decides nothing.
_RECENT_SECONDS = 60.0
_TRIES = 5
_BACKOFF_SECONDS = 0.005
_BACKOFF_LIMIT_SECONDS = 0.5
#: Generations for which a gap stays recorded. For a client that saw an entry in it and has missed
#: more, everything there has been trimmed.
_GAPS_KEPT = 2 * KEPT_ENTRIES
#: No writer and no repair advances the log by so much at once: a name listed so far beyond the log
#: that cannot be read is planted.
FAR = 1 << 40
#: What is wrong with such a name.
PLANTED = "it is not a log entry: it cannot be read, and its generation is far beyond the log"
_NOTHING_LEFT = (
    "free space there, or enlarge it: the repository's reserve for this is used up;"
    " restore, export, copy, sync, check and stats need none with --read-only"
)


@dataclass(frozen=True)
class Entry:
    """A state, and the digest by which the next entry refers to it."""

    state: LogState
    digest: bytes

    @property
    def generation(self) -> int:
        """The entry's generation."""
        return self.state.generation

    @property
    def anchor(self) -> Anchor | None:
        """The anchor of whatever follows this entry, as far as this entry knows."""
        if not is_anchor(self.generation):
            return self.state.anchor
        before = self.state.anchor
        return Anchor(self.generation, self.digest, before.since if before else self.generation + 1)


def is_anchor(generation: int) -> bool:
    """Return whether the entry of this generation is trimmed before everything that follows it."""
    return generation % ANCHOR_EVERY == 1


def anchor_before(generation: int) -> int:
    """Return the generation of the anchor that is trimmed before the entry of this generation; less
    than 1 if there is none.
    """
    return (generation - 2) // ANCHOR_EVERY * ANCHOR_EVERY + 1


def _may_be_trimmed(generation: int, newest: int) -> bool:
    """Return whether a trim of a log that has reached ``newest`` may have deleted the entry of
    ``generation``.
    """
    return generation <= newest - KEPT_ENTRIES


def _step_back(entry: Entry, to: int) -> int:
    """Return the oldest generation, from ``to`` on, for which ``entry`` tells whether it continues
    it.
    """
    # Generation 1 carries no transaction: only its successor names it.
    step = max(to, entry.generation - REMEMBERED + 1, 2 if entry.generation > 2 else 1)
    anchor = entry.state.anchor
    if (
        anchor is None
        or not to <= anchor.generation < step
        or gaps.gap_of(entry.state.gaps, anchor.generation) is not None
    ):
        return step
    return anchor.generation


def _names(entry: Entry, before: Entry) -> bool:
    """Return whether ``entry`` continues ``before``: by its digest if it holds that, otherwise by
    the transactions that it carried.
    """
    state, anchor = entry.state, entry.state.anchor
    if before.generation == entry.generation - 1:
        return state.predecessor == before.digest
    if anchor is not None and anchor.generation == before.generation:
        return anchor.digest == before.digest
    return (
        before.state.transactions[-1:] != [] and before.state.transactions[-1] in state.transactions
    )


@dataclass(frozen=True)
class _Waiting:
    """A transaction that waits for its turn."""

    change: Change
    words: str
    prove: bool
    result: asyncio.Future[Entry]


class Log:
    """The log of one repository.

    One entry carries all transactions that wait at the same time.

    Args:
        watermark: Where the newest generation seen is remembered.

    Attributes:
        emit: Gets an event for an entry that this client has seen and that a repair found lost.
        watermark: The argument.
    """

    def __init__(self, backend: Backend, key: bytes, *, watermark: Watermark | None = None) -> None:
        self.emit: Sink = discard
        self.pages = Pages(backend, key)
        self._backend = backend
        self._key = key
        self.watermark = watermark or Watermark()
        self._known: Entry | None = None
        #: The newest entry known to be part of the log: ``_known``, or the one before it; and when
        #: that was established, on a clock that includes sleep.
        self._proven: Entry | None = None
        self._proven_at = 0.0
        self._waiting: list[_Waiting] = []
        self._worker: asyncio.Task[None] | None = None
        #: Generations that are listed but planted.
        self._planted: set[int] = set()

    @property
    def known(self) -> LogState | None:
        """The newest state that this object has seen; others may have changed it since."""
        return self._known.state if self._known else None

    async def found(self) -> None:
        """Write the first entry of an empty repository, unless it exists."""
        first = LogState(generation=1, predecessor=b"", created_ns=time.time_ns(), changes=["init"])
        try:
            await self._backend.create(log_name(1), [encode_entry(first, self._key).data])
        except ObjectExists:
            pass

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
        return entry

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
            and _may_be_trimmed(seen.generation, newest)
            and await self._digest(seen.generation) is None
        ):
            return None  # no remaining entry refers to it
        while entry.generation > seen.generation:
            at = gaps.step(lost, entry.generation, _step_back(entry, seen.generation))
            if at < seen.generation:
                self._over_gap(entry, seen, lost, newest)
                return None
            try:
                before = await self.read(at)
            except ObjectMissing:
                if not _may_be_trimmed(at, newest):
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
                else _names(entry, before)
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
        if not _may_be_trimmed(missing, newer.generation):
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
            f" its newest {KEPT_ENTRIES} entries are kept: it cannot be shown to continue what this client has seen",
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
        self._proven_at = _now()

    def _keep(self, entry: Entry) -> None:
        self._known = self._proven = entry
        self._proven_at = _now()
        self.watermark.save(Seen(entry.generation, entry.digest.hex()))

    async def transact(
        self, change: Change, words: str, *, prove: bool = True, leave: int | None = None
    ) -> Entry:
        """Apply ``change`` to the newest state, and again to a newer one until the result becomes
        the next entry.

        Args:
            change: Called with a state that already has its new generation; returning that very
                state changes nothing.
            words: What it does, in a few words for people.
            prove: Establish at once that the entry is part of the log. Otherwise, this may be left
                to this object's next transaction, which builds on the entry: if the entry is not
                part of the log, that transaction does not find the change. Saves a request.
            leave: If there is no room, release pieces of the storage's reserve until this many are
                left (`Backend.give_up_reserve`); None: release none. For work that frees space, and
                for readers.

        Returns:
            The entry that carries the change, or the newest one if nothing had to change.

        Raises:
            StoreFull: No space; nothing was changed.
            StoreError: The store failed; if the message says so, the outcome is unknown.
            Exception: Raised by ``change`` on the newest state.
        """
        while True:
            try:
                return await self._transact(change, words, prove)
            except StoreFull as error:
                if leave is None:
                    raise
                if not await self._backend.give_up_reserve(leave):
                    raise StoreFull(error.message, cure=_NOTHING_LEFT) from error

    async def _transact(self, change: Change, words: str, prove: bool) -> Entry:
        waiting = _Waiting(change, words[:200], prove, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await waiting.result

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                await self._carry(batch)
            except BaseException as error:
                for waiting in batch:
                    if not waiting.result.done():
                        waiting.result.set_exception(error)
                if isinstance(error, asyncio.CancelledError):
                    raise
            if (
                self._known is not None
                and self._known.generation % _TRIM_EVERY == 0
                and not self._waiting
            ):
                try:
                    await self.trim(KEPT_ENTRIES)
                except StoreError:
                    pass  # housekeeping: the collector, or a later transaction, trims as well

    async def _carry(self, batch: list[_Waiting]) -> None:
        entry, fresh = await self._begin(), False
        attempt = 0
        while True:
            self.pages.attempt = attempt
            if entry.generation == LAST_GENERATION:
                raise StoreError(
                    f"the log in {self._backend.where} has reached its last generation",
                    cure="'icecore copy' copies its snapshots to a new repository",
                )
            state = msgspec.structs.replace(
                entry.state,
                generation=entry.generation + 1,
                predecessor=entry.digest,
                created_ns=time.time_ns(),
                changes=[],
                anchor=entry.anchor,
                gaps=gaps.kept(entry.state.gaps, entry.generation - _GAPS_KEPT),
            )
            carried: list[_Waiting] = []
            failed: list[tuple[_Waiting, Exception]] = []
            idle: list[_Waiting] = []
            for waiting in batch:
                if waiting.result.done():
                    continue  # its caller was cancelled
                try:
                    changed = await waiting.change(state, self.pages)
                except Exception as raised:  # noqa: BLE001 - it belongs to the change's caller
                    failed.append((waiting, raised))
                    continue
                if changed is state:
                    idle.append(waiting)
                else:
                    carried.append(waiting)
                    state = changed
            if (failed or not carried) and not fresh:
                entry, fresh = await self.newest(), True
                continue
            for waiting, error in failed:
                _deliver(waiting, error)
            if carried:
                state = msgspec.structs.replace(
                    state,
                    changes=[waiting.words for waiting in carried],
                    transactions=[
                        *[
                            written
                            for written in state.transactions
                            if written.generation > state.generation - REMEMBERED
                        ],
                        # Drawn for each attempt: they identify one entry, not what two entries of
                        # one generation may both have tried to carry.
                        Written(state.generation, secrets.token_bytes(16 * len(carried))),
                    ],
                )
                sealed = encode_entry(state, self._key)
                # At most one entry is left unproven, for a short time, and only where its anchor
                # proves it together with the next.
                assert self._proven is not None
                prove = (
                    any(waiting.prove for waiting in carried)
                    or entry is not self._proven
                    or entry.anchor is None
                    or not self._recent()
                )
                try:
                    won = await self._won(state, sealed, self._proven, prove=prove)
                except (StoreFull, StoreDenied):
                    raise
                except StoreError as error:
                    raise StoreError(
                        f"the outcome of transaction '{', '.join(state.changes)}' is unknown: {error}",
                        cure="look at the repository when the store can be reached again; nothing else is affected",
                    ) from error
                if won:
                    entry = Entry(state, sealed.digest)
                    if prove:
                        self._keep(entry)
                    else:
                        self._known = entry
                else:
                    batch = [*carried, *idle]
                    attempt += 1
                    limit = min(_BACKOFF_LIMIT_SECONDS, _BACKOFF_SECONDS * 2**attempt)
                    await asyncio.sleep(random.uniform(0, limit) if attempt > 1 else 0)
                    entry, fresh = await self.newest(), True
                    continue
            for waiting in [*carried, *idle]:
                _deliver(waiting, entry)
            return

    def _recent(self) -> bool:
        return _now() - self._proven_at < _RECENT_SECONDS

    async def _begin(self) -> Entry:
        """Return the entry to build on. It is not proven to be the newest: if it is not, creating
        the next entry fails, or turns out to have been in vain.
        """
        if self._known is None or self._proven is None:
            return await self.newest(prove=False)
        if not self._recent():
            # A log that moves fast may have trimmed it: its next generation could then be created
            # in vain.
            if not await self._untrimmed(self._proven):
                return await self.newest(prove=False)
            self._proven_at = _now()
        return self._known

    async def _untrimmed(self, entry: Entry) -> bool:
        """Return whether nothing that followed ``entry``, which is part of the log, has been
        trimmed. False may also mean that this is unknown.

        Anchors, and entries without an anchor, are trimmed before everything that follows them.
        """
        anchor = entry.anchor
        generation, digest = (
            (anchor.generation, anchor.digest) if anchor else (entry.generation, entry.digest)
        )
        return await self._digest(generation) == digest

    async def _won(self, state: LogState, sealed: Sealed, proven: Entry, *, prove: bool) -> bool:
        """Create the entry; return whether it is now part of the log, established by reading.

        Args:
            proven: The newest entry before it that is known to be part of the log.
            prove: Otherwise, only a taken name counts as an answer.

        Raises:
            StoreError: The store could not be reached for too long.
        """
        name = log_name(state.generation)
        try:
            await self._patiently(lambda: self._backend.create(name, [sealed.data]))
        except (StoreFull, StoreDenied):
            raise
        except StoreError as error:
            # Taken by another client, or by this one and the reply was lost: the digest covers the
            # random transaction ids.
            held = await self._digest(state.generation)
            if held is None and not isinstance(error, ObjectExists):
                raise
            if held is None:
                # Taken and trimmed since: this client slept through more than a thousand
                # generations, and another one took its generation.
                return await self._reached(state, sealed)
            if held != sealed.digest:
                return False
        if not prove or await self._untrimmed(proven):
            # Nothing that followed had been trimmed, so this generation had never been taken, nor
            # the one before if that was left unproven.
            return True
        if await self._reached(state, sealed):
            return True
        if (
            self._known is not None
            and self._known is not proven
            and await self._digest(self._known.generation) == self._known.digest
        ):
            await self._backend.delete(
                log_name(self._known.generation)
            )  # the unproven one: at best it was about to be trimmed
        return False

    async def _digest(self, generation: int) -> bytes | None:
        """Return the digest in the entry of ``generation``; None if there is no such entry."""
        header = bytearray(HEADER_BYTES)
        name = log_name(generation)
        try:
            await self._patiently(lambda: self._backend.get_into(name, 0, memoryview(header)))
        except ObjectMissing:
            return None
        return entry_digest(bytes(header))

    async def _reached(self, state: LogState, sealed: Sealed) -> bool:
        """Return whether the entry is in the chain of the newest, judged by the transaction ids
        that entries repeat; remove it if not.
        """
        ours = state.transactions[-1]
        generations = [
            generation
            async for generation in self.generations()
            if generation >= state.generation and generation not in self._planted
        ]
        for generation in reversed(generations):
            if generation == state.generation and len(generations) > 1:
                continue  # the entry in doubt
            try:
                entry = await self.read(generation)
            except (ObjectMissing, Damaged):
                continue
            if ours in entry.state.transactions or entry.digest == sealed.digest:
                return True
            if any(written.generation == ours.generation for written in entry.state.transactions):
                if await self._digest(state.generation) == sealed.digest:
                    await self._backend.delete(log_name(state.generation))
                return False
            break
        raise StoreError("the log has moved on by more than it keeps")

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
                await asyncio.sleep(random.uniform(0, _BACKOFF_SECONDS * 2**tries))

    async def trim(self, keep: int = KEPT_ENTRIES) -> int:
        """Delete entries more than ``keep`` generations older than the newest: first the anchors
        and the entries without one, oldest first, one after the other; then all others at once.

        This order distinguishes a writer that slept from one that won: see ``_untrimmed``.

        Args:
            keep: Clients expect to find entries that they have seen among the newest
                ``KEPT_ENTRIES``; leave fewer only where there are no clients.

        Returns:
            How many were deleted.
        """
        newest = await self.newest()
        since = newest.anchor.since if newest.anchor else newest.generation
        old = [
            generation
            async for generation in self.generations()
            if generation <= newest.generation - keep
        ]
        first = [
            generation
            for generation in reversed(old)
            if generation < since or is_anchor(generation)
        ]
        for generation in first:
            await self._backend.delete(log_name(generation))
        await self._backend.delete_many(
            [log_name(generation) for generation in sorted(set(old).difference(first))]
        )
        return len(old)


def _now() -> float:
    """Return a monotonic time in seconds that includes the machine's sleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _deliver(waiting: _Waiting, outcome: Entry | Exception) -> None:
    if waiting.result.done():
        return
    if isinstance(outcome, Exception):
        waiting.result.set_exception(outcome)
    else:
        waiting.result.set_result(outcome)
