"""Failures that only a bucket can have: credentials, names of places, failing servers, listings in
another order.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from icecore.errors import (
    Damaged,
    IcecoreError,
    NotFound,
    ObjectExists,
    ObjectMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    UsageError,
)
from icecore.store.backend.base import Backend, ObjectInfo
from icecore.store.backend.s3 import S3Backend, S3Place, _Order
from icecore.store.log.repository import probe
from tests.fakes.canned_s3 import Reply, canned
from tests.seaweedfs import ACCESS_KEY, SECRET_KEY, Server


def run(work: Callable[[Backend], Awaitable[object]], place: S3Place) -> object:
    async def body() -> object:
        return await asyncio.wait_for(work(S3Backend(place)), 60)

    return asyncio.run(body())


async def _rows(backend: Backend) -> list[ObjectInfo]:
    return [info async for info in backend.list("")]


CALLS: dict[str, Callable[[Backend], Awaitable[object]]] = {
    "create": lambda backend: backend.create("a/b", [b"0123456789"]),
    "get": lambda backend: backend.get("a/b"),
    "get_into": lambda backend: backend.get_into("a/b", 0, memoryview(bytearray(10))),
    "list": _rows,
    "delete": lambda backend: backend.delete("a/b"),
    "delete_many": lambda backend: backend.delete_many(["a/b", "a/c"]),
}


@pytest.mark.parametrize("call", CALLS)
def test_wrong_credentials_and_missing_buckets(
    s3_place: S3Place, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with pytest.raises(NotFound, match="no bucket") as caught:
        run(CALLS[call], replace(s3_place, bucket="there-is-none"))
    assert "make the bucket" in caught.value.cure
    for key, secret in ((ACCESS_KEY, "wrong"), ("nobody", SECRET_KEY)):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        with pytest.raises(StoreDenied) as denied:
            run(CALLS[call], s3_place)
        assert "credentials" in denied.value.cure
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreDenied, match="no credentials"):
        run(CALLS[call], s3_place)


def test_profiles_regions_and_endpoints_are_boto3s(
    region_a: Server, s3_place: S3Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in region_a.environment():
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    (tmp_path / "config").write_text(
        f"[profile ours]\nregion = us-east-1\nservices = here\n[services here]\ns3 =\n  endpoint_url = {region_a.endpoint}\n"
    )
    (tmp_path / "credentials").write_text(
        f"[ours]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    )
    place = replace(s3_place, endpoint="", profile="ours")
    run(CALLS["create"], place)
    assert run(CALLS["get"], place) == b"0123456789"
    # What is said outranks what lies about, with obstore as with boto3.
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "old")
    assert run(CALLS["get"], place) == b"0123456789"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert run(CALLS["get"], replace(place, endpoint=region_a.endpoint)) == b"0123456789"
    with pytest.raises(UsageError, match="theirs"):
        S3Backend(replace(place, profile="theirs"))


@pytest.mark.parametrize(
    ("call", "reply", "error", "words"),
    [
        ("create", Reply(409, "ConditionalRequestConflict"), StoreError, "in flight"),
        ("create", Reply(412, "PreconditionFailed"), ObjectExists, "exists"),
        ("create", Reply(503, "SlowDown"), StoreError, "SlowDown"),
        ("create", Reply(500, "InternalError"), StoreError, "InternalError"),
        ("create", Reply(400, "RequestTimeout"), StoreError, "RequestTimeout"),
        ("create", Reply(507, "XMinioStorageFull"), StoreFull, "free space"),
        ("create", Reply(403, "QuotaExceeded"), StoreFull, "free space"),
        ("create", Reply(403, "RequestTimeTooSkewed"), StoreDenied, "clock"),
        ("create", Reply(403, "AccessDenied"), StoreDenied, "let these credentials"),
        ("create", Reply(501, "NotImplemented"), StoreDenied, "lacks"),
        ("get", Reply(400, "ExpiredToken"), StoreDenied, "renew"),
        (
            "get",
            Reply(400, "AuthorizationHeaderMalformed", "<Region>eu-west-1</Region>"),
            StoreDenied,
            "eu-west-1",
        ),
        ("get", Reply(404, "NoSuchKey"), ObjectMissing, "a/b"),
        ("get", Reply(200, body=b"0123456789", cut=4), StoreError, "cannot read"),
        (
            "get_into",
            Reply(206, body=b"0123456789", cut=4, headers={"Content-Range": "bytes 0-9/10"}),
            StoreError,
            "cannot read",
        ),
        (
            "get_into",
            Reply(206, body=b"01234", headers={"Content-Range": "bytes 0-4/5"}),
            Damaged,
            "ends 5 bytes before",
        ),
        ("get_into", Reply(416, "InvalidRange"), Damaged, "ends before"),
        (
            "get_into",
            Reply(206, body=b"0123456789", headers={"Content-Range": "bytes 5-14/100"}),
            StoreError,
            "cannot read",
        ),
        ("list", Reply(503, "SlowDown"), StoreError, "cannot list"),
        ("delete", Reply(404, "NoSuchKey"), None, ""),
        ("delete", Reply(503, "SlowDown"), StoreError, "SlowDown"),
    ],
)
def test_replies(
    call: str,
    reply: Reply,
    error: type[IcecoreError] | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    with canned(lambda method, path: reply) as endpoint:
        place = S3Place("bucket", endpoint=endpoint)
        if error is None:
            run(CALLS[call], place)
            return
        with pytest.raises(error, match=words) as caught:
            run(CALLS[call], place)
    passing = error is StoreError
    assert passing == (type(caught.value) is StoreError), (
        "what may pass is a StoreError itself, all others are classes of their own"
    )


@pytest.mark.parametrize(
    "refusal",
    [Reply(501, "NotImplemented"), Reply(400, "MalformedXML"), Reply(405, "MethodNotAllowed")],
)
def test_many_are_deleted_one_by_one_where_they_cannot_be_at_once(
    refusal: Reply, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    deleted = []

    def answer(method: str, path: str) -> Reply:
        if method == "POST":
            return refusal
        deleted.append((method, path))
        return Reply(204)

    with canned(answer) as endpoint:
        run(
            lambda backend: backend.delete_many(["a/1", "a/2"]),
            S3Place("bucket", endpoint=endpoint),
        )
    assert sorted(deleted) == [
        ("DELETE", "/bucket/a/1"),
        ("DELETE", "/bucket/a/2"),
    ]  # they go side by side


def test_nobody_there_and_nobody_answering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    with pytest.raises(StoreError, match="cannot read") as caught:
        run(CALLS["get"], S3Place("bucket", endpoint="http://127.0.0.1:1"))
    assert "endpoint" in caught.value.cure
    forever = threading.Event()

    def silent(method: str, path: str) -> Reply:
        forever.wait(20)
        return Reply()

    with canned(silent) as endpoint:
        with pytest.raises(StoreError, match="no answer"):
            run(CALLS["get"], S3Place("bucket", endpoint=endpoint, patience=0.2))
        forever.set()


def test_the_probe_refuses_a_server_that_ignores_the_condition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    answer = lambda method, path: Reply(200 if method == "PUT" else 204)  # noqa: E731
    with canned(answer) as endpoint, pytest.raises(UsageError, match="created twice"):
        run(probe, S3Place("bucket", endpoint=endpoint))


@pytest.mark.parametrize("bucket", ["", "ab", "Upper", "a_b", "-abc", "a/b", "x" * 64])
def test_refuses_what_is_no_bucket(bucket: str) -> None:
    with pytest.raises(UsageError, match="bucket"):
        S3Place(bucket)


@pytest.mark.parametrize(
    "prefix", ["/", "a/", "/a", "a//b", "..", "a/../b", ".a", "a b", "ä", "x" * 500]
)
def test_refuses_what_is_no_prefix(prefix: str) -> None:
    with pytest.raises(UsageError, match="prefix"):
        S3Place("bucket", prefix)


NAMES = [
    "a",
    "a-1",
    "a-1/x",
    "a.b/c/d",
    "a/b",
    "a/b-1",
    "a/b/c",
    "a/b0",
    "a0",
    "a0/b",
    "b-1/a",
    "b-2",
    "b/z",
    "c",
]


@pytest.mark.parametrize("order", ["bytes", "folders"])
@pytest.mark.parametrize("prefix", ["", "p/"])
def test_listings_come_out_in_the_order_of_names(order: str, prefix: str) -> None:
    names = [prefix + name for name in NAMES]
    rows = sorted(names, key=lambda name: name.split("/") if order == "folders" else [name])
    sorter = _Order(prefix)
    listed = [info.name for name in rows for info in sorter.add(ObjectInfo(name, 1))] + [
        info.name for info in sorter.rest()
    ]
    assert listed == sorted(names)


def test_a_listing_without_order_is_refused() -> None:
    sorter = _Order("")
    with pytest.raises(StoreError, match="not in order"):
        for name in ("log/2", "log/1", "a"):
            sorter.add(ObjectInfo(name, 1))
