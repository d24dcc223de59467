"""The hint with a snapshot's fingerprints: one for each cell, by space and address, and the seed.
Pure; the dumper decides what they are computed from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

import blake3
import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from icecore.errors import Damaged
from icecore.store.format.keys import Keys
from icecore.store.format.manifest_rules import MAX_SPACES
from icecore.text import loaded, stored

FINGERPRINT = np.dtype("V16")
_MAX_HINTS = 1 << 30  # of the whole object, before compression


class Fingerprints(NamedTuple):
    """The fingerprints of one space's cells.

    Attributes:
        key: u8[n], as in `KnownCells`.
        fingerprint: V16[n].
        restless: u8[m], keys of cells that changed between pre-copy and window, so that storing
            them before the window was wasted.
    """

    key: npt.NDArray[np.uint64]
    fingerprint: npt.NDArray[np.void]
    restless: npt.NDArray[np.uint64] = np.empty(0, np.uint64)


NO_FINGERPRINTS = Fingerprints(np.empty(0, np.uint64), np.empty(0, FINGERPRINT))


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    key: bytes
    fingerprint: bytes
    restless: bytes = b""


_SPACES = Annotated[dict[str, _Stored], msgspec.Meta(max_length=MAX_SPACES)]


def encode_fingerprints(spaces: Mapping[str, Fingerprints]) -> bytes:
    """Encode fingerprints of many spaces (by ``kind:key``) as one hint object."""
    entries = {
        stored(space): _Stored(
            known.key.astype("<u8").tobytes(),
            known.fingerprint.tobytes(),
            known.restless.astype("<u8").tobytes(),
        )
        for space, known in spaces.items()
    }
    return zstandard.ZstdCompressor(level=1).compress(msgspec.msgpack.encode(entries))


def fingerprint_bytes(cells: int, spaces: int) -> int:
    """Return an upper bound of the bytes of fingerprints, before compression.

    Args:
        cells: Cells that the maps have room for.
    """
    return 64 * cells + 8192 * spaces + (16 << 20)


def decode_fingerprints(data: bytes, limit: int = _MAX_HINTS) -> dict[str, Fingerprints]:
    """Return the inverse of ``encode_fingerprints``.

    Args:
        limit: Most bytes that they have, from `fingerprint_bytes`.

    Raises:
        Damaged: the bytes are not such an object.
    """
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= min(limit, _MAX_HINTS):
            raise ValueError(f"implausible length {size}")
        entries = msgspec.msgpack.decode(
            zstandard.ZstdDecompressor().decompress(data, max_output_size=size), type=_SPACES
        )
        out = {}
        for space, item in entries.items():
            keys, restless = (
                np.frombuffer(part, "<u8").astype(np.uint64) for part in (item.key, item.restless)
            )
            fingerprint = np.frombuffer(item.fingerprint, FINGERPRINT)
            if len(keys) != len(fingerprint):
                raise ValueError(f"{space}: {len(keys)} addresses, {len(fingerprint)} fingerprints")
            out[loaded(space)] = Fingerprints(keys, fingerprint, restless)
        return out
    except (ValueError, msgspec.MsgspecError, zstandard.ZstdError, RecursionError) as error:
        raise Damaged("hint", "fingerprints", str(error)) from error


def fingerprint_seed(keys: Keys, lineage: str) -> int:
    """Return the secret 64-bit seed of a lineage's fingerprints."""
    return int.from_bytes(blake3.blake3(lineage.encode(), key=keys.hints).digest(8), "little")
