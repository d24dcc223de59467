"""Configuration and keys, without which nothing can be read: opens a repository with whichever copy
is intact, and repairs the others.

A copy counts only if it verifies under the keys, so an intact object of another repository counts
as damaged.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable

import msgspec

from icecore.errors import (
    Damaged,
    Distrusted,
    FormatTooNew,
    IcecoreError,
    NotFound,
    ObjectExists,
    ObjectMissing,
    StoreError,
    UsageError,
    WrongPassphrase,
)
from icecore.events import Event, Sink
from icecore.store.backend.base import Backend
from icecore.store.format.keys import (
    CONFIG_KIND,
    ENCRYPTED_FORMAT,
    FORMAT,
    KEY_KIND,
    Config,
    Keys,
    Parameters,
    decode_config,
    encode_config,
    encode_slot,
    new_slot,
    open_slot,
)
from icecore.store.format.names import (
    CONFIG,
    COPIES,
    LOG,
    PREFIX,
    copy_name,
    key_name,
    log_generation,
    random_id,
)
from icecore.store.format.slots import MAX_WORK, decode_slots, verify, work
from icecore.store.format.state import ENTRY_KIND, decode_entry
from icecore.store.log.keychain import (
    RECOVER,
    Admit,
    Newest,
    Passphrase,
    numbers_of,
    open_keys,
    readable,
    replaced,
)

_CONFIGS = (CONFIG, copy_name(CONFIG))
_MIB = 1 << 20
_LATER = "a later version wrote it, or somebody planted it: remove it if nobody uses this repository with a newer icecore"
#: Objects that are tried before keys count as those of another repository.
_WITNESSES = 64


class Identity(msgspec.Struct, frozen=True):
    """The key object and the configuration that open a repository."""

    keys: Keys
    config: Config
    data: bytes


def asked_once(passphrase: Passphrase | None) -> Passphrase | None:
    """Ask for the passphrase once, regardless of how many slots it is tried on."""
    if passphrase is None:
        return None
    given: list[bytes] = []

    def ask() -> bytes:
        if not given:
            given.append(passphrase())
        return given[0]

    return ask


async def from_copies(
    backend: Backend,
    passphrase: Passphrase | None,
    secret: bytes,
    error: IcecoreError,
    *,
    rebuild: bool = False,
    known: str = "",
    admit: Admit | None = None,
    emit: Sink,
) -> Identity:
    """Open by a key object and a configuration that match: the pair with the highest number, except
    what a change of slots has replaced.

    Args:
        passphrase, secret: As in `icecore.store.log.keychain.read_keys`.
        error: Why the first copies do not open it; raised if no others do.
        rebuild: Create a configuration if none is left; for ``repair``, which stores it.
        known: The id that the repository had, as far as this client knows; used if ``rebuild``
            finds none.
        admit: As in `icecore.store.log.keychain.read_keys`; refused candidates are skipped if
            anything else opens.
        emit: Gets an event for what was read instead.

    Raises:
        NotFound: There is no repository.
        Damaged: No copy is left of one of the two.
        WrongPassphrase: The same as ``error``.
        Distrusted: Only what ``admit`` refuses would open it.
    """
    objects = await readable(backend)
    configs = [
        (name, data)
        for name in _CONFIGS
        if (data := await _get(backend, name, CONFIG_KIND.object_limit)) is not None
    ]
    if not configs and not objects:
        raise NotFound(
            f"{backend.where} is no repository", cure="'icecore init' makes one"
        ) from error
    tried: list[tuple[Newest, Keys]] = []
    opened: list[Keys] = []
    too_new: FormatTooNew | None = None
    spent = 0
    # The cheap ones first, so that expensive planted ones block nobody from the one that matches.
    for found in sorted(objects, key=_work):
        if spent > MAX_WORK:
            break
        try:
            keys = await open_keys(backend, found, passphrase, secret, admit)
        except Distrusted as refused:
            error = refused
            continue
        except (Damaged, FormatTooNew, WrongPassphrase, UsageError):
            spent += _work(found)
            continue
        spent += _work(found)
        if not replaced(found, keys, objects):
            tried.append((found, keys))
    for found, keys in sorted(tried, key=lambda one: one[0].number, reverse=True):
        for name, data in configs:
            try:
                config = _decode(name, data, keys)
                if admit is not None:
                    admit(config.id, keys.encrypted)
            except Distrusted as refused:
                error = refused
                continue
            except FormatTooNew as later:
                too_new = later
                continue
            except Damaged:
                continue
            emit(Event("store.copy_read", {"object": f"{found.name}, {name}", "error": str(error)}))
            return Identity(keys, config, data)
        if keys.encrypted or not isinstance(error, Distrusted):
            opened.append(keys)
    if too_new is not None:
        raise error if isinstance(error, Distrusted) else too_new
    for keys in opened:
        if await is_of(backend, keys):
            if not rebuild:
                why = (
                    "it is missing, and so is its copy"
                    if not configs
                    else "neither it nor its copy can be read"
                )
                raise Damaged(
                    CONFIG_KIND.title, CONFIG, why, cure=f"'icecore repair' rebuilds it; {RECOVER}"
                ) from error
            config = await _rebuilt(backend, keys, known)
            return Identity(keys, config, encode_config(config, keys).data)
    if opened and isinstance(error, ObjectMissing):
        # Keys without anything that they open: 'init' was interrupted, and resumes there.
        raise NotFound(
            f"{backend.where} is no repository", cure="'icecore init' makes one"
        ) from error
    raise error


def _work(found: Newest) -> int:
    return work(found.slots) if found.slots is not None else 0


async def _rebuilt(backend: Backend, keys: Keys, known: str) -> Config:
    """Return a configuration like the lost one. The id of an encrypted repository is known; in a
    plain one, another id is harmless.
    """
    largest = max([info.size async for info in backend.list(PREFIX["shard"])], default=0)
    size = (
        Parameters().shard_bytes
        if not largest
        else min(1 << 30, max(_MIB, 1 << (largest - 1).bit_length()))
    )
    number = ENCRYPTED_FORMAT if keys.encrypted else FORMAT
    return Config(
        number, keys.repository or known or random_id().hex(), time.time_ns(), Parameters(size)
    )


async def is_of(backend: Backend, keys: Keys) -> bool:
    """Return whether anything in ``backend`` (a log entry or a manifest) verifies under the keys."""

    async def opens(
        names: AsyncIterator[str], limit: int, read: Callable[[str, bytes], object]
    ) -> bool:
        tried = 0
        async for name in names:
            data = await _get(backend, name, limit)
            try:
                if data is not None:
                    read(name, data)
                    return True
            except Damaged:
                pass
            tried += 1
            if tried == _WITNESSES:
                break
        return False

    async def listed(prefix: str) -> AsyncIterator[str]:
        async for info in backend.list(prefix):
            yield info.name

    def entry(name: str, data: bytes) -> object:
        return decode_entry(name, log_generation(name) or 0, data, keys.log)

    from icecore.store.format.manifest import MANIFEST_KIND, decode_manifest  # loads numpy

    return await opens(listed(LOG), ENTRY_KIND.object_limit, entry) or await opens(
        listed(PREFIX["manifest"]),
        MANIFEST_KIND.object_limit,
        lambda name, data: decode_manifest(data, keys.manifest, name=name),
    )


class Mend(msgspec.Struct, frozen=True):
    """One object that is not as it should be.

    Attributes:
        kind: Its kind, in words.
        name: The object.
        why: What is wrong with it.
        how: The remedy; empty if there is none.
        data: What to store in its place; None to remove it.
        before: Its present content; None if absent.
        harmless: It is not damage: an earlier version did not write a copy.
    """

    kind: str
    name: str
    why: str
    how: str
    data: bytes | None
    before: bytes | None
    harmless: bool = False


async def inspect(
    backend: Backend,
    keys: Keys,
    config: Config,
    *,
    spare_config: bytes = b"",
    spare_key: tuple[int, bytes] | None = None,
) -> list[Mend]:
    """Return what is wrong with the configuration, the keys and their copies.

    Args:
        keys, config: Those with which the repository was opened.
        spare_config, spare_key: Verified objects from a recovery file, used if the repository has
            none. The key object comes with its number.

    Raises:
        StoreError: The store failed.
    """
    copies = [info.name async for info in backend.list(COPIES)]
    mends = await _configs(backend, keys, config, spare_config, bool(copies))
    return mends + await _keys(backend, keys, spare_key, bool(copies))


async def _configs(
    backend: Backend, keys: Keys, config: Config, spare: bytes, copies: bool
) -> list[Mend]:
    held: dict[str, bytes | None] = {}
    wrong: dict[str, str] = {}
    for name in _CONFIGS:
        held[name] = data = await _get(backend, name, CONFIG_KIND.object_limit)
        try:
            if data is None:
                wrong[name] = "it is missing"
            else:
                _decode(name, data, keys)
        except Damaged as error:
            wrong[name] = error.why
    good = next((data for name, data in held.items() if name not in wrong), None)
    source, how = good or spare or encode_config(config, keys).data, "stored again"
    if not good and not spare:
        how = f"rebuilt from what this client knows, with the id {config.id}"
    return [
        _mend(CONFIG_KIND.title, name, why, how, source, held[name], copies)
        for name, why in wrong.items()
    ]


async def _keys(
    backend: Backend, keys: Keys, spare: tuple[int, bytes] | None, copies: bool
) -> list[Mend]:
    held: dict[tuple[int, str], bytes] = {}
    wrong: dict[str, str] = {}
    later: list[Mend] = []
    for prefix in ("", COPIES):
        for number in await numbers_of(backend, prefix):
            name = prefix + key_name(number)
            data = await _get(backend, name, KEY_KIND.object_limit)
            if data is None:
                continue  # replaced meanwhile
            try:
                _verify(name, data, keys)
            except FormatTooNew:
                later.append(Mend(KEY_KIND.title, name, _LATER, "", None, data))
                continue
            except Damaged as error:
                wrong[name] = error.why
            held[number, name] = data
    good = [(number, data) for (number, name), data in held.items() if name not in wrong]
    if good:
        counts, source = max(good, key=lambda one: one[0])
    elif spare is not None:
        counts, source = max([spare[0], *(number for number, _ in held)]), spare[1]
    elif not keys.encrypted:
        counts, source = 0, encode_slot(new_slot(keys.secret)).data
    else:
        named = sorted(wrong) or [key_name(0)]
        return [
            Mend(KEY_KIND.title, name, wrong.get(name, "there is none"), "", None, None)
            for name in named
        ] + later
    mends = later
    for name in (key_name(counts), copy_name(key_name(counts))):
        if (counts, name) not in held or name in wrong:
            why = wrong.get(name, "it is missing")
            mends.append(
                _mend(
                    KEY_KIND.title,
                    name,
                    why,
                    "stored again",
                    source,
                    held.get((counts, name)),
                    copies,
                )
            )
    for (number, name), data in held.items():
        if name in wrong and number != counts:
            mends.append(
                Mend(KEY_KIND.title, name, wrong[name], "removed: it opens nothing", None, data)
            )
    return mends


def _decode(name: str, data: bytes, keys: Keys) -> Config:
    """Return the configuration in object ``name``. A second copy has the same bytes, so it is
    encrypted for the name of the first.
    """
    try:
        return decode_config(CONFIG, data, keys)
    except Damaged as error:
        raise Damaged(error.kind, name, error.why) from error


def _mend(
    kind: str, name: str, why: str, how: str, source: bytes, before: bytes | None, copies: bool
) -> Mend:
    harmless = before is None and name.startswith(COPIES) and not copies
    return Mend(
        kind,
        name,
        "it has no second copy" if harmless else why,
        "a second copy is stored" if harmless else how,
        source,
        before,
        harmless,
    )


def _verify(name: str, data: bytes, keys: Keys) -> None:
    slots = decode_slots(name, data)
    if slots is not None and keys.encrypted and slots.repository == keys.repository:
        verify(name, slots, keys.secret)
    elif slots is not None or keys.encrypted or open_slot(name, data) != keys.secret:
        raise Damaged(KEY_KIND.title, name, "it belongs to another repository")


async def mend(backend: Backend, mends: list[Mend]) -> None:
    """Make the repairs. Safe to interrupt: an object is removed only while another copy of it is
    intact, or if it is useless.
    """
    for one in mends:
        if not one.how:
            continue
        if one.before is not None:
            if await _get(backend, one.name, KEY_KIND.object_limit) != one.before:
                continue  # another client has repaired it meanwhile
            await backend.delete(one.name)
        if one.data is not None:
            try:
                await backend.create(one.name, [one.data])
            except ObjectExists:
                pass  # likewise


async def _get(backend: Backend, name: str, limit: int) -> bytes | None:
    try:
        return await backend.get(name, limit=limit)
    except ObjectMissing:
        return None
    except Damaged:
        return b""  # longer than any object of its kind


async def agreed(backend: Backend, name: str, data: bytes) -> bytes:
    """Store object ``name``; return its content, which another client may have stored before.

    Raises:
        StoreError: The store failed.
    """
    try:
        await backend.create(name, [data])
        return data
    except ObjectExists:
        held = await _get(backend, name, CONFIG_KIND.object_limit)
        if held is None:
            raise StoreError(
                f"{name} is created and removed at the same time", cure="try again"
            ) from None
        return held
