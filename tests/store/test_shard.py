"""A shard identifies its chunks by itself; any changed byte of its footer is reported as damage."""

from __future__ import annotations

import secrets
import threading

import numpy as np
import pytest

from icecore.errors import Damaged, FormatTooNew
from icecore.sizes import PAGE
from icecore.store.format import codec, shard
from icecore.store.format.chunk import NO_CHUNK, chunk_id
from icecore.store.format.codec import Choice
from icecore.store.format.container import TAIL_BYTES
from icecore.store.format.shard import SHARD, ShardBuilder, fill, parse_footer
from tests.store.images import bitmap, make_data

KEY = bytes(range(32))
NAME = bytes(range(16))


def build(chunks: int = 5, name: bytes = NAME) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    builder = ShardBuilder(name, memoryview(bytearray(1 << 20)))
    contents = []
    for seed in range(chunks):
        data, bits = make_data("heap", 1 + seed, seed), bitmap(list(range(1 + seed)))
        number, parts = codec.encode(data, Choice(codec.ZSTD if seed % 2 else codec.RAW, 1))
        _, room = builder.reserve(
            chunk_id(KEY, bits, data), bits, NO_CHUNK, number, sum(len(p) for p in parts)
        )
        fill(room, parts)
        contents.append((bits, data))
    return b"".join(builder.finish(KEY)), contents


def footer_of(whole: bytes, name: bytes = NAME) -> bytes:
    where = SHARD.parse_tail(name, len(whole), whole[-TAIL_BYTES:])
    return whole[where.offset :]


def test_is_readable_without_any_index() -> None:
    whole, contents = build()
    entries = parse_footer(KEY, NAME, len(whole), footer_of(whole))
    assert len(entries) == len(contents)
    for entry, (bits, data) in zip(entries, contents, strict=True):
        stored = memoryview(whole)[
            int(entry["offset"]) : int(entry["offset"]) + int(entry["length"])
        ]
        out = bytearray(len(data))
        codec.decode(int(entry["codec"]), stored, memoryview(out))
        assert out == data
        assert entry["data"].tobytes() == bits
        assert chunk_id(KEY, bits, out) == entry["chunk"].tobytes()


def test_every_flipped_bit_of_the_footer_is_seen() -> None:
    whole, _ = build(3)
    footer = footer_of(whole)
    for at in range(len(footer)):
        for bit in range(8):
            damaged = bytearray(footer)
            damaged[at] ^= 1 << bit
            with pytest.raises(Damaged) as caught:
                parse_footer(KEY, NAME, len(whole), bytes(damaged))
            assert (caught.value.kind, caught.value.name) == ("shard", f"shards/00/{NAME.hex()}")


def test_other_lengths_names_and_keys() -> None:
    whole, _ = build()
    footer = footer_of(whole)
    for size, bad in (
        (len(whole) + 1, footer),
        (len(whole), footer[1:]),
        (len(whole), footer[:-1]),
        (len(whole), b""),
    ):
        with pytest.raises(Damaged):
            parse_footer(KEY, NAME, size, bad)
    with pytest.raises(Damaged, match="says that it is"):
        parse_footer(KEY, bytes(16), len(whole), footer)
    with pytest.raises(Damaged, match="digest"):
        parse_footer(bytes(32), NAME, len(whole), footer)


def test_a_later_version_is_named_as_such() -> None:
    later = SHARD.__class__("shard", SHARD.magic, 2, SHARD.entry, SHARD.max_entries)
    whole = later.footer(KEY, NAME, b"", 0)
    with pytest.raises(FormatTooNew, match="version 2"):
        parse_footer(KEY, NAME, len(whole), whole)


def entry(offset: int, length: int, number: int, pages: list[int], base: bytes = NO_CHUNK) -> bytes:
    made = np.zeros(1, shard.ENTRY)
    made["offset"], made["length"], made["codec"] = offset, length, number
    made["data"] = np.frombuffer(bitmap(pages), np.uint8)
    made["base"] = np.frombuffer(base, np.uint8)
    return made.tobytes()


@pytest.mark.parametrize(
    ("table", "end", "why"),
    [
        (entry(0, 100, codec.ZSTD, [0]) + entry(99, 100, codec.ZSTD, [0]), 199, "back to back"),
        (entry(0, 100, codec.ZSTD, [0]), 101, "back to back"),
        (entry(0, PAGE, codec.RAW, [0, 1]), PAGE, "does not fit"),
        (entry(0, 0, codec.ZSTD, [0]), 0, "does not fit"),
        (entry(0, 100, codec.ZSTD, []), 100, "does not fit"),
        (entry(0, 2 << 20, codec.ZSTD, list(range(256))), 2 << 20, "does not fit"),
        (entry(0, 100, 77, [0]), 100, "unknown codec"),
        (entry(0, 100, codec.XOR | codec.ZSTD, [0]), 100, "base"),
        (entry(0, 100, codec.ZSTD, [0], b"b" * 32), 100, "base"),
    ],
)
def test_tables_that_cannot_be(table: bytes, end: int, why: str) -> None:
    footer = SHARD.footer(KEY, NAME, table, end)
    with pytest.raises(Damaged, match=why):
        parse_footer(KEY, NAME, end + len(footer), footer)


def test_an_absurd_footer_is_refused_from_the_tail_alone() -> None:
    tail = SHARD.footer(KEY, NAME, b"", 0)
    with pytest.raises(Damaged, match="cannot begin"):
        SHARD.parse_tail(NAME, 1 << 40, tail)
    with pytest.raises(Damaged, match="cannot begin"):
        SHARD.parse_tail(NAME, TAIL_BYTES, tail[:16] + b"\1" + tail[17:])


def test_a_table_that_is_not_of_its_entries() -> None:
    footer = SHARD.footer(KEY, NAME, entry(0, 100, codec.ZSTD, [0]) + b"x", 100)
    with pytest.raises(Damaged, match="1 entries"):
        parse_footer(KEY, NAME, 100 + len(footer), footer)


def test_a_full_buffer_is_told_of() -> None:
    builder = ShardBuilder(secrets.token_bytes(16), memoryview(bytearray(PAGE)))
    assert builder.fits(PAGE)
    builder.reserve(bytes(32), bitmap([0]), NO_CHUNK, codec.RAW, PAGE)
    assert not builder.fits(1)
    with pytest.raises(ValueError, match="fit"):
        builder.reserve(bytes(32), bitmap([0]), NO_CHUNK, codec.RAW, 1)


def test_rooms_may_be_filled_at_the_same_time() -> None:
    builder = ShardBuilder(NAME, memoryview(bytearray(64 * PAGE)))
    pages = [make_data("random", 1, seed) for seed in range(64)]
    rooms = [builder.reserve(bytes(32), bitmap([0]), NO_CHUNK, codec.RAW, PAGE)[1] for _ in pages]
    threads = [
        threading.Thread(
            target=lambda first=first: [
                fill(rooms[i], (pages[i][:7], pages[i][7:])) for i in range(first, 64, 4)
            ]
        )  # type: ignore[misc]
        for first in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bytes(builder.finish(KEY)[0]) == b"".join(pages)
