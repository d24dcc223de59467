"""``icecore run --log-limit``: what the commands remove and say, and snapshots of such a job."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest

from icecore.commands.event_text import describe
from icecore.commands.job_output import OutputWriter
from icecore.events import Event
from icecore.host.jobs.job import Job
from icecore.host.jobs.log_trimming import read_starts
from icecore.host.jobs.logs import LogPiece
from tests.cli.conftest import SECONDS, Cli, until
from tests.cli.documents import check_event, documented_events

pytestmark = [
    pytest.mark.criu,
    pytest.mark.skipif(os.geteuid() != 0, reason="jobs need root"),
]

KIB, MIB = 1 << 10, 1 << 20
#: Writes as many lines of 64 bytes that cannot be compressed as its argument says, and again when
#: asked by a file, and ends when asked by another.
WRITER = """
import os, sys, time
count, part = int(sys.argv[1]), 0
while not os.path.exists("end"):
    if not part or os.path.exists(f"more{part}"):
        sys.stdout.write("".join(f"{os.urandom(27).hex()} {n:08d}\\n" for n in range(count * part, count * (part + 1))))
        sys.stdout.flush()
        part += 1
    time.sleep(0.01)
sys.exit(3)
"""
LINE = 64


def writer(cli: Cli, count: int) -> list[str]:
    """Return the command that writes so many lines at once."""
    program = cli.folder / "writer.py"
    program.write_text(WRITER)
    return ["--", sys.executable, str(program), str(count)]


def numbers(text: str) -> list[int]:
    return [int(line.split()[1]) for line in text.splitlines()]


def start(job: Job) -> int:
    """Return how much of stdout was removed."""
    return read_starts(job.directory).get("stdout", 0)


def wait_written(job: Job, size: int) -> Path:
    log = job.log_path("stdout")
    until(lambda: log.stat().st_size == size, f"{size} bytes written")
    return log


def test_commands_that_show_output_remove_none(cli: Cli) -> None:
    words = ("run", "-d", "--name", "w", "--log-limit", "64 KiB", *writer(cli, 16384))
    started = cli.run(*words)
    assert "warning: only dumps trim the logs of job w (--log-limit)" in started.stderr
    job = cli.job("w")
    assert job.description.log_limit == 64 * KIB
    wait_written(job, MIB)
    assert numbers(cli.run("logs", "w").stdout) == [*range(16384)]
    attached = cli.start("attach", "w")
    assert attached.stderr is not None
    attached.stderr.readline()
    (cli.folder / "more1").touch()
    wait_written(job, 2 * MIB)
    (cli.folder / "end").touch()
    out, error = attached.communicate(timeout=SECONDS)
    assert (numbers(out), error, attached.returncode) == ([*range(16384, 32768)], "", 3)
    assert start(job) == 0


def test_what_was_removed_is_reported(cli: Cli) -> None:
    cli.run("run", "--name", "w", "--log-limit", "64 KiB", "--", "seq", "-f", "%015.0f", "65536")
    job = cli.job("w")
    log, start_of_rest = job.log_path("stdout"), MIB - 64 * KIB
    job.log_path("stderr").write_bytes(b"error\n")
    cli.registry.trim_logs()
    assert start(job) == start_of_rest
    done = cli.run("logs", "w", "--stream", "stderr")
    assert (done.stdout, done.stderr) == ("", "error\n")
    events, documented = cli.events("logs", "w", "--stream", "stdout"), documented_events()
    for event in events:
        check_event(event, documented)
    first, *rest = events
    assert (first["event"], first["stream"], first["bytes"]) == (
        "job.output_skipped",
        "stdout",
        960 * KIB,
    )
    text = "".join(event["text"] for event in rest)
    assert text.encode() == log.read_bytes()[start_of_rest:]


def test_no_character_is_made_of_two_sides_of_a_gap() -> None:
    job = mock.Mock()
    job.name = "w"
    context = mock.Mock()
    context.output.as_json = True
    writer = OutputWriter(job, context, "both")
    writer.write(LogPiece("stdout", b"a\xe2\x82"))
    writer.write(LogPiece("stdout", b"\xacb", 10))
    results = [call.args for call in context.output.result.call_args_list]
    assert [fields.get("text", fields.get("bytes")) for _, fields in results] == [
        "a",
        "\udce2\udc82",
        10,
        "\udcacb",
    ]


def test_the_limit_can_be_configured_and_is_off_by_default(cli: Cli) -> None:
    cli.run("run", "--name", "a", "--", "true", ICECORE_RUN_LOG_LIMIT="2 MiB")
    assert cli.job("a").description.log_limit == 2 * MIB
    done = cli.run(
        "run", "--name", "b", "--log-limit", "0", "--", "true", ICECORE_RUN_LOG_LIMIT="2 MiB"
    )
    assert cli.job("b").description.log_limit == 0 and done.stderr == ""


def test_a_failure_to_trim_is_described() -> None:
    event = Event("job.trim_failed", {"job": "w", "instance": "i", "error": "[Errno 1] no"})
    assert describe(event) == ["warning: cannot trim the logs of job w: [Errno 1] no"]


@pytest.mark.usefixtures("needs_criu")
def test_a_snapshot_has_the_hole_and_its_instances_too(cli: Cli) -> None:
    """The dump makes the hole before its window, and stores only what is left."""
    cli.run("init")
    cli.run("run", "-d", "--name", "w", "--log-limit", "256 KiB", *writer(cli, 65536))
    job = cli.job("w")
    log = wait_written(job, 4 * MIB)
    written = log.read_bytes()
    gone = 4 * MIB - 256 * KIB
    cli.run("dump", "w")
    assert start(job) == gone
    (details,) = [one for one in cli.events("show", "w", "--all") if one.get("path") == str(log)]
    assert details["bytes"] == 4 * MIB
    cli.run("restore", "w", "--name", "second")
    other = cli.job("second")
    assert other.description.log_limit == 256 * KIB
    assert other.log_sizes() == {"stdout": 4 * MIB, "stderr": 0}
    assert start(other) == gone
    first = next(other.logs())
    assert (first.removed, first.data) == (gone, written[gone:])
    # It goes on where it was, and is trimmed on. Of the log, a snapshot stores what is left.
    (cli.folder / "more1").touch()
    wait_written(job, 8 * MIB)
    cli.run("dump", "w")
    assert start(job) == 8 * MIB - 256 * KIB
    totals = [one for one in cli.events("diff", "w~1", "w") if one["event"] == "diff.total"]
    assert [one["logical"] for one in totals if one["space"] == "file"] == [256 * KIB]


@pytest.mark.usefixtures("needs_criu")
def test_a_dump_needs_neither_the_logs_nor_their_lock(cli: Cli) -> None:
    """Somebody has deleted a log, and another process that trims is stopped."""
    cli.run("init")
    cli.run("run", "-d", "--name", "w", "--log-limit", "64 KiB", *writer(cli, 16384))
    job = cli.job("w")
    wait_written(job, MIB)
    descriptor = os.open(job.directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        cli.run("dump", "w")
        assert start(job) == 0
    finally:
        os.close(descriptor)
    cli.run("dump", "w")
    assert start(job) == MIB - 64 * KIB


@pytest.mark.usefixtures("needs_criu")
def test_dumps_while_the_logs_are_trimmed(cli: Cli) -> None:
    """Whatever was removed in their windows: what is shown stands at its place."""
    cli.run("init")
    count = 512
    cli.run("run", "-d", "--name", "w", "--log-limit", "64 KiB", *writer(cli, count))
    job, over = cli.job("w"), threading.Event()

    def trim() -> None:
        part = 1
        while not over.wait(0.003):
            job.trim_logs(lambda event: None)
            if job.log_sizes()["stdout"] == count * LINE * part:
                (cli.folder / f"more{part}").touch()
                part += 1

    trimming = threading.Thread(target=trim)
    trimming.start()
    try:
        for _ in range(2):
            cli.run("dump", "w")
    finally:
        over.set()
        trimming.join(SECONDS)
    for number, snapshot in enumerate(("w~1", "w")):
        cli.run("restore", snapshot, "--name", f"r{number}")
        at = 0
        for piece in cli.job(f"r{number}").logs():
            at += piece.removed
            assert b"\0" not in piece.data and at % LINE == 0
            shown = numbers(piece.data[: len(piece.data) // LINE * LINE].decode())
            assert shown == [*range(at // LINE, at // LINE + len(shown))]
            at += len(piece.data)
        assert at > 0


@pytest.mark.usefixtures("needs_criu")
def test_a_supervisor_trims_although_nobody_reads_its_output(cli: Cli) -> None:
    cli.run("init")
    for size, limit in ((4 * MIB, "64 KiB"), (8 * MIB, "1 GiB")):  # started, then brought back
        words = ("run", "--name", "w", "--resume", "--log-limit", limit, *writer(cli, 65536))
        process = cli.start(*words)
        until(lambda: any(job.alive for job in cli.registry.instances()), "started")
        job = cli.job("w")
        if size > 4 * MIB:
            (cli.folder / "more1").touch()
        wait_written(job, size)
        until(lambda: size - start(job) < 128 * KIB, "trimmed")  # noqa: B023
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=SECONDS)
        assert process.returncode == 85 and "\0" not in out, error
        assert "of stdout, removed by --log-limit" in error
        ignored = "job w keeps its log limit (64.0 KiB); --log-limit is ignored" in error
        assert ignored == (size > 4 * MIB), error
        shown = numbers(out)
        assert shown == sorted(set(shown)) and shown[-1] == size // LINE - 1
        assert shown[0] >= (size - 4 * MIB) // LINE
