"""A repository in a bucket of a real S3 server, through the command line: the whole life of a real
job, and every kind of invalid place.
"""

from __future__ import annotations

import asyncio
import filecmp
import json
import secrets
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import icecore
from icecore.config import CacheSettings, Config, S3Settings
from icecore.events import Event
from icecore.sizes import CELL_BYTES
from icecore.store.backend.local import LocalBackend
from icecore.store.backend.replicas import ReplicaBackend
from icecore.store.backend.s3 import S3Backend, S3Place
from icecore.store.format import keys
from icecore.store.format.names import CONFIG
from icecore.store.log.repository import StoredRepository
from tests.cli.conftest import Cli, until
from tests.cli.documents import check_event, documented_events
from tests.fakes.bad_proxy import at_random, unreliable
from tests.fakes.canned_s3 import Reply, canned
from tests.seaweedfs import Server
from tests.store.miniature import page, take

#: Counts; its ballast is most of what a first snapshot stores.
COUNT = [
    "/bin/sh",
    "-c",
    "for n in 1 2 3 4 5 6 7 8; do eval b$n=$(head -c 60000 /dev/urandom | base64 -w 0); done; "
    "i=0; while ! [ -e finish ]; do i=$((i+1)); echo $i; sleep 0.02; done; exit 9",
]


@pytest.fixture
def bucket(cli: Cli, region_a: Server, s3_place: S3Place) -> Iterator[Cli]:
    """Return the command line with a repository in a bucket, configured by ./icecore.toml and the
    environment.
    """
    (cli.folder / "icecore.toml").write_text(
        f'repository = "{s3_place.location}"\n[s3]\nendpoint = "{region_a.endpoint}"\npatience = "20 s"\n'
    )
    environment = {
        name: value for name, value in cli.environment.items() if name != "ICECORE_REPOSITORY"
    }
    environment |= {
        name: value
        for name, value in region_a.environment().items()
        if name != "AWS_ENDPOINT_URL_S3"
    }
    yield replace(cli, environment=environment)


def counted(cli: Cli, name: str = "count") -> int:
    lines = (cli.job(name).directory / "stdout.log").read_text().split("\n")[:-1]
    assert lines == [str(number) for number in range(1, len(lines) + 1)]
    return len(lines)


@pytest.mark.criu
@pytest.mark.usefixtures("needs_criu")
def test_a_store_that_fails_half_its_requests_is_slower_and_nothing_else(
    bucket: Cli, region_a: Server
) -> None:
    with unreliable(region_a.endpoint, at_random(11, refuse=0.28, lose=0.28)) as (endpoint, toll):
        cli = replace(
            bucket,
            environment={
                **bucket.environment,
                "ICECORE_S3_ENDPOINT": endpoint,
                "ICECORE_S3_ATTEMPTS": "30",
            },
        )
        cli.run("init")
        cli.run("run", "-d", "--name", "count", "--", *COUNT)
        until(lambda: counted(cli) >= 5, "counting")
        cli.run("dump", "count", "--stop")
        at_end = counted(cli)
        cli.run("restore", "latest")
        until(lambda: counted(cli) > at_end, "going on")
    assert (
        toll.refused > 10
        and toll.lost > 10
        and toll.refused + toll.lost >= 0.45 * (toll.refused + toll.lost + toll.passed)
    )
    # The data is intact.
    assert bucket.one("check.done", "check", "--read-data")["sound"]


@pytest.mark.criu
@pytest.mark.usefixtures("needs_criu")
def test_the_whole_way(bucket: Cli) -> None:
    cli = bucket
    documented = documented_events()
    cli.run("init")
    assert "is already a repository" in cli.run("init", status=2).stderr
    cli.run("run", "-d", "--name", "count", "--", *COUNT)
    until(lambda: counted(cli) >= 5, "counting")
    events = cli.events("dump", "count")
    first = next(event for event in events if event["event"] == "dump.done")
    second = cli.one("dump.done", "dump", "count", "--stop")
    assert second["parent"] == first["snapshot"] and second["stored"] < first["stored"]
    assert [event["snapshot"] for event in cli.events("ls") if event["event"] == "snapshot"] == [
        first["snapshot"],
        second["snapshot"],
    ]
    at_end = counted(cli)
    events += cli.events("restore", "latest")
    until(lambda: counted(cli) > at_end, "going on")
    (cli.folder / "finish").touch()
    assert cli.one("job.ended", "wait", "count", status=9)["how"] == "exited 9"

    kept = {"ICECORE_CACHE_DIRECTORY": str(cli.folder / "cache")}
    hits: list[int] = []
    for number in range(2):
        said = [
            json.loads(line)
            for line in cli.run(
                "--json", "export", "count~1", f"images-{number}", **kept
            ).stdout.splitlines()
        ]
        (cache,) = (event for event in said if event["event"] == "store.cache")
        assert (cache["missed_bytes"] > 0) == (number == 0)
        hits.append(cache["hit_bytes"])
        events += said
    assert 0 <= hits[0] < hits[1], (
        "the first run finds no more than what lies in blocks that it has read itself"
    )
    same = filecmp.dircmp(cli.folder / "images-0", cli.folder / "images-1")
    assert same.common_files and not (same.left_only or same.right_only or same.diff_files)
    imported = cli.one("import.done", "import", "images-1", "--job", "again")
    assert imported["stored"] < first["stored"] / 2, "it is all there already"
    cli.run("forget", "count@1", "count@2")
    events += cli.events("gc")
    assert [event["job"] for event in cli.events("ls") if event["event"] == "snapshot"] == ["again"]
    checked = cli.one("check.done", "check", "--read-data")
    assert checked["sound"] and checked["snapshots"] == 1 and checked["read_chunks"] > 0
    requests = [event for event in events if event["event"] == "store.requests"]
    assert {"create", "get", "get_into", "list"} <= {event["operation"] for event in requests}
    for event in events:
        check_event(event, documented)


