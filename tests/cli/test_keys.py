"""Encrypted repositories on the command line: sources of passphrases, who can open what, and that
no job inherits a passphrase.
"""

from __future__ import annotations

import os
import pty
import stat
import subprocess
import time
from pathlib import Path

import pytest

from icecore.store.format.slots import decode_slots
from tests.cli.conftest import SECONDS, Cli

FIRST = "the passphrase of the first"


def test_a_life_with_several_passphrases(cli: Cli, tmp_path: Path) -> None:
    secret = {"ICECORE_PASSPHRASE": FIRST}
    assert "none is given" in cli.run("init", "--encrypt", status=14).stderr
    assert "the repository is unreadable" in cli.run("init", "--encrypt", **secret).stderr
    assert "none is given" in cli.run("ls", status=14).stderr
    assert "opens none" in cli.run("ls", status=14, ICECORE_PASSPHRASE="another").stderr
    cli.run("ls", **secret)

    (tmp_path / "second").write_text("of the second person\n")
    refused = cli.run("key", "add", "second", status=14, **secret)
    assert "ICECORE_NEW_PASSPHRASE" in refused.stderr
    cli.run("key", "add", "second", "--new-file", "second", **secret)
    cli.run("ls", ICECORE_PASSPHRASE_FILE="second")
    cli.run("ls", ICECORE_PASSPHRASE_COMMAND="cat second")
    (tmp_path / "icecore.toml").write_text('passphrase_command = "echo of the second person"\n')
    assert "second" in cli.run("key", "list").stdout
    assert "opens none" in cli.run("ls", status=14, ICECORE_PASSPHRASE_COMMAND="echo wrong").stderr
    assert "status 3" in cli.run("ls", status=2, ICECORE_PASSPHRASE_COMMAND="exit 3").stderr
    assert "cannot be read" in cli.run("ls", status=2, ICECORE_PASSPHRASE_FILE="nowhere").stderr

    cli.run("key", "rotate", "second", "--new-command", "echo a newer one, second")
    assert cli.run("ls", status=14).stderr
    (tmp_path / "icecore.toml").unlink()
    cli.run("key", "remove", "second", **secret)
    assert "only passphrase" in cli.run("key", "remove", "first", status=2, **secret).stderr
    assert (
        "8" in cli.run("key", "rotate", status=2, ICECORE_NEW_PASSPHRASE="short", **secret).stderr
    )
    cli.run("key", "rotate", ICECORE_NEW_PASSPHRASE="the first's other one", **secret)
    assert cli.run("ls", status=14, **secret).stderr
    found = cli.run("--json", "key", "list", ICECORE_PASSPHRASE="the first's other one").stdout
    assert found.count("key.slot") == 1 and '"first"' in found
    assert (
        cli.run("check", "--read-data", ICECORE_PASSPHRASE="the first's other one").returncode == 0
    )
    assert stat.S_IMODE(os.stat(tmp_path / "repository").st_mode) == 0o700


def test_a_slot_costs_what_it_should(cli: Cli, tmp_path: Path) -> None:
    """In commands of their own: those in forks make cheap ones."""
    secrets = {"ICECORE_PASSPHRASE": FIRST, "ICECORE_NEW_PASSPHRASE": "of the second person"}
    real = Cli(tmp_path, {**cli.environment, **secrets})
    assert real.zygote is None
    for words, slots in (
        (("init", "--encrypt"), 1),
        (("key", "add", "second"), 2),
        (("key", "rotate", "second"), 2),
    ):
        real.run(*words)
        newest = max((tmp_path / "repository" / "keys").iterdir())
        found = decode_slots(f"keys/{newest.name}", newest.read_bytes())
        costs = [(one.memory_kib, one.passes, one.lanes) for one in found.slots]
        assert costs == slots * [(64 << 10, 3, 4)]


def test_plain_repositories_have_no_slots(cli: Cli) -> None:
    cli.run("init")
    assert "not encrypted" in cli.run("key", "list", status=2).stderr
    assert (
        "not encrypted"
        in cli.run("key", "add", "x", status=2, ICECORE_NEW_PASSPHRASE="long enough").stderr
    )
    cli.run("ls")  # no prompt for a passphrase


def test_asked_at_the_terminal(cli: Cli) -> None:
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            cli.command("init", "--encrypt"),
            env=cli.environment,
            cwd=cli.folder,
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as asking:
            for prompt in (b"New passphrase", b"Once more"):
                seen = b""
                end = time.monotonic() + SECONDS
                while prompt not in seen and time.monotonic() < end and asking.poll() is None:
                    assert asking.stderr is not None
                    seen += os.read(asking.stderr.fileno(), 1000)
                assert prompt in seen
                time.sleep(0.1)  # getpass discards input from before the prompt
                os.write(ours, FIRST.encode() + b"\n")
            out, error = asking.communicate(timeout=SECONDS)
        assert asking.returncode == 0, (out, error)
    finally:
        os.close(ours)
        os.close(theirs)
    cli.run("ls", ICECORE_PASSPHRASE=FIRST)


@pytest.mark.criu
@pytest.mark.usefixtures("needs_criu")
def test_a_job_is_dumped_encrypted_restored_and_never_sees_the_passphrase(
    cli: Cli, tmp_path: Path
) -> None:
    secret = {"ICECORE_PASSPHRASE": FIRST}
    cli.run("init", "--encrypt", **secret)
    told = "'ICECORE_PASSPHRASE' in os.environ"
    program = f"import os, time; word = 'spelt ' * 5000; print({told}, flush=True); time.sleep(600)"
    cli.run("run", "-d", "--name", "spy", "--", "python3", "-c", program, **secret)
    end = time.monotonic() + SECONDS
    while "False" not in cli.run("logs", "spy").stdout and time.monotonic() < end:
        time.sleep(0.05)
    assert cli.run("logs", "spy").stdout.split() == ["False"]
    cli.run("dump", "spy", **secret)
    cli.run("dump", "spy", **secret)
    cli.run("kill", "spy", "-s", "KILL")
    assert "none is given" in cli.run("restore", "spy", status=14).stderr
    cli.run("restore", "spy", **secret)
    assert cli.job("spy").alive
    assert cli.run("check", "--read-data", **secret).returncode == 0
    stored = b"".join(
        path.read_bytes() for path in (tmp_path / "repository").rglob("*") if path.is_file()
    )
    assert len(stored) > 1 << 19 and b"spelt spelt" not in stored and b"python3" not in stored
