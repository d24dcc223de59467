"""Key slots of an encrypted repository: its master secret, wrapped once under each passphrase
(Argon2id, AES-256-GCM). Pure, and slow on purpose.

One object holds all slots, so that adding or removing one is a single creation: the object with the
highest number counts. A keyed digest tells anyone who has the master secret that no slot was
planted or altered by somebody without it.
"""

from __future__ import annotations

import hmac
import re
import secrets
import time
from collections.abc import Sequence
from typing import Annotated

import blake3
import msgspec

from icecore.errors import Damaged, FormatTooNew, NotFound, UsageError, WrongPassphrase
from icecore.store.format.envelope import Sealed
from icecore.store.format.keys import ENCRYPTED_FORMAT, KEY_KIND, encode_slot, read_slot
from icecore.text import require_label

METHOD = "argon2id"
MAX_SLOTS = 64
MIN_PASSPHRASE = 8
_SALT_BYTES = 16
_CHANGES = 16
_ID = re.compile(r"[0-9a-f]{32}\Z")
#: Upper bounds of what a slot may cost whoever tries a passphrase: anyone who can write to the
#: store can plant a slot.
_MAX_MEMORY_KIB = 1 << 20
_MAX_PASSES = 16
_MAX_LANES = 16
#: Upper bound for all slots together, in KiB times passes: four times the cost of 64 default slots.
MAX_WORK = 4 * MAX_SLOTS * 3 * (64 << 10)


class Cost(msgspec.Struct, frozen=True):
    """The cost of trying a passphrase: memory in KiB, passes over it, lanes. The default is RFC
    9106's second recommendation (about 0.1 s).
    """

    memory_kib: int = 64 << 10
    passes: int = 3
    lanes: int = 4


#: The cost of new slots if the caller names none.
DEFAULT_COST = Cost()


class Slot(msgspec.Struct, frozen=True):
    """The master secret under one passphrase.

    ``id`` is 16 hexadecimal digits, ``label`` a name for people, ``wrapped`` the secret encrypted
    under Argon2id of passphrase and ``salt``.
    """

    id: str
    label: str
    created_ns: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    salt: bytes
    memory_kib: int
    passes: int
    lanes: int
    wrapped: bytes


class Slots(msgspec.Struct, frozen=True):
    """The object ``keys/<n>`` of an encrypted repository.

    ``repository`` is its id (32 hexadecimal digits). ``changes`` are random ids of the last
    changes, the newest last, so that a writer can tell whether its own is among them. ``digest`` is
    a BLAKE3 over all of this under a key derived from the master secret. ``secret`` is empty:
    readers of version 1 look for it, and then at ``method``.
    """

    format: int
    method: str
    repository: str
    slots: Annotated[list[Slot], msgspec.Meta(max_length=MAX_SLOTS)]
    changes: Annotated[list[bytes], msgspec.Meta(max_length=1 << 10)]
    digest: bytes
    secret: bytes = b""


def new_slots(
    repository: str, secret: bytes, passphrase: bytes, label: str, cost: Cost | None = None
) -> Slots:
    """Return the slots of a new repository, with one slot.

    Raises:
        UsageError: The passphrase is too short.
    """
    return _sealed(repository, secret, [_wrap(repository, secret, passphrase, label, cost)], [])


def encode_slots(slots: Slots) -> Sealed:
    """Return the object of ``slots``."""
    return encode_slot(slots)


def decode_slots(name: str, data: bytes) -> Slots | None:
    """Return the slots in object ``name``; None if its repository is not encrypted.

    Raises:
        Damaged: It is not what was written, or demands more than the upper bounds.
        FormatTooNew: A later version wrote it.
    """
    body = read_slot(name, data)
    try:
        method = msgspec.msgpack.decode(body, type=_Method)
        if method.method == "plain":
            return None
        if method.format > ENCRYPTED_FORMAT or method.method != METHOD:
            raise FormatTooNew(
                f"key slot {name} has method {method.method!r}, which this icecore does not know",
                cure="use a newer icecore",
            )
        slots = msgspec.msgpack.decode(body, type=Slots)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(KEY_KIND.title, name, str(error)) from error
    if not _ID.match(slots.repository) or not 0 < len(slots.slots) <= MAX_SLOTS:
        raise Damaged(
            KEY_KIND.title,
            name,
            f"it has {len(slots.slots)} slots of repository {slots.repository[:40]!r}",
        )
    for slot in slots.slots:
        cost = Cost(slot.memory_kib, slot.passes, slot.lanes)
        sane = (
            0 < cost.lanes <= _MAX_LANES
            and 8 * cost.lanes <= cost.memory_kib <= _MAX_MEMORY_KIB
            and 0 < cost.passes <= _MAX_PASSES
        )
        if not sane or len(slot.salt) != _SALT_BYTES:
            raise Damaged(
                KEY_KIND.title,
                name,
                f"slot {slot.id[:16]!r} asks for {cost} and has {len(slot.salt)} bytes of salt",
            )
    if work(slots) > MAX_WORK:
        raise Damaged(
            KEY_KIND.title,
            name,
            f"its slots require {work(slots) >> 20} GiB of memory before a passphrase proves wrong",
        )
    return slots


class _Method(msgspec.Struct, frozen=True):
    format: int
    method: str


def work(slots: Slots) -> int:
    """Return what trying a passphrase on all of the slots costs, in KiB times passes."""
    return sum(slot.memory_kib * slot.passes for slot in slots.slots)


