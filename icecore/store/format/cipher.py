"""Encryption: AES-256-GCM under a key that belongs to one object, with the object's name and the
place in it as associated data. Pure.

There are two ways, and both guarantee that no pair of key and nonce ever encrypts two texts. A
*whole* (envelope) is encrypted under a key derived from its kind's key, 24 fresh random bytes, and
its name: two writers that race for a name, or one that retries, draw different bytes. A *piece* of
a larger object (a chunk, a node, a block of a table) is encrypted under a key derived from its
kind's key and the object's name, which is random, drawn by one writer and never reused; the nonce
is the piece's offset in the object, where nothing else is ever stored.

AES-GCM is used rather than ChaCha20-Poly1305 because it is three times as fast with AES
instructions (16 against 5 GB/s on one core). docs/reference/format.md specifies the bytes.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence

import blake3

Buffer = bytes | bytearray | memoryview

TAG_BYTES = 16
SALT_BYTES = 24
#: Bytes by which a whole grows.
WHOLE_BYTES = SALT_BYTES + TAG_BYTES
#: Set in the version of an object whose content is encrypted.
ENCRYPTED = 0x80
_BLOCK_BYTES = 16
_FIRST_COUNTER = 2
_NONCE = struct.Struct("<Q4x")
_PLACE = struct.Struct("<Q")


class Key(bytes):
    """32 bytes that digest or name objects or pieces of one kind. It carries the key that encrypts
    them, if they are encrypted.

    Attributes:
        encryption: 32 bytes, or None in a repository that is not encrypted.
    """

    encryption: bytes | None

    def __new__(cls, digest: bytes, encryption: bytes | None = None) -> Key:
        """Create a key from both as bytes."""
        made = super().__new__(cls, digest)
        made.encryption = encryption
        return made

    def __repr__(self) -> str:
        return "Key(…)"


def encryption_of(key: bytes) -> bytes | None:
    """Return the encryption key that comes with ``key``; None without encryption."""
    return key.encryption if isinstance(key, Key) else None


def overhead(key: bytes) -> int:
    """Return the bytes that encryption adds to a piece stored under ``key``: 16 or 0."""
    return TAG_BYTES if encryption_of(key) is not None else 0


def flag(key: bytes) -> int:
    """Return the bit to set in the version of objects written under ``key``."""
    return ENCRYPTED if encryption_of(key) is not None else 0


def seal_whole(key: bytes, name: str, header: Buffer, body: Buffer) -> bytes:
    """Return ``body`` of object ``name`` encrypted: salt, ciphertext, tag; ``header`` is
    authenticated with it.

    Args:
        key: A key that encrypts.
    """
    if not name:
        raise ValueError("what is encrypted has a name")
    # The library loads slowly, and a repository that is not encrypted does without.
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    salt = secrets.token_bytes(SALT_BYTES)
    return salt + AESGCM(_derive(key, salt, name)).encrypt(
        bytes(12), body, _associated(name, 0, header)
    )


def open_whole(key: bytes, name: str, header: Buffer, payload: Buffer) -> bytes:
    """Return the body that was given to :func:`seal_whole`.

    Raises:
        ValueError: It was not encrypted under this key for an object with that name and header.
    """
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    view = memoryview(payload)
    if view.nbytes < WHOLE_BYTES:
        raise ValueError(f"{view.nbytes} bytes are too few to be encrypted")
    try:
        own = AESGCM(_derive(key, bytes(view[:SALT_BYTES]), name))
        return own.decrypt(bytes(12), view[SALT_BYTES:], _associated(name, 0, header))
    except InvalidTag:
        raise ValueError("it is not what was encrypted for its name") from None


def seal_piece(
    key: bytes, name: str, offset: int, context: Buffer, parts: Sequence[Buffer], out: memoryview
) -> None:
    """Encrypt a piece of object ``name``, or copy it if ``key`` does not encrypt. Releases the GIL.

    Args:
        offset: Its offset in the object, which nothing else ever has.
        context: What it is, for instance a chunk's id; it can be decrypted only as that.
        parts: Its bytes, one part after the other; must not overlap ``out``.
        out: Exactly its bytes and :func:`overhead` of room.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES256
    from cryptography.hazmat.primitives.ciphers.modes import GCM

    sealing = Cipher(AES256(_derive(key, b"", name)), GCM(_NONCE.pack(offset))).encryptor()
    sealing.authenticate_additional_data(_associated(name, offset, context))
    at = 0
    for part in parts:
        # The room for the tag behind the last part is the slack that the library requires.
        at += sealing.update_into(part, out[at:])
    sealing.finalize()
    if at + TAG_BYTES != len(out):
        raise ValueError(f"{len(out)} bytes of room for {at} and a tag")
    out[at:] = sealing.tag


