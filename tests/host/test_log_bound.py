"""The bound on logs: what is removed and when, what readers see, and whose files are left alone."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from icecore.errors import UsageError
from icecore.events import Event
from icecore.host.jobs import log_bound
from icecore.host.jobs.job import Job, Stream
from icecore.host.jobs.log_bound import HeldLogs, LogReader, make_records, trim
from icecore.host.jobs.namespaces import Isolation
from icecore.host.jobs.registry import Registry
from tests.recorded import through_manifest

from .criu_round import emptied, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="jobs need root")

KIB = 1 << 10
MIB = 1 << 20
#: Writes a MiB of numbered lines, and more whenever there is another file to say so.
WRITER = """
for part in 0 1 2 3; do
    while ! [ -e "$1/$part" ]; do sleep 0.01; done
    seq -f "%015.0f" $((part * 65536)) $((part * 65536 + 65535))
done
sleep 60
"""


def numbered(parts: int) -> bytes:
    """Return what the writer writes."""
    return b"".join(b"%015d\n" % number for number in range(parts * 65536))


def allocated(path: Path) -> int:
    return path.stat().st_blocks * 512


def read(directory: Path, at: int = 0, most: int = MIB, stream: Stream = "stdout") -> list[Any]:
    """Return what a reader sees: how much was removed, and what is there, neighbours joined."""
    found: list[Any] = []
    with LogReader(directory, stream, at) as reader:
        while any(piece := reader.read(most)):
            removed, data = piece
            if removed:
                found.append(removed)
            if found and isinstance(found[-1], bytes):
                found[-1] += data
            elif data:
                found.append(data)
    return found


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return the directory of an instance whose logs have a bound and are empty."""
    made = tmp_path / "instance"
    made.mkdir(mode=0o700)
    for name in ("stdout", "stderr"):
        (made / f"{name}.log").touch(mode=0o600)
    make_records(made, {})
    return made


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with emptied(Registry(tmp_path / "state")) as registry:
        yield registry


@pytest.mark.criu
def test_the_oldest_output_is_removed_while_the_job_writes_and_others_follow(
    registry: Registry, tmp_path: Path
) -> None:
    words = ["sh", "-c", WRITER, "sh", str(tmp_path)]
    job = registry.start(words, name="writer", log_bytes=256 * KIB)
    log = job.log_path("stdout")
    follower = job.logs_after({}, follow=True)
    seen = b""
    for part in range(3):
        (tmp_path / str(part)).touch()
        while len(seen) < (part + 1) * MIB:  # the follower is never behind
            piece = next(follower)
            assert piece.removed == 0
            seen += piece.data
        until(lambda: log.stat().st_size == (part + 1) * MIB)  # noqa: B023
        registry.trim_logs()
        assert log.stat().st_size == (part + 1) * MIB
        assert 256 * KIB <= allocated(log) <= 256 * KIB + 8 * KIB
    assert seen == numbered(3)
    first, *others = registry.find("writer").logs()
    assert first.removed == 3 * MIB - 256 * KIB
    assert first.data == seen[first.removed :]
    assert not any(piece.removed for piece in others)
    assert job.log_sizes() == {"stdout": 3 * MIB, "stderr": 0}
    assert [piece.data for piece in job.logs_after({"stdout": 3 * MIB - 16}, follow=False)] == [
        seen[-16:]
    ]


@pytest.mark.criu
def test_a_bound_is_a_number_of_bytes(registry: Registry) -> None:
    for wrong in (-1, 1 << 63):
        with pytest.raises(UsageError, match="no bound"):
            registry.start(["true"], log_bytes=wrong)
    job = registry.start(["true"])
    job.wait(10)
    assert job.description.log_bytes == 0 and not [*job.directory.glob("*.removed")]


