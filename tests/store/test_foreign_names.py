"""Names that are not UTF-8 come back exactly, in a format that older readers refuse; all other
manifests are unchanged.
"""

from __future__ import annotations

import asyncio
import os

import blake3
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icecore.errors import Damaged, StoreError, UsageError
from icecore.store.backend.memory import MemoryBackend
from icecore.store.format.envelope import seal, unseal
from icecore.store.format.fingerprints import (
    FINGERPRINT,
    Fingerprints,
    decode_fingerprints,
    encode_fingerprints,
)
from icecore.store.format.manifest import (
    MANIFEST_KIND,
    Manifest,
    Namespaces,
    OpenFile,
    Process,
    Region,
    Requirements,
    Space,
    decode_manifest,
    encode_manifest,
)
from icecore.store.log.repository import StoredRepository
from icecore.store.log.session import Heartbeat, encode_heartbeat
from icecore.text import host_name
from tests.store.miniature import take

KEY = blake3.blake3(b"test").digest()
_NAMES = (
    st.binary(min_size=1, max_size=40)
    .map(lambda name: os.fsdecode(name.replace(b"\0", b"\\")))
    .filter(lambda name: not {"..", ""} & set(name.split("/")))
)


def manifest(name: str) -> Manifest:
    """Return a manifest with a name in every place that the kernel fills."""
    file = OpenFile(
        f"/{name}", 3, 4, 5, 6, 0o644, 0, 0, True, "content", links=[f"/linked {name}", "/plain"]
    )
    process = Process(1, 2, 0, 1, 1, 1, ["/bin/x", name, ""], f"/bin/{name}", 0)
    return Manifest(
        format=1,
        snapshot="0" * 32,
        job="job",
        lineage="1" * 32,
        parent="",
        created_ns=1,
        host="host",
        writer="test",
        root_pid=1,
        processes=[process],
        spaces=[Space("file", f"/{name}", 3, [Region(0, 4096, 0, kind="file", name=f"/{name}")])],
        files=[file],
        requirements=Requirements("x86_64", "6", "4"),
        namespaces=Namespaces(),
        criu_options=["--shell-job"],
        extra={"imported": name},
    )


def body(sealed: bytes) -> dict[str, object]:
    found: dict[str, object] = msgspec.msgpack.decode(
        unseal(MANIFEST_KIND, "snapshots/x", sealed, KEY, None)
    )
    return found


@given(_NAMES)
def test_a_manifest_comes_back_as_it_was(name: str) -> None:
    given_ = manifest(name)
    sealed = encode_manifest(given_, KEY).data
    found = decode_manifest(sealed, KEY, name="snapshots/x")
    assert msgspec.structs.replace(found, format=1) == given_
    assert encode_manifest(found, KEY).data == sealed, "written again it is the same"


def test_utf8_names_are_written_as_ever() -> None:
    """A repository of an earlier version is continued identically, byte for byte, by either
    version.
    """
    given_ = manifest("n\x1b[31mä\\xff\n語")
    assert body(encode_manifest(given_, KEY).data) == msgspec.msgpack.decode(
        msgspec.msgpack.encode(given_)
    )
    assert body(encode_manifest(given_, KEY).data)["format"] == 1


def test_an_older_reader_refuses_it_by_its_version() -> None:
    """It decodes the structure first, which must succeed; otherwise it would report damage."""
    data = unseal(
        MANIFEST_KIND, "snapshots/x", encode_manifest(manifest("n\udcff"), KEY).data, KEY, None
    )
    assert msgspec.msgpack.decode(data, type=Manifest).format == 2


def test_an_escape_means_nothing_in_the_plain_format() -> None:
    """A writer of an escaped name into a manifest of format 1 gets the literal name, and no other
    path.
    """
    hostile = "\0/etc/\\xff"
    plain = msgspec.structs.replace(manifest("x"), extra={"imported": hostile})
    assert (
        decode_manifest(encode_manifest(plain, KEY).data, KEY, name="snapshots/x").extra["imported"]
        == hostile
    )


@pytest.mark.parametrize("written", ["\0/plain", "\0/\\xc3\\xa4\\xff", "\0/\\x41\\xff", "\0/\\"])
def test_a_text_that_is_not_in_its_only_form_is_damage(written: str) -> None:
    fields = body(encode_manifest(manifest("n\udcff"), KEY).data)
    fields["host"] = written
    forged = seal(MANIFEST_KIND, msgspec.msgpack.encode(fields), KEY, "").data
    with pytest.raises(Damaged, match="only form"):
        decode_manifest(forged, KEY, name="snapshots/x")


@pytest.mark.parametrize("where", ["path", "links"])
def test_a_path_with_a_nul_is_damage(where: str) -> None:
    file = msgspec.structs.replace(
        manifest("x").files[0], **{where: "/a\0b" if where == "path" else ["/a\0b"]}
    )
    hostile = msgspec.structs.replace(manifest("x"), files=[file])
    with pytest.raises(StoreError, match="an open file named"):
        encode_manifest(hostile, KEY)
    forged = seal(MANIFEST_KIND, msgspec.msgpack.encode(hostile), KEY, "").data
    with pytest.raises(Damaged, match="an open file named"):
        decode_manifest(forged, KEY, name="snapshots/x")


def test_unknown_fields_are_passed_over_in_both_formats() -> None:
    fields = body(encode_manifest(manifest("n\udcff"), KEY).data)
    fields["later"] = {1: ["\0\\xff", b"\xff", {"x": None}]}
    forged = seal(MANIFEST_KIND, msgspec.msgpack.encode(fields), KEY, "").data
    assert decode_manifest(forged, KEY, name="snapshots/x").files[0].path == "/n\udcff"


@given(
    st.dictionaries(_NAMES.map(lambda name: f"file:/{name}"), st.integers(0, 2**64 - 1), max_size=4)
)
def test_fingerprints_are_kept_by_any_name(spaces: dict[str, int]) -> None:
    given_ = {
        key: Fingerprints(np.array([value], np.uint64), np.zeros(1, FINGERPRINT))
        for key, value in spaces.items()
    }
    found = decode_fingerprints(encode_fingerprints(given_))
    assert {key: int(known.key[0]) for key, known in found.items()} == spaces


def test_a_host_may_have_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "n\udcff\x1b[31m")
    assert host_name() == r"n\xff\x1b[31m"
    encode_heartbeat(Heartbeat("0" * 32, 1, 2, host_name(), 3), KEY)


def test_labels_are_refused_before_they_are_stored() -> None:
    async def scenario() -> None:
        repository = await StoredRepository.create(MemoryBackend())
        snapshot = await take(repository, {0: 1})
        for wrong in ("a\udcff", "\x1b[31m", ""):
            with pytest.raises(UsageError, match="not a tag"):
                await repository.update(snapshot, tags=[wrong])
        assert (await repository.update(snapshot, tags=["ä"])).tags == ["ä"]
        await repository.close()

    asyncio.run(scenario())