#: Changes a few bytes in each 32 KiB of 48 MiB, and knows in the end what must be there.
CHANGES = """
import os, time
import numpy as np

def made():
    return np.random.default_rng(1).integers(0, 1 << 62, 6 << 20)

memory, steps = made(), 0
while not os.path.exists("finish"):
    memory[::4096] += 1
    steps += 1
    print(steps, flush=True)
    time.sleep(0.05)
right = made()
right[::4096] += steps
raise SystemExit(9 if (memory == right).all() else 1)
"""


@pytest.mark.criu
@pytest.mark.usefixtures("needs_criu")
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_encoders(bucket: Cli, encrypted: bool) -> None:
    """They ask the dumper for bases, which come from the bucket or the cache."""
    secret = {"ICECORE_PASSPHRASE": "of the bucket"} if encrypted else {}
    cli = replace(bucket, environment={**bucket.environment, **secret})
    cli.run("init", *(["--encrypt"] if encrypted else []))
    cli.run("run", "-d", "--name", "count", "--", sys.executable, "-c", CHANGES)
    until(lambda: counted(cli) >= 3, "counting")
    kept = {"ICECORE_CACHE_DIRECTORY": str(cli.folder / "cache")}
    used: list[int] = []
    # Encoders may begin too late for one snapshot.
    while sum(map(bool, used)) < 2 and len(used) < 8:
        cached = kept if len(used) % 2 else {}
        said = cli.run("--json", "dump", "count", "--encoders", "2", **cached).stdout
        events = [json.loads(line) for line in said.splitlines()]
        (stored,) = (e for e in events if e["event"] == "dump.store" and e["state"] == "end")
        assert not [e for e in events if e["event"] in ("dump.encoder_lost", "store.base_damaged")]
        used.append(stored["encoders"] if stored["deltas"] >= 45 else 0)  # the first has none
    assert sum(map(bool, used)) == 2
    cli.run("dump", "count", "--stop")
    at_end = counted(cli)
    cli.run("restore", "latest")
    until(lambda: counted(cli) > at_end, "going on")
    (cli.folder / "finish").touch()
    assert cli.one("job.ended", "wait", "count", status=9)["how"] == "exited 9"
    assert cli.one("check.done", "check", "--read-data")["sound"]


