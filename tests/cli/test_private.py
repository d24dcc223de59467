"""Files of jobs and repositories are accessible to their owner alone, whatever the umask is and
whatever existed before.
"""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import SECONDS, Cli

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")

NOBODY = 65534


def under(cli: Cli, script: str) -> str:
    """Return the output of a shell script in which ``icecore`` is the command line, with its own
    /run.
    """
    icecore = " ".join(cli.command())
    whole = f'mount -t tmpfs -o mode=755 none /run; icecore() {{ {icecore} "$@"; }}; {script}'
    words = ["unshare", "--mount", "--propagation", "private", "/bin/bash", "-ec", whole]
    done = subprocess.run(
        words,
        env=cli.environment,
        cwd=cli.folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def open_to_others(folder: Path) -> list[str]:
    """Return everything in a directory, itself included, to which others have access."""
    return [
        str(path)
        for path in [folder, *folder.rglob("*")]
        if not path.is_symlink() and path.stat().st_mode & 0o077
    ]


@pytest.mark.parametrize("umask", ["0", "0077"])
def test_state_is_private_whatever_the_umask(cli: Cli, umask: str) -> None:
    state = cli.folder / "deep" / "state"
    cli.environment["ICECORE_STATE"] = str(state)
    cli.environment["ICECORE_REPOSITORY"] = str(cli.folder / "other" / "repository")
    run = under(
        cli,
        f"umask {umask}; icecore init; icecore run --name j --root private -- sh -c 'umask; sleep 0.1';"
        "icecore run -d --name k -- sleep 1; icecore ls; icecore wait k;"
        "stat -c '%a %n' /run/icecore /run/icecore/job",
    )
    assert f"{int(umask, 8):04o}\n" in run  # the job's own umask is unchanged
    assert {entry.name for entry in state.iterdir()} >= {"jobs", "lock", "seen"}
    assert open_to_others(state) == open_to_others(cli.folder / "other" / "repository") == []
    mode = f"{0o755 & ~int(umask, 8):o}"
    assert f"{mode} /run/icecore\n{mode} /run/icecore/job\n" in run
    for parent in (state.parent, cli.folder / "other"):
        assert not parent.stat().st_mode & 0o022


def test_a_loose_directory_is_tightened_and_that_is_said(cli: Cli) -> None:
    state = cli.folder / "state"
    (state / "jobs").mkdir(parents=True)
    for path in (state, state / "jobs"):
        path.chmod(0o777)
    done = cli.run("run", "--", "true")
    assert done.stderr.count("now only its owner has") == 2
    assert open_to_others(state) == []
    assert "owner alone" not in cli.run("run", "--", "true").stderr


def test_a_directory_that_holds_more_is_left_or_refused(cli: Cli) -> None:
    state = cli.folder / "state"
    state.mkdir(mode=0o755)
    (state / "mail").mkdir()
    cli.run("run", "--", "true")
    assert stat.S_IMODE(state.stat().st_mode) == 0o755
    assert open_to_others(state / "jobs") == []
    state.chmod(0o775)
    assert "ICECORE_STATE" in cli.run("run", "--", "true", status=2).stderr
    assert stat.S_IMODE(state.stat().st_mode) == 0o775


@pytest.mark.parametrize("which", ["state", "state/jobs"])
def test_a_directory_of_somebody_else_is_refused(cli: Cli, which: str) -> None:
    cli.run("run", "--", "true")
    os.chown(cli.folder / which, NOBODY, NOBODY)
    for words in (("ps",), ("run", "--", "true"), ("kill", "j")):
        done = cli.run(*words, status=2)
        assert f"belongs to user {NOBODY}" in done.stderr
        assert "chown 0" in done.stderr
    os.chown(cli.folder / which, 0, 0)


def test_a_link_of_somebody_else_is_not_followed(cli: Cli) -> None:
    elsewhere = cli.folder / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    (cli.folder / "state").symlink_to(elsewhere)
    cli.run("run", "--", "true")  # the user's own is accepted
    os.chown(cli.folder / "state", NOBODY, NOBODY, follow_symlinks=False)
    before = sorted(os.listdir(elsewhere))
    for words in (("ps",), ("run", "--", "true")):
        assert f"belongs to user {NOBODY}" in cli.run(*words, status=2).stderr
    assert sorted(os.listdir(elsewhere)) == before
    (cli.folder / "state").unlink()
