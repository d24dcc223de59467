"""The table of a data directory: what is written is read, and a table that breaks a rule is refused."""

from __future__ import annotations

import json

import msgspec
import pytest

from icecore.errors import Damaged
from icecore.sizes import CELL_BYTES
from icecore.store.format.contract import Run, RunFiles, RunIsolation, encode_records, read_run
from icecore.store.format.data import (
    DataDirectory,
    Entry,
    content_key,
    data_spaces,
    decode_entries,
    encode_data,
    encode_entries,
    entries_key,
    read_data,
)
from icecore.store.format.manifest import Manifest, Space
from tests.restorer.places import empty_manifest

TOP = Entry("directory", b"", 0o755)
FILE = Entry(
    "file", b"file", 0o640, 1, 2, 5, -1, 4, 5, CELL_BYTES, attributes={b"user.a": b"\0\xff"}
)
GOOD = [
    TOP,
    FILE,
    Entry("directory", b"d", 0o700),
    Entry("link", b"d/\xff", target=b"file"),
    Entry("symlink", b"d/s", target=b"../../else\xfe"),
    Entry("fifo", b"p"),
    Entry("skipped", b"socket"),
]
SIZE = 4 * CELL_BYTES


def test_what_is_written_is_read() -> None:
    assert decode_entries(encode_entries(GOOD), "/data", SIZE) == GOOD


def test_attributes_that_give_rights() -> None:
    """Only a snapshot of root's gives those back, and capabilities only to a program of root's."""
    own, trusted, capability = b"user.a", b"trusted.b", b"security.capability"
    every = {own: b"1", trusted: b"2", capability: b"3"}
    of_root, of_user = (Entry("file", b"f", user=user, attributes=every) for user in (0, 7))
    assert set(of_root.attributes_for(0)) == {own, trusted, capability}
    assert set(of_user.attributes_for(0)) == {own, trusted}
    assert set(of_root.attributes_for(7)) == set(of_user.attributes_for(7)) == {own}


def test_later_versions_may_add_to_an_entry() -> None:
    rows = msgspec.msgpack.decode(encode_entries(GOOD))
    data = msgspec.msgpack.encode([[*row, "later"] for row in rows])
    assert decode_entries(data, "/data", SIZE) == GOOD


BAD = {
    "its first entry is not the directory": [FILE],
    "two entries": [TOP, FILE, FILE],
    "no name in it": [TOP, Entry("fifo", b"..")],
    "precedes its directory": [TOP, Entry("fifo", b"d/p")],
    "leads nowhere": [TOP, Entry("symlink", b"s")],
    "not in the table": [TOP, Entry("link", b"l", target=b"file")],
    "no restore sets": [
        TOP,
        msgspec.structs.replace(FILE, attributes={b"security.selinux": b"\1"}),
    ],
    "beyond the end": [TOP, msgspec.structs.replace(FILE, location=SIZE)],
    "overlap": [
        TOP,
        msgspec.structs.replace(FILE, size=2 * CELL_BYTES),
        msgspec.structs.replace(FILE, path=b"g", location=2 * CELL_BYTES),
    ],
    "at whole cells": [TOP, msgspec.structs.replace(FILE, location=4096)],
    "too long": [TOP, msgspec.structs.replace(FILE, attributes={b"user.a": bytes(1 << 21)})],
}
NAMES = [b"/p", b"a//b", b"d/../p", b".", b"p\0", b"d/", b"x" * 256]


@pytest.mark.parametrize("why", BAD)
def test_a_table_that_breaks_a_rule_is_refused(why: str) -> None:
    with pytest.raises(Damaged, match=why):
        decode_entries(encode_entries(BAD[why]), "/data", SIZE)


@pytest.mark.parametrize("name", NAMES)
def test_names_that_lead_elsewhere_are_refused(name: bytes) -> None:
    entries = [TOP, Entry("directory", b"d"), Entry("fifo", name)]
    with pytest.raises(Damaged):
        decode_entries(encode_entries(entries), "/data", SIZE)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x90", b"\x91\xa1x", b"\xdd\xff\xff\xff\xff"])
def test_what_is_no_table_is_refused(data: bytes) -> None:
    with pytest.raises(Damaged):
        decode_entries(data, "/data", SIZE)


def manifest_with(*paths: str) -> Manifest:
    found = [DataDirectory(path, 1, 1, 5) for path in paths]
    spaces = [
        Space("file", key(path), 0, []) for path in paths for key in (entries_key, content_key)
    ]
    return msgspec.structs.replace(empty_manifest(), spaces=spaces, extra=encode_data(found))


def test_the_record_of_directories() -> None:
    manifest = manifest_with("/a", "/b/c")
    assert [one.path for one in read_data(manifest)] == ["/a", "/b/c"]
    assert [space.key for space in data_spaces(manifest, "/a")] == ["/a/./entries", "/a/./content"]
    assert read_data(empty_manifest()) == []


@pytest.mark.parametrize("paths", [("/a", "/a/b"), ("/",), ("/a/../b",), ("a",), ("/a/",)])
def test_directories_that_cannot_be_are_refused(paths: tuple[str, ...]) -> None:
    with pytest.raises(Damaged):
        read_data(manifest_with(*paths))


def test_a_directory_without_its_spaces_is_refused() -> None:
    manifest = msgspec.structs.replace(manifest_with("/a"), spaces=[])
    with pytest.raises(Damaged, match="are missing"):
        read_data(manifest)


def test_versions_without_data_refuse_the_run() -> None:
    """They refuse unknown fields of the record; without data it is as before."""
    run = Run(
        "job", ["true"], "/", RunIsolation(), RunFiles("/o", "/e", status="/s", init="/i"), [], b""
    )
    assert "data" not in json.loads(encode_records(run=run)["run"])
    record = encode_records(run=msgspec.structs.replace(run, data=["/a"]))
    manifest = msgspec.structs.replace(empty_manifest(), extra=record)
    read = read_run(manifest)
    assert read is not None and read.data == ["/a"]
    record["run"] = record["run"].replace('"data"', '"later"')
    with pytest.raises(Damaged, match="unknown field"):
        read_run(msgspec.structs.replace(manifest, extra=record))
