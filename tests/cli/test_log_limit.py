"""``icecore run --log-limit``: what the commands remove and say, and snapshots of such a job."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from icecore.host.jobs.job import Job
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


def allocated(job: Job) -> int:
    return job.log_path("stdout").stat().st_blocks * 512


def wait_written(job: Job, size: int) -> Path:
    log = job.log_path("stdout")
    until(lambda: log.stat().st_size == size, f"{size} bytes written")
    return log


def test_logs_and_attach_of_a_job_that_nobody_else_follows(cli: Cli) -> None:
    cli.run("run", "-d", "--name", "w", "--log-limit", "64 KiB", *writer(cli, 16384))
    job = cli.job("w")
    assert job.description.log_limit == 64 * KIB
    wait_written(job, MIB)
    assert allocated(job) >= MIB
    done = cli.run("logs", "w")
    assert numbers(done.stdout) == [*range(16384 - 1024, 16384)]
    assert allocated(job) <= 72 * KIB
    assert done.stderr.splitlines() == [
        "note: 960 KiB of stdout of job w were removed (--log-limit)"
    ]
    assert cli.run("logs", "w", "--stream", "stderr").stderr == ""
    events, documented = cli.events("logs", "w"), documented_events()
    for event in events:
        check_event(event, documented)
    first, *rest = events
    assert (first["event"], first["stream"], first["bytes"]) == (
        "job.output_removed",
        "stdout",
        960 * KIB,
    )
    assert "".join(event["text"] for event in rest) == done.stdout
    # What comes later is shown at its place, and nothing is said of what was seen before.
    attached = cli.start("attach", "w")
    assert attached.stderr is not None
    attached.stderr.readline()
    (cli.folder / "more1").touch()
    wait_written(job, 2 * MIB)
    (cli.folder / "end").touch()
    out, error = attached.communicate(timeout=SECONDS)
    assert (numbers(out), error, attached.returncode) == ([*range(16384, 32768)], "", 3)
    assert allocated(job) <= 72 * KIB


def test_the_foreground_trims_although_nobody_reads_its_output(cli: Cli) -> None:
    running = cli.start("run", "--name", "w", "--log-limit", "64 KiB", *writer(cli, 65536))
    until(lambda: any(job.alive for job in cli.registry.instances()), "started")
    job = cli.job("w")
    wait_written(job, 4 * MIB)
    until(lambda: allocated(job) <= 72 * KIB, "trimmed")
    (cli.folder / "end").touch()
    out, error = running.communicate(timeout=SECONDS)
    assert running.returncode == 3 and "\0" not in out
    assert "of stdout of job w were removed" in error
    shown = numbers(out)  # the hole ends at a block, not at a line, but blocks hold whole lines
    assert shown == sorted(set(shown)) and shown[-1] == 65535


def test_the_bound_can_be_configured_and_is_off_by_default(cli: Cli) -> None:
    cli.run("run", "--name", "a", "--", "true", ICECORE_RUN_LOG_LIMIT="2 MiB")
    assert cli.job("a").description.log_limit == 2 * MIB
    cli.run("run", "--name", "b", "--log-limit", "0", "--", "true", ICECORE_RUN_LOG_LIMIT="2 MiB")
    assert cli.job("b").description.log_limit == 0
    cli.run("run", "--name", "c", "--", "seq", "300000")
    job = cli.job("c")
    assert job.description.log_limit == 0
    cli.run("logs", "c")
    assert allocated(job) >= job.log_sizes()["stdout"] > MIB


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
    assert allocated(job) <= 264 * KIB
    (details,) = [one for one in cli.events("show", "w", "--all") if one.get("path") == str(log)]
    assert details["bytes"] == 4 * MIB
    for name in ("second", "third"):
        cli.run("restore", "w", "--name", name)
        other = cli.job(name)
        assert other.description.log_limit == 256 * KIB
        assert other.log_sizes() == {"stdout": 4 * MIB, "stderr": 0}
        assert allocated(other) <= 264 * KIB
        first = next(other.logs())
        assert (first.removed, first.data) == (gone, written[gone:])
    # It goes on where it was, and is trimmed on.
    (cli.folder / "more1").touch()
    other = cli.job("second")
    wait_written(other, 8 * MIB)
    shown = cli.run("logs", "second")
    assert numbers(shown.stdout) == [*range(131072 - 4096, 131072)]
    assert allocated(other) <= 264 * KIB
    # Of the log, a snapshot stores what is left.
    wait_written(job, 8 * MIB)
    cli.run("dump", "w")
    totals = [one for one in cli.events("diff", "w~1", "w") if one["event"] == "diff.total"]
    assert [one["logical"] for one in totals if one["space"] == "file"] == [256 * KIB]


@pytest.mark.usefixtures("needs_criu")
def test_a_dump_that_cannot_tell_what_was_removed_fails_and_the_job_goes_on(cli: Cli) -> None:
    cli.run("init")
    cli.run("run", "-d", "--name", "w", "--log-limit", "64 KiB", *writer(cli, 16384))
    job = cli.job("w")
    wait_written(job, MIB)
    os.chown(job.directory, 12345, -1)
    done = cli.run("dump", "w", status=5)
    assert "logs of job w" in done.stderr
    os.chown(job.directory, 0, -1)
    (cli.folder / "more1").touch()
    wait_written(job, 2 * MIB)
    cli.run("dump", "w")
    assert allocated(job) <= 72 * KIB


@pytest.mark.usefixtures("needs_criu")
def test_a_supervisor_trims_although_nobody_reads_its_output(cli: Cli) -> None:
    cli.run("init")
    words = ("run", "--name", "w", "--resume", "--log-limit", "64 KiB", *writer(cli, 65536))
    for size in (4 * MIB, 8 * MIB):  # started, then brought back
        process = cli.start(*words)
        until(lambda: any(job.alive for job in cli.registry.instances()), "started")
        job = cli.job("w")
        if size > 4 * MIB:
            (cli.folder / "more1").touch()
        wait_written(job, size)
        until(lambda: allocated(job) <= 72 * KIB, "trimmed")  # noqa: B023
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=SECONDS)
        assert process.returncode == 85 and "\0" not in out, error
        assert "of stdout of job w were removed" in error
        shown = numbers(out)
        assert shown == sorted(set(shown)) and shown[-1] == size // LINE - 1
        assert shown[0] >= (size - 4 * MIB) // LINE
