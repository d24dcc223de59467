"""Jobs through the command line: output, exit status, signals, names, and survival of the process
that started them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

import icecore
from icecore.config import Config
from icecore.environment import CREDENTIALS
from icecore.events import Event
from tests.cli.conftest import Cli, until
from tests.cli.documents import check_event, documented_events

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")

COUNT = ["/bin/sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.02; done"]


def test_foreground_shows_output_and_returns_the_exit_status(cli: Cli) -> None:
    done = cli.run("run", "--", "/bin/sh", "-c", "echo out; echo err >&2; exit 7", status=7)
    assert (done.stdout, done.stderr) == ("out\n", "err\n")
    done = cli.run(
        "run", "--", "/bin/sh", "-c", "kill -USR1 $$; sleep 5", status=128 + signal.SIGUSR1
    )
    assert "killed by SIGUSR1" in done.stderr


def test_the_jobs_own_options_are_not_parsed(cli: Cli) -> None:
    assert (
        cli.run("run", "-q", "--", "echo", "--json", "-d", "--", "x").stdout == "--json -d -- x\n"
    )


def test_a_bound_for_snapshots_that_are_not_taken(cli: Cli) -> None:
    done = cli.run("run", "--background-cpu", "50%", "--", "true", status=2)
    assert "--every" in done.stderr
    for share in ("150%", "0.5%", "1e-6", "1e-14"):
        done = cli.run("dump", "--background-cpu", share, "1", status=2)
        assert "a share from 1% to 100%" in done.stderr


def test_output_as_events(cli: Cli) -> None:
    events = cli.events(
        "run",
        "--name",
        "j",
        "--",
        "/bin/sh",
        "-c",
        "printf 'h\\303'; sleep 0.3; printf '\\266\\n'; exit 3",
        status=3,
    )
    documented = documented_events()
    for event in events:
        check_event(event, documented)
    assert "".join(event["text"] for event in events if event["event"] == "job.output") == "hö\n"
    assert events[-1] | {"at": 0, "instance": ""} == {
        "event": "job.ended",
        "at": 0,
        "job": "j",
        "instance": "",
        "how": "exited 3",
        "exit_code": 3,
    }


def test_a_job_gets_no_standard_input_and_that_is_said(cli: Cli) -> None:
    def run(stdin: int) -> tuple[str, str]:
        words = cli.command("run", "--rm", "--", "/bin/sh", "-c", "wc -c; readlink /proc/self/fd/0")
        done = subprocess.run(
            words,
            env=cli.environment,
            cwd=cli.folder,
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout, done.stderr

    (cli.folder / "words").write_text("some words")
    (cli.folder / "empty").touch()
    ours, theirs = os.pipe()
    terminal = os.openpty()
    with (
        open(cli.folder / "words") as words,
        open(cli.folder / "empty") as empty,
        open(os.devnull) as nothing,
    ):
        for stdin, said in (
            (ours, True),
            (words.fileno(), True),
            (empty.fileno(), False),
            (nothing.fileno(), False),
            (terminal[1], False),
        ):
            out, error = run(stdin)
            assert out == "0\n/dev/null\n"
            assert ("does not get this standard input" in error) is said
    for fd in (ours, theirs, *terminal):
        os.close(fd)
    assert "/dev/null" in cli.run("run", "--help").stdout


def test_environment_directory_and_removal(cli: Cli) -> None:
    (cli.folder / "elsewhere").mkdir()
    done = cli.run(
        "run",
        "--rm",
        "--cwd",
        "elsewhere",
        "--env",
        "WORD=a=b",
        "--",
        "/bin/sh",
        "-c",
        "pwd; echo $WORD",
    )
    assert done.stdout == f"{cli.folder}/elsewhere\na=b\n"
    assert cli.events("ps", "-a") == []


def test_a_job_gets_no_credentials_of_icecores_unless_by_name(cli: Cli) -> None:
    held = {name: f"secret {name}" for name in CREDENTIALS if name != "AWS_CONFIG_FILE"}
    passed = {"AWS_REGION": "here", "GOOGLE_APPLICATION_CREDENTIALS": "/its/own", "WORD": "x"}
    show = ("--", "env", "-0")

    def variables(*options: str, **more: str) -> tuple[dict[str, str], str]:
        done = cli.run("run", "--rm", *options, *show, **held, **passed, **more)
        return dict(
            pair.split("=", 1) for pair in done.stdout.rstrip("\0").split("\0")
        ), done.stderr

    seen, said = variables()
    assert seen.items() >= passed.items()
    assert not [value for value in seen.values() if "secret" in value]
    assert (
        all(name in said for name in held)
        and "AWS_CONFIG_FILE" not in said
        and said.count("\n") == 1
    )
    seen, said = variables("--env", "AWS_PROFILE", "--env", "AWS_ROLE_ARN=other", "--env", "WORD")
    assert (seen["AWS_PROFILE"], seen["AWS_ROLE_ARN"], seen["WORD"]) == (
        held["AWS_PROFILE"],
        "other",
        "x",
    )
    assert "AWS_PROFILE" not in said and "AWS_ROLE_ARN" not in said and "AWS_SESSION_TOKEN" in said
    environment = {**cli.environment, **held}
    done = subprocess.run(
        cli.command("--json", "run", *show),
        env=environment,
        cwd=cli.folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    [event] = [
        event
        for event in map(json.loads, done.stdout.splitlines())
        if event["event"] == "run.withheld"
    ]
    check_event(event, documented_events())
    assert event["names"] == list(held)


def test_the_api_gives_a_job_no_credentials(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("ICECORE_PASSPHRASE", "secret")
    monkeypatch.setenv("ICECORE_STATE", str(cli.folder / "state"))
    events: list[Event] = []
    jobs = [icecore.run(["env"], config=Config(), emit=events.append), cli.registry.start(["env"])]
    for job in jobs:
        assert job.wait(20).code == 0
        assert "secret" not in job.log_path("stdout").read_text()
    assert [event.fields["names"] for event in events if event.name == "run.withheld"] == [
        ["ICECORE_PASSPHRASE", "AWS_SECRET_ACCESS_KEY"]
    ]


def test_a_job_has_its_own_pids_or_the_hosts(cli: Cli) -> None:
    assert cli.run("run", "--", "/bin/sh", "-c", "echo $$").stdout == "2\n"
    assert int(cli.run("run", "--pid", "host", "--", "/bin/sh", "-c", "echo $$").stdout) > 2
    assert int(cli.run("run", "--", "/bin/sh", "-c", "echo $$", ICECORE_RUN_PID="host").stdout) > 2


def test_detached_followed_and_ended(cli: Cli) -> None:
    assert cli.run("run", "-d", "--name", "count", "--", *COUNT).stdout == "count\n"
    (job,) = cli.events("ps")
    assert (job["job"], job["state"], job["command"], job["exit_code"]) == (
        "count",
        "running",
        COUNT,
        None,
    )
    assert (
        "a job named count runs"
        in cli.run("run", "-d", "--name", "count", "--", "true", status=2).stderr
    )
    assert "count" in cli.run("ps").stdout
    cli.run("init")
    assert cli.events("ls", "count") == []  # the job exists, without a snapshot
    assert cli.run("wait", "count", "--timeout", "0.1", status=124).stderr
    first = cli.run("logs", "count").stdout.splitlines()
    assert first[:2] == ["1", "2"]
    assert cli.run("logs", "count", "--stream", "stderr").stdout == ""
    assert "unknown" not in cli.run("kill", "count", "-s", "unheard-of", status=2).stdout
    cli.run("kill", "count", "-s", "sigusr1")
    assert (
        cli.run("wait", "count", status=128 + signal.SIGUSR1).stdout == "count: killed by SIGUSR1\n"
    )
    assert "does not run" in cli.run("kill", "count", status=3).stderr
    assert cli.events("ps") == []
    (job,) = cli.events("ps", "-a")
    assert (job["state"], job["exit_code"]) == ("ended", 138)
    assert "SIGUSR1" in cli.run("ps", "-a").stdout
    assert cli.one("job.removed", "rm", "count")["job"] == "count"
    assert cli.events("ps", "-a") == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_go_of_the_job(cli: Cli, number: signal.Signals) -> None:
    following = cli.start("run", "--name", "count", "--", *COUNT)
    assert following.stdout is not None
    assert following.stdout.readline() == "1\n"
    following.send_signal(number)
    _, error = following.communicate(timeout=20)
    assert following.returncode == 128 + number
    assert "job count continues" in error and "icecore attach count" in error
    assert cli.job("count").alive


def test_attach_shows_what_comes_from_now_on(cli: Cli) -> None:
    cli.run(
        "run",
        "-d",
        "--name",
        "count",
        "--",
        "/bin/sh",
        "-c",
        "echo early; while ! [ -e go ]; do sleep 0.02; done; echo late; exit 5",
    )
    until(lambda: "early" in cli.run("logs", "count").stdout, "started")
    attached = cli.start("attach", "count")
    assert attached.stderr is not None
    assert "following job count" in attached.stderr.readline()
    (cli.folder / "go").touch()
    out, _ = attached.communicate(timeout=20)
    assert (out, attached.returncode) == ("late\n", 5)
    assert cli.run("wait", "count", status=5).stdout == "count: exited 5\n"


def test_what_cannot_be_forgotten_does_not_keep_the_others(cli: Cli) -> None:
    cli.run("run", "-d", "--name", "count", "--", *COUNT)
    for name in ("first", "second"):
        cli.run("run", "--name", name, "--", "true")
    assert "there is no job nobody" in cli.run("rm", "nobody", status=3).stderr
    done = cli.run("rm", "nobody", "count", "first", "--ended", "0", status=2)
    assert "there is no job nobody" in done.stderr
    assert "count" in done.stderr and "runs" in done.stderr
    assert [line.split(" (")[0] for line in done.stdout.splitlines()] == ["first", "second"]
    assert cli.job("count").alive
    assert [record["job"] for record in cli.events("ps", "-a") if record["event"] == "job"] == [
        "count"
    ]


def test_a_job_that_cannot_be_read_is_said_and_can_be_forgotten(cli: Cli) -> None:
    documented = documented_events()
    for name in ("first", "second"):
        cli.run("run", "--name", name, "--", "true")
    lost = cli.job("second")
    (lost.directory / "job.json").write_text("{}")
    assert f"icecore rm {lost.instance}" in cli.run("ps").stderr
    events = cli.events("ps", "-a")
    for event in events:
        check_event(event, documented)
    assert [event["instance"] for event in events if event["event"] == "job.damaged"] == [
        lost.instance
    ]
    assert [event["job"] for event in events if event["event"] == "job"] == ["first"]
    assert cli.events("wait", lost.instance, status=9)[-1]["class"] == "Damaged"
    cli.run("run", "--name", "third", "--", "true")
    assert cli.run("rm", "--ended", "0").stderr.count(lost.instance) == 2
    assert cli.run("rm", lost.instance).stdout == f"({lost.instance}) forgotten\n"
    assert cli.events("ps", "-a") == [] and not lost.directory.exists()


def test_killing_the_starter_leaves_the_job(cli: Cli) -> None:
    following = cli.start("run", "--name", "count", "--", *COUNT)
    assert following.stdout is not None
    assert following.stdout.readline() == "1\n"
    following.kill()
    following.communicate(timeout=20)
    assert cli.job("count").alive
    cli.run("kill", "count", "-s", "KILL")
    assert not cli.job("count").alive
    assert cli.run("rm", "--ended", "0").stdout.startswith("count (")


@pytest.mark.criu
@pytest.mark.parametrize("moment", ["dump.criu", "dump.store"])
def test_the_next_command_removes_what_a_killed_dump_left(cli: Cli, moment: str) -> None:
    """The dump's guard removes it, unless the guard is killed too."""
    workdir = cli.folder / "workdir"
    workdir.mkdir()
    cli.environment["ICECORE_DUMP_WORKDIR"] = str(workdir)
    cli.run("init")
    cli.run("run", "-d", "--name", "j", "--", "sleep", "1000")
    dump = cli.start("--json", "dump", "j", "--before", "true")
    assert dump.stdout is not None
    while json.loads(dump.stdout.readline())["event"] != moment:
        pass
    guard = [
        int(child)
        for child in Path(f"/proc/{dump.pid}/task/{dump.pid}/children").read_text().split()
        if b"icecore.dumper.freeze.guard_process" in words_of(child)
    ]
    dump.send_signal(signal.SIGSTOP)
    [left] = workdir.iterdir()
    cli.run("ps")
    assert left.is_dir()  # it is in use, even though it does not change
    for pid in (*guard, dump.pid):
        os.kill(pid, signal.SIGKILL)
    dump.communicate(timeout=20)
    until(
        lambda: (
            not [
                entry
                for entry in os.listdir("/proc")
                if entry.isdecimal() and str(left).encode() in words_of(entry)
            ]
        ),
        "over",
    )
    assert left.is_dir()
    [swept] = [event for event in cli.events("ps") if event["event"] == "workdir.swept"]
    check_event(swept, documented_events())
    assert swept["directory"] == str(left) and not left.exists()


def words_of(pid: str) -> bytes:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
