"""Two regions, buckets of two real S3 servers: syncs and copies are killed midway and repeated, and
a job is restored before all its data has arrived.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

import icecore
from icecore.store.backend.s3 import S3Backend, S3Place
from tests.cli.conftest import SECONDS, Cli, until
from tests.conftest import BUCKET
from tests.fakes.bad_proxy import hold_after, unreliable
from tests.seaweedfs import ACCESS_KEY, SECRET_KEY, Server
from tests.store.miniature import read, take

T = TypeVar("T")

CONTENTS = [{1: number, 2: 100 + number, 3: 200} for number in range(8)]
SECRET = {"ICECORE_PASSPHRASE": "the passphrase of both regions"}
OTHER = {"ICECORE_TARGET_PASSPHRASE": "that of a stranger"}
PROGRAM = (
    "import os, time; word = os.urandom(16 << 20); print(len(word), flush=True); time.sleep(600)"
)


@dataclass(frozen=True)
class Regions:
    """Two places, each with its own profile. Neither the environment nor [s3] says where they are."""

    cli: Cli
    servers: dict[str, Server]
    prefix: str

    def place(self, region: str) -> str:
        """Return the region's location."""
        return f"s3://{region}@{BUCKET}/{self.prefix}"

    def profiles(self, **endpoints: str) -> None:
        """Write the profiles. A region's endpoint may differ from its server."""
        lines = []
        for region, server in self.servers.items():
            lines += [
                f"[profile {region}]",
                "region = us-east-1",
                f"endpoint_url = {endpoints.get(region, server.endpoint)}",
            ]
        (self.cli.folder / "aws").write_text("\n".join(lines) + "\n")
        keys = f"aws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
        (self.cli.folder / "keys").write_text(
            "".join(f"[{region}]\n{keys}" for region in self.servers)
        )

    @contextmanager
    def stopping(self, region: str, shards: int) -> Iterator[Callable[[], bool]]:
        """Admit only so many shards into a region; tell whether others wait."""
        with unreliable(self.servers[region].endpoint, hold_after(shards, "PUT", "/shards/")) as (
            endpoint,
            toll,
        ):
            self.profiles(**{region: endpoint})
            yield lambda: toll.held > 0 and len(self.shards(region)) == shards
        self.profiles()

    def within(self, region: str, work: Callable[[S3Backend], Awaitable[T]]) -> T:
        """Run a function on a region's objects."""

        async def body() -> T:
            backend = S3Backend(
                S3Place(BUCKET, self.prefix, endpoint=self.servers[region].endpoint, profile=region)
            )
            try:
                return await work(backend)
            finally:
                await backend.close()

        return asyncio.run(asyncio.wait_for(body(), SECONDS))

    def shards(self, region: str) -> list[str]:
        """Return the names of a region's shards."""

        async def names(backend: S3Backend) -> list[str]:
            return [info.name async for info in backend.list("shards/")]

        return self.within(region, names)

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        """Start a command that the test will kill."""
        return replace(self.cli, environment={**self.cli.environment, **variables}).start(*words)

    def said(self, *words: str, **variables: str) -> list[dict[str, Any]]:
        """Return the events that a command prints."""
        return [
            json.loads(line)
            for line in self.cli.run("--json", *words, **variables).stdout.splitlines()
        ]

    def done(self, name: str, *words: str, **variables: str) -> dict[str, Any]:
        """Return the only event of a name that a command prints."""
        (found,) = [event for event in self.said(*words, **variables) if event["event"] == name]
        return found


