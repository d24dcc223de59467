"""The right to run the job of a name, held by one process on whatever node.

A lease is a session of its own purpose: BEGIN is refused while another session of that purpose is
open, and the log decides between two that begin at once. The holder gives signs of life. Whoever
wants the lease and sees none for `SILENCE_SECONDS`, by its own clock, ends the holder's session.

A holder that could not renew for `PAUSE_SECONDS` cannot know whether it still holds the lease, so
it has to keep its job from running until it can; that is less than `SILENCE_SECONDS`, so a job
never runs twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from icecore.errors import JobHeld, SessionFenced, StoreError
from icecore.store.format.names import SESSIONS, heartbeat_session
from icecore.store.format.state import LogState, SessionRecord
from icecore.store.log.catalog import Pages
from icecore.store.log.presence import has_ended
from icecore.store.log.repository import StoredRepository
from icecore.store.log.session import Session

BEAT_SECONDS = 15.0
PAUSE_SECONDS = 60.0
SILENCE_SECONDS = 90.0
#: How often the session moves to the newest generation: an open session keeps a collector from
#: deleting what was condemned since it began, and this one needs nothing.
_MOVE_SECONDS = 600.0
_LOOK_SECONDS = 1.0


def purpose_of(name: str) -> str:
    """Return the purpose of the sessions that are leases of a job."""
    return f"run {name}"


async def holder(repository: StoredRepository, name: str) -> SessionRecord | None:
    """Return the session that holds the lease of a job; None: there is none."""
    state = (await repository.log.newest()).state
    return next((one for one in state.sessions if one.purpose == purpose_of(name)), None)


class Lease:
    """A lease that is held; `take` makes them. It is renewed in the repository's event loop.

    Args:
        repository: Where.
        name: The job's name.
        session: The open session.
    """

    def __init__(self, repository: StoredRepository, name: str, session: Session) -> None:
        self.name = name
        self._repository = repository
        self._session = session
        self._renewed = time.monotonic()
        self._moved = time.monotonic()
        self._lost: str = ""
        self._task = asyncio.create_task(self._renew())

    @property
    def lost(self) -> str:
        """Why the lease is lost for good; empty: it is not known to be."""
        return self._lost

    @property
    def certain(self) -> bool:
        """Whether nobody else can hold the lease now."""
        return not self._lost and time.monotonic() - self._renewed < PAUSE_SECONDS

    async def release(self) -> None:
        """Give the lease back.

        Raises:
            StoreError: The store failed; the lease ends by silence.
        """
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if not self._lost:
            await self._session.abort()

    async def _renew(self) -> None:
        while not self._lost:
            began = time.monotonic()
            try:
                await self._session.heartbeat()
                await self._require()
                self._renewed = began
            except SessionFenced as error:
                self._lost = error.message
            except (StoreError, OSError):
                pass  # `certain` tells when this has lasted for too long
            await asyncio.sleep(BEAT_SECONDS)

    def _fenced(self) -> SessionFenced:
        return SessionFenced(
            f"the lease of job {self.name} was taken by another process",
            cure="the job runs elsewhere; 'icecore ls' shows its snapshots",
        )

    async def _require(self) -> None:
        """Raise SessionFenced if another process has ended the session; move it now and then."""
        state = (await self._repository.log.newest()).state
        if state.session(self._session.id) is None:
            raise self._fenced()
        if time.monotonic() - self._moved < _MOVE_SECONDS:
            return

        async def move(state: LogState, pages: Pages) -> LogState:
            if state.session(self._session.id) is None:
                raise self._fenced()
            moved = [
                msgspec.structs.replace(one, began=state.generation)
                if one.id == self._session.id
                else one
                for one in state.sessions
            ]
            return msgspec.structs.replace(state, sessions=moved)

        await self._repository.log.transact(move, f"move {self._session.id}", leave=0)
        self._moved = time.monotonic()


async def take(
    repository: StoredRepository, name: str, *, told: Callable[[SessionRecord], None] | None = None
) -> Lease:
    """Take the lease of a job; wait for the silence of a holder that gives no sign of life.

    Args:
        repository: Where.
        name: The job's name.
        told: Gets the holder's session once, before it is waited for.

    Raises:
        JobHeld: Its holder is alive.
        StoreError: The store failed.
    """
    while True:
        try:
            session = await repository.begin(
                None, purpose_of(name), load_index=False, beat_seconds=None, alone=True
            )
        except JobHeld:
            held = await holder(repository, name)
            if held is None:
                continue
            if not has_ended(held.process):
                if told is not None:
                    told(held)
                await _require_silence(repository, name, held)
            await _fence(repository, held.id)
        else:
            return Lease(repository, name, session)


async def _require_silence(repository: StoredRepository, name: str, held: SessionRecord) -> None:
    """Return once the holder has been silent for `SILENCE_SECONDS`, or has ended.

    Raises:
        JobHeld: It has given a sign of life.
    """
    first = await _signs(repository, held.id)
    end = time.monotonic() + SILENCE_SECONDS
    while time.monotonic() < end:
        await asyncio.sleep(_LOOK_SECONDS)
        if await holder(repository, name) is None:
            return
        if await _signs(repository, held.id) != first:
            raise held_by(name, held)
        if has_ended(held.process):
            return


def held_by(name: str, held: SessionRecord) -> JobHeld:
    """Return the error that says who runs a job."""
    return JobHeld(
        f"job {name} is run by {held.host} since {_moment(held.created_ns)}",
        cure="wait for its end, or stop it there: 'icecore kill' or SIGTERM to its 'icecore run'",
    )


def _moment(at_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_ns / 1e9))


async def _signs(repository: StoredRepository, session: str) -> frozenset[str]:
    """Return the names of a session's heartbeats."""
    return frozenset(
        [
            info.name
            async for info in repository.backend.list(SESSIONS)
            if heartbeat_session(info.name) == session
        ]
    )


async def _fence(repository: StoredRepository, session: str) -> None:
    async def change(state: LogState, pages: Pages) -> LogState:
        if state.session(session) is None:
            return state
        left = [one for one in state.sessions if one.id != session]
        return msgspec.structs.replace(state, sessions=left)

    await repository.log.transact(change, f"fence {session}", leave=0)