def unlock(name: str, slots: Slots, passphrase: bytes) -> tuple[bytes, Slot]:
    """Return the master secret, and the slot that the passphrase opens.

    Raises:
        WrongPassphrase: It opens no slot.
        Damaged: It opens a slot, but not all slots are as a holder of the secret left them.
    """
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    for slot in slots.slots:
        try:
            secret = AESGCM(_stretch(slot, passphrase)).decrypt(
                bytes(12), slot.wrapped, _about(slots.repository, slot)
            )
        except InvalidTag:
            continue
        verify(name, slots, secret)
        return secret, slot
    raise WrongPassphrase(
        f"the passphrase opens none of the {len(slots.slots)} slots of this repository",
        cure="correct ICECORE_PASSPHRASE, the file or the command that gives it",
    )


def verify(name: str, slots: Slots, secret: bytes) -> None:
    """Check that a holder of the master ``secret`` wrote the slots.

    Raises:
        Damaged: Somebody else wrote them.
    """
    if len(secret) != 32 or not hmac.compare_digest(_digest(slots, secret), slots.digest):
        raise Damaged(
            KEY_KIND.title, name, "its slots were changed by somebody without the master secret"
        )


def add(
    slots: Slots, secret: bytes, passphrase: bytes, label: str, cost: Cost | None = None
) -> Slots:
    """Return ``slots`` with one more slot.

    Raises:
        UsageError: The passphrase is too short, the label taken, or there are too many.
    """
    if len(slots.slots) >= MAX_SLOTS:
        raise UsageError(f"there are {MAX_SLOTS} slots already", cure="'icecore key remove' one")
    require_label(label)
    if any(slot.label == label for slot in slots.slots):
        raise UsageError(
            f"there is a slot {label!r} already",
            cure="give another --label, or 'icecore key rotate' it",
        )
    new = _wrap(slots.repository, secret, passphrase, label, cost)
    return _sealed(slots.repository, secret, [*slots.slots, new], slots.changes)


def remove(slots: Slots, secret: bytes, which: str) -> Slots:
    """Return ``slots`` without the slot that ``which`` names (:func:`find`).

    Raises:
        UsageError: It is the last one.
    """
    found = find(slots, which)
    left = [slot for slot in slots.slots if slot.id != found.id]
    if not left:
        raise UsageError(
            "this is the only passphrase: nobody could open the repository any more",
            cure="add another first",
        )
    return _sealed(slots.repository, secret, left, slots.changes)


def rotate(
    slots: Slots, secret: bytes, which: str, passphrase: bytes, cost: Cost | None = None
) -> Slots:
    """Return ``slots`` with another passphrase for slot ``which``; its label stays.

    Raises:
        UsageError: The passphrase is too short.
    """
    found = find(slots, which)
    new = _wrap(slots.repository, secret, passphrase, found.label, cost)
    changed = [new if slot.id == found.id else slot for slot in slots.slots]
    return _sealed(slots.repository, secret, changed, slots.changes)


def find(slots: Slots, which: str) -> Slot:
    """Return the slot with that label or id.

    Raises:
        NotFound: There is none.
    """
    for slot in slots.slots:
        if which in (slot.label, slot.id):
            return slot
    raise NotFound(f"there is no key slot {which!r}", cure="'icecore key list' lists them")


def _wrap(repository: str, secret: bytes, passphrase: bytes, label: str, cost: Cost | None) -> Slot:
    cost = cost or DEFAULT_COST
    if len(passphrase) < MIN_PASSPHRASE:
        raise UsageError(
            f"a passphrase of {len(passphrase)} bytes",
            cure=f"use at least {MIN_PASSPHRASE}, better five random words",
        )
    slot = Slot(
        secrets.token_hex(8),
        label,
        time.time_ns(),
        secrets.token_bytes(_SALT_BYTES),
        cost.memory_kib,
        cost.passes,
        cost.lanes,
        b"",
    )
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    wrapped = AESGCM(_stretch(slot, passphrase)).encrypt(
        bytes(12), secret, _about(repository, slot)
    )
    return msgspec.structs.replace(slot, wrapped=wrapped)


def _stretch(slot: Slot, passphrase: bytes) -> bytes:
    """Return Argon2id (RFC 9106) of the passphrase. Each slot has a random salt, so the key wraps
    one secret once.
    """
    from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

    return Argon2id(
        salt=slot.salt,
        length=32,
        iterations=slot.passes,
        lanes=slot.lanes,
        memory_cost=slot.memory_kib,
    ).derive(passphrase)


def _about(repository: str, slot: Slot) -> bytes:
    return msgspec.msgpack.encode([repository, msgspec.structs.replace(slot, wrapped=b"")])


def _sealed(
    repository: str, secret: bytes, slots: Sequence[Slot], before: Sequence[bytes]
) -> Slots:
    changes = [*before[-_CHANGES + 1 :], secrets.token_bytes(16)]
    made = Slots(ENCRYPTED_FORMAT, METHOD, repository, list(slots), changes, b"")
    return msgspec.structs.replace(made, digest=_digest(made, secret))


def _digest(slots: Slots, secret: bytes) -> bytes:
    key = blake3.blake3(secret, derive_key_context="icecore format 2 key slots").digest()
    body = msgspec.msgpack.encode([slots.repository, slots.slots, slots.changes])
    return blake3.blake3(body, key=key).digest()
