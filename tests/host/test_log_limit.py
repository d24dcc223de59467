"""The limit of logs: what is removed and when, what readers see, and whose files are left alone."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from icecore.errors import UsageError
from icecore.events import Event
from icecore.host.jobs import log_trimming, logs
from icecore.host.jobs.description import describe
from icecore.host.jobs.job import Job
from icecore.host.jobs.log_trimming import read_starts, trim, trim_to, write_starts
from icecore.host.jobs.logs import LogPiece, LogReader, Stream
from icecore.host.jobs.namespaces import Isolation
from icecore.host.jobs.registry import Registry
from icecore.host.kernel import libc
from tests.recorded import through_manifest

from .criu_round import emptied, until

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="jobs need root")

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


def read(
    directory: Path, at: int = 0, most: int = MIB, stream: Stream = "stdout"
) -> list[int | bytes]:
    """Return what a reader sees: how much was removed, and what is there, neighbours joined."""
    found: list[int | bytes] = []
    with LogReader(directory, stream, at) as reader:
        while piece := reader.read(most):
            if piece.removed:
                found.append(piece.removed)
            if found and isinstance(found[-1], bytes):
                found[-1] += piece.data
            elif piece.data:
                found.append(piece.data)
    return found


def first_data(log: Path) -> int:
    """Return where the data of a log begin."""
    with open(log, "rb") as file:
        return os.lseek(file.fileno(), 0, os.SEEK_DATA)


def append(log: Path, data: bytes) -> None:
    with open(log, "ab") as file:
        file.write(data)


def instance(directory: Path) -> Path:
    """Return the directory of an instance whose logs have a limit and are empty."""
    directory.mkdir(mode=0o700)
    for name in ("stdout", "stderr"):
        (directory / f"{name}.log").touch(mode=0o600)
    write_starts(directory, {})
    return directory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return the directory of an instance whose logs have a limit and are empty."""
    return instance(tmp_path / "instance")


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with emptied(Registry(tmp_path / "state")) as registry:
        yield registry


@needs_root
@pytest.mark.criu
def test_the_oldest_output_is_removed_while_the_job_writes_and_others_follow(
    registry: Registry, tmp_path: Path
) -> None:
    words = ["sh", "-c", WRITER, "sh", str(tmp_path)]
    job = registry.start(words, name="writer", log_limit=256 * KIB)
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
        assert read_starts(job.directory) == {"stdout": (part + 1) * MIB - 256 * KIB}
    assert seen == numbered(3)
    first, *others = registry.find("writer").logs()
    assert first.removed == 3 * MIB - 256 * KIB
    assert first.data == seen[first.removed :]
    assert not any(piece.removed for piece in others)
    assert job.log_sizes() == {"stdout": 3 * MIB, "stderr": 0}
    assert [piece.data for piece in job.logs_after({"stdout": 3 * MIB - 16}, follow=False)] == [
        seen[-16:]
    ]


@needs_root
@pytest.mark.criu
def test_a_limit_is_a_number_of_bytes(registry: Registry) -> None:
    for wrong in (-1, 1 << 56):
        with pytest.raises(UsageError, match="invalid log limit"):
            registry.start(["true"], log_limit=wrong)
    job = registry.start(["true"])
    job.wait(10)
    assert job.description.log_limit == 0 and not [*job.directory.glob("*.start")]