@pytest.mark.parametrize(
    ("bound", "beyond"), [(4 * KIB, 64 * KIB), (512 * KIB, 64 * KIB), (1 * MIB, 128 * KIB)]
)
def test_little_is_not_removed(directory: Path, bound: int, beyond: int) -> None:
    """Less than an eighth of the bound, or than 64 KiB."""
    log = directory / "stderr.log"
    log.write_bytes(b"x" * (bound + beyond - 1))
    assert trim(directory, 0, bound) == ""
    assert allocated(log) >= bound + beyond - 1
    with open(log, "ab") as file:
        file.write(b"x")
    assert trim(directory, 0, bound) == ""
    assert read(directory, stream="stderr") == [beyond, b"x" * bound]
    with open(log, "ab") as file:
        file.write(b"x" * (beyond - 1))
    assert trim(directory, 0, bound) == ""
    assert read(directory, stream="stderr") == [beyond, b"x" * (bound + beyond - 1)]


def test_the_hole_ends_at_a_block(directory: Path) -> None:
    (directory / "stdout.log").write_bytes(b"x" * (MIB + 1234))
    assert trim(directory, 0, 100_000) == ""
    removed, data = read(directory)
    assert removed == (MIB + 1234 - 100_000) // 4096 * 4096
    assert data == b"x" * (MIB + 1234 - removed)


def test_what_the_job_has_written_is_shown_even_if_it_is_a_hole(directory: Path) -> None:
    """Only what was removed is left out: not zeros that follow it, nor a sparse region."""
    log = directory / "stdout.log"
    with open(log, "wb") as file:
        file.write(b"a" * (512 * KIB) + bytes(256 * KIB) + b"b" * 5000)
        file.truncate(MIB)
        file.seek(0, os.SEEK_END)
        file.write(b"end")
    written = log.read_bytes()
    assert trim(directory, 0, 512 * KIB) == ""
    assert read(directory) == [512 * KIB, written[512 * KIB :]]
    # A restore brings zeros back as a hole.
    restored = directory.with_name("restored")
    restored.mkdir(mode=0o700)
    make_records(restored, {"stdout": 512 * KIB})
    with open(restored / "stdout.log", "wb") as file:
        for at in range(0, len(written), 4096):
            file.seek(at)
            if at >= 512 * KIB and written[at : at + 4096].strip(b"\0"):
                file.write(written[at : at + 4096])
    assert allocated(restored / "stdout.log") <= 64 * KIB
    assert read(restored) == [512 * KIB, written[512 * KIB :]]


def test_a_log_without_a_bound_is_read_unchanged(tmp_path: Path) -> None:
    for stream in ("stdout", "stderr"):
        with open(tmp_path / f"{stream}.log", "wb") as file:
            file.truncate(MIB)
            file.seek(MIB)
            file.write(b"end")
    assert read(tmp_path) == [bytes(MIB) + b"end"]


def test_a_log_that_the_job_has_truncated(directory: Path) -> None:
    """``echo > /dev/stdout`` in a shell does that."""
    log = directory / "stdout.log"
    log.write_bytes(b"x" * (4 * MIB))
    assert trim(directory, 0, MIB) == ""
    os.truncate(log, 0)
    assert read(directory) == []
    with open(log, "ab") as file:
        file.write(b"new" * 1000)
    assert read(directory) == [b"new" * 1000]
    with open(log, "ab") as file:
        file.write(b"y" * (2 * MIB))
    assert trim(directory, 0, MIB) == ""
    removed, data = read(directory)
    assert removed == (2 * MIB + 3000 - MIB) // 4096 * 4096
    assert data == b"y" * (2 * MIB + 3000 - removed)


def test_a_log_into_whose_hole_the_job_writes(directory: Path) -> None:
    """It can open its output anew, without O_APPEND."""
    log = directory / "stdout.log"
    log.write_bytes(b"x" * MIB)
    assert trim(directory, 0, 256 * KIB) == ""
    with open(log, "r+b") as file:
        file.seek(64 * KIB)
        file.write(b"y" * 4096)
    left = 1024 - 256 - 64 - 4
    for most in (MIB, 1000):
        assert read(directory, most=most) == [
            64 * KIB,
            b"y" * 4096,
            left * KIB,
            b"x" * (256 * KIB),
        ]


