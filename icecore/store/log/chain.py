"""The transaction log. The state is its newest entry, and whoever creates generation + 1 has
changed the state; no locks and no clocks decide anything. `icecore.store.log.reading` finds the
newest entry.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Callable

import msgspec

from icecore.errors import (
    Damaged,
    IcecoreError,
    ObjectExists,
    ObjectMissing,
    StoreDenied,
    StoreError,
    StoreFull,
)
from icecore.store.backend.base import Backend
from icecore.store.format import gaps
from icecore.store.format.envelope import Sealed
from icecore.store.format.names import LAST_GENERATION, log_name
from icecore.store.format.state import (
    REMEMBERED,
    LogState,
    Written,
    encode_entry,
)
from icecore.store.log import entries
from icecore.store.log.catalog import Pages
from icecore.store.log.entries import Entry, is_anchor
from icecore.store.log.reading import BACKOFF_SECONDS, LogReader, now
from icecore.store.log.watermark import Watermark

#: A transaction's change: from a state to the next. It may be called again with a newer state, so
#: it must not remember what it saw. If it raises an error, the transaction ends and nothing
#: changes.
Change = Callable[[LogState, Pages], Awaitable[LogState]]

_TRIM_EVERY = entries.KEPT_ENTRIES // 2
#: What was seen of the log longer ago than this may have been trimmed, so it is checked before
#: anything is built on it. This costs requests and decides nothing.
_RECENT_SECONDS = 60.0
_BACKOFF_LIMIT_SECONDS = 0.5
#: Generations for which a gap stays recorded. For a client that saw an entry in it and has missed
#: more, everything there has been trimmed.
_GAPS_KEPT = 2 * entries.KEPT_ENTRIES
_NOTHING_LEFT = (
    "free space there, or enlarge it: the repository's reserve for this is used up;"
    " restore, export, copy, sync, check and stats need none with --read-only"
)


class _Waiting(msgspec.Struct, frozen=True):
    """A transaction that waits for its turn."""

    change: Change
    words: str
    prove: bool
    result: asyncio.Future[Entry]


class Log(LogReader):
    """The log of one repository.

    One entry carries all transactions that wait at the same time.

    Args:
        watermark: Where the newest generation seen is remembered.
    """

    def __init__(self, backend: Backend, key: bytes, *, watermark: Watermark | None = None) -> None:
        super().__init__(backend, key, watermark=watermark)
        self.pages = Pages(backend, key)
        self._waiting: list[_Waiting] = []
        self._worker: asyncio.Task[None] | None = None

    async def found(self) -> None:
        """Write the first entry of an empty repository, unless it exists."""
        first = LogState(generation=1, predecessor=b"", created_ns=time.time_ns(), changes=["init"])
        try:
            await self._backend.create(log_name(1), [encode_entry(first, self._key).data])
        except ObjectExists:
            pass

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
        try:
            await self._carry_all()
        except BaseException as error:
            for waiting in self._waiting:  # they came since, and nobody else carries them
                _deliver(waiting, StoreError(f"the log was not written: {error}"))
            self._waiting = []
            raise

    async def _carry_all(self) -> None:
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
                    await self.trim(entries.KEPT_ENTRIES)
                except IcecoreError:
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
                    limit = min(_BACKOFF_LIMIT_SECONDS, BACKOFF_SECONDS * 2**attempt)
                    await asyncio.sleep(random.uniform(0, limit) if attempt > 1 else 0)
                    entry, fresh = await self.newest(), True
                    continue
            for waiting in [*carried, *idle]:
                _deliver(waiting, entry)
            return

    def _recent(self) -> bool:
        return now() - self._proven_at < _RECENT_SECONDS

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
            self._proven_at = now()
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
        outcome: StoreError | None = None
        try:
            await self._patiently(lambda: self._backend.create(name, [sealed.data]))
        except (StoreFull, StoreDenied):
            raise
        except StoreError as error:
            outcome = error
        try:
            return await self._decided(state, sealed, proven, outcome, prove=prove)
        except (StoreFull, StoreDenied) as error:
            # These two say that nothing was written, and the entry may be.
            raise StoreError(error.message, cure=error.cure) from error

    async def _decided(
        self,
        state: LogState,
        sealed: Sealed,
        proven: Entry,
        outcome: StoreError | None,
        *,
        prove: bool,
    ) -> bool:
        """Return whether an entry is part of the log after the attempt to create it.

        Args:
            outcome: How the attempt failed; None: it did not.
        """
        if outcome is not None:
            # Taken by another client, or by this one and the reply was lost: the digest covers the
            # random transaction ids.
            held = await self._digest(state.generation)
            if held is None and not isinstance(outcome, ObjectExists):
                raise outcome
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

    async def trim(self, keep: int = entries.KEPT_ENTRIES) -> int:
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


def _deliver(waiting: _Waiting, outcome: Entry | Exception) -> None:
    if waiting.result.done():
        return
    if isinstance(outcome, Exception):
        waiting.result.set_exception(outcome)
    else:
        waiting.result.set_result(outcome)
