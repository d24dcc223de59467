"""Regions on the command line: a replica is made, filled and restored from, even before it is
complete; copies go to any other repository.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

import icecore
from tests.cli.conftest import SECONDS, Cli
from tests.cli.documents import check_event, documented_events
from tests.store.miniature import read, take

SECRET = {"ICECORE_PASSPHRASE": "the passphrase of both regions"}
OTHER = {"ICECORE_TARGET_PASSPHRASE": "that of a stranger"}
PROGRAM = (
    "import os, time; word = os.urandom(3 << 20); print(len(word), flush=True); time.sleep(600)"
)


def started(cli: Cli, name: str) -> None:
    cli.run("run", "-d", "--name", name, "--", "python3", "-c", PROGRAM)
    end = time.monotonic() + SECONDS
    while not cli.run("logs", name).stdout and time.monotonic() < end:
        time.sleep(0.05)


def test_replicas_and_strangers_are_told_apart(cli: Cli, tmp_path: Path) -> None:
    cli.run("init", "--encrypt", **SECRET)
    made = cli.run(
        "init",
        "--replica-of",
        "repository",
        "far",
        ICECORE_NEW_PASSPHRASE="far away, another one",
        **SECRET,
    )
    assert "encrypted" in made.stdout
    assert (
        "leave out"
        in cli.run(
            "init", "--replica-of", "repository", "--encrypt", "x", status=2, **SECRET
        ).stderr
    )
    cli.run("-r", "far", "ls", ICECORE_PASSPHRASE="far away, another one")
    cli.run("-r", "far", "ls", status=14, **SECRET)
    cli.run("sync", "far", **SECRET)  # the replica's own passphrase is not needed
    cli.run("init", "plain")
    assert "not a replica" in cli.run("sync", "plain", status=2, **SECRET).stderr
    assert "opens none" in cli.run("copy", "far", status=14, **SECRET, **OTHER).stderr
    assert "not a directory" in cli.run("sync", "nowhere", status=3, **SECRET).stderr


def test_marks_travel_and_forgets_when_asked(cli: Cli, tmp_path: Path) -> None:
    documented, state = documented_events(), str(tmp_path / "state")
    with icecore.Repository.create(tmp_path / "repository", state=state) as repository:
        kept, gone, pinned = (
            repository.loop.run(take(repository.core, {1: value})) for value in range(3)
        )
    cli.run("init", "--replica-of", "repository", "far")
    cli.run("sync", "far")
    cli.run("mark", kept, "--tag", "golden", "--pin")
    cli.run("-r", "far", "mark", pinned, "--pin")
    cli.run("forget", gone, pinned)

    plan = cli.one("sync.plan", "sync", "far", "--forget", "-n")
    check_event(plan, documented)
    assert (plan["bring"], plan["mark"], plan["forget"], plan["keep"]) == (
        [],
        [kept],
        [gone],
        [pinned],
    )
    said = cli.run("sync", "far", "--forget", "-n").stdout
    assert "would forget 1, and keep 1" in said and f"forget  {gone}" in said
    assert cli.one("sync.plan", "sync", "far", "-n")["forget"] == []
    assert len(cli.run("-r", "far", "ls").stdout.splitlines()) == 4, "a dry run changes nothing"

    assert "named snapshots" in cli.run("sync", "far", kept, "--forget", status=2).stderr
    marked = cli.one("sync.done", "sync", "far")
    check_event(marked, documented)
    assert (marked["marked"], marked["forgotten"], marked["snapshots"]) == ([kept], [], [])
    done = cli.run("sync", "far", "--forget")
    assert "forgot 1" in done.stdout and f"KEPT {pinned}" in done.stderr
    listed = {
        event["snapshot"]: event
        for event in cli.events("-r", "far", "ls")
        if event["event"] == "snapshot"
    }
    assert (
        listed.keys() == {kept, pinned}
        and listed[kept]["tags"] == ["golden"]
        and listed[kept]["pinned"]
    )
    cli.run("-r", "far", "gc")
    cli.run("-r", "far", "check", "--read-data")


def test_a_region_that_lost_data(cli: Cli, tmp_path: Path) -> None:
    """Repair examines the region itself, whatever other regions have. What is quarantined there is
    read from another region and restored from it.
    """
    home, far, state = tmp_path / "repository", tmp_path / "far", str(tmp_path / "state")
    given = SECRET["ICECORE_PASSPHRASE"].encode
    with icecore.Repository.create(home, passphrase=given, state=state) as repository:
        snapshot = repository.loop.run(take(repository.core, {1: 1, 2: 2}))
        repository.create_replica(far, passphrase=lambda: b"far away, another one").close()
        assert repository.sync_to(far).snapshots == [snapshot]
    (shard,) = [path for path in (home / "shards").rglob("*") if path.is_file()]
    shard.unlink()
    with icecore.Repository.open(
        home, replicas=[str(far)], passphrase=given, state=state
    ) as repository:
        assert repository.holder(snapshot) is repository
        assert repository.loop.run(read(repository.core, snapshot)) == {1: 1, 2: 2}
        assert repository.repair().quarantine.keys() == {snapshot}
        other = repository.holder(snapshot[:20])
        assert other is not repository and not other.find(snapshot).quarantined
    cli.run("init", "plain")
    assert "not a replica" in cli.run("repair", "--from", "plain", status=2, **SECRET).stderr
    cli.run("repair", "--from", "far", **SECRET)  # the replica's own passphrase is not needed
    cli.run("check", "--read-data", **SECRET)
    with icecore.Repository.open(home, passphrase=given, state=state) as repository:
        assert repository.holder(snapshot) is repository
        assert repository.loop.run(read(repository.core, snapshot)) == {1: 1, 2: 2}
        assert repository.stats().live > 0


@pytest.mark.criu
@pytest.mark.usefixtures("needs_criu")
def test_a_job_is_restored_in_another_region(cli: Cli, tmp_path: Path) -> None:
    documented = documented_events()

    def done(name: str, *words: str) -> dict[str, object]:
        lines = cli.run("--json", *words, **SECRET, **OTHER).stdout.splitlines()
        events = [json.loads(line) for line in lines]
        for event in events:
            check_event(event, documented)
        (found,) = [event for event in events if event["event"] == name]
        return found

    cli.run("init", "--encrypt", **SECRET)
    cli.run("init", "--replica-of", "repository", "far", **SECRET)
    started(cli, "job")
    first = str(done("dump.done", "dump", "job")["snapshot"])
    synced = done("sync.done", "sync", "far")
    assert synced["snapshots"] == [first] and int(str(synced["bytes"])) > 3 << 20
    second = str(done("dump.done", "dump", "job")["snapshot"])
    cli.run("kill", "job", "-s", "KILL")

    # The replica does not list the second yet; it knows where to look, and reads what it has
    # itself.
    assert "there is no snapshot" in cli.run("-r", "far", "show", second, status=3, **SECRET).stderr
    (tmp_path / "icecore.toml").write_text('replicas = ["far", "repository"]\n')
    home, far = tmp_path / "repository", tmp_path / "far"
    shards = [path for path in (home / "shards").rglob("*") if path.is_file()]
    gone = [path for path in shards if (far / path.relative_to(home)).exists()]
    assert gone
    for path in gone:
        path.unlink()
    cli.run("-r", "far", "restore", second, **SECRET)
    assert cli.job("job").alive
    cli.run("kill", "job", "-s", "KILL")

    # A region is lost completely; the synced snapshots restore without it.
    again = done("sync.done", "sync", "far")
    assert again["snapshots"] == [second] and again["present"]
    shutil.rmtree(tmp_path / "repository")
    restored = cli.run("-r", "far", "--json", "restore", "job", **SECRET)
    assert "store.replica_missing" in restored.stdout
    assert cli.job("job").alive
    cli.run("kill", "job", "-s", "KILL")
    assert cli.run("-r", "far", "check", "--read-data", **SECRET).returncode == 0

    # Any other repository accepts copies, plain or with its own passphrase.
    cli.run("init", "--encrypt", "stranger", ICECORE_PASSPHRASE=OTHER["ICECORE_TARGET_PASSPHRASE"])
    copied = done("copy.done", "-r", "far", "copy", "stranger", "--job", "job")
    assert copied["snapshots"] == [first, second]
    (tmp_path / "icecore.toml").unlink()
    cli.run(
        "-r", "stranger", "restore", second, ICECORE_PASSPHRASE=OTHER["ICECORE_TARGET_PASSPHRASE"]
    )
    assert cli.job("job").alive