def test_a_slow_reader_is_told_what_it_has_missed(directory: Path) -> None:
    log = directory / "stdout.log"
    log.write_bytes(b"x" * MIB)
    with LogReader(directory, "stdout") as reader:
        assert reader.read(1000) == (0, b"x" * 1000)
        assert trim(directory, 0, 256 * KIB) == ""
        assert reader.read(1000) == (768 * KIB - 1000, b"x" * 1000)
        assert reader.read(MIB) == (0, b"x" * (256 * KIB - 1000))
        assert reader.read(MIB) == (0, b"")


def test_nobody_reads_a_hole_that_is_being_made(directory: Path) -> None:
    log, over = directory / "stdout.log", threading.Event()
    line = b"%015d\n"

    def write() -> None:
        with open(log, "ab", 0) as file:
            number = 0
            while not over.is_set():
                file.write(b"".join(line % (number + n) for n in range(8192)))
                number += 8192

    def remove() -> None:
        while not over.is_set():
            trim(directory, 0, 4096)

    threads = [threading.Thread(target=target) for target in (write, remove)]
    for thread in threads:
        thread.start()
    try:
        gaps = 0
        for _ in range(20):
            at = 0
            with LogReader(directory, "stdout") as reader:
                for _ in range(50):
                    removed, data = reader.read(64 * KIB)
                    at += removed
                    gaps += bool(removed)
                    assert at % 16 == 0 and len(data) % 16 == 0
                    expected = range(at // 16, (at + len(data)) // 16)
                    assert data == b"".join(line % number for number in expected)
                    at += len(data)
    finally:
        over.set()
        for thread in threads:
            thread.join(20)
    assert gaps > 5


def test_nothing_is_removed_while_a_dump_reads_the_logs(directory: Path) -> None:
    log = directory / "stdout.log"
    log.write_bytes(b"x" * MIB)
    assert trim(directory, 0, 512 * KIB) == ""
    held = HeldLogs(directory)
    assert held.removed == {"stdout": 512 * KIB}
    with open(log, "ab") as file:
        file.write(b"x" * MIB)
    assert trim(directory, 0, 512 * KIB) == ""
    assert allocated(log) >= 512 * KIB + MIB
    assert read(directory) == [512 * KIB, b"x" * (512 * KIB + MIB)]  # readers do not wait
    held.release()
    held.release()
    assert trim(directory, 0, 512 * KIB) == ""
    assert allocated(log) <= 520 * KIB


def test_what_was_not_removed_counts_as_there(directory: Path) -> None:
    """The process that was to remove it was killed in between."""
    (directory / "stdout.log").write_bytes(b"x" * MIB)
    os.truncate(directory / "stdout.removed", 512 * KIB)
    held = HeldLogs(directory)
    assert held.removed == {}
    held.release()
    assert read(directory) == [b"x" * MIB]


def test_a_file_system_without_holes_keeps_everything_and_that_is_said_once(
    tmp_path: Path,
) -> None:
    place = tmp_path / "ramfs"
    place.mkdir()
    subprocess.run(["mount", "-t", "ramfs", "none", place], check=True, timeout=20)
    said: list[Event] = []
    try:
        with emptied(Registry(place / "state", emit=said.append)) as own:
            job = own.start(["sh", "-c", "seq 100000; sleep 60"], name="kept", log_bytes=64 * KIB)
            written = "".join(f"{number}\n" for number in range(1, 100001)).encode()
            until(lambda: job.log_path("stdout").stat().st_size == len(written))
            for _ in range(3):
                own.trim_logs()
                assert read(job.directory) == [written]
        assert [(one.name, one.fields["job"]) for one in said] == [("job.logs_kept", "kept")]
    finally:
        subprocess.run(["umount", place], check=True, timeout=20)


# -- whose files are left alone


def test_no_other_file_is_punched(directory: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"x" * MIB)
    log = directory / "stdout.log"
    log.unlink()
    os.link(other, log)
    os.chown(log, 12345, -1)  # of a user to whom the job does not belong
    assert "not the file" in trim(directory, 0, 64 * KIB)
    assert trim(directory, 0, 64 * KIB) == ""  # that was said
    assert allocated(other) >= MIB
    # What takes the place of the log after its size was looked at.
    folder = os.open(directory, os.O_RDONLY)
    try:
        log.unlink()
        log.symlink_to(other)
        with pytest.raises(OSError, match="symbolic links"):
            log_bound._trim(folder, "stdout", 12345, 64 * KIB)
        assert allocated(other) >= MIB
        log.unlink()
        os.mkfifo(log)
        with pytest.raises(OSError, match="No such device"):  # and it does not wait for a reader
            log_bound._trim(folder, "stdout", 0, 64 * KIB)
        reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
        with pytest.raises(Exception, match="not the file"):
            log_bound._trim(folder, "stdout", 0, 64 * KIB)
        os.close(reader)
    finally:
        os.close(folder)


def test_the_logs_of_a_users_job(directory: Path) -> None:
    log = directory / "stdout.log"
    log.write_bytes(b"x" * MIB)
    os.chown(log, 12345, -1)
    assert trim(directory, 12345, 256 * KIB) == ""
    assert allocated(log) <= 264 * KIB


def test_a_directory_of_another_user_is_refused(directory: Path) -> None:
    (directory / "stdout.log").write_bytes(b"x" * MIB)
    os.chown(directory, 12345, -1)
    with pytest.raises(PermissionError):
        trim(directory, 0, 64 * KIB)
    with pytest.raises(PermissionError):
        HeldLogs(directory)
    assert allocated(directory / "stdout.log") >= MIB


def test_an_instance_that_is_being_removed(registry: Registry, directory: Path) -> None:
    with pytest.raises(FileNotFoundError):
        trim(directory / "gone", 0, 1)
    job = registry.start(["true"], log_bytes=1)
    job.wait(10)
    registry.remove(job)
    job.trim_logs(lambda event: pytest.fail(event.name))


# -- with snapshots


@pytest.mark.criu
def test_a_restored_instance_keeps_the_bound(registry: Registry) -> None:
    job = registry.start(["seq", "100000"], name="seq", log_bytes=64 * KIB)
    job.wait(10)
    registry.trim_logs()
    held = HeldLogs(job.directory)
    record = job.record()
    record.log_removed.update(held.removed)
    held.release()
    there = through_manifest(record)
    assert there.log_bytes == 64 * KIB
    with registry.restoring(there, snapshot="s1") as new:
        assert new.job.description.log_bytes == 64 * KIB
        # What a restore writes there is left alone until it is done.
        log: Path = new.job.log_path("stdout")
        size, gone = job.log_sizes()["stdout"], held.removed["stdout"]
        with open(log, "wb") as file:
            file.truncate(size)
            file.seek(gone)
            file.write(job.log_path("stdout").read_bytes()[gone:])
        assert read(new.job.directory) == read(job.directory)
        with open(log, "ab") as file:
            file.write(b"x" * MIB)
        registry.trim_logs()
        assert allocated(log) >= MIB
        restored = new.started(os.getpid())
        try:
            registry.trim_logs()
            assert allocated(log) <= 72 * KIB
        finally:
            Job.load(restored.directory).with_lost(1)  # this process is no job


def test_a_job_without_a_bound_has_none_in_its_snapshots() -> None:
    from icecore.dumper.phases.commit import recorded_run
    from icecore.host.jobs.namespaces import OWN_FILES, RunRecord
    from icecore.store.format.contract import RUN, encode_records

    files = {name: f"/x/{name}" for name in OWN_FILES}
    record = RunRecord("job", ["sleep"], "/", Isolation(), files, [], b"init")
    assert "log_" not in encode_records(run=recorded_run(record))[RUN]