def test_an_encrypted_replica_in_a_bucket(
    bucket: Cli, s3_place: S3Place, region_a: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica is made, filled, read through a node cache where the repository has lost data,
    and used to repair the repository.
    """
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")  # only the configuration names the place
    folder, content, said = bucket.folder, {1: 1, 2: 2, 9: 3}, list[Event]()
    config = Config(
        state=str(folder / "state"),
        s3=S3Settings(endpoint=region_a.endpoint),
        cache=CacheSettings(directory=str(folder / "cache")),
    )
    secret = {"ICECORE_PASSPHRASE": "the passphrase of both"}
    given = secret["ICECORE_PASSPHRASE"].encode
    with icecore.Repository.create(
        folder / "home", passphrase=given, state=config.state, config=config
    ) as home:
        snapshot = home.loop.run(take(home.core, content))
        home.create_replica(s3_place.location, passphrase=given).close()
        assert home.sync_to(s3_place.location).snapshots == [snapshot]
        assert not home.sync_to(s3_place.location).snapshots
    for path in [path for path in (folder / "home" / "shards").rglob("*") if path.is_file()]:
        path.unlink()
    with icecore.Repository.open(
        folder / "home",
        replicas=[s3_place.location],
        passphrase=given,
        state=config.state,
        config=config,
        emit=said.append,
    ) as home:
        assert isinstance(home.core.backend, ReplicaBackend)
        assert not home.check(read_data=1.0).sound
        for _ in range(2):
            reader, room = home.reader(snapshot), memoryview(bytearray(CELL_BYTES))
            (records,) = reader.records(reader.manifest.spaces[0])
            found = {
                int(record["cell"]): bytes(reader.read_cell(record, room)) for record in records
            }
            assert found == {cell: page(value) for cell, value in content.items()}
    (cache,) = [event.fields for event in said if event.name == "store.cache"]
    assert int(str(cache["hit_bytes"])) > 0 < int(str(cache["missed_bytes"]))
    assert any(event.name == "store.failover" for event in said)
    bucket.run("-r", "home", "repair", "--from", s3_place.location, **secret)
    bucket.run("-r", "home", "check", "--read-data", **secret)
    bucket.run("check", "--read-data", **secret)
    bucket.run("init", "plain")
    assert bucket.run("copy", "plain", **secret).stdout.startswith("copied 1 ")
    bucket.run("-r", "plain", "check", "--read-data")


def test_wrong_credentials_and_missing_buckets(bucket: Cli) -> None:
    for command in (["init"], ["ls"]):
        denied = bucket.run(*command, status=8, AWS_SECRET_ACCESS_KEY="wrong")
        assert "SignatureDoesNotMatch" in denied.stderr and "AWS_PROFILE" in denied.stderr
        none = bucket.run(*command, status=8, AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="")
        assert "there are no credentials" in none.stderr
        missing = bucket.run(*command, status=3, ICECORE_REPOSITORY="s3://there-is-none/x")
        assert (
            "there is no bucket for s3://there-is-none/x" in missing.stderr
            and "make the bucket" in missing.stderr
        )
        unreachable = bucket.run(
            *command, status=8, ICECORE_S3_ENDPOINT="http://127.0.0.1:1", ICECORE_S3_ATTEMPTS="2"
        )
        assert "endpoint" in unreachable.stderr


def test_a_clock_that_is_wrong(bucket: Cli) -> None:
    """A store refuses requests signed with a wrong time. icecore itself takes no decision by the
    clock that could lose data (session model).
    """
    with canned(lambda method, path: Reply(403, "RequestTimeTooSkewed")) as endpoint:
        for command in (["init"], ["ls"], ["gc"]):
            refused = bucket.run(*command, status=8, ICECORE_S3_ENDPOINT=endpoint)
            assert "RequestTimeTooSkewed" in refused.stderr and "clock" in refused.stderr


def test_wrong_settings(bucket: Cli) -> None:
    assert "icecore" in bucket.run("ls", status=2, ICECORE_S3_PROFILE="icecore-nobody").stderr
    assert "not a bucket name" in bucket.run("ls", status=2, ICECORE_REPOSITORY="s3://A_B/x").stderr
    assert (
        "is not a valid prefix"
        in bucket.run("ls", status=2, ICECORE_REPOSITORY="s3://bucket/../x").stderr
    )
    assert (
        "directories and S3 buckets"
        in bucket.run("ls", status=2, ICECORE_REPOSITORY="gs://bucket/x").stderr
    )
    assert "ICECORE_S3_REGIO" in bucket.run("ls", status=2, ICECORE_S3_REGIO="x").stderr


def test_what_is_no_repository_and_what_is_a_newer_one(
    bucket: Cli, s3_place: S3Place, tmp_path: Path
) -> None:
    assert f"{s3_place.location} is no repository" in bucket.run("ls", status=3).stderr

    async def newer() -> None:
        local = LocalBackend(tmp_path / "local", create=True)
        repository = await StoredRepository.create(local)
        there = S3Backend(s3_place)
        async for info in local.list(""):
            if info.name != CONFIG:
                await there.create(info.name, [await local.get(info.name)])
        config = keys.Config(keys.ENCRYPTED_FORMAT + 1, secrets.token_hex(16), 1, keys.Parameters())
        await there.create(CONFIG, [keys.encode_config(config, repository.keys).data])
        await local.close()

    asyncio.run(newer())
    assert f"format {keys.ENCRYPTED_FORMAT + 1}" in bucket.run("ls", status=10).stderr
    assert "is already a repository" in bucket.run("init", status=2).stderr


def test_init_refuses_a_store_that_lies(bucket: Cli) -> None:
    with canned(lambda method, path: Reply(200 if method == "PUT" else 204)) as endpoint:
        assert "created twice" in bucket.run("init", status=2, ICECORE_S3_ENDPOINT=endpoint).stderr
