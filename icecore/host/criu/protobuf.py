"""The protobuf wire format, as far as CRIU's images need it. Unknown fields are kept, and every
length is checked before use.

CRIU's images promise stable field numbers, so a few numbers replace generated code: nothing depends
on which CRIU's pycriu is installed or on which protobuf package it needs.
https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MASK = (1 << 64) - 1


class WireError(ValueError):
    """The bytes are not a protobuf message."""


def read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return the varint at ``at`` and the position after it."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise WireError("a varint does not end")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _MASK, at
        shift += 7


def write_varint(value: int) -> bytes:
    """Encode a varint; negative numbers as 64-bit two's complement, as int32 and int64 fields
    require.
    """
    value &= _MASK
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class Message(msgspec.Struct):
    """A message as its fields in order: (number, wire type, value). A value is an int, or bytes if
    it has a length.
    """

    fields: list[tuple[int, int, int | bytes]] = msgspec.field(default_factory=list)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Message:
        """Decode a message.

        Raises:
            WireError: It is none.
        """
        fields: list[tuple[int, int, int | bytes]] = []
        at, end = 0, len(data)
        while at < end:
            key, at = read_varint(data, at)
            number, kind = key >> 3, key & 7
            if kind == _VARINT:
                value, at = read_varint(data, at)
                fields.append((number, kind, value))
                continue
            if kind == _BYTES:
                size, at = read_varint(data, at)
            elif kind in (_FIXED64, _FIXED32):
                size = 8 if kind == _FIXED64 else 4
            else:
                raise WireError(f"wire type {kind} is unknown")
            if number == 0 or size > end - at:
                raise WireError("a field is longer than its message")
            raw = bytes(data[at : at + size])
            fields.append((number, kind, raw if kind == _BYTES else int.from_bytes(raw, "little")))
            at += size
        return cls(fields)

    def encode(self) -> bytes:
        """Encode the message."""
        out = bytearray()
        for number, kind, value in self.fields:
            out += write_varint(number << 3 | kind)
            if isinstance(value, bytes):
                out += write_varint(len(value)) + value
            elif kind == _VARINT:
                out += write_varint(value)
            else:
                out += value.to_bytes(8 if kind == _FIXED64 else 4, "little")
        return bytes(out)

    def _values(self, number: int) -> Iterator[int | bytes]:
        return (value for n, _, value in self.fields if n == number)

    def has(self, number: int) -> bool:
        """Return whether the field is present."""
        return any(n == number for n, _, _ in self.fields)

    def integer(self, number: int, default: int = 0) -> int:
        """Return the (last) value of an unsigned field or enum."""
        value: int | bytes = default
        for found in self._values(number):
            value = found
        if isinstance(value, bytes):
            raise WireError(f"field {number} is no number")
        return value

    def signed(self, number: int, default: int = 0) -> int:
        """Return the value of an int32 or int64 field."""
        value = self.integer(number, default & _MASK)
        return value - (1 << 64) if value >> 63 else value

    def zigzag(self, number: int, default: int = 0) -> int:
        """Return the value of a sint32 or sint64 field."""
        value = self.integer(number, default << 1 if default >= 0 else (-default << 1) - 1)
        return (value >> 1) ^ -(value & 1)

    def integers(self, number: int) -> list[int]:
        """Return the values of a repeated field, packed or not."""
        found: list[int] = []
        for value in self._values(number):
            if isinstance(value, int):
                found.append(value)
                continue
            at = 0
            while at < len(value):
                one, at = read_varint(value, at)
                found.append(one)
        return found

    def raw(self, number: int) -> bytes:
        """Return the (last) bytes of a field; empty if it is absent."""
        found = b""
        for value in self._values(number):
            if not isinstance(value, bytes):
                raise WireError(f"field {number} is a number")
            found = value
        return found

    def text(self, number: int) -> str:
        """Return a string field; file names need not be UTF-8."""
        return self.raw(number).decode("utf-8", "surrogateescape")

    def message(self, number: int) -> Message:
        """Return the message in a field; empty if it is absent."""
        return Message.decode(self.raw(number))

    def messages(self, number: int) -> list[Message]:
        """Return the messages of a repeated field."""
        return [Message.decode(value) for value in self._values(number) if isinstance(value, bytes)]

    def set(self, number: int, value: int | bytes | str | Message) -> None:
        """Replace a field in place, or append it; a repeated field becomes a single one."""
        if isinstance(value, Message):
            value = value.encode()
        elif isinstance(value, str):
            value = value.encode("utf-8", "surrogateescape")
        kind = _BYTES if isinstance(value, bytes) else _VARINT
        places = [i for i, (n, _, _) in enumerate(self.fields) if n == number]
        if not places:
            self.fields.append((number, kind, value))
            return
        self.fields[places[0]] = (number, kind, value)
        for place in reversed(places[1:]):
            del self.fields[place]


def decode_columns(
    data: bytes, start: npt.NDArray[np.int64], end: npt.NDArray[np.int64], numbers: tuple[int, ...]
) -> dict[int, npt.NDArray[np.uint64]]:
    """Decode many small messages of varint fields at once.

    Args:
        data: Bytes that hold them.
        start: Where each message begins.
        end: Where each ends.
        numbers: Fields to give (below 16); the others are passed over. A field that a message lacks
            is 0.

    Returns:
        For each number, its values in all messages.

    Raises:
        WireError: Some message has another kind of field, or does not end where it should.
    """
    count = len(start)
    # Sixteen zeros more, so that nothing below reads past the end before it is checked.
    source = np.frombuffer(bytes(data) + bytes(16), np.uint8)
    out = {number: np.zeros(count, np.uint64) for number in numbers}
    at = start.astype(np.int64)
    left = np.flatnonzero(at < end)
    while len(left):
        keys = source[at[left]]
        if ((keys & 7) | (keys & 0x80)).any():
            raise WireError("a field is not a varint")
        at[left] += 1
        value = np.zeros(len(left), np.uint64)
        going = np.arange(len(left))
        for shift in range(0, 70, 7):
            where = left[going]
            if (at[where] >= end[where]).any():
                raise WireError("a varint does not end")
            byte = source[at[where]]
            at[where] += 1
            value[going] |= (byte & 0x7F).astype(np.uint64) << np.uint64(shift)
            going = going[byte > 0x7F]
            if not len(going):
                break
        else:
            raise WireError("a varint does not end")
        for number in numbers:
            mine = keys == number << 3
            out[number][left[mine]] = value[mine]
        left = left[at[left] < end[left]]
    return out


def encode_columns(columns: list[tuple[int, npt.NDArray[np.uint64]]], *, sized: bool) -> bytes:
    """Encode many messages of varint fields at once, back to back.

    Args:
        columns: Field numbers (below 16) in the order in which they shall stand, with the values of
            all messages.
        sized: Whether each message is preceded by its length as a little-endian u32, as in CRIU's
            images.
    """
    count = len(columns[0][1])
    head = 4 if sized else 0
    width = head + 11 * len(columns)
    matrix = np.zeros((count, width), np.uint8)
    used = np.zeros((count, width), np.bool_)
    for index, (number, values) in enumerate(columns):
        base = head + 11 * index
        matrix[:, base] = number << 3
        used[:, base] = True
        rest = values.astype(np.uint64)
        more = np.ones(count, np.bool_)
        for byte in range(10):
            used[:, base + 1 + byte] = more
            matrix[:, base + 1 + byte] = rest & np.uint64(0x7F)
            rest = rest >> np.uint64(7)
            more = more & (rest != 0)
            matrix[more, base + 1 + byte] |= 0x80
            if not more.any():
                break
    if sized:
        lengths = used.sum(axis=1, dtype=np.uint32).astype("<u4")
        matrix[:, :4] = lengths.view(np.uint8).reshape(count, 4)
        used[:, :4] = True
    return matrix[used].tobytes()
