"""Files planted among the objects of a repository in a directory are skipped and reported; nothing
hangs, and nothing outside is touched.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from icecore.errors import Damaged, IcecoreError, StoreDenied, StoreError
from icecore.events import Event
from icecore.store.backend.local import LocalBackend
from icecore.store.backend.s3 import S3Backend, S3Place
from icecore.store.format.names import key_name, log_name, object_name
from icecore.store.log.repository import StoredRepository
from icecore.store.maintenance import gc
from icecore.store.maintenance.check import check
from icecore.store.maintenance.stats import stats
from tests.fakes.canned_s3 import Reply, canned
from tests.store.miniature import read, take

SECONDS = 60


def fifo(path: Path) -> None:
    os.mkfifo(path)


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.open(path.parent, os.O_PATH)
        try:
            made.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


def to_zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def to_shadow(path: Path) -> None:
    path.symlink_to("/etc/shadow")


def dangling(path: Path) -> None:
    path.symlink_to("/nowhere/at/all")


def folder(path: Path) -> None:
    path.mkdir()


KINDS: dict[str, Callable[[Path], None]] = {
    "FIFO": fifo,
    "socket": bound,
    "/dev/zero": to_zero,
    "/etc/shadow": to_shadow,
    "dangling": dangling,
    "directory": folder,
}
HEX = "ab" * 16
PLACES = [
    "config",
    "keys/00000000",
    "keys/00000001",
    log_name(1),
    log_name(9),
    f"sessions/{HEX}/{1:016x}",
    f"hints/job/{HEX}",
    f"filters/{HEX}",
    *(
        object_name(kind, bytes.fromhex(HEX))
        for kind in ("shard", "nodes", "manifest", "segment", "page")
    ),
    f"probe/{HEX}",
]


def sparse(path: bytes) -> None:
    """Make a sparse file of 10 GiB, and its folders."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.truncate(10 << 30)


def still_there(root: Path, names: list[str]) -> set[str]:
    return {name for name in names if os.path.lexists(os.fsencode(root) + b"/" + os.fsencode(name))}


async def patiently(work: object) -> object:
    return await asyncio.wait_for(work, SECONDS)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_no_object_is_read_through_something_else(tmp_path: Path, kind: str) -> None:
    async def body() -> None:
        backend = LocalBackend(tmp_path, create=True)
        await backend.create("a/b", [b"data"])
        KINDS[kind](tmp_path / "a" / "c")
        for work in (
            lambda: backend.get("a/c"),
            lambda: backend.size("a/c"),
            lambda: backend.get_into("a/c", 0, memoryview(bytearray(4))),
        ):
            with pytest.raises((Damaged, StoreError)) as caught:
                await patiently(work())
            assert "a/c" in str(caught.value)
        with pytest.raises(IcecoreError):
            await backend.create("a/c", [b"mine"])
        assert [info.name async for info in backend.list("")] == ["a/b"]
        assert (len(await backend.foreign()) == 1) == (kind != "directory")
        await backend.close()

    asyncio.run(body())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_planted_is_skipped_and_told_of(tmp_path: Path, kind: str, place: str) -> None:
    """Every operation ends soon, successfully or with an error of icecore's; check names the
    foreign files.
    """

    async def body() -> None:
        backend = LocalBackend(tmp_path, create=True)
        repository = await StoredRepository.create(backend)
        snapshot = await take(repository, {0: 1, 1: 2})
        path = tmp_path / place
        was = path.read_bytes() if path.exists() else None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        KINDS[kind](path)
        heard: list[Event] = []
        try:
            opened = await patiently(
                StoredRepository.open(LocalBackend(tmp_path), emit=heard.append)
            )
            assert isinstance(opened, StoredRepository)
        except IcecoreError as error:
            assert place in ("config", key_name(0), key_name(1)), error
            opened = repository
        works = [
            lambda: read(opened, snapshot),
            opened.snapshots,
            lambda: stats(opened),
            lambda: gc.Collector(opened, gc.Options()).plan(),
            lambda: take(opened, {0: 3}, snapshot),
        ]
        for work in works:
            try:
                await patiently(work())
            except IcecoreError:
                assert was is not None or place.startswith("log/")
        try:
            report = await patiently(check(opened))
        except IcecoreError as error:  # the log stands still in front of it; whoever writes says so
            assert place == log_name(9) and (place in str(error) or kind == "directory")
            return
        told = [one.name for one in report.foreign] + [damage.name for damage in report.damages]  # type: ignore[attr-defined]
        if kind != "directory":
            assert place in told
        assert (path.is_dir() and kind == "directory") or path.is_symlink() or not path.is_file()
        await opened.close()

    asyncio.run(body())


ODD = [
    "keys/zzzz",
    "keys/0000000g",
    "keys/٠٠٠٠٠٠٠٠",
    "keys/+0000001",
    "keys/UPPER",
    "keys/a b",
    "keys/\x1b[31m",
    "keys/\udcff",
    "shards/ab/x",
    "shards/AB",
    "log/zzzz",
    "log/0",
    "sessions/x",
    "sessions/w/y",
    "filters/x",
    "index/x",
    "nodes/../../x",
    "snapshots/x\n",
    "hints/ODD",
]


