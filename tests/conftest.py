"""What tests of several folders share: real S3 servers, started when first asked for, one for each region and session of pytest."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from icecore.store.s3 import S3Place
from tests.seaweedfs import Server, running

BUCKET = "icecore-tests"

# With it, print() writes a line in two calls, and a job may be frozen between the two; the tests' jobs flush what they print.
os.environ.pop("PYTHONUNBUFFERED", None)


@pytest.fixture(scope="session")
def region_a(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An S3 server with a bucket ``icecore-tests``."""
    yield from _region(tmp_path_factory.mktemp("region-a"))


@pytest.fixture(scope="session")
def region_b(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Another one."""
    yield from _region(tmp_path_factory.mktemp("region-b"))


def _region(folder: Path) -> Iterator[Server]:
    with running(folder) as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture
def s3_place(region_a: Server, monkeypatch: pytest.MonkeyPatch) -> S3Place:
    """A place of this test's own in region a, with credentials in the environment."""
    for name, value in region_a.environment().items():
        monkeypatch.setenv(name, value)
    return S3Place(BUCKET, prefix=f"test-{secrets.token_hex(6)}", endpoint=region_a.endpoint)
