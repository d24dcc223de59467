"""The envelope of metadata objects: magic, version, length, keyed digest, then the compressed and
possibly encrypted body. A flipped bit is reported, never parsed.
"""

from __future__ import annotations

import struct

import blake3
import msgspec
import zstandard

from icecore.errors import Damaged, FormatTooNew
from icecore.store.format.cipher import (
    ENCRYPTED,
    WHOLE_BYTES,
    encryption_of,
    flag,
    open_whole,
    seal_whole,
)

HEADER_BYTES = 56
DIGEST_BYTES = 32
#: magic (7 bytes), version, compression (0 none, 1 zstd), reserved, length of the body before
#: compression; the digest follows.
_HEADER = struct.Struct("<7sBBxxxxxxxQ")
_NONE, _ZSTD = 0, 1
#: Before an encrypted body: its compression and its uncompressed length. The header has zeros in
#: their place then.
_INNER = struct.Struct("<BxxxxxxxQ")


class ObjectKind(msgspec.Struct, frozen=True):
    """The magic, the version and the size limit of one kind of object.

    Attributes:
        title: The kind in words, as errors name it.
        magic: 7 bytes.
        version: The newest version that this code reads and the one it writes.
        limit: The longest body in bytes, before compression.
        level: zstd level, or None to store the body as it is.
    """

    title: str
    magic: bytes
    version: int
    limit: int
    level: int | None = 3

    @property
    def object_limit(self) -> int:
        """The longest whole object in bytes; zstd adds little to an incompressible body."""
        return HEADER_BYTES + self.limit + self.limit // 128 + 1024


class Sealed(msgspec.Struct, frozen=True):
    """An object ready to be stored, and the digest by which others refer to it."""

    data: bytes
    digest: bytes


def _digest(header: bytes, payload: bytes | memoryview, key: bytes) -> bytes:
    hasher = blake3.blake3(header, key=key)
    hasher.update(payload)
    return hasher.digest()


def sealed_bytes(length: int, key: bytes) -> int:
    """Return the length of an object with an uncompressed body of ``length`` bytes
    (``ObjectKind.level`` is None), sealed under ``key``.
    """
    return HEADER_BYTES + length + (_INNER.size + WHOLE_BYTES if flag(key) else 0)


def seal(kind: ObjectKind, body: bytes, key: bytes, name: str = "") -> Sealed:
    """Wrap ``body``; ``key`` has 32 bytes.

    Args:
        name: The object's name; required where ``key`` encrypts.

    Raises:
        ValueError: ``body`` is longer than its kind allows, or an encrypted object has no name.
    """
    if len(body) > kind.limit:
        raise ValueError(f"a {kind.title} may have {kind.limit} bytes, not {len(body)}")
    payload, compression = body, _NONE
    if kind.level is not None:
        squeezed = zstandard.ZstdCompressor(level=kind.level).compress(body)
        if len(squeezed) < len(body):
            payload, compression = squeezed, _ZSTD
    header = _HEADER.pack(kind.magic, kind.version, compression, len(body))
    if encryption_of(key) is not None:
        header = _HEADER.pack(kind.magic, kind.version | flag(key), 0, 0)
        payload = seal_whole(key, name, header, _INNER.pack(compression, len(body)) + payload)
    digest = _digest(header, payload, key)
    return Sealed(header + digest + payload, digest)


def unseal(
    kind: ObjectKind, name: str, data: bytes, key: bytes, digest: bytes | None = None
) -> bytes:
    """Return the body of object ``name``.

    Args:
        digest: The digest by which another object refers to it, if one does.

    Raises:
        Damaged: It is not what was written.
        FormatTooNew: A later version wrote it. Header and digest have the same place in all
            versions.
    """
    if len(data) < HEADER_BYTES:
        raise Damaged(kind.title, name, f"it has {len(data)} bytes, fewer than its header")
    header = data[: _HEADER.size]
    magic, version, compression, length = _HEADER.unpack(header)
    if magic != kind.magic:
        raise Damaged(kind.title, name, f"it begins with {magic!r} instead of {kind.magic!r}")
    payload = memoryview(data)[HEADER_BYTES:]
    written = data[_HEADER.size : HEADER_BYTES]
    if _digest(header, payload, key) != written:
        raise Damaged(kind.title, name, "its digest does not match its bytes")
    if digest is not None and digest != written:
        raise Damaged(kind.title, name, "it is not the one that was referred to")
    if version & ~ENCRYPTED > kind.version:
        raise FormatTooNew(
            f"{kind.title} {name} has version {version & ~ENCRYPTED}, this icecore reads up to {kind.version}",
            cure="use a newer icecore",
        )
    if version & ENCRYPTED != flag(key):
        raise Damaged(kind.title, name, "its encryption differs from its repository's")
    if version & ENCRYPTED:
        try:
            inner = open_whole(key, name, header, payload)
            compression, length = _INNER.unpack_from(inner)
        except (ValueError, struct.error) as error:
            raise Damaged(kind.title, name, str(error)) from error
        payload = memoryview(inner)[_INNER.size :]
    if length > kind.limit:
        raise Damaged(
            kind.title,
            name,
            f"it claims {length} bytes, more than the {kind.limit} that it can have",
        )
    if compression == _NONE:
        if len(payload) != length:
            raise Damaged(kind.title, name, f"it has {len(payload)} bytes instead of {length}")
        return bytes(payload)
    if compression != _ZSTD:
        raise Damaged(kind.title, name, f"it has unknown compression {compression}")
    try:
        # zstd allocates what the frame claims, so the frame must claim what the header says.
        if zstandard.frame_content_size(payload) != length:
            raise Damaged(
                kind.title, name, "the length in its compressed frame differs from its header"
            )
        body = zstandard.ZstdDecompressor().decompress(payload, max_output_size=length)
    except zstandard.ZstdError as error:
        raise Damaged(kind.title, name, f"it does not decompress: {error}") from error
    if len(body) != length:
        raise Damaged(kind.title, name, f"it decompresses to {len(body)} bytes instead of {length}")
    return body


def is_encrypted(data: bytes) -> bool:
    """Return whether the object claims to be encrypted; unverified."""
    return len(data) >= HEADER_BYTES and bool(data[7] & ENCRYPTED)


def digest_of(data: bytes | memoryview) -> bytes:
    """Return the digest in an object's header, unverified; ``data`` begins with the header."""
    return bytes(data[_HEADER.size : HEADER_BYTES])
