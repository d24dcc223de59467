"""Encrypted repositories: without the key, only names and sizes are visible, and no object that was
moved, cut, replayed or planted is accepted.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives import ciphers
from cryptography.hazmat.primitives.ciphers import algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from icecore.errors import (
    Damaged,
    FormatTooNew,
    IcecoreError,
    NotFound,
    RollbackDetected,
    StoreError,
    UsageError,
    WrongPassphrase,
)
from icecore.sizes import PAGE
from icecore.store.backend.faulty import Call, Crashed, FaultyBackend, Outcome, stop_at
from icecore.store.backend.local import LocalBackend
from icecore.store.backend.memory import MemoryBackend
from icecore.store.format import cipher, slots
from icecore.store.format.cipher import (
    Key,
    open_piece,
    open_whole,
    peek_piece,
    seal_piece,
    seal_whole,
)
from icecore.store.format.envelope import seal
from icecore.store.format.keys import KEY_KIND, PUBLIC, Keys, Parameters, encode_slot, open_slot
from icecore.store.format.names import copy_name, key_name, log_generation
from icecore.store.format.state import ENTRY_KIND
from icecore.store.log import keychain
from icecore.store.log.repository import StoredRepository
from icecore.store.log.watermark import Watermark
from icecore.store.maintenance.check import check
from tests.store.images import image, place, touch
from tests.store.miniature import CHEAP, PASSPHRASE, collect, listed, page, read, sound, take

A = {cell: cell for cell in range(12)}
B = {**A, **{cell: 100 + cell for cell in range(10)}}
JOB = "a-job-that-nobody-must-know-of"


def giving(passphrase: bytes = PASSPHRASE) -> Callable[[], bytes]:
    return lambda: passphrase


async def made(backend: MemoryBackend, **more: object) -> StoredRepository:
    return await StoredRepository.create(
        backend,
        Parameters(shard_bytes=1 << 18),
        passphrase=giving(),
        cost=CHEAP,
        **more,  # type: ignore[arg-type]
    )


async def filled() -> tuple[MemoryBackend, dict[str, dict[int, int]]]:
    """Return a repository with two snapshots, one forgotten before, compacted once."""
    backend = MemoryBackend()
    repository = await made(backend)
    old = await take(repository, A)
    contents = {
        await take(repository, B, old, job=JOB, tags=[JOB]): dict(B),
        await take(repository, {3: 77, 4: 78}, job=JOB): {3: 77, 4: 78},
    }
    await repository.forget([old])
    await collect(repository, fence_seconds=0)
    return backend, contents


def test_a_whole_life_and_nothing_in_the_clear() -> None:
    async def body() -> None:
        backend, contents = await filled()
        repository = await StoredRepository.open(backend, passphrase=giving())
        await sound(repository, unreached=0)
        for snapshot, content in contents.items():
            assert await read(repository, snapshot) == content
        record = await repository.find(next(iter(contents)))
        state = (await repository.log.newest()).state
        secrets = {
            "job": JOB.encode(),
            "snapshot": record.snapshot.encode(),
            "manifest": record.manifest.encode(),
            "segment": state.segments[0].id,
            "secret": repository.keys.secret,
            **{f"page {value}": page(value)[100:116] for value in {*B.values(), 77}},
        }
        assert {name.split("/")[0] for name in backend.objects} >= {
            "config",
            "keys",
            "log",
            "shards",
            "nodes",
            "index",
        }
        for name, data in backend.objects.items():
            for what, secret in secrets.items():
                assert secret not in data, f"{name} tells the {what}"
            if not name.removeprefix("copies/").startswith("keys/"):
                # Beyond headers and tails, which hold magics and counts, bytes are as random ones.
                body = np.frombuffer(data[56:-72] if len(data) > 400 else data[56:], np.uint8)
                assert (
                    len(body) < 200
                    or np.bincount(body, minlength=256).max() < len(body) / 256 * 4 + 16
                ), name

    asyncio.run(body())


def test_no_key_and_nonce_meet_two_texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever fails while shards are written: one place of one shard never gets two different
    chunks.
    """
    used: set[tuple[bytes, bytes]] = set()
    here = threading.local()
    real_key, real_mode, real_cipher = algorithms.AES256, modes.GCM, ciphers.Cipher

    def key_of(key: bytes) -> object:
        here.key = key
        return real_key(key)

    def mode_of(nonce: bytes) -> object:
        here.nonce = nonce
        return real_mode(nonce)

    class Recording:
        def __init__(self, *parts: object) -> None:
            self._inner = real_cipher(*parts)  # type: ignore[arg-type]

        def encryptor(self) -> object:
            pair = here.key, here.nonce
            assert pair not in used
            used.add(pair)
            return self._inner.encryptor()

        def decryptor(self) -> object:
            return self._inner.decryptor()

    monkeypatch.setattr(algorithms, "AES256", key_of)
    monkeypatch.setattr(modes, "GCM", mode_of)
    monkeypatch.setattr(ciphers, "Cipher", Recording)
    failing = FaultyBackend(LocalBackend(tmp_path / "r", create=True))
    with place(failing, encrypted=True) as here_:
        first = here_.take(image(6, "heap", 1), threads=2)
        appends = 0

        def plan(call: Call) -> Outcome:
            nonlocal appends
            appends += call.operation == "append"
            return Outcome.FAIL if call.operation == "append" and appends % 3 == 0 else Outcome.PASS

        for _ in range(3):
            failing.plan = plan
            with pytest.raises(StoreError):
                here_.take(image(9, "random", 2), first, threads=2)
            failing.plan = lambda call: Outcome.PASS
        here_.take(touch(image(6, "heap", 1), [1, 2], 3, 5), first, threads=2)
    assert len(used) > 20


