"""Repositories on storage that is not writable: mounted read-only, or full. The mounts and the jobs
are real.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import icecore
from icecore.config import Config
from icecore.errors import StoreDenied
from icecore.events import Event
from icecore.restorer.options import RestoreOptions
from tests.cli.conftest import Cli, until

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("needs_criu")]

COUNT = ["/bin/sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.02; done"]


def counted(cli: Cli) -> int:
    return (cli.job("count").directory / "stdout.log").read_text().count("\n")


def stopped(cli: Cli) -> str:
    """Return the snapshot of a counting job that it ended, in a new repository."""
    cli.run("init")
    cli.run("run", "-d", "--name", "count", "--", *COUNT)
    until(lambda: counted(cli) >= 5, "counting")
    snapshot: str = cli.one("dump.done", "dump", "count", "--stop")["snapshot"]
    until(lambda: not cli.job("count").alive, "stopped")
    return snapshot


def goes_on(cli: Cli) -> None:
    before = counted(cli)
    until(lambda: counted(cli) > before, "going on")
    job = cli.job("count")
    job.kill(signal.SIGKILL)
    job.wait(timeout=30)


@contextmanager
def mounted(place: Path, *words: str) -> Iterator[None]:
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", *words, place], check=True, timeout=20)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True, timeout=20)


@pytest.fixture
def read_only(cli: Cli) -> Iterator[tuple[Cli, str]]:
    """Return a repository with one snapshot, seen through a read-only mount."""
    snapshot = stopped(cli)
    place = cli.folder / "mounted"
    with mounted(place, "--bind", str(cli.folder / "repository")):
        subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True, timeout=20)
        yield (
            replace(cli, environment={**cli.environment, "ICECORE_REPOSITORY": str(place)}),
            snapshot,
        )


def test_a_read_only_repository_says_so(read_only: tuple[Cli, str]) -> None:
    cli, snapshot = read_only
    cli.run("run", "-d", "--name", "other", "--", *COUNT)
    cli.run("init", "--replica-of", cli.environment["ICECORE_REPOSITORY"], "far")
    for words in (
        ["restore", snapshot],
        ["export", snapshot, "out"],
        ["check"],
        ["stats"],
        ["forget", snapshot],
        ["gc"],
        ["mark", "--pin", snapshot],
        ["dump", "other"],
        ["sync", "far"],
    ):
        said = cli.run(*words, status=8).stderr
        assert (
            "Read-only file system" in said and "--read-only" in said and "unknown" not in said
        ), said
    assert cli.job("other").alive
    findings = {
        event["name"]: event
        for event in cli.events("doctor", status=0)
        if event["event"] == "doctor.finding"
    }
    assert (
        findings["repository"]["state"] == "warning"
        and "is not writable" in findings["repository"]["message"]
    )


def test_a_read_only_repository_can_be_read(read_only: tuple[Cli, str]) -> None:
    cli, snapshot = read_only
    for mode in ("full", "lazy"):
        restored = cli.run("restore", "--read-only", "--mode", mode, "count")
        assert (
            restored.stderr.count("warning:") == 1 and "a collection elsewhere" in restored.stderr
        )
        goes_on(cli)
    assert cli.one("export.done", "export", "--read-only", snapshot, "out")["images"]
    assert (cli.folder / "out" / "inventory.img").exists()
    other = str(cli.folder / "other")
    cli.run("init", other)
    told = cli.events("copy", "--read-only", other)
    assert [event["snapshots"] for event in told if event["event"] == "copy.done"] == [[snapshot]]
    assert "a collection elsewhere" in next(
        event["message"] for event in told if event["event"] == "copy.warning"
    )
    cli.run("init", "--replica-of", cli.environment["ICECORE_REPOSITORY"], "far")
    told = cli.events("sync", "--read-only", "far")
    assert [event["snapshots"] for event in told if event["event"] == "sync.done"] == [[snapshot]]
    assert "a collection elsewhere" in next(
        event["message"] for event in told if event["event"] == "sync.warning"
    )
    for place in (cli.environment["ICECORE_REPOSITORY"], other, "far"):
        cli.run("check", "--read-data", "--read-only", "-r", place)
        cli.run("stats", "--read-only", "-r", place)
    for place in (other, "far"):
        cli.run("restore", "-r", place, snapshot)
        goes_on(cli)


def test_a_read_only_repository_through_the_api(read_only: tuple[Cli, str]) -> None:
    cli, snapshot = read_only
    place = cli.environment["ICECORE_REPOSITORY"]
    config = Config(state=str(cli.folder / "state"))
    told: list[Event] = []
    with icecore.Repository.open(place, state=config.state, config=config) as repository:
        with pytest.raises(StoreDenied, match="Read-only"):
            icecore.restore(snapshot, repository, config=config)
        icecore.restore(
            snapshot, repository, RestoreOptions(register=False), config=config, emit=told.append
        )
        assert [event.fields["name"] for event in told if event.name == "restore.warning"] == [
            "session"
        ]
        goes_on(cli)
        other = icecore.Repository.create(cli.folder / "other", state=config.state, config=config)
        with other, pytest.raises(StoreDenied, match="Read-only"):
            repository.copy_to(other.location)
        assert repository.copy_to(other.location, register=False).snapshots == [snapshot]


def test_a_full_repository(cli: Cli) -> None:
    """The repository is restored from, forgotten from, collected, and written to again; nothing
    outside it changes.
    """
    place = cli.folder / "small"
    with mounted(place, "-t", "tmpfs", "-o", "size=60m", "tmpfs"):
        cli = replace(
            cli, environment={**cli.environment, "ICECORE_REPOSITORY": str(place / "repository")}
        )
        snapshot = stopped(cli)
        # The file that fills it belongs to a job, too.
        (cli.folder / "fill.py").write_text(
            "import os, time\nheld = os.urandom(40 << 20)\nprint('ready', flush=True)\ntime.sleep(600)\n"
        )
        cli.run("run", "-d", "--name", "large", "--", "python3", "fill.py")
        until(lambda: "ready" in (cli.job("large").directory / "stdout.log").read_text(), "ready")
        large = cli.one("dump.done", "dump", "large", "--stop")["snapshot"]
        descriptor = os.open(place / "filler", os.O_WRONLY | os.O_CREAT)
        with pytest.raises(OSError, match="No space"):
            while True:
                os.write(descriptor, bytes(4096))
        os.close(descriptor)
        assert os.statvfs(place).f_bavail == 0
        cli.run("run", "-d", "--name", "other", "--", *COUNT)
        assert "'icecore gc'" in cli.run("dump", "other", status=8).stderr
        for _ in range(2):
            cli.run("restore", snapshot)
            goes_on(cli)
        cli.run("check", "--read-data")
        freed = [
            json.loads(line)
            for line in cli.run("--json", "forget", "--gc", large).stdout.splitlines()
        ]
        assert (
            next(event["deleted_bytes"] for event in freed if event["event"] == "gc.done")
            > 40 << 20
        )
        cli.run("dump", "other")
        cli.run("check", "--read-data")
        assert sorted(os.listdir(place / "repository" / ".reserve")) == list("01234567")
