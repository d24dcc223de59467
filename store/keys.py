"""The repository's identity: its configuration and its master secret, from which every key is derived; both objects are created once and never changed."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import blake3
import msgspec

from icecore.errors import Damaged, FormatTooNew
from icecore.store.envelope import ObjectKind, Sealed, seal, unseal

#: The version of the repository as a whole: which objects there are and what they mean.
FORMAT = 1

CONFIG_KIND = ObjectKind("configuration", b"ICECONF", 1, 1 << 16, None)
KEY_KIND = ObjectKind("key slot", b"ICEKEYS", 1, 1 << 16, None)

#: Digest key of what must be read before there is a secret: guards against accidents, not against people.
_PUBLIC = blake3.blake3(b"", derive_key_context="icecore format 1 public integrity").digest()


class Parameters(msgspec.Struct, frozen=True):
    """What is the same for everything in a repository. ``shard_bytes``: size at which a shard is closed."""

    shard_bytes: int = 64 << 20


class Config(msgspec.Struct, frozen=True):
    """The object ``config``: makes a place a repository. ``id`` is 32 hexadecimal digits; ``created_ns`` Unix time."""

    format: int
    id: str
    created_ns: int
    parameters: Parameters


class KeySlot(msgspec.Struct, frozen=True):
    """An object ``keys/<n>``: the master secret, as it is (method "plain") or, in a later version, wrapped under a passphrase.

    ``salt`` and ``cost`` are a passphrase method's; ``secret`` has 32 bytes when plain.
    """

    format: int
    method: str
    secret: bytes
    salt: bytes = b""
    cost: dict[str, int] = {}


@dataclass(frozen=True)
class Keys:
    """The 32-byte keys of a repository, one per use, so that bytes of one kind never pass for another.

    ``chunk`` and ``node`` name chunks and map nodes; the others authenticate objects of their kind.
    """

    config: bytes
    chunk: bytes
    node: bytes
    shard: bytes
    manifest: bytes
    log: bytes
    segment: bytes
    hints: bytes
    sessions: bytes

    @classmethod
    def derive(cls, secret: bytes) -> Keys:
        """All keys of master ``secret``: BLAKE3 in its key derivation mode, context "icecore format 1 <use>"."""
        if len(secret) != 32:
            raise ValueError(f"a master secret has 32 bytes, not {len(secret)}")
        return cls(
            **{
                use: blake3.blake3(secret, derive_key_context=f"icecore format 1 {use}").digest()
                for use in cls.__dataclass_fields__
            }
        )

    def __repr__(self) -> str:
        return "Keys(…)"


def new_slot() -> KeySlot:
    """A slot with a fresh random master secret."""
    return KeySlot(FORMAT, "plain", secrets.token_bytes(32))


def encode_slot(slot: KeySlot) -> Sealed:
    """The object of ``slot``."""
    return seal(KEY_KIND, msgspec.msgpack.encode(slot), _PUBLIC)


def open_slot(name: str, data: bytes) -> bytes:
    """The master secret in key slot ``name``.

    Raises:
        Damaged: The slot is not what was written.
        FormatTooNew: It needs a method that this version does not know.
    """
    body = unseal(KEY_KIND, name, data, _PUBLIC)
    try:
        slot = msgspec.msgpack.decode(body, type=KeySlot)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(KEY_KIND.title, name, str(error)) from error
    if slot.format > FORMAT or slot.method != "plain":
        raise FormatTooNew(
            f"key slot {name} has method {slot.method!r}, which this icecore does not know", cure="use a newer icecore"
        )
    if len(slot.secret) != 32:
        raise Damaged(KEY_KIND.title, name, f"its secret has {len(slot.secret)} bytes")
    return slot.secret


def encode_config(config: Config, keys: Keys) -> Sealed:
    """The object of ``config``."""
    return seal(CONFIG_KIND, msgspec.msgpack.encode(config), keys.config)


def decode_config(name: str, data: bytes, keys: Keys) -> Config:
    """The configuration in object ``name``.

    Raises:
        Damaged: It is not what was written, or not with this master secret.
        FormatTooNew: The repository has a later format.
    """
    body = unseal(CONFIG_KIND, name, data, keys.config)
    try:
        config = msgspec.msgpack.decode(body, type=Config)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(CONFIG_KIND.title, name, str(error)) from error
    if config.format > FORMAT:
        raise FormatTooNew(
            f"the repository has format {config.format}, this icecore reads up to {FORMAT}", cure="use a newer icecore"
        )
    return config