@pytest.mark.parametrize("harm", ["cut", "halved", "swapped", "flipped"])
def test_no_harmed_object_is_believed(harm: str) -> None:
    """Every object in turn is cut, replaced by another of its kind, or has a bit flipped: it is
    named, or the data read is right.
    """

    async def body() -> None:
        backend, contents = await filled()
        objects = dict(backend.objects)
        kinds: dict[str, list[str]] = {}
        for name in objects:
            kinds.setdefault(name.split("/")[0], []).append(name)
        harmed = 0
        for name, data in objects.items():
            if harm == "swapped":
                others = [other for other in kinds[name.split("/")[0]] if other != name]
                if not others:
                    continue
                data = objects[others[0]]
            elif harm == "flipped":
                data = (
                    data[: len(data) // 2]
                    + bytes([data[len(data) // 2] ^ 1])
                    + data[len(data) // 2 + 1 :]
                )
            else:
                data = data[:-1] if harm == "cut" else data[: len(data) // 2]
            copy = MemoryBackend({**objects, name: data})
            noticed = False
            try:
                repository = await StoredRepository.open(copy, passphrase=giving())
                for snapshot, content in contents.items():
                    try:
                        assert await read(repository, snapshot) == content
                    except (Damaged, NotFound):
                        noticed = True
                noticed |= not (await check(repository, read_data=1.0)).sound
            except IcecoreError as error:
                assert isinstance(error, Damaged | RollbackDetected), error
                noticed = True
            assert noticed, f"{name} {harm} went unnoticed"
            harmed += 1
        assert harmed > 8

    asyncio.run(body())


def test_chunks_of_a_shard_do_not_change_places() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        repository = await made(backend)
        snapshot = await take(repository, A)
        (shard,) = [name for name in backend.objects if name.startswith("shards/")]
        data, size = backend.objects[shard], PAGE + cipher.TAG_BYTES
        backend.objects[shard] = data[size : 2 * size] + data[:size] + data[2 * size :]
        with pytest.raises(Damaged, match="not what was encrypted for its place"):
            await read(repository, snapshot)

    asyncio.run(body())


def test_pieces_and_wholes_open_only_where_they_belong() -> None:
    key, other = Key(bytes(32), bytes(range(32))), Key(bytes(32), bytes(32))
    room = memoryview(bytearray(100 + 16))
    seal_piece(key, "shards/a", 7, b"id", [b"x" * 60, b"", b"y" * 40], room)
    out = memoryview(bytearray(200))
    assert open_piece(key, "shards/a", 7, b"id", room, out) == b"x" * 60 + b"y" * 40
    # Part of it, for estimates: the same text, of which nobody knows whether it is sound.
    some = memoryview(bytearray(room[48:90]))
    peek_piece(key, "shards/a", 7, 48, some, some)
    assert some == (b"x" * 60 + b"y" * 40)[48:90]
    for wrong in (
        (other, "shards/a", 7, b"id", room),
        (key, "shards/b", 7, b"id", room),
        (key, "shards/a", 8, b"id", room),
        (key, "shards/a", 7, b"ie", room),
        (key, "shards/a", 7, b"id", room[:-1]),
        (key, "shards/a", 7, b"id", room[:10]),
    ):
        with pytest.raises(ValueError, match="encrypted"):
            open_piece(*wrong, out)  # type: ignore[arg-type]
    whole = seal_whole(key, "log/1", b"head", b"body")
    assert (
        open_whole(key, "log/1", b"head", whole) == b"body"
        and seal_whole(key, "log/1", b"head", b"body") != whole
    )
    for name, header, payload in (
        ("log/2", b"head", whole),
        ("log/1", b"heat", whole),
        ("log/1", b"head", whole[:20]),
    ):
        with pytest.raises(ValueError, match="encrypted"):
            open_whole(key, name, header, payload)


def test_what_is_not_encrypted_is_refused_even_with_a_right_digest() -> None:
    """A writer with only the digest key cannot make clients read plain objects, nor the reverse."""

    async def body() -> None:
        backend = MemoryBackend()
        repository = await made(backend)
        entry = await repository.log.newest()
        state = msgspec.structs.replace(entry.state, generation=2, predecessor=entry.digest)
        plain = seal(ENTRY_KIND, msgspec.msgpack.encode(state), bytes(repository.keys.log))
        await backend.create("log/fffffffffffffffd", [plain.data])
        with pytest.raises(Damaged, match="differs from its repository"):
            await repository.log.newest()

    asyncio.run(body())


def test_a_replicas_log_is_not_anothers() -> None:
    """Replicas share the master secret and most objects, but not the log: an entry of one in the
    place of the other's is refused.
    """

    async def body() -> None:
        here, there = MemoryBackend(), MemoryBackend()
        repository = await made(here)
        replica = await made(there, secret=repository.keys.secret)
        assert (
            replica.keys.chunk == repository.keys.chunk
            and replica.config.id != repository.config.id
        )
        await take(repository, A)
        newest = min(name for name in here.objects if name.startswith("log/"))
        there.objects[newest] = here.objects[newest]
        with pytest.raises(Damaged):
            await (await StoredRepository.open(there, passphrase=giving())).log.newest()
        there.objects["config"] = there.objects["copies/config"] = here.objects["config"]
        with pytest.raises(Damaged):
            await StoredRepository.open(there, passphrase=giving())

    asyncio.run(body())


def test_rollback_is_noticed_by_who_saw_more() -> None:
    async def body() -> None:
        backend, watermark = MemoryBackend(), Watermark()
        repository = await StoredRepository.create(
            backend, passphrase=giving(), cost=CHEAP, watermark=watermark
        )
        first = await take(repository, A)
        before = dict(backend.objects)
        await take(repository, B)
        newer = dict(backend.objects)
        backend.objects.clear()
        backend.objects.update(before)
        seen = await StoredRepository.open(backend, passphrase=giving(), watermark=watermark)
        with pytest.raises(RollbackDetected):
            await seen.snapshots()
        # A client that never saw more can only believe what it is shown; the newest entry alone,
        # put back, is noticed by its predecessor's digest.
        assert await listed(await StoredRepository.open(backend, passphrase=giving())) == [first]
        last = max(
            name for name in before if name.startswith("log/")
        )  # the oldest: names are inverted
        fork = min(name for name in newer if name.startswith("log/"))
        backend.objects.clear()
        backend.objects.update({**newer, fork: newer[last]})
        with pytest.raises(Damaged):
            await (await StoredRepository.open(backend, passphrase=giving())).snapshots()
        assert log_generation(fork) is not None

    asyncio.run(body())


# -- passphrases


def test_slots_are_added_removed_and_rotated() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        repository = await made(backend)
        snapshot = await take(repository, A)
        secret = repository.keys.secret

        async def opens(passphrase: bytes) -> bool:
            try:
                return (
                    await read(
                        await StoredRepository.open(backend, passphrase=giving(passphrase)),
                        snapshot,
                    )
                    == A
                )
            except WrongPassphrase:
                return False

        async def change(edit: Callable[[slots.Slots], slots.Slots]) -> None:
            await keychain.change(backend, repository.keys, edit)
            assert len([name for name in backend.objects if name.startswith("keys/")]) == 1

        with pytest.raises(WrongPassphrase, match="no passphrase"):
            await StoredRepository.open(backend)
        assert await opens(PASSPHRASE) and not await opens(b"something else")
        await change(lambda now: slots.add(now, secret, b"of the second person", "second", CHEAP))
        assert await opens(PASSPHRASE) and await opens(b"of the second person")
        await change(
            lambda now: slots.rotate(now, secret, "first", b"another for the first", CHEAP)
        )
        assert not await opens(PASSPHRASE) and await opens(b"another for the first")
        await change(lambda now: slots.remove(now, secret, "first"))
        assert not await opens(b"another for the first") and await opens(b"of the second person")
        for wrong, edit in {
            UsageError: lambda now: slots.remove(now, secret, "second"),  # the last one
            NotFound: lambda now: slots.remove(now, secret, "first"),
        }.items():
            with pytest.raises(wrong):
                await change(edit)
        with pytest.raises(UsageError, match="7 bytes"):
            await change(lambda now: slots.add(now, secret, b"7 bytes", "short", CHEAP))
        with pytest.raises(UsageError, match="already"):
            await change(lambda now: slots.add(now, secret, b"long enough", "second", CHEAP))
        with pytest.raises(Damaged, match="without the master secret"):
            await keychain.change(
                backend, Keys.derive(bytes(32), repository.config.id), lambda now: now
            )
        await sound(repository)

    asyncio.run(body())


@pytest.mark.parametrize("effect", [False, True], ids=["before", "after"])
def test_crash_at_every_call_of_a_key_change(effect: bool) -> None:
    """Afterwards, either the old or the new passphrases open it, and the next change leaves one
    object.
    """

    async def body() -> None:
        whole = MemoryBackend()
        keys = (await made(whole)).keys
        number = 0
        while True:
            number += 1
            backend = MemoryBackend(dict(whole.objects))
            faulty = FaultyBackend(backend, stop_at(number, effect=effect))
            try:
                await keychain.change(
                    faulty,
                    keys,
                    lambda now: slots.rotate(now, keys.secret, "first", b"new and long", CHEAP),
                )
            except Crashed:
                works = []
                for passphrase in (PASSPHRASE, b"new and long"):
                    try:
                        await StoredRepository.open(backend, passphrase=giving(passphrase))
                        works.append(passphrase)
                    except WrongPassphrase:
                        pass
                assert len(works) == 1
                await keychain.change(
                    backend,
                    keys,
                    lambda now: slots.add(now, keys.secret, b"the third of them", "x", CHEAP),
                )
                await StoredRepository.open(backend, passphrase=giving(works[0]))
                assert len([name for name in backend.objects if name.startswith("keys/")]) == 1
                continue
            break
        assert number > 4

    asyncio.run(body())


def test_lost_replies_and_races_of_key_changes() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        keys = (await made(backend)).keys
        lost: list[Call] = []

        def lose(call: Call) -> Outcome:
            if call.operation == "create" and not lost:
                lost.append(call)
                return Outcome.LOSE
            return Outcome.PASS

        losing = FaultyBackend(backend, lose)
        await keychain.change(
            losing,
            keys,
            lambda now: slots.add(now, keys.secret, b"although unheard", "lost", CHEAP),
        )
        await asyncio.gather(
            *(
                keychain.change(
                    backend,
                    keys,
                    lambda now, n=n: slots.add(
                        now, keys.secret, b"passphrase %d" % n, f"racer {n}", CHEAP
                    ),  # type: ignore[misc]
                )
                for n in range(4)
            )
        )
        found = (await keychain.newest(backend)).slots
        assert found is not None
        assert {slot.label for slot in found.slots} == {
            "first",
            "lost",
            *(f"racer {n}" for n in range(4)),
        }
        for n in range(4):
            await StoredRepository.open(backend, passphrase=giving(b"passphrase %d" % n))

        # One that slept while its number was taken, followed and given up: its change is made
        # again, and nobody's is lost.
        slept = False

        def sleepily(now: slots.Slots) -> slots.Slots:
            nonlocal slept
            if not slept:
                slept = True
                for label in ("meanwhile", "and after"):
                    edit = partial(
                        slots.add,
                        secret=keys.secret,
                        passphrase=b"long enough",
                        label=label,
                        cost=CHEAP,
                    )
                    asyncio.run(keychain.change(backend, keys, edit))
            return slots.add(now, keys.secret, b"who slept long", "sleeper", CHEAP)

        await keychain.change(backend, keys, sleepily)
        found = (await keychain.newest(backend)).slots
        assert found is not None and {"meanwhile", "and after", "sleeper"} <= {
            slot.label for slot in found.slots
        }

    asyncio.run(body())


def test_key_objects_of_others_and_of_later_versions() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        repository = await made(backend)
        name, data = key_name(0), backend.objects[key_name(0)]
        # A reader of version 1 does what open_slot still does for plain repositories.
        with pytest.raises(FormatTooNew, match="argon2id"):
            open_slot(name, data)
        real = slots.decode_slots(name, data)
        assert real is not None
        planted = slots.new_slots(
            repository.config.id, repository.keys.secret, b"known to a thief", "planted", CHEAP
        )
        both = msgspec.structs.replace(real, slots=[*real.slots, *planted.slots])
        greedy = [msgspec.structs.replace(real.slots[0], memory_kib=1 << 30)]
        for insane in (greedy, []):
            backend.objects[key_name(1)] = encode_slot(
                msgspec.structs.replace(real, slots=insane)
            ).data
            assert (
                await StoredRepository.open(backend, passphrase=giving())
            ).config == repository.config
        whole = dict(backend.objects)
        for harmed, error in (
            (both, Damaged),
            (msgspec.structs.replace(real, format=3), FormatTooNew),
            (msgspec.structs.replace(real, method="scrypt"), FormatTooNew),
            (msgspec.structs.replace(real, repository="f" * 32), WrongPassphrase),
        ):
            backend.objects = {**whole, key_name(1): encode_slot(harmed).data}
            assert (
                await StoredRepository.open(backend, passphrase=giving())
            ).config == repository.config
            for kept in (key_name(0), copy_name(key_name(0))):
                del backend.objects[kept]
            with pytest.raises(error):
                await StoredRepository.open(backend, passphrase=giving())

    asyncio.run(body())


_VALUES = st.recursive(
    st.none()
    | st.integers(-(2**40), 2**64 - 1)
    | st.text(max_size=40)
    | st.binary(max_size=60)
    | st.booleans(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(slots.Slot.__struct_fields__), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.sampled_from(slots.Slots.__struct_fields__), _VALUES, max_size=7),
    st.sampled_from(["argon2id", "plain", "x"]),
    st.binary(max_size=4),
)
def test_whatever_stands_in_a_key_object_is_a_named_error(
    fields: dict[str, object], method: str, tail: bytes
) -> None:
    """Its digest protects against accidents only: anyone who can write to the store can write
    anything there.
    """
    real = msgspec.to_builtins(
        slots.new_slots("0" * 32, bytes(32), PASSPHRASE, "label", CHEAP), builtin_types=[bytes]
    )
    for body in ({**real, **fields}, {**fields, "format": 2, "method": method}):
        data = seal(KEY_KIND, msgspec.msgpack.encode(body) + tail, PUBLIC).data
        try:
            found = slots.decode_slots("keys/x", data)
            if found is not None and (
                found.slots[0].memory_kib > 1 << 14 or found.slots[0].passes > 4
            ):
                continue  # within bounds, but long
            if found is not None:
                slots.unlock(
                    "keys/x", msgspec.structs.replace(found, slots=found.slots[:1]), b"not this one"
                )
            else:
                open_slot("keys/x", data)
        except (Damaged, FormatTooNew, WrongPassphrase):
            continue
        assert found is None, "a passphrase that is wrong opened it"
    with pytest.raises(Damaged):
        slots.decode_slots("keys/x", seal(KEY_KIND, b"\x81\xa6method\xa2\xff\xfe", PUBLIC).data)


def test_plain_stays_plain() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        plain = await StoredRepository.create(backend)
        assert not plain.keys.encrypted and plain.config.format == 1
        with pytest.raises(UsageError, match="not encrypted"):
            await keychain.change(backend, plain.keys, lambda now: now)
        asked: list[bool] = []
        await StoredRepository.open(backend, passphrase=lambda: asked.append(True) or b"")  # type: ignore[func-returns-value]
        assert not asked

    asyncio.run(body())


def test_an_init_that_broke_off_is_not_finished_as_another() -> None:
    async def body() -> None:
        whole = MemoryBackend()
        await made(whole)
        begun = {key_name(0): whole.objects[key_name(0)]}
        with pytest.raises(WrongPassphrase):
            await StoredRepository.create(
                MemoryBackend(dict(begun)), passphrase=giving(b"not the same"), cost=CHEAP
            )
        with pytest.raises((UsageError, WrongPassphrase)):
            await StoredRepository.create(MemoryBackend(dict(begun)))
        finished = await StoredRepository.create(
            MemoryBackend(dict(begun)), passphrase=giving(), cost=CHEAP
        )
        assert finished.keys.encrypted

    asyncio.run(body())
