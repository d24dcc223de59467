"""Completion scripts: what bash offers for a command line."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys

import pytest

from icecore.cli import build_parser
from icecore.commands.completion import script
from tests.cli.conftest import Cli, until


def complete(cli: Cli, *words: str) -> set[str]:
    """Return what bash offers for the last of the words."""
    icecore = shlex.join([sys.executable, "-P", "-m", "icecore.cli"])
    program = "\n".join(
        [
            f'icecore() {{ {icecore} "$@"; }}',
            script(build_parser(), "bash"),
            f"COMP_WORDS=(icecore {shlex.join(words)})",
            f"COMP_CWORD={len(words)}",
            "COMP_LINE=${COMP_WORDS[*]}",
            f"_shtab_icecore icecore {shlex.quote(words[-1])} ''",
            "printf '%s\\n' \"${COMPREPLY[@]}\"",
        ]
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", program],
        env=cli.environment,
        cwd=cli.folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return {line.strip() for line in done.stdout.splitlines() if line.strip()}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_valid(cli: Cli, shell: str) -> None:
    text = cli.run("completion", shell).stdout
    assert "restore" in text and "--files-to" in text
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n"], input=text, text=True, check=True, timeout=60)


def test_bash_completes_commands_and_options(cli: Cli) -> None:
    assert complete(cli, "re") == {"repair", "restore"}
    assert complete(cli, "key", "ex") == {"export"}
    assert complete(cli, "restore", "--files") == {"--files", "--files-to"}
    assert complete(cli, "restore", "--mode", "l") == {"lazy"}
    (cli.folder / "images").mkdir()
    assert complete(cli, "import", "im") == {"images"}
    (cli.folder / "image.tar").touch()
    assert complete(cli, "import", "im") == {"images", "image.tar"}


def test_bash_completes_jobs_and_snapshots(cli: Cli) -> None:
    cli.run("run", "-d", "--name", "train", "--", "sleep", "60")
    until(lambda: cli.job("train").alive, "running")
    assert complete(cli, "logs", "tr") == {"train"}
    assert complete(cli, "dump", "") == {"train"}
    assert complete(cli, "restore", "") == {"latest", "train"}
    cli.run("init")
    assert cli.run("completion", "snapshots").stdout.split() == ["latest", "train"]
    cli.run("kill", "-s", "KILL", "train")


def test_snapshots_of_the_repository_are_offered(cli: Cli, needs_criu: None) -> None:
    cli.run("init")
    cli.run("run", "-d", "--name", "train", "--", "sleep", "60")
    snapshot = cli.one("dump.done", "dump", "train", "--job", "kept")["snapshot"]
    offered = {"latest", "train", "kept", snapshot}
    assert set(cli.run("completion", "snapshots").stdout.split()) == offered
    # A passphrase makes opening slow, so only names known to this node are offered.
    words = cli.run("completion", "snapshots", ICECORE_PASSPHRASE="x").stdout.split()
    assert words == ["latest", "train"]
    cli.run("kill", "-s", "KILL", "train")