@pytest.mark.parametrize(
    ("size", "start", "limit", "end"),
    [
        (0, 0, 1 * MIB, 0),
        (68 * KIB - 1, 0, 4 * KIB, 0),
        (68 * KIB, 0, 4 * KIB, 64 * KIB),
        (1 * MIB + 128 * KIB - 1, 0, 1 * MIB, 0),
        (1 * MIB + 128 * KIB, 0, 1 * MIB, 128 * KIB),
        (2 * MIB, 1 * MIB - 64 * KIB, 1 * MIB, 1 * MIB - 64 * KIB),  # an eighth is missing
        (2 * MIB, 1 * MIB - 128 * KIB, 1 * MIB, 1 * MIB),
        (1 * MIB + 1234, 0, 100_000, (1 * MIB + 1234 - 100_000) // 4096 * 4096),
        (10, 512 * KIB, 64 * KIB, 512 * KIB),  # the job has truncated it
    ],
)
def test_little_is_not_removed(size: int, start: int, limit: int, end: int) -> None:
    """Less than an eighth of the limit, or than 64 KiB."""
    assert trim_to(size, start, limit) == end


def test_both_logs_are_trimmed(directory: Path) -> None:
    for stream in logs.STREAMS:
        (directory / f"{stream}.log").write_bytes(b"x" * MIB)
    trim(directory, 256 * KIB)
    for stream in logs.STREAMS:
        assert read(directory, stream=stream) == [768 * KIB, b"x" * (256 * KIB)]
        assert first_data(directory / f"{stream}.log") > 0
    assert read_starts(directory) == {"stdout": 768 * KIB, "stderr": 768 * KIB}


def test_a_large_hole_is_made_in_steps(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the lock in between, and not more than so much in one call."""
    monkeypatch.setattr(log_trimming, "_STEP_BYTES", 128 * KIB)
    log = directory / "stdout.log"
    log.write_bytes(b"x" * (2 * MIB))
    really, steps = libc.punch, list[tuple[int, int]]()

    def punched(descriptor: int, offset: int, length: int) -> None:
        steps.append((offset, length))
        really(descriptor, offset, length)

    monkeypatch.setattr(libc, "punch", punched)
    trim(directory, 1 * MIB, 512 * KIB)
    assert steps == [(n * 128 * KIB, 128 * KIB) for n in range(4)]
    assert read(directory) == [512 * KIB, b"x" * (1536 * KIB)]
    trim(directory, 1 * MIB)
    assert read(directory) == [MIB, b"x" * MIB]


def test_a_block_of_which_a_part_is_removed_is_punched_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZFS, for example, has blocks of 128 KiB, which are data as long as a byte of them is."""
    append(directory / "stdout.log", b"x" * (10 * MIB + 124 * KIB))
    first, punch, punches = log_trimming._first_data, libc.punch, list[tuple[int, int]]()

    def punched(log: int, at: int, length: int) -> None:
        punches.append((at, length))
        punch(log, at, length)

    monkeypatch.setattr(
        log_trimming, "_first_data", lambda log, size: first(log, size) // (128 * KIB) * 128 * KIB
    )
    monkeypatch.setattr(libc, "punch", punched)
    trim(directory, 512 * KIB)
    assert len(punches) == 1 and sum(punches[0]) == 9 * MIB + 636 * KIB
    trim(directory, 512 * KIB)
    assert len(punches) <= 2


def test_a_file_system_that_shows_no_holes_is_reported(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of a restored job may lie on one."""
    append(directory / "stdout.log", b"x" * (20 * MIB))
    monkeypatch.setattr(log_trimming, "_first_data", lambda log, size: 0)
    with pytest.raises(OSError, match="finds no holes"):
        trim(directory, MIB)


def test_what_the_job_has_written_is_shown_even_if_it_is_a_hole(directory: Path) -> None:
    """Only what was removed is left out: not zeros that follow it, nor a sparse region."""
    log = directory / "stdout.log"
    with open(log, "wb") as file:
        file.write(b"a" * (512 * KIB) + bytes(256 * KIB) + b"b" * 5000)
        file.truncate(MIB)
        file.seek(0, os.SEEK_END)
        file.write(b"end")
    written = log.read_bytes()
    trim(directory, 512 * KIB)
    assert read(directory) == [512 * KIB, written[512 * KIB :]]
    # A restore brings zeros back as a hole.
    restored = directory.with_name("restored")
    restored.mkdir(mode=0o700)
    write_starts(restored, {"stdout": 512 * KIB})
    with open(restored / "stdout.log", "wb") as file:
        for at in range(0, len(written), 4096):
            file.seek(at)
            if at >= 512 * KIB and written[at : at + 4096].strip(b"\0"):
                file.write(written[at : at + 4096])
    assert read(restored) == [512 * KIB, written[512 * KIB :]]


def test_a_log_without_a_limit_is_read_unchanged(tmp_path: Path) -> None:
    """Holes, zeros, and through a link, as an administrator may leave behind who has moved it."""
    log = tmp_path / "stdout.log"
    with open(log, "wb") as file:
        file.truncate(MIB)
        file.seek(MIB)
        file.write(b"end")
    assert read(tmp_path) == [bytes(MIB) + b"end"]
    log.rename(tmp_path / "moved")
    log.symlink_to("moved")
    assert read(tmp_path, MIB) == [b"end"]


def test_a_log_that_the_job_has_truncated(directory: Path) -> None:
    """``echo > /dev/stdout`` in a shell does that."""
    log = directory / "stdout.log"
    log.write_bytes(b"x" * (4 * MIB))
    trim(directory, MIB)
    os.truncate(log, 0)
    assert read(directory) == []
    assert read(directory, 3 * MIB) == []
    assert read_starts(directory) == {}
    append(log, b"new" * 1000)
    assert read(directory) == [b"new" * 1000]
    append(log, b"y" * (2 * MIB))
    trim(directory, MIB)
    removed = (2 * MIB + 3000 - MIB) // 4096 * 4096
    assert read(directory) == [removed, b"y" * (2 * MIB + 3000 - removed)]


def test_a_log_that_the_job_truncates_while_it_is_read(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = directory / "stdout.log"
    log.write_bytes(b"x" * MIB)
    trim(directory, 256 * KIB)
    really = os.lseek

    def truncating(descriptor: int, offset: int, how: int) -> int:
        if how == os.SEEK_HOLE:
            os.truncate(log, 0)
        return really(descriptor, offset, how)

    monkeypatch.setattr(os, "lseek", truncating)
    assert read(directory) == []


def test_a_log_into_whose_hole_the_job_writes(directory: Path) -> None:
    """It can open its output anew, without O_APPEND."""
    log = directory / "stdout.log"
    log.write_bytes(b"x" * MIB)
    trim(directory, 256 * KIB)
    with open(log, "r+b") as file:
        file.seek(256 * KIB)
        file.write(b"y" * (128 * KIB))
    for most in (MIB, 1000):
        assert read(directory, most=most) == [
            256 * KIB,
            b"y" * (128 * KIB),
            384 * KIB,
            b"x" * (256 * KIB),
        ]


def test_a_slow_reader_is_told_what_it_has_missed(directory: Path) -> None:
    log = directory / "stdout.log"
    log.write_bytes(b"x" * MIB)
    with LogReader(directory, "stdout") as reader:
        assert reader.read(1000) == LogPiece("stdout", b"x" * 1000)
        trim(directory, 256 * KIB)
        assert reader.read(1000) == LogPiece("stdout", b"x" * 1000, 768 * KIB - 1000)
        assert reader.read(MIB) == LogPiece("stdout", b"x" * (256 * KIB - 1000))
        assert reader.read(MIB) is None


def test_a_reader_sees_no_hole_that_is_being_made(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any moment: before, while and after it is made, and in the middle of a read."""
    log = directory / "stdout.log"
    log.write_bytes(b"x" * MIB)
    punch, pread = libc.punch, os.pread

    def punched(descriptor: int, offset: int, length: int) -> None:
        monkeypatch.setattr(os, "pread", pread)
        assert read(directory) == [b"x" * MIB]  # the start is recorded, the hole is not made
        punch(descriptor, offset + length // 2, length - length // 2)  # from the end, as ext4
        assert read(directory, most=2 * MIB) == [
            b"x" * (length // 2), length - length // 2, b"x" * (MIB - length),
        ]  # fmt: skip
        punch(descriptor, offset, length)

    monkeypatch.setattr(libc, "punch", punched)

    def during(descriptor: int, size: int, offset: int) -> bytes:
        data = pread(descriptor, size, offset)
        trim(directory, 256 * KIB)  # the next reads are not disturbed
        return data

    monkeypatch.setattr(os, "pread", during)
    assert read(directory) == [768 * KIB, b"x" * (256 * KIB)]


def test_zeros_that_are_being_made_are_not_shown(directory: Path) -> None:
    log, over, failed = directory / "stdout.log", threading.Event(), list[OSError]()
    line = b"%015d\n"

    def write() -> None:
        number = 0
        with open(log, "ab", 0) as file:
            while not over.is_set() and number < 4 << 20:  # 64 MiB
                file.write(b"".join(line % (number + n) for n in range(8192)))
                number += 8192

    def remove() -> None:
        try:
            while not over.is_set():
                trim(directory, 4096)
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=target) for target in (write, remove)]
    for thread in threads:
        thread.start()
    gaps, deadline = 0, time.monotonic() + 20
    try:
        while gaps < 8 and time.monotonic() < deadline:
            at = 0
            with LogReader(directory, "stdout") as reader:
                while piece := reader.read(64 * KIB):
                    at += piece.removed
                    gaps += bool(piece.removed)
                    expected = range(at // 16, -(-(at + len(piece.data)) // 16))
                    text = b"".join(line % number for number in expected)
                    assert text[at % 16 :].startswith(piece.data)
                    at += len(piece.data)
    finally:
        over.set()
        for thread in threads:
            thread.join(20)
    assert not failed and gaps >= 8


def test_only_trimmers_wait_for_one_that_is_stopped(directory: Path) -> None:
    """Not even these do: they leave it for the next time."""
    log = directory / "stdout.log"
    log.write_bytes(b"x" * MIB)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        trim(directory, 256 * KIB)
        assert read(directory) == [b"x" * MIB]
        assert read_starts(directory) == {}
    finally:
        os.close(descriptor)
    trim(directory, 256 * KIB)
    assert read_starts(directory) == {"stdout": 768 * KIB}


def test_what_was_not_removed_is_shown_and_removed_later(directory: Path) -> None:
    """The process that was to remove it was killed in between."""
    (directory / "stdout.log").write_bytes(b"x" * MIB)
    os.truncate(directory / "stdout.start", 512 * KIB)
    assert read(directory) == [b"x" * MIB]
    trim(directory, 512 * KIB)
    assert read(directory) == [512 * KIB, b"x" * (512 * KIB)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EOPNOTSUPP])
def test_a_hole_that_cannot_be_made(
    directory: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A part of it may have been. The other log is trimmed all the same."""
    for stream in logs.STREAMS:
        (directory / f"{stream}.log").write_bytes(b"x" * MIB)
    really, calls = libc.punch, list[int]()

    def half(descriptor: int, offset: int, length: int) -> None:
        calls.append(descriptor)
        if len(calls) > 1:
            return really(descriptor, offset, length)
        if number == errno.ENOSPC:
            really(descriptor, offset + length // 2, length // 2)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(libc, "punch", half)
    with pytest.raises(OSError, match=os.strerror(number)):
        trim(directory, 256 * KIB)
    assert read(directory, stream="stderr") == [768 * KIB, b"x" * (256 * KIB)]
    if number == errno.ENOSPC:
        assert read(directory) == [b"x" * (384 * KIB), 384 * KIB, b"x" * (256 * KIB)]
    else:
        assert read(directory) == [b"x" * MIB]
        assert "stdout" not in read_starts(directory)
    trim(directory, 256 * KIB)
    assert read(directory) == [768 * KIB, b"x" * (256 * KIB)]


def test_a_log_that_was_deleted(directory: Path) -> None:
    for stream in logs.STREAMS:
        (directory / f"{stream}.log").write_bytes(b"x" * MIB)
    trim(directory, 256 * KIB)
    (directory / "stdout.log").unlink()
    append(directory / "stderr.log", b"y" * MIB)
    trim(directory, 256 * KIB)
    assert read_starts(directory) == {"stderr": 1792 * KIB}


def test_start_offsets_that_no_file_can_have(tmp_path: Path) -> None:
    """A snapshot may name them."""
    write_starts(tmp_path, {"stdout": (1 << 56) - 1})
    assert read_starts(tmp_path) == {}


# -- a file system without holes


@pytest.fixture
def ramfs(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "ramfs"
    place.mkdir()
    subprocess.run(["mount", "-t", "ramfs", "none", place], check=True, timeout=20)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True, timeout=20)


@needs_root
def test_a_limit_is_refused_there(ramfs: Path) -> None:
    registry = Registry(ramfs / "state")
    with pytest.raises(UsageError, match="cannot limit logs below") as caught:
        registry.start(["true"], log_limit=MIB)
    assert "tmpfs" in caught.value.cure
    assert registry.instances() == [] and not [*(ramfs / "state" / "jobs").iterdir()]
    job = registry.start(["true"])
    job.wait(10)


@needs_root
def test_a_restored_log_keeps_all_further_output_there(ramfs: Path) -> None:
    """It has no holes to be found, so zeros stand for what was removed."""
    restored = ramfs / "instance"
    restored.mkdir(mode=0o700)
    write_starts(restored, {"stdout": 3 * MIB})
    for stream in logs.STREAMS:
        (restored / f"{stream}.log").touch()
    log = restored / "stdout.log"
    with open(log, "wb") as file:
        file.seek(3 * MIB)
        file.write(b"x" * MIB)
    assert read(restored) == [3 * MIB, b"x" * MIB]
    about = describe("kept", ["sleep"], "/", Isolation(), [])
    known = Job(restored, replace(about, log_limit=64 * KIB, pid=1))
    said: list[Event] = []
    for _ in range(2):
        known.trim_logs(said.append)
    assert [one.name for one in said] == ["job.trim_failed"]
    assert read(restored) == [3 * MIB, b"x" * MIB]
    assert read_starts(restored) == {"stdout": 3 * MIB}


# -- whose files are left alone


def test_no_other_file_is_punched(directory: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"x" * MIB)
    log = directory / "stdout.log"
    log.unlink()
    log.symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        trim(directory, 64 * KIB)
    assert first_data(other) == 0


def test_no_pipe_is_waited_for(directory: Path) -> None:
    log = directory / "stdout.log"
    log.unlink()
    os.mkfifo(log)
    with pytest.raises(OSError, match="No such device"):
        trim(directory, 64 * KIB)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(OSError, match="not a regular file"):
            trim(directory, 64 * KIB)
    finally:
        os.close(reader)


@needs_root
def test_a_log_is_trimmed_whoever_owns_it(directory: Path) -> None:
    """The job's user, or another to whom a job of root has given its output."""
    log = directory / "stdout.log"
    log.write_bytes(b"x" * MIB)
    os.chown(log, 12345, -1)
    trim(directory, 256 * KIB)
    assert read_starts(directory) == {"stdout": 768 * KIB}


@needs_root
def test_a_directory_of_another_user_is_refused(directory: Path) -> None:
    (directory / "stdout.log").write_bytes(b"x" * MIB)
    os.chown(directory, 12345, -1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        trim(directory, 64 * KIB)
    assert first_data(directory / "stdout.log") == 0


@needs_root
@pytest.mark.criu
def test_an_instance_that_is_being_removed(registry: Registry, directory: Path) -> None:
    with pytest.raises(FileNotFoundError):
        trim(directory / "gone", 1)
    job = registry.start(["true"], log_limit=1)
    job.wait(10)
    registry.remove(job)
    job.trim_logs(lambda event: pytest.fail(event.name))


def test_a_sweep_ends_when_it_is_told_to(registry: Registry) -> None:
    jobs = [registry.start(["true"], name=f"job{n}", log_limit=64 * KIB) for n in range(3)]
    for job in jobs:
        job.wait(10)
        append(job.log_path("stdout"), b"x" * MIB)
    asked: list[bool] = []

    def over() -> bool:
        asked.append(len(asked) == 2)
        return asked[-1]

    registry.trim_logs(over)
    trimmed = [bool(read_starts(job.directory)) for job in registry.instances()]
    assert trimmed == [True, True, False] and asked == [False, False, True]


# -- with snapshots


@needs_root
@pytest.mark.criu
def test_a_restored_instance_keeps_the_limit(registry: Registry) -> None:
    job = registry.start(["seq", "100000"], name="seq", log_limit=64 * KIB)
    job.wait(10)
    registry.trim_logs()
    record, starts = job.record(), read_starts(job.directory)
    record.log_start.update(starts)
    there = through_manifest(record)
    assert (there.log_limit, there.log_start) == (64 * KIB, starts)
    with registry.restoring(there, snapshot="s1") as new:
        assert new.job.description.log_limit == 64 * KIB
        # What a restore writes there is left alone until it is done.
        log: Path = new.job.log_path("stdout")
        size, start = job.log_sizes()["stdout"], starts["stdout"]
        with open(log, "wb") as file:
            file.truncate(size)
            file.seek(start)
            file.write(job.log_path("stdout").read_bytes()[start:])
        assert read(new.job.directory) == read(job.directory)
        append(log, b"x" * MIB)
        registry.trim_logs()
        assert read_starts(new.job.directory) == starts
        restored = new.started(os.getpid())
        try:
            registry.trim_logs()
            assert read_starts(new.job.directory)["stdout"] > starts["stdout"]
        finally:
            Job.load(restored.directory).with_lost(1)  # this process is no job


def test_a_job_without_a_limit_has_none_in_its_snapshots() -> None:
    import json

    from icecore.dumper.phases.commit import recorded_run
    from icecore.host.jobs.namespaces import OWN_FILES, RunRecord
    from icecore.store.format.contract import RUN, encode_records

    files = {name: f"/x/{name}" for name in OWN_FILES}
    record = RunRecord("job", ["sleep"], "/", Isolation(), files, [], b"init")
    fields = json.loads(encode_records(run=recorded_run(record, {}))[RUN])
    assert not {"log_limit", "log_start"} & set(fields)
