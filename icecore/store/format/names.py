"""Names of objects: each kind has one place, and its random 16-byte part is never used twice."""

from __future__ import annotations

import re
import secrets
import time
from typing import Literal, get_args

#: Kinds of objects that sessions write under random names and that the collector deletes.
Kind = Literal["shard", "nodes", "manifest", "segment", "page"]
KINDS: tuple[Kind, ...] = get_args(Kind)

CONFIG = "config"
KEYS = "keys/"
LOG = "log/"
SESSIONS = "sessions/"
HINTS = "hints/"
#: Second copies of the few objects without which nothing can be read: each under its own name below
#: this prefix.
COPIES = "copies/"
FILTERS = "filters/"
#: Left behind by an interrupted ``init``.
PROBE = "probe/"

PREFIX: dict[Kind, str] = {
    "shard": "shards/",
    "nodes": "nodes/",
    "manifest": "snapshots/",
    "segment": "index/",
    "page": "pages/",
}
#: The kinds whose objects lie in 256 folders, by the first byte of their name.
_SPREAD: frozenset[Kind] = frozenset({"shard", "segment"})
_ID = re.compile(r"[0-9a-f]{32}\Z")
#: The highest number that the name of a key object can hold.
LAST_KEY = (1 << 32) - 1
#: The highest generation that the name of a log entry can hold.
LAST_GENERATION = (1 << 64) - 1


def random_id() -> bytes:
    """Return 16 random bytes for an object that has not been written yet."""
    return secrets.token_bytes(16)


def object_name(kind: Kind, identity: bytes) -> str:
    """Return the name of the object of ``kind`` whose random part is ``identity`` (16 bytes)."""
    if len(identity) != 16:
        raise ValueError(f"the id of an object has 16 bytes, not {len(identity)}")
    text = identity.hex()
    return f"{PREFIX[kind]}{text[:2]}/{text}" if kind in _SPREAD else PREFIX[kind] + text


def parse_name(name: str) -> tuple[Kind, bytes] | None:
    """Return the kind and the random part of an object's name; None if `object_name` does not make
    such names.
    """
    for kind in KINDS:
        if name.startswith(PREFIX[kind]):
            text = name.rsplit("/", 1)[-1]
            if _ID.match(text) and object_name(kind, bytes.fromhex(text)) == name:
                return kind, bytes.fromhex(text)
    return None


def filter_name(segment: bytes) -> str:
    """Return the name of the filter of index segment ``segment`` (its random 16 bytes)."""
    return FILTERS + segment.hex()


def filtered_segment(name: str) -> bytes | None:
    """Return the random part of the segment whose filter has this name; None if it is not the name
    of a filter.
    """
    text = name.removeprefix(FILTERS)
    return bytes.fromhex(text) if name.startswith(FILTERS) and _ID.match(text) else None


def log_name(generation: int) -> str:
    """Return the name of the log entry of ``generation``: inverted, so that the newest is listed
    first.
    """
    if not 0 < generation <= LAST_GENERATION:
        raise ValueError(f"generation {generation} is out of range")
    return f"{LOG}{LAST_GENERATION - generation:016x}"


def log_generation(name: str) -> int | None:
    """Return the generation in a log entry's name; None if it is not the name of a log entry."""
    text = name.removeprefix(LOG)
    if name.startswith(LOG) and re.fullmatch(r"[0-9a-f]{16}", text):
        return LAST_GENERATION - int(text, 16) or None
    return None


def key_name(slot: int) -> str:
    """Return the name of key slot ``slot``."""
    return f"{KEYS}{slot:08x}"


def key_number(name: str) -> int | None:
    """Return the number in a key slot's name; None if it is not the name of a key slot."""
    text = name.removeprefix(KEYS)
    return int(text, 16) if name.startswith(KEYS) and re.fullmatch(r"[0-9a-f]{8}", text) else None


def copy_name(name: str) -> str:
    """Return the name of the second copy of the configuration or of a key slot."""
    return COPIES + name


def heartbeat_name(session: str, sequence: int) -> str:
    """Return the name of heartbeat ``sequence`` of a session (its id in hexadecimal)."""
    return f"{SESSIONS}{session}/{sequence:016x}"


def heartbeat_session(name: str) -> str | None:
    """Return the session whose heartbeat has this name; None if it is not the name of a heartbeat."""
    found = re.fullmatch(r"([0-9a-f]{32})/[0-9a-f]{16}", name.removeprefix(SESSIONS))
    return found[1] if found and name.startswith(SESSIONS) else None


def is_known(name: str) -> bool:
    """Return whether a repository uses such names. Of hints, only the folder is known."""
    return (
        name == CONFIG
        or parse_name(name) is not None
        or log_generation(name) is not None
        or key_number(name) is not None
        or filtered_segment(name) is not None
        or heartbeat_session(name) is not None
        or name.startswith((HINTS, PROBE))
    )


def new_snapshot_id() -> str:
    """Return a new snapshot id: 6 bytes of Unix time in ms, then 10 random ones, in hexadecimal.

    The time only keeps neighbours in time on the same page of the snapshot list; nothing relies on
    it.
    """
    return (time.time_ns() // 1_000_000 & (1 << 48) - 1).to_bytes(
        6, "big"
    ).hex() + secrets.token_hex(10)
