"""Objects of many pieces (shards, node packs): the pieces back to back, then a footer that lists
them, so that the object can be read without any index.

The footer is a table of fixed entries (each with its piece's ``offset`` and ``length``) and a tail
of 72 bytes: magic, version, number of entries, offset of the table, the object's own random name,
and the keyed BLAKE3 of table and tail. The pieces tile the bytes before the table without a gap, so
every byte of the object is accounted for. In an encrypted repository, the pieces and the table are
encrypted, each bound to its place.
"""

from __future__ import annotations

import struct
from typing import Any

import blake3
import msgspec
import numpy as np

from icecore.errors import Damaged, FormatTooNew
from icecore.store.format.cell import Records
from icecore.store.format.cipher import ENCRYPTED, TAG_BYTES, flag, opened_piece, sealed_piece
from icecore.store.format.codec import Buffer
from icecore.store.format.names import Kind, object_name

_TAIL = struct.Struct("<8sIIQ16s32s")
_DIGEST_BYTES = 32
#: What an encrypted table is bound to besides its place.
_TABLE = b"table"

#: Bytes at the end of an object that say where its footer begins.
TAIL_BYTES = _TAIL.size
NAME_BYTES = 16


class Container(msgspec.Struct, frozen=True):
    """The layout of one kind of object.

    Attributes:
        kind: Its name in object names and errors.
        magic: 8 bytes with which the tail begins.
        version: The version that is written, and the newest that is read.
        entry: Record type of the table; has the fields ``offset`` (u8) and ``length`` (u4).
        max_entries: The longest table that is accepted, whatever a tail says.
    """

    kind: Kind
    magic: bytes
    version: int
    entry: np.dtype[Any]
    max_entries: int

    def footer(self, key: bytes, name: bytes, table: bytes, offset: int) -> bytes:
        """Return the footer of object ``name`` whose pieces end at ``offset``; ``table`` is their
        entries.
        """
        count = len(table) // self.entry.itemsize
        head = _TAIL.pack(self.magic, self.version | flag(key), count, offset, name, b"")[
            :-_DIGEST_BYTES
        ]
        table = sealed_piece(key, object_name(self.kind, name), offset, _TABLE, table)
        return table + head + _digest(key, table, head)

    def parse_tail(self, name: bytes, size: int, tail: Buffer) -> Where:
        """Return where the footer of an object of ``size`` bytes begins, from its last
        :data:`TAIL_BYTES`; the same in all versions.

        Only :meth:`parse_footer` verifies it.

        Raises:
            Damaged: The tail of another kind or object, or an impossible offset.
        """
        if len(tail) != TAIL_BYTES or size < TAIL_BYTES:
            raise self.damaged(name, "it is shorter than its tail")
        magic, _, _, offset, own_name, _ = _TAIL.unpack(tail)
        if magic != self.magic:
            raise self.damaged(name, f"its end is not that of a {self.kind} object")
        if own_name != name:
            raise self.damaged(name, f"it says that it is {own_name.hex()}")
        length = size - offset
        if (
            not TAIL_BYTES
            <= length
            <= TAIL_BYTES + self.max_entries * self.entry.itemsize + TAG_BYTES
        ):
            raise self.damaged(name, f"its footer cannot begin at {offset} of {size} bytes")
        return Where(offset, length)

    def parse_footer(self, key: bytes, name: bytes, size: int, footer: Buffer) -> Records:
        """Return the table of an object of ``size`` bytes, from its last :attr:`Where.length`
        bytes.

        Returns:
            Records of ``entry`` in order of their offset; they tile the bytes before the table.

        Raises:
            Damaged: A byte of the footer is not what was written, or the pieces do not tile the
                object.
            FormatTooNew: A later version wrote it.
        """
        view = memoryview(footer)
        where = self.parse_tail(name, size, view[-TAIL_BYTES:])
        if len(view) != where.length:
            raise self.damaged(name, f"a footer of {len(view)} bytes where {where.length} belong")
        table: Buffer = view[:-TAIL_BYTES]
        if _digest(key, table, view[-TAIL_BYTES:-_DIGEST_BYTES]) != view[-_DIGEST_BYTES:]:
            raise self.damaged(name, "its footer's digest differs")
        _, version, count, *_ = _TAIL.unpack(view[-TAIL_BYTES:])
        if version & ~ENCRYPTED > self.version:
            raise FormatTooNew(
                f"{object_name(self.kind, name)} has version {version & ~ENCRYPTED}, this icecore reads up to {self.version}",
                cure="use a newer icecore",
            )
        if version & ENCRYPTED != flag(key):
            raise self.damaged(name, "its encryption differs from its repository's")
        try:
            table = opened_piece(key, object_name(self.kind, name), where.offset, _TABLE, table)
        except ValueError as error:
            raise self.damaged(name, f"its table: {error}") from error
        if len(table) != count * self.entry.itemsize:
            raise self.damaged(name, f"a table of {len(table)} bytes for {count} entries")
        entries = np.frombuffer(table, self.entry)
        ends = np.cumsum(entries["length"], dtype=np.int64)
        starts = ends - entries["length"]
        if (ends[-1] if count else 0) != where.offset or (
            starts != entries["offset"].astype(np.int64)
        ).any():
            raise self.damaged(name, "its pieces do not lie back to back")
        return entries

    def damaged(self, name: bytes, why: str) -> Damaged:
        """Return the error for object ``name`` of this kind."""
        return Damaged(self.kind, object_name(self.kind, name), why)


class Where(msgspec.Struct, frozen=True):
    """Where an object's footer is: ``offset`` of the table (also the bytes of all pieces),
    ``length`` of table and tail together.
    """

    offset: int
    length: int


def _digest(key: bytes, table: Buffer, head: Buffer) -> bytes:
    state = blake3.blake3(table, key=key)
    state.update(head)
    return state.digest()