@pytest.mark.parametrize("encrypted", [False, True])
def test_odd_names_are_skipped_and_told_of(tmp_path: Path, encrypted: bool) -> None:
    async def body() -> None:
        from tests.store.miniature import CHEAP, PASSPHRASE

        given = (lambda: PASSPHRASE) if encrypted else None
        repository = await StoredRepository.create(
            LocalBackend(tmp_path / "r", create=True), passphrase=given, cost=CHEAP
        )
        snapshot = await take(repository, {0: 1})
        odd = [name for name in ODD if ".." not in name]
        for name in odd:
            sparse(os.fsencode(tmp_path / "r") + b"/" + os.fsencode(name))
        heard: list[Event] = []
        again = await StoredRepository.open(
            LocalBackend(tmp_path / "r"), passphrase=given, emit=heard.append
        )
        assert await read(again, snapshot) == {0: 1}
        await take(again, {0: 2}, snapshot)
        await gc.Collector(again, gc.Options()).collect()
        report = await check(again, read_data=1.0)
        assert report.sound, report.damages
        left = still_there(tmp_path / "r", odd)
        assert {one.name for one in report.foreign} == left
        assert (
            len(left) >= len(odd) - 3
        )  # signs of sessions and hints of nobody are the collector's to delete
        told = [event.fields["object"] for event in heard if event.name == "check.foreign"]
        assert len(told) == len(left) and all(
            str(name).isascii() and str(name).isprintable() for name in told
        )
        await again.close()

    asyncio.run(body())


def test_a_huge_object_is_not_read(tmp_path: Path) -> None:
    async def body() -> None:
        repository = await StoredRepository.create(LocalBackend(tmp_path, create=True))
        await take(repository, {0: 1})
        for name in (
            "keys/00000001",
            f"shards/ab/{HEX}",
            f"nodes/{HEX}",
            f"snapshots/{HEX}",
            f"pages/{HEX}",
            f"hints/job/{HEX}",
            f"index/ab/{HEX}",
        ):
            sparse(os.fsencode(tmp_path / name))
        again = await StoredRepository.open(LocalBackend(tmp_path))
        report = await patiently(check(again))
        assert [damage.name for damage in report.damages] == ["keys/00000001"]  # type: ignore[attr-defined]
        await gc.Collector(again, gc.Options()).collect()
        await again.close()

    asyncio.run(body())


@pytest.mark.parametrize(
    "where", ["shards", "shards/ab", "keys", "log", "snapshots", "nodes", "hints", ".reserve"]
)
def test_a_folder_that_is_a_link_leads_nowhere(tmp_path: Path, where: str) -> None:
    """Nothing outside the repository is read, created or removed through it."""
    outside, inside = tmp_path / "outside", tmp_path / "repository"

    async def body() -> None:
        outside.mkdir()
        for name in ("0", "1", "7", HEX, "00000005", ".new-0123"):
            (outside / name).write_bytes(b"theirs")
        os.utime(outside / ".new-0123", (1, 1))
        before = sorted((path.name, path.read_bytes()) for path in outside.iterdir())
        backend = LocalBackend(inside, create=True)
        await backend.create("other/x", [b"1"])
        link = inside / where
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(outside)
        backend = LocalBackend(inside)
        if where != ".reserve":
            with pytest.raises(StoreDenied, match="a link or a file has the name of that folder"):
                await backend.create(f"{where}/{'cd' * 16}", [b"ours"])
            with pytest.raises(StoreDenied):
                backend.draft(f"{where}/{'cd' * 16}")
            with pytest.raises((StoreError, Damaged)):
                await backend.get(f"{where}/{HEX}")
            await backend.delete(f"{where}/{HEX}")
            assert [info.name async for info in backend.list(f"{where}/")] == []
            assert [one.name for one in await backend.foreign()] == [where]
        await backend.keep_reserve()
        assert await backend.give_up_reserve(0) == (where != ".reserve")
        assert await backend.sweep(0) == 0
        await backend.close()
        assert sorted((path.name, path.read_bytes()) for path in outside.iterdir()) == before

    asyncio.run(body())


def _listing(keys: list[str]) -> bytes:
    rows = "".join(
        f"<Contents><Key>{key}</Key><LastModified>2026-11-21T00:00:00.000Z</LastModified><ETag>0</ETag><Size>5</Size></Contents>"
        for key in keys
    )
    return f"<ListBucketResult><Name>bucket</Name><KeyCount>{len(keys)}</KeyCount><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode()


def test_odd_keys_of_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")

    async def listed(url: str) -> tuple[list[str], list[str]]:
        backend = S3Backend(S3Place("bucket", "repo", endpoint=url))
        names = [info.name async for info in backend.list("keys/")]
        found = [one.name for one in await backend.foreign()]
        await backend.close()
        return names, found

    good, odd = (
        "repo/keys/00000000",
        ["repo/keys/a b", "repo/keys/UPPER", "repo/keys/%00", "repo/keys/", "elsewhere"],
    )
    with canned(
        lambda method, path: Reply(
            body=_listing([good, *odd]), headers={"Content-Type": "application/xml"}
        )
    ) as url:
        names, found = asyncio.run(listed(url))
        assert names == ["keys/00000000"] and len(found) == len(odd)
    # obstore cannot name some keys at all; then the error says what is the matter.
    for key in ("repo/keys//x", "repo/keys/../x", "repo/keys/a&#10;b"):
        with canned(
            lambda method, path, key=key: Reply(
                body=_listing([good, key]), headers={"Content-Type": "application/xml"}
            )
        ) as url:  # type: ignore[misc]
            with pytest.raises(StoreError, match="a key there is not an object name") as caught:
                asyncio.run(listed(url))
            assert str(caught.value).isprintable() and "delete that key" in caught.value.cure
