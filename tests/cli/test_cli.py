"""The command line without jobs: parsing, exit codes, errors with their cures, JSON, repositories."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from icecore.cli import build_parser, main, split_command
from icecore.config import Config
from icecore.errors import UsageError
from icecore.node import doctor
from tests.cli.conftest import Cli
from tests.cli.documents import check_event, documented_events


def test_common_options_stand_anywhere() -> None:
    for words in (
        ["-r", "/x", "--json", "ls", "job"],
        ["ls", "-r", "/x", "job", "--json"],
        ["--json", "ls", "job", "-r", "/x"],
    ):
        got = build_parser().parse_args(words)
        assert (got.repository, got.json, got.job, got.quiet, got.config) == (
            "/x",
            True,
            "job",
            False,
            "",
        )


def test_what_follows_the_dashes_is_the_jobs() -> None:
    assert split_command(["run", "-d", "--", "x", "--json", "--", "y"]) == (
        ["run", "-d"],
        ["x", "--json", "--", "y"],
    )
    assert split_command(["ls"]) == (["ls"], None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nonsense"], "invalid choice"),
        (["ls", "--jsno"], "unrecognized arguments"),
        (["dump"], "required: JOB|PID"),
        (
            ["dump", "x", "--max-window", "soon"],
            "argument --max-window: 'soon' is not a duration such as '30 s' or a number of seconds",
        ),
        (
            ["restore", "x", "--mode", "fast"],
            'argument --mode: \'fast\' is not one of "full", "lazy"',
        ),
        (["dump", "x", "--max"], "unrecognized arguments"),
        (
            ["dump", "x", "--threads", "100000"],
            "argument --threads: '100000' is not a whole number from 0 to 1024",
        ),
        (["restore", "x", "--threads", "1025"], "'1025' is not a whole number from 0 to 1024"),
        (["restore", "x", "--placers", "1025"], "'1025' is not a whole number from 0 to 1024"),
        (["import", "x", "--threads", "1025"], "'1025' is not a whole number from 0 to 1024"),
        (
            ["check", "--read-data", "101"],
            "argument --read-data: '101' is not a percentage from 0 to 100",
        ),
        (["check", "--read-data", "nan"], "'nan' is not a percentage from 0 to 100"),
        (["repair", "--read-data", "all"], "'all' is not a percentage from 0 to 100"),
    ],
)
def test_the_parser_says_what_is_wrong(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_parser().parse_args(words)
    assert message in caught.value.message
    assert "--help" in caught.value.cure


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ([], 2, "no command is given"),
        (["ls", "--", "x"], 2, "belong to 'run'"),
        (["run"], 2, "no command to run"),
        (
            ["run", "-d", "sleep", "1", "-x"],
            2,
            "write the command after '--': icecore run -- sleep 1 -x",
        ),
        (["run", "sleep", "--", "true"], 2, "unrecognized arguments: sleep"),
        (["run", "--rm", "-d", "--", "true"], 2, "--rm needs the foreground"),
        (["run", "--env", "no_such", "--", "true"], 2, "write no_such=VALUE"),
        (["run", "--env", "=x", "--", "true"], 2, "NAME=VALUE"),
        (["run", "--", "no-such-program"], 3, "there is no program no-such-program"),
        (["run", "--name", "a b", "--", "true"], 2, "is no name for a job"),
        (["--config", "nowhere.toml", "ls"], 3, "nowhere.toml"),
        (["ls"], 3, "is not a directory"),
        (["-r", "gs://bucket/x", "ls"], 2, "directories and S3 buckets"),
        (["-r", "file://x", "ls"], 2, "no absolute path"),
        (["logs", "nobody"], 3, "there is no job nobody"),
        (["kill", "nobody"], 3, "there is no job nobody"),
        (["rm"], 2, "no job is named"),
        (["init", "--shard", "1KiB"], 2, "shards of 1024 bytes"),
    ],
)
def test_exit_codes_and_messages(
    cli: Cli,
    words: list[str],
    status: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(cli.folder)
    for name, value in cli.environment.items():
        monkeypatch.setenv(name, value)
    assert main(words) == status
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""
    assert main(["--json", *words]) == status
    said = capsys.readouterr()
    assert message in said.err
    error = json.loads(said.out.splitlines()[-1])
    assert (error["event"], error["exit_code"]) == ("error", status)
    assert message in error["message"] or message in error["cure"]
    check_event(error, documented_events())


def test_errors_tell_the_cure(cli: Cli) -> None:
    done = cli.run("ls", status=2, ICECORE_REPOSITORY="")
    assert "no repository is named" in done.stderr
    assert "cure: name one with --repository" in done.stderr
    done = cli.run("ls", status=2, ICECORE_DUMP_MAX_WINDOW="soon")
    assert "ICECORE_DUMP_MAX_WINDOW='soon'" in done.stderr
    (cli.folder / "icecore.toml").write_text("[dump]\nmax_window = 'soon'\n")
    done = cli.run("ls", status=2)
    assert str(cli.folder / "icecore.toml") in done.stderr


def test_version_and_help(cli: Cli) -> None:
    assert cli.run("--version").stdout.startswith("icecore ")
    text = cli.run("--help").stdout
    assert "secrets" in text
    for name in ("init", "dump", "restore", "doctor"):
        assert "usage:" in cli.run(name, "--help").stdout


def test_a_repository_is_made_once_and_found(cli: Cli) -> None:
    made = cli.one("repository", "init")
    assert made["location"] == str(cli.folder / "repository")
    assert os.stat(cli.folder / "repository").st_mode & 0o077 == 0, "others can read it"
    assert "is already a repository" in cli.run("init", status=2).stderr
    assert cli.events("ls") == []
    assert "no job 'nobody'" in cli.run("ls", "nobody", status=3).stderr
    assert "there is no snapshot" in cli.run("show", "latest", status=3).stderr
    assert cli.one("check.done", "check")["sound"] is True
    assert cli.one("gc.plan", "gc", "-n")["delete"] == 0
    assert cli.one("gc.done", "gc")["deleted"] == 0
    assert "this policy keeps nothing" in cli.run("forget", status=2).stderr
    assert cli.one("forget.done", "forget", "--keep-last", "3")["forgotten"] == 0


def test_a_place_that_is_no_repository(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert (
        "'icecore init' makes one" in cli.run("-r", str(tmp_path / "empty"), "ls", status=3).stderr
    )


def test_damage_has_its_exit_code(cli: Cli) -> None:
    cli.run("init")
    for path in (
        cli.folder / "repository" / "config",
        cli.folder / "repository" / "copies" / "config",
    ):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.chmod(0o600)
        path.write_bytes(data)
    done = cli.run("ls", status=9)
    assert "configuration config is damaged" in done.stderr


def test_an_older_copy_of_the_repository_is_noticed(cli: Cli) -> None:
    cli.run("init")
    subprocess.run(["cp", "-a", "repository", "older"], cwd=cli.folder, check=True, timeout=20)
    cli.run("check")  # a transaction: a session begins and ends
    subprocess.run(["rm", "-r", "repository"], cwd=cli.folder, check=True, timeout=20)
    subprocess.run(["mv", "older", "repository"], cwd=cli.folder, check=True, timeout=20)
    assert "has already seen" in cli.run("ls", status=12).stderr
    # Another repository in the same place does not count as an older copy.
    subprocess.run(["rm", "-r", "repository"], cwd=cli.folder, check=True, timeout=20)
    cli.run("init")
    cli.run("ls")


def test_doctor_names_what_is_bad(cli: Cli) -> None:
    findings = cli.events("doctor", status=1)
    by_name = {event["name"]: event for event in findings}
    assert by_name["repository"]["state"] == "bad" and "init" in by_name["repository"]["cure"]
    assert {
        "kernel",
        "capabilities",
        "CRIU",
        "pipes",
        "io_uring",
        "workdir",
        "userfaultfd",
        "jobs",
    } <= by_name.keys()
    assert all(event["cure"] for event in findings if event["state"] != "good")
    assert (
        "no NVIDIA driver"
        in cli.run("doctor", status=1, ICECORE_CUDA=f"fake:{cli.folder}/none").stdout
    )
    done = cli.run("doctor", status=1, ICECORE_CRIU="/nowhere/criu")
    assert "BAD   CRIU" in done.stdout and "install-criu" in done.stdout
    for event in findings:
        check_event(event, documented_events())


def test_doctor_says_what_a_build_without_a_compiler_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "CRIU_LIBRARY", tmp_path / "libicecore-criu.so")
    [finding] = [
        finding
        for finding in doctor.examine(Config(), str(tmp_path))
        if finding.name == "CRIU's library"
    ]
    assert finding.state == "warning" and "gcc" in finding.cure


def test_output_is_whole_when_its_reader_leaves(cli: Cli) -> None:
    cli.run("init")
    done = subprocess.run(
        ["/bin/sh", "-c", f"{' '.join(cli.command('doctor', '--json'))} | head -n 1"],
        env=cli.environment,
        cwd=cli.folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert json.loads(done.stdout)["event"] == "doctor.finding"
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_a_terminal_gets_bars_and_whole_lines(cli: Cli) -> None:
    cli.run("init")
    ours, theirs = os.openpty()
    running = subprocess.Popen(
        cli.command("check", "--read-data"),
        env={**cli.environment, "TERM": "xterm"},
        cwd=cli.folder,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    said = b""
    try:
        while piece := os.read(ours, 1 << 16):
            said += piece
    except OSError:
        pass  # how Linux reports that the other side is closed
    finally:
        os.close(ours)
    assert running.wait(30) == 0
    assert b"checking" in said and "━".encode() in said
    assert b"all is well" in said.splitlines()[-1]
