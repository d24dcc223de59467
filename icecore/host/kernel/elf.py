"""The build id of an ELF file (.note.gnu.build-id), which distinguishes two builds of one
program; elf(5), and the Linux Standard Base on notes.
"""

from __future__ import annotations

import os
import struct

_MAGIC = b"\x7fELF"
_PT_NOTE, _NT_GNU_BUILD_ID = 4, 3
_GNU = b"GNU\0"
_NOTE = 12
#: Longest program header table and note segment that are read, bytes.
_MOST = 1 << 16


def build_id(descriptor: int) -> str:
    """Return the build id of the file in hexadecimal; empty: it is not an ELF file, or has none.

    Args:
        descriptor: Open for reading.

    Raises:
        OSError: As pread(2).
    """
    head = os.pread(descriptor, 64, 0)
    if len(head) < 52 or not head.startswith(_MAGIC) or head[4] not in (1, 2):
        return ""
    wide, order = head[4] == 2, "<" if head[5] == 1 else ">"
    try:
        if wide:
            (start,) = struct.unpack_from(f"{order}Q", head, 32)
            size, count = struct.unpack_from(f"{order}HH", head, 54)
        else:
            (start,) = struct.unpack_from(f"{order}I", head, 28)
            size, count = struct.unpack_from(f"{order}HH", head, 42)
        table = os.pread(descriptor, min(size * count, _MOST), start)
        for at in range(0, len(table) - size + 1, size or _MOST):
            if found := _of_segment(descriptor, table[at : at + size], order, wide):
                return found
    except (struct.error, OverflowError):
        pass  # cut off, or numbers that no file has
    return ""


def _of_segment(descriptor: int, header: bytes, order: str, wide: bool) -> str:
    """Return the build id in the segment of a program header; empty: there is none."""
    if struct.unpack_from(f"{order}I", header)[0] != _PT_NOTE:
        return ""
    if wide:
        (offset,), (length,) = (struct.unpack_from(f"{order}Q", header, at) for at in (8, 32))
    else:
        (offset,), (length,) = (struct.unpack_from(f"{order}I", header, at) for at in (4, 16))
    notes = os.pread(descriptor, min(length, _MOST), offset)
    at = 0
    while at + _NOTE <= len(notes):
        name, size, kind = struct.unpack_from(f"{order}III", notes, at)
        begin = at + _NOTE + -(-name // 4) * 4
        if kind == _NT_GNU_BUILD_ID and notes[at + _NOTE :].startswith(_GNU):
            return notes[begin : begin + size].hex()
        at = begin + -(-size // 4) * 4
    return ""
