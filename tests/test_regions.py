"""docker-compose.yml and the test servers define the same two regions: flags, credentials, and no
knowledge of each other.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from icecore.errors import ObjectMissing
from icecore.store.backend.s3 import S3Backend, S3Place
from tests.seaweedfs import ACCESS_KEY, SECRET_KEY, Server, find_weed

ROOT = Path(__file__).resolve().parent.parent


def test_the_composed_servers_are_started_as_the_tested_ones() -> None:
    composed = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    weed = find_weed()
    assert weed is not None
    known = set(
        re.findall(
            r"^\s+-([\w.]+)",
            subprocess.run(
                [weed, "help", "server"], capture_output=True, text=True, timeout=60
            ).stderr,
            re.MULTILINE,
        )
    )
    assert {"dir", "s3.config", "s3.autoCreateBucket"} <= known
    ports = set()
    for name in ("region-a", "region-b"):
        service = composed["services"][name]
        words = service["command"].split()
        assert words[0] == "server"
        flags = {word.removeprefix("-").partition("=")[0] for word in words[1:]}
        assert flags <= known, f"{name}: {flags - known}"
        assert {"s3.autoCreateBucket", "s3.config", "master.volumeSizeLimitMB"} <= flags
        ports.update(port.split(":")[1] for port in service["ports"])
    assert ports == {"8333", "8334"}
    (identity,) = json.loads((ROOT / "configs" / "seaweedfs-s3.json").read_text())["identities"]
    assert identity["credentials"] == [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]


def test_two_regions(s3_place: S3Place, region_b: Server) -> None:
    async def body() -> None:
        a, b = S3Backend(s3_place), S3Backend(replace(s3_place, endpoint=region_b.endpoint))
        await a.create("here", [b"a"])
        with pytest.raises(ObjectMissing):
            await b.get("here")
        await b.create("here", [b"b"])
        assert (await a.get("here"), await b.get("here")) == (b"a", b"b")

    asyncio.run(body())
