"""The repository's state as one log entry holds it, and the pages that the entry refers to. Pure;
what an entry holds itself stays small.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from icecore.errors import Damaged, StoreError
from icecore.store.format.envelope import ObjectKind, Sealed, digest_of, unseal
from icecore.store.format.envelope import seal as _seal
from icecore.store.format.names import KINDS, Kind, log_name

ENTRY_KIND = ObjectKind("log entry", b"ICELOG\0", 1, 64 << 20)
PAGE_KIND = ObjectKind("snapshot page", b"ICEPAGE", 1, 16 << 20)
NAMES_KIND = ObjectKind("name list", b"ICENAME", 1, 17 << 22)

#: Generations whose transaction ids an entry repeats.
LEASE = "run "
REMEMBERED = 32
NAME_BYTES = 17

Id = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
MarkId = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
HexId = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]
UserId = Annotated[int, msgspec.Meta(ge=0, lt=(1 << 32) - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Generation = Annotated[int, msgspec.Meta(ge=0)]
#: Lists are bounded before they are created: a decoder first reads how long a list claims to be.
Some = msgspec.Meta(max_length=1 << 12)
Many = msgspec.Meta(max_length=1 << 16)
#: Most records of a page: as many as eight pages of the next smaller class can have.
PAGE_LIMIT = 1 << 15
#: Most snapshots that a repository lists.
MAX_SNAPSHOTS = 1 << 20


class SnapshotRecord(msgspec.Struct, frozen=True, array_like=True):
    """One committed snapshot in the snapshot list.

    ``manifest`` is the object's name; ``manifest_digest`` the digest in its header; ``logical``,
    ``stored``, ``changed`` and ``device`` are bytes as in ``manifest.Sizes``; ``data`` the bytes of
    all files in data directories; ``parent`` is empty
    for the first of a lineage. ``quarantined``, if not empty, says what of the snapshot is lost: it
    is kept for what can still be read, and no snapshot is based on it. ``marks`` are the ids of the
    last changes of ``tags`` and ``pinned``, newest last (see ``marks``); ``origin`` is the id of
    the repository from which a sync copied the snapshot, empty where it was taken. ``owner`` is the
    uid of its job (`icecore.store.format.contract.recorded_owner`); None: it is not recorded.
    """

    snapshot: HexId
    job: str
    lineage: str
    parent: str
    created_ns: Count
    manifest: str
    manifest_length: Count
    manifest_digest: Digest
    logical: Count = 0
    stored: Count = 0
    changed: Count = 0
    window_seconds: float = 0.0
    tags: Annotated[list[str], Some] = []
    pinned: bool = False
    device: Count = 0
    quarantined: str = ""
    marks: Annotated[list[MarkId], Some] = []
    origin: str = ""
    data: Count = 0
    owner: UserId | None = None


class PageRef(msgspec.Struct, frozen=True, array_like=True):
    """An immutable page of the snapshot list. ``first`` and ``last`` are the smallest and largest
    leading 48 bits of its snapshot ids.
    """

    id: Id
    digest: Digest
    length: Count
    count: Count
    first: Count
    last: Count


class SegmentRef(msgspec.Struct, frozen=True, array_like=True):
    """A live index segment: ``count`` chunk ids, all of which begin with the ``bits`` bits
    ``prefix``; ``digest`` is in its header.
    """

    id: Id
    digest: Digest
    length: Count
    count: Count
    bits: Annotated[int, msgspec.Meta(ge=0, le=8)] = 0
    prefix: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0


class NameListRef(msgspec.Struct, frozen=True, array_like=True):
    """A name list too long for the entry, as an object under pages/."""

    id: Id
    digest: Digest
    length: Count
    count: Count


class Condemned(msgspec.Struct, frozen=True, array_like=True):
    """Objects marked for deletion at ``generation``, in the entry itself (``names``) or in a list
    object (``ref``).

    The mark of a shard outlives the shard: it stays until no live index segment names it.
    """

    generation: Generation
    names: bytes = b""
    ref: NameListRef | None = None


class Process(msgspec.Struct, frozen=True, array_like=True):
    """A process, identified uniquely: ``boot`` names the running kernel, ``namespaces`` those in
    which ``pid`` and ``started`` (clock ticks after boot) are valid.
    """

    boot: str
    namespaces: str
    pid: int
    started: int


class SessionRecord(msgspec.Struct, frozen=True, array_like=True):
    """An open session: the generation at which it began and the snapshots that it pins, whether or
    not they are still listed.

    ``process`` is the process that holds it, if known.
    """

    id: HexId
    began: Generation
    purpose: str
    host: str
    created_ns: Count
    pins: Annotated[list[SnapshotRecord], msgspec.Meta(max_length=MAX_SNAPSHOTS)] = []
    process: Process | None = None


class Written(msgspec.Struct, frozen=True, array_like=True):
    """The ids of the transactions that one generation carried, concatenated (16 bytes each)."""

    generation: Generation
    ids: bytes


class Anchor(msgspec.Struct, frozen=True, array_like=True):
    """The entry whose deletion precedes the deletion of everything after it: its generation, its
    digest, and the first generation from which on every entry has an anchor.
    """

    generation: Annotated[int, msgspec.Meta(ge=1)]
    digest: Digest
    since: Annotated[int, msgspec.Meta(ge=1)]


class Gap(msgspec.Struct, frozen=True, array_like=True):
    """Generations ``first`` to ``last``, whose entries a repair found lost; ``base`` is the digest
    of the entry before them, empty if that is lost as well.
    """

    first: Annotated[int, msgspec.Meta(ge=1)]
    last: Annotated[int, msgspec.Meta(ge=1)]
    base: bytes = b""


class LogState(msgspec.Struct, frozen=True):
    """The contents of a log entry.

    ``predecessor`` is the digest of the previous entry; ``transactions`` are the transaction ids of
    the last generations, oldest first, this entry's own last; ``changes`` describes in words what
    this entry did. The snapshots are those of ``pages``, then ``tail``, in commit order. ``anchor``
    is the last entry before this one that is trimmed by itself (see ``log``), if known. ``gaps``
    are lost entries, ascending (see ``gaps``).
    """

    generation: Annotated[int, msgspec.Meta(ge=1)]
    predecessor: bytes
    created_ns: Count
    changes: Annotated[list[str], Many] = []
    transactions: Annotated[list[Written], Some] = []
    pages: Annotated[list[PageRef], Many] = []
    tail: Annotated[list[SnapshotRecord], msgspec.Meta(max_length=PAGE_LIMIT)] = []
    sessions: Annotated[list[SessionRecord], Many] = []
    condemned: Annotated[list[Condemned], Many] = []
    segments: Annotated[list[SegmentRef], Many] = []
    anchor: Anchor | None = None
    gaps: list[Gap] = []

    def session(self, identity: str) -> SessionRecord | None:
        """Return the open session with this id."""
        return next((session for session in self.sessions if session.id == identity), None)

    @property
    def snapshots(self) -> int:
        """Number of listed snapshots."""
        return sum(page.count for page in self.pages) + len(self.tail)


_ENTRY = msgspec.msgpack.Decoder(LogState)
_PAGE: msgspec.msgpack.Decoder[list[SnapshotRecord]] = msgspec.msgpack.Decoder(
    Annotated[list[SnapshotRecord], msgspec.Meta(max_length=PAGE_LIMIT)]
)


def encode_entry(state: LogState, key: bytes) -> Sealed:
    """Return the log entry of ``state``.

    Raises:
        StoreError: No reader would accept it: it is longer than an entry can be, or exceeds another
            bound.
    """
    name, body = log_name(state.generation), msgspec.msgpack.encode(state)
    try:
        _decode_state(name, body)
        return _seal(ENTRY_KIND, body, key, name)
    except (Damaged, ValueError) as error:
        raise StoreError(
            f"the log entry {name} cannot be written: {getattr(error, 'why', error)}"
        ) from error


def _decode_state(name: str, body: bytes) -> LogState:
    """Return the state in an entry's body.

    Raises:
        Damaged: It is not a state, or breaks a rule.
    """
    try:
        state = _ENTRY.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(ENTRY_KIND.title, name, str(error)) from error
    for batch in state.condemned:
        _check_names(ENTRY_KIND, name, batch.names)
    lists = [batch.ref.id for batch in state.condemned if batch.ref is not None]
    for what, identities in (
        ("page", [ref.id for ref in state.pages]),
        ("name list", lists),
        ("index segment", [ref.id for ref in state.segments]),
    ):
        if len(set(identities)) != len(identities):
            raise Damaged(ENTRY_KIND.title, name, f"it names one {what} twice")
    if state.snapshots > MAX_SNAPSHOTS:
        raise Damaged(
            ENTRY_KIND.title,
            name,
            f"it lists {state.snapshots} snapshots, more than {MAX_SNAPSHOTS}",
        )
    if any(ref.prefix >> ref.bits for ref in state.segments):
        raise Damaged(ENTRY_KIND.title, name, "an index segment has a prefix longer than its bits")
    if not all(math.isfinite(record.window_seconds) for record in state.tail):
        raise Damaged(ENTRY_KIND.title, name, "a snapshot's window has no length")
    return state


def decode_entry(name: str, generation: int, data: bytes, key: bytes) -> LogState:
    """Return the state in log entry ``name``, which must be that of ``generation``.

    Raises:
        Damaged: It is not what was written there.
    """
    state = _decode_state(name, unseal(ENTRY_KIND, name, data, key))
    if state.generation != generation:
        raise Damaged(
            ENTRY_KIND.title, name, f"it holds generation {state.generation}, not {generation}"
        )
    if len(state.predecessor) != (32 if generation > 1 else 0):
        raise Damaged(
            ENTRY_KIND.title, name, f"its predecessor's digest has {len(state.predecessor)} bytes"
        )
    return state


def encode_page(records: list[SnapshotRecord], key: bytes, name: str = "") -> Sealed:
    """Return the page of ``records``, for object ``name`` (which only encryption needs).

    Raises:
        StoreError: No reader would accept it.
    """
    body = msgspec.msgpack.encode(records)
    try:
        _decode_records(name, body)
        return _seal(PAGE_KIND, body, key, name)
    except (Damaged, ValueError) as error:
        raise StoreError(
            f"the snapshot page {name} cannot be written: {getattr(error, 'why', error)}"
        ) from error


def _decode_records(name: str, body: bytes) -> list[SnapshotRecord]:
    try:
        records = _PAGE.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(PAGE_KIND.title, name, str(error)) from error
    if not all(math.isfinite(record.window_seconds) for record in records):
        raise Damaged(PAGE_KIND.title, name, "a snapshot's window has no length")
    return records


def page_ref(identity: bytes, sealed: Sealed, records: list[SnapshotRecord]) -> PageRef:
    """Return the reference to the page that holds ``records``."""
    prefixes = [leading(record.snapshot) for record in records]
    return PageRef(
        identity, sealed.digest, len(sealed.data), len(records), min(prefixes), max(prefixes)
    )


def decode_page(
    name: str, data: bytes, key: bytes, ref: PageRef | None = None
) -> list[SnapshotRecord]:
    """Return the records on page ``name``, checked against the reference that led to it.

    Raises:
        Damaged: It is not what was written, or not the page that was referred to.
    """
    records = _decode_records(name, unseal(PAGE_KIND, name, data, key, ref.digest if ref else None))
    if ref is not None and len(records) != ref.count:
        raise Damaged(
            PAGE_KIND.title, name, f"it has {len(records)} records instead of {ref.count}"
        )
    return records


def leading(snapshot: str) -> int:
    """Return the leading 48 bits of a snapshot id, which pages are ordered by."""
    return int(snapshot[:12], 16)


def join_names(names: list[tuple[Kind, bytes]]) -> bytes:
    """Return objects as 17 bytes each, sorted: the kind's number (its place in ``names.KINDS``),
    then the random part of the name.
    """
    return b"".join(sorted(bytes([KINDS.index(kind)]) + identity for kind, identity in names))


def split_names(names: bytes) -> list[tuple[Kind, bytes]]:
    """Return the inverse of ``join_names``."""
    return [
        (KINDS[names[at]], names[at + 1 : at + NAME_BYTES])
        for at in range(0, len(names), NAME_BYTES)
    ]


def _check_names(kind: ObjectKind, name: str, names: bytes) -> None:
    if len(names) % NAME_BYTES:
        raise Damaged(
            kind.title,
            name,
            f"a list of names has {len(names)} bytes, not a multiple of {NAME_BYTES}",
        )
    if any(code >= len(KINDS) for code in names[::NAME_BYTES]):
        raise Damaged(kind.title, name, "a list of names has an unknown kind")


def encode_names(names: list[tuple[Kind, bytes]], key: bytes, name: str = "") -> Sealed:
    """Return the object of a long name list, for object ``name`` (which only encryption needs)."""
    return _seal(NAMES_KIND, join_names(names), key, name)


def decode_names(
    name: str, data: bytes, key: bytes, ref: NameListRef | None = None
) -> list[tuple[Kind, bytes]]:
    """Return the names in list object ``name``.

    Raises:
        Damaged: It is not what was written, or not the list that was referred to.
    """
    joined = unseal(NAMES_KIND, name, data, key, ref.digest if ref else None)
    _check_names(NAMES_KIND, name, joined)
    if ref is not None and len(joined) != ref.count * NAME_BYTES:
        raise Damaged(
            NAMES_KIND.title,
            name,
            f"it has {len(joined) // NAME_BYTES} names instead of {ref.count}",
        )
    return split_names(joined)


def entry_digest(data: bytes) -> bytes:
    """Return the digest in a log entry's first bytes, by which its successor refers to it."""
    return digest_of(data)
