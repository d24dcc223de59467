"""Where a repository's keys come from: its newest key object, and a passphrase if it is encrypted.
Each change of slots is one creation.

Each key object has a second copy under another name, which is read if the first is damaged or
missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import msgspec
from msgspec.structs import replace

from icecore.errors import (
    Damaged,
    FormatTooNew,
    IcecoreError,
    ObjectExists,
    ObjectMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    UsageError,
    WrongPassphrase,
)
from icecore.events import Event, Sink, discard
from icecore.store.backend.base import Backend
from icecore.store.format.keys import KEY_KIND, Keys, open_slot
from icecore.store.format.names import COPIES, KEYS, LAST_KEY, copy_name, key_name, key_number
from icecore.store.format.slots import Slots, decode_slots, encode_slots, unlock, verify

#: Gets the id of a repository and whether it is encrypted; raises if a client may not open it.
Admit = Callable[[str, bool], None]
#: Asks for the passphrase, only if there is something to open with it. It runs in a thread, so it
#: may ask a person.
Passphrase = Callable[[], bytes]

#: How to restore keys of which no copy is left.
RECOVER = "'icecore key import FILE' restores what 'icecore key export FILE' wrote"
_PLANTED = (
    "'icecore key export FILE' saves what opens the repository; if a key object with a lower number, or its copy, is intact, remove this object and its copy;"
    " otherwise, 'icecore copy' copies the snapshots to a new repository"
)
_TRIES = 8
_PAUSE_SECONDS = 0.1


class Newest(msgspec.Struct, frozen=True):
    """A key object: its name, number and bytes, and its slots if the repository is encrypted.

    Attributes:
        above: The highest number of any key object that can be read, or that follows it without a
            gap, readable or not: the next change takes the number after it. An unreadable object
            further away does not count, because anyone who can write to the store can plant it.
    """

    name: str
    number: int
    data: bytes
    slots: Slots | None
    above: int


async def newest(backend: Backend, emit: Sink = discard) -> Newest:
    """Return the key object with the highest number, or its second copy if it is damaged or
    missing.

    Args:
        emit: Gets an event if it is not the one that counts.

    Raises:
        Damaged: No key object can be read.
        FormatTooNew: A later version wrote it, and no other can be read.
    """
    while True:
        numbers = await numbers_of(backend)
        failed: IcecoreError = Damaged(KEY_KIND.title, KEYS, "there is none", cure=RECOVER)
        if numbers:
            name = key_name(numbers[-1])
            try:
                data = await backend.get(name, limit=KEY_KIND.object_limit)
                return Newest(name, numbers[-1], data, decode_slots(name, data), numbers[-1])
            except ObjectMissing as error:
                if (await numbers_of(backend))[-1:] != numbers[-1:]:
                    continue  # replaced meanwhile
                failed = error
            except (Damaged, FormatTooNew) as error:
                failed = error
        found = await readable(backend)
        if found:
            emit(Event("store.copy_read", {"object": found[0].name, "error": str(failed)}))
            return found[0]
        if isinstance(failed, Damaged):
            raise Damaged(failed.kind, failed.name, failed.why, cure=RECOVER)
        raise failed


async def readable(backend: Backend) -> list[Newest]:
    """Return all readable key objects, including second copies, each content once, the one that
    counts first.
    """
    first, second = await numbers_of(backend), await numbers_of(backend, COPIES)
    found: dict[bytes, Newest] = {}
    for number in sorted({*first, *second}, reverse=True):
        for name in (key_name(number), copy_name(key_name(number))):
            try:
                data = await backend.get(name, limit=KEY_KIND.object_limit)
                found.setdefault(data, Newest(name, number, data, decode_slots(name, data), number))
            except (Damaged, FormatTooNew, ObjectMissing):
                continue
    above = max((one.number for one in found.values()), default=0)
    while above + 1 in first or above + 1 in second:
        above += 1
    return [replace(one, above=above) for one in found.values()]


def replaced(found: Newest, keys: Keys, objects: Iterable[Newest]) -> bool:
    """Return whether a change of slots has replaced ``found``: a holder of the master secret wrote
    an object with a higher number that is no older.

    Args:
        keys: The keys that ``found`` holds.
        objects: The other readable objects. Planted ones do not verify, and an old one stored under
            a higher number names no later change.
    """
    mine = found.slots
    if mine is None:
        return False
    for other in objects:
        theirs = other.slots
        if (
            other.number <= found.number
            or theirs is None
            or theirs.repository != mine.repository
            or theirs.changes[-1:] == mine.changes[-1:]
        ):
            continue
        try:
            verify(other.name, theirs, keys.secret)
        except Damaged:
            continue
        if not set(theirs.changes[-1:]) <= set(mine.changes):
            return True
    return False


async def _first(backend: Backend) -> Newest | None:
    """Return the key object of a repository that is not encrypted: the first one, which nothing
    ever replaces. None if the repository is encrypted.
    """
    try:
        data = await backend.get(key_name(0), limit=KEY_KIND.object_limit)
        slots = decode_slots(key_name(0), data)
    except (Damaged, ObjectMissing):
        return None
    return Newest(key_name(0), 0, data, None, 0) if slots is None else None


async def read_keys(
    backend: Backend,
    passphrase: Passphrase | None,
    secret: bytes = b"",
    *,
    encrypted: bool = True,
    admit: Admit | None = None,
    emit: Sink = discard,
) -> Keys:
    """Return the keys of the repository in ``backend``.

    Args:
        encrypted: Whether it seems to be encrypted; if not, one request is tried before the key
            objects are listed.
        passphrase: Gives the passphrase of an encrypted repository.
        secret: The master secret, if known from a replica. No passphrase is needed then.
        admit: Called for an encrypted repository before the passphrase is asked for.

    Raises:
        UsageError: It has another master secret.
        WrongPassphrase: It is encrypted, and the passphrase is missing or wrong.
        Damaged, FormatTooNew: As `newest`.
    """
    found = (None if encrypted else await _first(backend)) or await newest(backend, emit)
    return await open_keys(backend, found, passphrase, secret, admit)


async def open_keys(
    backend: Backend,
    found: Newest,
    passphrase: Passphrase | None,
    secret: bytes = b"",
    admit: Admit | None = None,
) -> Keys:
    """Return the keys in a key object; arguments and errors as in `read_keys`."""
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
        f"{backend.where} is not a replica: it has another master secret",
        cure="'icecore init --replica-of' makes a replica; 'icecore copy' copies snapshots to any other repository",
    )


async def change(backend: Backend, keys: Keys, edit: Callable[[Slots], Slots]) -> Slots:
    """Replace the slots by the result of ``edit``, in one creation; then delete what it replaces.

    Args:
        keys: The repository's keys: only a holder of the master secret changes slots.
        edit: Called again with newer slots if another change came first. Slow: it runs in a thread.

    Raises:
        UsageError: The repository is not encrypted.
        StoreError: The store failed; `newest` tells which slots count.
    """
    for _ in range(_TRIES):
        found = await newest(backend)
        if found.slots is None:
            raise UsageError(
                f"{backend.where} is not encrypted",
                cure="'icecore init --encrypt' makes one that is, 'icecore copy' copies snapshots into it",
            )
        verify(found.name, found.slots, keys.secret)
        changed = await asyncio.to_thread(edit, found.slots)
        number, data = found.above + 1, encode_slots(changed).data
        if number > LAST_KEY:
            raise Damaged(
                KEY_KIND.title,
                found.name,
                "its number is the last one, so no change can follow it: somebody planted it",
                cure=_PLANTED,
            )
        if await _create(backend, key_name(number), data):
            # The number may have been taken and released while this process slept: what counts is
            # whether the newest follows ours.
            counts = (await newest(backend)).slots
            await _create(backend, copy_name(key_name(number)), data)
            await tidy(backend)
            if counts is not None and changed.changes[-1] in counts.changes:
                return changed
    raise StoreError("other clients keep changing the key slots", cure="try again")


async def tidy(backend: Backend) -> int:
    """Delete key objects that no longer count (an interrupted change leaves one), because they
    still open the repository; return how many.
    """
    counts = (await newest(backend)).number
    old = [number for number in await numbers_of(backend) if number < counts]
    for number in old:
        await backend.delete(key_name(number))
    for number in await numbers_of(backend, COPIES):
        if number < counts:
            await backend.delete(copy_name(key_name(number)))
    return len(old)


async def _create(backend: Backend, name: str, data: bytes) -> bool:
    """Create object ``name``; return whether it is now ours. The reply may get lost, but nobody
    else writes these bytes.
    """
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


async def numbers_of(backend: Backend, prefix: str = "") -> list[int]:
    """Return the numbers of all key objects, ascending.

    Args:
        prefix: `COPIES` for the second copies.
    """
    numbers = [
        key_number(info.name.removeprefix(prefix)) async for info in backend.list(prefix + KEYS)
    ]
    return sorted(number for number in numbers if number is not None)
