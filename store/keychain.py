"""Where a repository's keys come from: its newest key object, and a passphrase where that must be asked for; each change of slots is one creation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from icecore.errors import (
    Damaged,
    ObjectExists,
    ObjectMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    UsageError,
    WrongPassphrase,
)
from icecore.store.backend import Backend
from icecore.store.keys import KEY_KIND, Keys, open_slot
from icecore.store.names import KEYS, key_name, key_number
from icecore.store.slots import Slots, decode_slots, encode_slots, unlock, verify

#: Told the id of a repository, and whether it is encrypted; raises where a client may not open it.
Admit = Callable[[str, bool], None]
#: Asked for the passphrase when, and only when, there is something to open with it; in a thread, so it may ask a person.
Passphrase = Callable[[], bytes]

_TRIES = 8
_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class Newest:
    """The key object that counts: its number and bytes, and its slots if the repository is encrypted."""

    number: int
    data: bytes
    slots: Slots | None

    @property
    def name(self) -> str:
        """The object's name."""
        return key_name(self.number)


async def newest(backend: Backend) -> Newest:
    """The key object of the highest number.

    Raises:
        Damaged: There is none, or it is not what was written.
        FormatTooNew: A later version wrote it.
    """
    while True:
        numbers = await _numbers(backend)
        if not numbers:
            raise Damaged(KEY_KIND.title, KEYS, "there is none")
        name = key_name(numbers[-1])
        try:
            data = await backend.get(name, limit=KEY_KIND.object_limit)
        except ObjectMissing:
            if (await _numbers(backend))[-1:] == numbers[-1:]:
                raise
            continue  # replaced meanwhile
        return Newest(numbers[-1], data, decode_slots(name, data))


async def _first(backend: Backend) -> Newest | None:
    """The key object of a repository that is not encrypted: the first, and nothing ever takes its place. None if it is not such a one."""
    try:
        data = await backend.get(key_name(0), limit=KEY_KIND.object_limit)
    except ObjectMissing:
        return None
    slots = decode_slots(key_name(0), data)
    return Newest(0, data, None) if slots is None else None


async def read_keys(
    backend: Backend, passphrase: Passphrase | None, secret: bytes = b"", *, encrypted: bool = True, admit: Admit | None = None
) -> Keys:
    """The keys of the repository in ``backend``.

    Args:
        encrypted: Whether it seems to be; if not, one request is tried before the key objects are listed.
        passphrase: Gives it where the repository is encrypted.
        secret: The master secret, where it is known: that of a replica. No passphrase is needed then.
        admit: Asked of an encrypted repository before its passphrase is.

    Raises:
        UsageError: It has another master secret than that.
        WrongPassphrase: It is encrypted, and there is no passphrase or a wrong one.
        Damaged, FormatTooNew: As `newest`.
    """
    found = (None if encrypted else await _first(backend)) or await newest(backend)
    if found.slots is None:
        plain = open_slot(found.name, found.data)
        if secret and secret != plain:
            raise _unrelated(backend)
        return Keys.derive(plain)
    if admit is not None:
        admit(found.slots.repository, True)
    if secret:
        try:
            verify(found.name, found.slots, secret)
        except Damaged:
            raise _unrelated(backend) from None
        return Keys.derive(secret, found.slots.repository)
    if passphrase is None:
        raise WrongPassphrase(
            f"{backend.where} is encrypted and no passphrase is given",
            cure="set ICECORE_PASSPHRASE_FILE, ICECORE_PASSPHRASE_COMMAND or ICECORE_PASSPHRASE",
        )
    given = await asyncio.to_thread(passphrase)
    secret, _ = await asyncio.to_thread(unlock, found.name, found.slots, given)
    return Keys.derive(secret, found.slots.repository)


def _unrelated(backend: Backend) -> UsageError:
    return UsageError(
        f"{backend.where} is no replica: its master secret is another",
        cure="'icecore init --replica-of' makes a replica; 'icecore copy' brings snapshots to any other repository",
    )


async def change(backend: Backend, keys: Keys, edit: Callable[[Slots], Slots]) -> Slots:
    """Replace the slots by what ``edit`` makes of them, in one creation; what it replaces is then deleted.

    Args:
        keys: The repository's: only a holder of the master secret changes slots.
        edit: Called again with newer slots if another change came first. Slow: it runs in a thread.

    Raises:
        UsageError: The repository is not encrypted.
        StoreError: The store failed; `newest` tells which slots count.
    """
    for _ in range(_TRIES):
        found = await newest(backend)
        if found.slots is None:
            raise UsageError(
                f"{backend.where} is not encrypted", cure="'icecore init --encrypt' makes one that is, 'icecore copy' fills it"
            )
        verify(found.name, found.slots, keys.secret)
        changed = await asyncio.to_thread(edit, found.slots)
        if await _create(backend, key_name(found.number + 1), encode_slots(changed).data):
            # The number may have been taken and given up while we slept: what counts is whether the newest follows ours.
            counts = (await newest(backend)).slots
            await tidy(backend)
            if counts is not None and changed.changes[-1] in counts.changes:
                return changed
    raise StoreError("others change the key slots all the time", cure="try again")


async def tidy(backend: Backend) -> int:
    """Delete key objects that do not count any more (a change that broke off leaves one): they still open the repository; returns how many."""
    old = (await _numbers(backend))[:-1]
    for number in old:
        await backend.delete(key_name(number))
    return len(old)


async def _create(backend: Backend, name: str, data: bytes) -> bool:
    """Whether object ``name`` is now ours: the reply to a creation may get lost, its bytes are of nobody else."""
    tries = 0
    while True:
        try:
            await backend.create(name, [data])
            return True
        except ObjectExists:
            try:
                return await backend.get(name, limit=KEY_KIND.object_limit) == data
            except ObjectMissing:
                return False  # replaced already
        except (StoreDenied, StoreFull):
            raise
        except StoreError:
            tries += 1
            if tries == _TRIES:
                raise
            await asyncio.sleep(_PAUSE_SECONDS)


async def _numbers(backend: Backend) -> list[int]:
    found = []
    async for info in backend.list(KEYS):
        number = key_number(info.name)
        if number is not None:
            found.append(number)
    return sorted(found)
