"""The right to run a user's job of a name, held by one process on whatever node.

A lease is a session of its own purpose: BEGIN is refused while a session that excludes it is open,
and the log decides between two that begin at once. Leases of the same name exclude each other,
unless they are of different users. A lease without a user is an administrator's; it excludes those
of all users.

The holder gives signs of life. Whoever wants the lease and sees none for `SILENCE_SECONDS`, by its
own clock, ends the holder's session, unless the holder has renewed it meanwhile. No one else ends
it: a collector leaves leases alone, and waits for none, because a lease pins nothing.

A holder that could not renew for `PAUSE_SECONDS` cannot know whether it still holds the lease, so
it has to keep its job from running until it can. Both times count on clocks that also run in
suspend on the holder's side; a machine whose clocks all stand still knows nothing of that time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from icecore.errors import IcecoreError, JobHeld, SessionFenced, StoreError
from icecore.store.backend.base import READERS_LEAVE
from icecore.store.format.names import SESSIONS, heartbeat_session
from icecore.store.format.state import LEASE, LogState, SessionRecord
from icecore.store.log.catalog import Pages
from icecore.store.log.lease_clock import now
from icecore.store.log.presence import has_ended
from icecore.store.log.repository import StoredRepository
from icecore.store.log.session import Session

BEAT_SECONDS = 15.0
PAUSE_SECONDS = 60.0
SILENCE_SECONDS = 90.0
_LOOK_SECONDS = 1.0
_RELEASE_SECONDS = 20.0


def purpose_of(name: str, user: int | None = None) -> str:
    """Return the purpose of the sessions that are leases of a user's job; None: an administrator's."""
    return f"{LEASE}{name}" if user is None else f"{LEASE}{name} {user}"


def lease_of(purpose: str) -> tuple[str, str]:
    """Return the job's name and the user of a lease's purpose; an empty user: an administrator's."""
    name, _, user = purpose.removeprefix(LEASE).partition(" ")
    return name, user


def excluded_by(purpose: str) -> Callable[[SessionRecord], bool]:
    """Return the function that tells which sessions exclude a lease."""
    name, user = lease_of(purpose)

    def excludes(other: SessionRecord) -> bool:
        if not other.purpose.startswith(LEASE):
            return False
        held, by = lease_of(other.purpose)
        return held == name and (by == user or not by or not user)

    return excludes


async def holder(
    repository: StoredRepository, name: str, user: int | None = None
) -> SessionRecord | None:
    """Return a session that excludes the lease of a user's job; None: there is none."""
    excludes = excluded_by(purpose_of(name, user))
    state = (await repository.log.newest()).state
    return next((one for one in state.sessions if excludes(one)), None)


class Lease:
    """A lease that is held; `take` makes them. It is renewed in the repository's event loop.

    Args:
        repository: Where.
        name: The job's name.
        session: The open session.
        began: When it was asked for, by `now`.

    Attributes:
        renewed: Called after each renewal, in the event loop.
    """

    def __init__(
        self, repository: StoredRepository, name: str, session: Session, began: float
    ) -> None:
        self.name = name
        self.renewed: Callable[[], None] = lambda: None
        self._repository = repository
        self._session = session
        self._renewed = began
        self._lost: str = ""
        self._task = asyncio.create_task(self._renew())

    @property
    def lost(self) -> str:
        """Why the lease is lost for good; empty: it is not known to be."""
        return self._lost

    @property
    def session(self) -> str:
        """The id of the session that is the lease."""
        return self._session.id

    @property
    def renewed_at(self) -> float:
        """When it was asked for or last renewed, by `now`."""
        return self._renewed

    @property
    def certain(self) -> bool:
        """Whether nobody else can hold the lease now."""
        return not self._lost and now() - self._renewed < PAUSE_SECONDS

    async def release(self) -> None:
        """Give the lease back.

        Raises:
            StoreError: The store failed; the lease ends by silence.
        """
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if not self._lost:
            try:
                await asyncio.wait_for(self._session.abort(), _RELEASE_SECONDS)
            except TimeoutError as error:
                raise StoreError(f"the lease of job {self.name} could not be given back") from error

    async def _renew(self) -> None:
        while not self._lost:
            began = now()
            try:
                await self._session.heartbeat()
                await self._require()
                self._renewed = began
                self.renewed()
            except SessionFenced as error:
                self._lost = error.message
            except (IcecoreError, OSError):
                pass  # `certain` tells when this has lasted for too long
            await asyncio.sleep(BEAT_SECONDS)

    def _fenced(self) -> SessionFenced:
        return SessionFenced(
            f"the lease of job {self.name} was taken by another process",
            cure="the job runs elsewhere; 'icecore ls' shows its snapshots",
        )

    async def _require(self) -> None:
        """Raise SessionFenced if another process has ended the session. After a time of uncertainty
        the record is changed, which keeps a taker that has seen the silence from ending it.
        """
        if self.certain:
            if (await self._repository.log.newest()).state.session(self._session.id) is None:
                raise self._fenced()
            return

        async def touch(state: LogState, pages: Pages) -> LogState:
            if state.session(self._session.id) is None:
                raise self._fenced()
            touched = [
                msgspec.structs.replace(one, created_ns=max(one.created_ns + 1, time.time_ns()))
                if one.id == self._session.id
                else one
                for one in state.sessions
            ]
            return msgspec.structs.replace(state, sessions=touched)

        await self._repository.log.transact(touch, f"renew {self._session.id}", leave=READERS_LEAVE)


