"""Encryption: AES-256-GCM under a key that belongs to one object, with the object's name and the
place in it as associated data; pure.

Two ways, one rule: no key and nonce ever meet two different texts. A *whole* (envelope) is
encrypted under a key derived from its kind's key, 24 random bytes drawn for it, and its name: two
writers who race for one name, and one who tries again, draw different ones. A *piece* of a larger
object (a chunk, a node, a block of a table) is encrypted under a key derived from its kind's key
and the object's name, which is random, drawn by one writer and never used twice; the nonce is the
offset in the object, which holds one piece.

AES-GCM rather than ChaCha20-Poly1305: measured with `cryptography` 50 on one core with AES
instructions, 1 MiB a call and the GIL released, 16 against 5 GB/s. docs/format.md has the bytes.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence

import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR, GCM

Buffer = bytes | bytearray | memoryview

TAG_BYTES = 16
SALT_BYTES = 24
#: What a whole grows by.
WHOLE_BYTES = SALT_BYTES + TAG_BYTES
#: Set in the version of an object whose content is encrypted.
ENCRYPTED = 0x80
_BLOCK_BYTES = 16
_FIRST_COUNTER = 2
_NONCE = struct.Struct("<Q4x")
_PLACE = struct.Struct("<Q")


class Key(bytes):
    """32 bytes under which objects or pieces of one kind are digested or named; it carries the key
    that they are encrypted with, where they are.

    Attributes:
        encryption: 32 bytes, or None in a repository that is not encrypted.
    """

    encryption: bytes | None

    def __new__(cls, digest: bytes, encryption: bytes | None = None) -> Key:
        """Both as bytes."""
        made = super().__new__(cls, digest)
        made.encryption = encryption
        return made

    def __repr__(self) -> str:
        return "Key(…)"


def encryption_of(key: bytes) -> bytes | None:
    """Return the encryption key that comes with ``key``; None if what it guards is not encrypted."""
    return key.encryption if isinstance(key, Key) else None


def overhead(key: bytes) -> int:
    """Return the bytes by which a piece grows when it is stored under ``key``: 16 or none."""
    return TAG_BYTES if encryption_of(key) is not None else 0


def flag(key: bytes) -> int:
    """Return what is set in the version of objects written under ``key``."""
    return ENCRYPTED if encryption_of(key) is not None else 0


def seal_whole(key: bytes, name: str, header: Buffer, body: Buffer) -> bytes:
    """Return ``body`` of object ``name`` encrypted: salt, ciphertext, tag; ``header`` is
    authenticated with it.

    Args:
        key: One that encrypts.
    """
    if not name:
        raise ValueError("what is encrypted has a name")
    salt = secrets.token_bytes(SALT_BYTES)
    return salt + AESGCM(_derive(key, salt, name)).encrypt(
        bytes(12), body, _associated(name, 0, header)
    )


def open_whole(key: bytes, name: str, header: Buffer, payload: Buffer) -> bytes:
    """Return what :func:`seal_whole` was given.

    Raises:
        ValueError: It is not what was encrypted under this key for an object of that name and
            header.
    """
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
    """Encrypt a piece of object ``name``, or copy it where ``key`` does not encrypt. Releases the
    GIL.

    Args:
        offset: Where in the object it goes; nothing else ever goes there.
        context: What it is, for instance a chunk's id: it is found again only as that.
        parts: Its bytes, one part after the other; must not overlap ``out``.
        out: Exactly the room for it: its bytes and :func:`overhead`.
    """
    sealing = Cipher(AES256(_derive(key, b"", name)), GCM(_NONCE.pack(offset))).encryptor()
    sealing.authenticate_additional_data(_associated(name, offset, context))
    at = 0
    for part in parts:
        # The tag's room behind the last part is the slack that the library asks for.
        at += sealing.update_into(part, out[at:])
    sealing.finalize()
    if at + TAG_BYTES != len(out):
        raise ValueError(f"{len(out)} bytes of room for {at} and a tag")
    out[at:] = sealing.tag


def open_piece(
    key: bytes, name: str, offset: int, context: Buffer, stored: Buffer, out: memoryview
) -> memoryview:
    """Decrypt a piece; nothing is in ``out`` that was not verified. Releases the GIL.

    Args:
        stored: What is stored at ``offset`` of object ``name``; must not overlap ``out``.
        out: Room for at least its bytes.

    Returns:
        The beginning of ``out``.

    Raises:
        ValueError: It is not what was encrypted under this key for that place and as that.
    """
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
    """Decrypt part of a piece without knowing whether it is sound: for estimates only, never for
    what is stored or handed out.

    Args:
        start: Where in the piece the part begins, a multiple of 16.
        stored: The stored bytes of the part alone.
        out: As much room; may be ``stored`` itself.
    """
    if start % _BLOCK_BYTES:
        raise ValueError(f"a part that begins at {start}")
    # GCM is counter mode; with a nonce of 12 bytes the text begins at counter 2 (NIST SP 800-38D).
    counter = (_FIRST_COUNTER + start // _BLOCK_BYTES).to_bytes(4, "big")
    opening = Cipher(
        AES256(_derive(key, b"", name)), CTR(_NONCE.pack(offset) + counter)
    ).decryptor()
    opening.update_into(stored, out)


def sealed_piece(key: bytes, name: str, offset: int, context: Buffer, piece: Buffer) -> bytes:
    """Return a small piece as it is stored: encrypted if ``key`` encrypts, else as it is."""
    if encryption_of(key) is None:
        return bytes(piece)
    out = bytearray(len(piece) + TAG_BYTES)
    seal_piece(key, name, offset, context, [piece], memoryview(out))
    return bytes(out)


def opened_piece(key: bytes, name: str, offset: int, context: Buffer, stored: Buffer) -> Buffer:
    """Return the inverse of :func:`sealed_piece`; raises what :func:`open_piece` does."""
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
