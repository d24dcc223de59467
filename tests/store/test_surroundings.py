"""The record of what surrounds open files: read as it was written, and refused if it makes no
sense.
"""

from __future__ import annotations

import base64
import json

import msgspec
import pytest

from icecore.errors import Damaged
from icecore.store.format.manifest import decode_manifest, encode_manifest
from icecore.store.format.surroundings import (
    KEY,
    MAX_SMALL,
    Fifo,
    Folder,
    SmallFile,
    SocketName,
    Surroundings,
    encode_surroundings,
    read_surroundings,
)
from tests.restorer.places import empty_manifest

FOUND = Surroundings(
    [Folder("/a", 0o1777, 0, 5), Folder("/a/caf\udce9", 0o2750, 7, 8, -1, True)],
    [Fifo("/a/fifo", 0o600, 7, 8)],
    [SocketName("/a/socket", 0o660, 7, 8), SocketName("/b/s", 0, 7, 8, "/a")],
    [SmallFile("/a/x.pid", 0o644, 7, 8, 9, base64.b64encode(b"12\n").decode())],
    {"/lib/libc.so.6": "00ff", "/bin/old": ""},
)


def holding(text: str) -> object:
    manifest = msgspec.structs.replace(empty_manifest(), extra={KEY: text})
    return read_surroundings(manifest)


def test_a_record_survives_the_manifest() -> None:
    manifest = msgspec.structs.replace(empty_manifest(), extra={KEY: encode_surroundings(FOUND)})
    key = bytes(32)
    name = f"manifests/{manifest.snapshot}"
    stored = encode_manifest(manifest, key, name)
    assert read_surroundings(decode_manifest(stored.data, key, name=name)) == FOUND


def test_an_older_snapshot_has_none() -> None:
    assert read_surroundings(empty_manifest()) is None


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"folders": [["relative", 0, 0, 0]]},
        {"folders": [["/a/../b", 0, 0, 0]]},
        {"folders": [["/", 0, 0, 0]]},
        {"folders": [["/a", 0o10000, 0, 0]]},
        {"folders": [["/a", 0, -1, 0]]},
        {"folders": [["/a", 0, 0, 1 << 32]]},
        {"fifos": [["/a"]]},
        {"sockets": {"/a": 1}},
        {"sockets": [["/a", 0, 0, 0, "relative"]]},
        {"small": [["/a", 0, 0, 0, 0, "no base64!"]]},
        {"small": [["/a", 0, 0, 0, 0, base64.b64encode(bytes(MAX_SMALL + 1)).decode()]]},
        {"programs": {"a": ""}},
        {"programs": [1]},
    ],
)
def test_what_makes_no_sense_is_damage(value: object) -> None:
    with pytest.raises(Damaged, match="surroundings"):
        holding(json.dumps(value))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "nul", '"x"'])
def test_what_is_no_json_is_damage(text: str) -> None:
    with pytest.raises(Damaged, match="surroundings"):
        holding(text)
