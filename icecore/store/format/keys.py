"""The repository's identity: its configuration and its master secret, from which every key is
derived. Both objects are created once and never changed.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import blake3
import msgspec

from icecore.errors import Damaged, FormatTooNew
from icecore.store.format.cipher import Key
from icecore.store.format.envelope import ObjectKind, Sealed, seal, unseal
from icecore.store.format.names import CONFIG

#: Versions of the repository as a whole: which objects there are and what they mean. Encrypted
#: repositories have the second.
FORMAT = 1
ENCRYPTED_FORMAT = 2

CONFIG_KIND = ObjectKind("configuration", b"ICECONF", 1, 1 << 16, None)
KEY_KIND = ObjectKind("key slot", b"ICEKEYS", 1, 1 << 16, None)

#: Digest key of objects that are read before the secret is known. It protects against accidents,
#: not against attackers.
PUBLIC = blake3.blake3(b"", derive_key_context="icecore format 1 public integrity").digest()


class Parameters(msgspec.Struct, frozen=True):
    """Settings of the whole repository. ``shard_bytes`` is the size at which a shard is closed."""

    shard_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)] = 64 << 20


class Config(msgspec.Struct, frozen=True):
    """The object ``config``, which makes a place a repository. ``id`` is 32 hexadecimal digits,
    ``created_ns`` Unix time.
    """

    format: int
    #: Files are named after it.
    id: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    created_ns: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    parameters: Parameters


class KeySlot(msgspec.Struct, frozen=True):
    """An object ``keys/<n>`` of a repository that is not encrypted: the plain master secret (method
    "plain", 32 bytes).

    An encrypted repository has another method (`icecore.store.format.slots`). ``salt`` and ``cost``
    are not used.
    """

    format: int
    method: str
    secret: bytes
    salt: bytes = b""
    cost: dict[str, int] = {}


class Keys(msgspec.Struct, frozen=True):
    """The 32-byte keys of a repository, one per use, so that bytes of one kind never pass for
    another.

    ``chunk`` and ``node`` name chunks and map nodes; the others authenticate objects of their kind.
    In an encrypted repository, each is an `icecore.store.format.cipher.Key` that also encrypts its
    kind.

    Attributes:
        secret: The master secret.
        repository: The id that keys of objects of this replica alone (configuration, log, sessions)
            are bound to; empty if not encrypted.
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
    secret: bytes
    repository: str = ""

    @property
    def encrypted(self) -> bool:
        """Whether the objects under these keys are encrypted."""
        return bool(self.repository)

    @classmethod
    def derive(cls, secret: bytes, repository: str = "") -> Keys:
        """Return all keys of master ``secret``: BLAKE3 in key derivation mode (docs/reference/format.md).

        Args:
            repository: The id of an encrypted repository, 32 hexadecimal digits; empty for one that
                is not encrypted.
        """
        if len(secret) != 32:
            raise ValueError(f"a master secret has 32 bytes, not {len(secret)}")
        made: dict[str, Any] = {use: _derive(f"1 {use}", secret) for use in USES}
        if repository:
            bound = secret + bytes.fromhex(repository)
            made = {
                use: Key(key, _derive(f"2 encryption of {use}", secret))
                for use, key in made.items()
            }
            made |= {
                use: Key(_derive(f"2 {use}", bound), _derive(f"2 encryption of {use}", bound))
                for use in _OWN
            }
        return cls(**made, secret=secret, repository=repository)

    def __repr__(self) -> str:
        return "Keys(…)"


#: Uses of keys.
USES = ("config", "chunk", "node", "shard", "manifest", "log", "segment", "hints", "sessions")
#: The uses for objects of one replica alone; replicas share all others.
_OWN = ("config", "log", "sessions")


def _derive(context: str, material: bytes) -> bytes:
    return blake3.blake3(material, derive_key_context=f"icecore format {context}").digest()


def new_slot(secret: bytes = b"") -> KeySlot:
    """Return a slot with a master secret, a new random one by default."""
    return KeySlot(FORMAT, "plain", secret or secrets.token_bytes(32))


def encode_slot(slot: msgspec.Struct) -> Sealed:
    """Return the object of ``slot``: a `KeySlot`, or its counterpart in an encrypted repository."""
    return seal(KEY_KIND, msgspec.msgpack.encode(slot), PUBLIC)


def read_slot(name: str, data: bytes) -> bytes:
    """Return the body of key slot ``name``. Its digest is verified, which does not prove who wrote
    it.

    Raises:
        Damaged: The slot is not what was written.
    """
    return unseal(KEY_KIND, name, data, PUBLIC)


def open_slot(name: str, data: bytes) -> bytes:
    """Return the master secret in key slot ``name``.

    Raises:
        Damaged: The slot is not what was written.
        FormatTooNew: Its method is unknown to this version.
    """
    body = read_slot(name, data)
    try:
        slot = msgspec.msgpack.decode(body, type=KeySlot)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(KEY_KIND.title, name, str(error)) from error
    if slot.format > FORMAT or slot.method != "plain":
        raise FormatTooNew(
            f"key slot {name} has method {slot.method!r}, which this icecore does not know",
            cure="use a newer icecore",
        )
    if len(slot.secret) != 32:
        raise Damaged(KEY_KIND.title, name, f"its secret has {len(slot.secret)} bytes")
    return slot.secret


def encode_config(config: Config, keys: Keys) -> Sealed:
    """Return the object of ``config``."""
    return seal(CONFIG_KIND, msgspec.msgpack.encode(config), keys.config, CONFIG)


def decode_config(name: str, data: bytes, keys: Keys) -> Config:
    """Return the configuration in object ``name``.

    Raises:
        Damaged: It is not what was written, or not with this master secret.
        FormatTooNew: The repository has a later format.
    """
    body = unseal(CONFIG_KIND, name, data, keys.config)
    try:
        config = msgspec.msgpack.decode(body, type=Config)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(CONFIG_KIND.title, name, str(error)) from error
    if config.format > ENCRYPTED_FORMAT:
        raise FormatTooNew(
            f"the repository has format {config.format}, this icecore reads up to {ENCRYPTED_FORMAT}",
            cure="use a newer icecore",
        )
    if (config.format == ENCRYPTED_FORMAT) != keys.encrypted or (
        keys.encrypted and config.id != keys.repository
    ):
        raise Damaged(CONFIG_KIND.title, name, "it belongs to another repository than these keys")
    return config