async def take(
    repository: StoredRepository,
    name: str,
    *,
    user: int | None = None,
    where: str = "",
    told: Callable[[SessionRecord], None] | None = None,
) -> Lease:
    """Take the lease of a job; wait for the silence of a holder that stores no heartbeat.

    Args:
        repository: Where.
        name: The job's name.
        user: The uid whose job it is. None: an administrator's, which excludes those of all users.
        where: This node and its state directory. A holder of the same ``where`` whose process has
            ended is not waited for: its job can be seen from here. Empty: every holder is.
        told: Gets the holder's session once, before it is waited for.

    Raises:
        JobHeld: Its holder is alive.
        StoreError: The store failed.
    """
    purpose = purpose_of(name, user)
    while True:
        began = now()
        try:
            session = await repository.begin(
                None,
                purpose,
                load_index=False,
                beat_seconds=None,
                leave=READERS_LEAVE,
                excludes=excluded_by(purpose),
                host=where,
            )
        except JobHeld:
            held = await holder(repository, name, user)
            if held is None:
                continue
            if not _is_gone(held, where):
                if told is not None:
                    told(held)
                await _require_silence(repository, name, held, where)
            await _fence(repository, name, held)
        else:
            return Lease(repository, name, session, began)


def _is_gone(held: SessionRecord, where: str) -> bool:
    return bool(where) and held.host == where and has_ended(held.process)


async def _require_silence(
    repository: StoredRepository, name: str, held: SessionRecord, where: str
) -> None:
    """Return once the holder has been silent for `SILENCE_SECONDS`, or has ended.

    Raises:
        JobHeld: It has stored a heartbeat.
    """
    first = await _signs(repository, held.id)
    end = time.monotonic() + SILENCE_SECONDS
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        began = time.monotonic()
        current = (await repository.log.newest()).state.session(held.id)
        if current is None:
            return
        if current != held or await _signs(repository, held.id) - first:
            raise held_by(name, held)
        if began > end or _is_gone(held, where):
            return


def held_by(name: str, held: SessionRecord) -> JobHeld:
    """Return the error that says who runs a job."""
    return JobHeld(
        f"job {name} is run by {held.host} since {_moment(held.created_ns)}",
        cure="wait for its end, or stop it there: send SIGTERM to its 'icecore run'",
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


async def _fence(repository: StoredRepository, name: str, held: SessionRecord) -> None:
    """End a holder's session, unless it has changed since it was seen."""

    async def change(state: LogState, pages: Pages) -> LogState:
        current = state.session(held.id)
        if current is None:
            return state
        if current != held:
            raise held_by(name, held)
        left = [one for one in state.sessions if one.id != held.id]
        return msgspec.structs.replace(state, sessions=left)

    await repository.log.transact(change, f"fence {held.id}", leave=READERS_LEAVE)