@pytest.fixture
def regions(
    cli: Cli, region_a: Server, region_b: Server, monkeypatch: pytest.MonkeyPatch
) -> Regions:
    own = {name: value for name, value in cli.environment.items() if name != "ICECORE_REPOSITORY"}
    added = {
        "AWS_CONFIG_FILE": str(cli.folder / "aws"),
        "AWS_SHARED_CREDENTIALS_FILE": str(cli.folder / "keys"),
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    # The profile in a place's location overrides settings of the environment.
    added |= {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1", "AWS_DEFAULT_REGION": "eu-west-1"}
    for name, value in added.items():
        monkeypatch.setenv(name, value)
    made = Regions(
        replace(cli, environment={**own, **added}),
        {"near": region_a, "far": region_b},
        f"test-{secrets.token_hex(6)}",
    )
    made.profiles()
    return made


@pytest.mark.parametrize("verb", ["sync", "copy"])
def test_what_was_killed_goes_on_where_it_was(regions: Regions, verb: str) -> None:
    cli, near, far, state = (
        regions.cli,
        regions.place("near"),
        regions.place("far"),
        str(regions.cli.folder / "state"),
    )
    given = SECRET["ICECORE_PASSPHRASE"].encode
    with icecore.Repository.create(near, passphrase=given, state=state) as home:
        taken = [home.loop.run(take(home.core, content)) for content in CONTENTS]
        home.update(taken[0], pinned=True, tags=["first"])
    if verb == "sync":
        cli.run("init", "--replica-of", near, far, **SECRET)
    else:
        cli.run("init", "--encrypt", far, ICECORE_PASSPHRASE=OTHER["ICECORE_TARGET_PASSPHRASE"])
    with regions.stopping("far", 3) as stopped:
        process = regions.start("-r", near, verb, far, **SECRET, **OTHER)
        try:
            until(stopped, "waiting for the far region", SECONDS)
        finally:
            process.kill()
            process.communicate(timeout=20)
    opens = SECRET if verb == "sync" else {"ICECORE_PASSPHRASE": OTHER["ICECORE_TARGET_PASSPHRASE"]}
    there = sum(event["event"] == "snapshot" for event in regions.said("-r", far, "ls", **opens))
    done = regions.done(f"{verb}.done", "-r", near, verb, far, **SECRET, **OTHER)
    assert done["snapshots"] == taken[there:] and 0 < there < len(taken) and not done["lost"]
    if verb == "sync":
        assert regions.shards("far") == regions.shards("near")
        assert done["present"], "what had arrived did not travel again"
    assert not regions.done(f"{verb}.done", "-r", near, verb, far, **SECRET, **OTHER)["snapshots"]
    cli.run("-r", far, "gc", **opens)
    cli.run("-r", far, "check", "--read-data", **opens)
    with icecore.Repository.open(
        far, passphrase=opens["ICECORE_PASSPHRASE"].encode, state=state
    ) as target:
        assert [record.snapshot for record in target.snapshots()] == taken
        assert (target.find(taken[0]).pinned, target.find(taken[0]).tags) == (True, ["first"])
        for snapshot, content in zip(taken, CONTENTS, strict=True):
            assert target.loop.run(read(target.core, snapshot)) == content


@pytest.mark.criu
@pytest.mark.usefixtures("needs_criu")
def test_a_job_is_restored_where_not_all_of_it_has_arrived(
    regions: Regions, tmp_path: Path
) -> None:
    cli, near, far = regions.cli, regions.place("near"), regions.place("far")
    cli.run("init", "--encrypt", "--shard", "1 MiB", near, **SECRET)
    cli.run("init", "--replica-of", near, far, **SECRET)
    cli.run("run", "-d", "--name", "job", "--", "python3", "-c", PROGRAM)
    until(lambda: bool(cli.run("logs", "job").stdout), "running")
    snapshot = regions.done("dump.done", "-r", near, "dump", "job", "--stop", **SECRET)["snapshot"]
    with regions.stopping("far", 2) as stopped:
        process = regions.start("-r", near, "sync", far, **SECRET)
        try:
            until(stopped, "waiting for the far region", SECONDS)
        finally:
            process.kill()
            process.communicate(timeout=20)
    arrived = regions.shards("far")
    assert set(arrived) < set(regions.shards("near")) and len(arrived) == 2

    async def lose(backend: S3Backend) -> None:
        for name in arrived:
            await backend.delete(name)

    # The objects that arrived are deleted at the source, so both regions must be read.
    regions.within("near", lose)
    assert "there is no snapshot" in cli.run("-r", far, "show", snapshot, status=3, **SECRET).stderr
    (tmp_path / "icecore.toml").write_text(f'replicas = ["{far}", "{near}"]\n')
    cli.run("-r", far, "restore", snapshot, **SECRET)
    job = cli.job("job")
    time.sleep(0.2)
    assert job.alive
