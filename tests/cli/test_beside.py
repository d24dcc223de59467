"""The README's commands with a job that writes a file: `restore --name` beside the original, by
default and with each option.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, until

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("needs_criu")]

#: Counts on stdout and into a file that stays open; ends once a file appears.
SERVE = [
    "/bin/sh",
    "-c",
    "exec 5> out.txt; i=0; while ! [ -e finish ]; do i=$((i+1)); echo $i; echo $i >&5; sleep 0.02; done",
]


def lines(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1]


def whole(found: list[str]) -> bool:
    return found == [str(number) for number in range(1, len(found) + 1)]


@pytest.fixture
def served(cli: Cli) -> Path:
    """Return the output of the job serve, which was dumped twice."""
    cli.run("init")
    cli.run("run", "-d", "--name", "serve", "--", *SERVE)
    out = cli.folder / "out.txt"
    until(lambda: out.exists() and len(lines(out)) > 5, "writing")
    cli.run("dump", "-q", "serve")
    cli.run("dump", "-q", "serve")
    until(lambda: len(lines(out)) > 15, "still writing")
    return out


def test_the_readme_with_a_file(cli: Cli, served: Path) -> None:
    cli.run("kill", "serve", "-s", "KILL")
    cli.run("restore", "-q", "serve")
    inode = served.stat().st_ino
    refused = cli.run("restore", "-q", "serve", "--name", "serve-2", status=6).stderr
    assert all(
        word in refused
        for word in (
            str(served),
            "open for writing",
            "--files-to DIR",
            "--files leave",
            "--files restore",
            "--files truncate",
        )
    )
    assert served.stat().st_ino == inode
    shown = cli.run("restore", "-n", "serve", status=6).stdout
    assert f"BAD   holder: {served}: process " in shown and "--files-to DIR" in shown
    answer = [
        json.loads(line)
        for line in cli.run(
            "--json", "restore", "-n", "serve", "--files", "leave"
        ).stdout.splitlines()
    ]
    (holder,) = [one for one in answer if one.get("name") == "holder"]
    assert (holder["met"], holder["hard"]) == (
        False,
        False,
    ) and "writes to the same file" in holder["message"]

    cli.run("restore", "-q", "serve", "--name", "serve-2", "--files-to", "own")
    copy = Path(f"{cli.folder}/own{served}")
    before = len(lines(served)), len(lines(copy))
    until(lambda: len(lines(served)) > before[0] and len(lines(copy)) > before[1], "both write")
    assert {event["job"] for event in cli.events("ps")} == {"serve", "serve-2"}
    assert (cli.folder / "own").stat().st_mode & 0o7777 == 0o700
    cli.run("dump", "-q", "serve-2")
    cli.run("kill", "serve-2", "-s", "KILL")
    cli.run("restore", "-q", "latest", "--name", "serve-2")
    at = len(lines(copy))
    until(lambda: len(lines(copy)) > at, "it goes on with its copy")
    (cli.folder / "finish").touch()
    for name in ("serve", "serve-2"):
        cli.run("wait", name)
        assert whole(lines(cli.job(name).log_path("stdout")))
    assert served.stat().st_ino == inode and whole(lines(served)) and whole(lines(copy))


@pytest.mark.parametrize("files", ["restore", "leave", "truncate"])
def test_each_choice_is_done_as_asked(files: str, cli: Cli, served: Path) -> None:
    inode = served.stat().st_ino
    kept = os.open(served, os.O_RDONLY)
    said = cli.run("restore", "serve", "--name", "serve-2", "--files", files).stderr
    assert "open for writing, and " in said
    assert (served.stat().st_ino == inode) is (files != "restore")
    at = len(lines(cli.job("serve-2").log_path("stdout")))
    until(lambda: len(lines(cli.job("serve-2").log_path("stdout"))) > at, "the second goes on")
    (cli.folder / "finish").touch()
    for name in ("serve", "serve-2"):
        cli.run("wait", name)
        assert whole(lines(cli.job(name).log_path("stdout")))
    if files == "restore":
        assert whole(lines(served)) and whole(os.pread(kept, 1 << 20, 0).decode().split("\n")[:-1])
    os.close(kept)


def test_a_setting_is_a_choice(cli: Cli, served: Path) -> None:
    (cli.folder / "icecore.toml").write_text('[restore]\nfiles = "restore"\n')
    cli.run("restore", "serve", "--name", "serve-2")
    assert cli.job("serve-2").alive


@pytest.mark.parametrize("event", ["restore.images", "restore.criu", "restore.memory"])
def test_a_restore_that_is_killed_leaves_no_mount_and_no_half_copy(
    event: str, cli: Cli, served: Path
) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    restore = cli.start("--json", "restore", "serve", "--name", "serve-2", "--files-to", "own")
    assert restore.stdout is not None
    for line in restore.stdout:
        found = json.loads(line)
        if found["event"] == event and found["state"] == "end":
            break
    restore.send_signal(signal.SIGKILL)
    rest, _ = restore.communicate(timeout=30)
    if any(json.loads(line)["event"] == "restore.running" for line in rest.splitlines()):
        pytest.skip("it was faster than the signal")
    own = Path(f"{cli.folder}/own{served}")
    until(lambda: not in_view(own), "nobody sees the copy")
    cli.run("ps")
    # All or nothing: killed in the moment in which the job was let go, its file stays as the job
    # left it.
    until(
        lambda: (
            not own.exists()
            or (not list((cli.folder / "state" / "restores").iterdir()) and whole(lines(own)))
        ),
        "the copy is undone or whole",
        20,
    )
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert cli.job("serve").alive and whole(lines(served))
    cli.run("restore", "serve", "--name", "serve-2", "--files-to", "own")
    (cli.folder / "finish").touch()
    cli.run("wait", "serve-2")
    assert whole(lines(own)) and whole(lines(served))


def in_view(copy: Path) -> bool:
    """Return whether any process has the copy mounted."""
    for name in os.listdir("/proc"):
        try:
            if name.isdecimal() and str(copy) in Path(f"/proc/{name}/mountinfo").read_text():
                return True
        except OSError:
            continue
    return False