def open_piece(
    key: bytes, name: str, offset: int, context: Buffer, stored: Buffer, out: memoryview
) -> memoryview:
    """Decrypt a piece; ``out`` holds nothing unverified on return. Releases the GIL.

    Args:
        stored: The bytes stored at ``offset`` of object ``name``; must not overlap ``out``.
        out: Room for at least its bytes.

    Returns:
        The beginning of ``out``.

    Raises:
        ValueError: It was not encrypted under this key for that place and context.
    """
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    length = len(stored) - TAG_BYTES
    if not 0 <= length <= len(out):
        raise ValueError(f"{len(stored)} bytes cannot be an encrypted piece here")
    room = out[:length]
    try:
        AESGCM(_derive(key, b"", name)).decrypt_into(
            _NONCE.pack(offset), stored, _associated(name, offset, context), room
        )
    except InvalidTag:
        raise ValueError("it is not what was encrypted for its place") from None
    return room


def peek_piece(
    key: bytes, name: str, offset: int, start: int, stored: Buffer, out: memoryview
) -> None:
    """Decrypt part of a piece without verifying it: for estimates only, never for data that is
    stored or handed out.

    Args:
        start: Where in the piece the part begins, a multiple of 16.
        stored: The stored bytes of the part alone.
        out: The same amount of room; may be ``stored`` itself.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES256
    from cryptography.hazmat.primitives.ciphers.modes import CTR

    if start % _BLOCK_BYTES:
        raise ValueError(f"a part that begins at {start}")
    # GCM is counter mode; with a nonce of 12 bytes the text begins at counter 2 (NIST SP 800-38D).
    counter = (_FIRST_COUNTER + start // _BLOCK_BYTES).to_bytes(4, "big")
    opening = Cipher(
        AES256(_derive(key, b"", name)), CTR(_NONCE.pack(offset) + counter)
    ).decryptor()
    opening.update_into(stored, out)


def sealed_piece(key: bytes, name: str, offset: int, context: Buffer, piece: Buffer) -> bytes:
    """Return a small piece as stored: encrypted if ``key`` encrypts, otherwise unchanged."""
    if encryption_of(key) is None:
        return bytes(piece)
    out = bytearray(len(piece) + TAG_BYTES)
    seal_piece(key, name, offset, context, [piece], memoryview(out))
    return bytes(out)


def opened_piece(key: bytes, name: str, offset: int, context: Buffer, stored: Buffer) -> Buffer:
    """Return the inverse of :func:`sealed_piece`; raise as :func:`open_piece` does."""
    if encryption_of(key) is None:
        return stored
    return open_piece(
        key, name, offset, context, stored, memoryview(bytearray(max(0, len(stored) - TAG_BYTES)))
    )


def _derive(key: bytes, salt: bytes, name: str) -> bytes:
    encryption = encryption_of(key)
    if encryption is None:
        raise ValueError("a key that does not encrypt")
    return blake3.blake3(salt + name.encode(), key=encryption).digest()


def _associated(name: str, offset: int, context: Buffer) -> bytes:
    return b"".join((_PLACE.pack(offset), name.encode(), b"\0", context))
