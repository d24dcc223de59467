"""The hint of a snapshot's fingerprints: one of each cell, by space and address, and the seed. Pure; what they are of is the dumper's business."""

from __future__ import annotations

import blake3
import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from icecore.errors import Damaged
from icecore.store.keys import Keys

FINGERPRINT = np.dtype("V16")
_MAX_HINTS = 1 << 30  # of the whole object, before compression


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    key: bytes
    fingerprint: bytes


def encode_fingerprints(spaces: dict[str, tuple[npt.NDArray[np.uint64], npt.NDArray[np.void]]]) -> bytes:
    """Fingerprints of many spaces (``kind:key`` → addresses u8[n], fingerprints V16[n]) as one hint object."""
    stored = {
        space: _Stored(keys.astype("<u8").tobytes(), fingerprint.tobytes())
        for space, (keys, fingerprint) in spaces.items()
    }
    return zstandard.ZstdCompressor(level=1).compress(msgspec.msgpack.encode(stored))


def decode_fingerprints(data: bytes) -> dict[str, tuple[npt.NDArray[np.uint64], npt.NDArray[np.void]]]:
    """The reverse of ``encode_fingerprints``.

    Raises:
        Damaged: the bytes are not such an object.
    """
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= _MAX_HINTS:
            raise ValueError(f"implausible length {size}")
        stored = msgspec.msgpack.decode(
            zstandard.ZstdDecompressor().decompress(data, max_output_size=size), type=dict[str, _Stored]
        )
        out = {}
        for space, item in stored.items():
            keys = np.frombuffer(item.key, "<u8").astype(np.uint64)
            fingerprint = np.frombuffer(item.fingerprint, FINGERPRINT)
            if len(keys) != len(fingerprint):
                raise ValueError(f"{space}: {len(keys)} addresses, {len(fingerprint)} fingerprints")
            out[space] = (keys, fingerprint)
        return out
    except (ValueError, msgspec.MsgspecError, zstandard.ZstdError, RecursionError) as error:
        raise Damaged("hint", "fingerprints", str(error)) from error


def fingerprint_seed(keys: Keys, lineage: str) -> int:
    """The secret 64-bit seed of a lineage's fingerprints."""
    return int.from_bytes(blake3.blake3(lineage.encode(), key=keys.hints).digest(8), "little")
