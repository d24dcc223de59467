"""The content of a job's data directories is part of its snapshots: a restore brings back what the
job has long closed, replaced, removed or added, as it was in the window.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from icecore.dumper.dump import DumpResult, dump
from icecore.dumper.options import DumpOptions
from icecore.dumper.target import Target
from icecore.errors import DumpFailed, NotFound, RestoreFailed, RestoreRefused, UsageError
from icecore.events import Event, Sink, discard
from icecore.host.jobs.identity import Identity
from icecore.host.jobs.job import Job
from icecore.host.jobs.registry import Registry
from icecore.host.kernel.listing import TooMany, walk
from icecore.restorer.options import RestoreOptions
from icecore.restorer.restore import check, restore
from icecore.snapshots.difference import compare
from icecore.store.backend.local import LocalBackend
from icecore.store.format.data import read_data
from icecore.store.log.repository import StoredRepository
from icecore.store.maintenance.check import check as verify
from icecore.store.replication.transfer import copy
from icecore.store.snapshot.reader import SnapshotReader
from tests.coarse import begin_of_second, mounted_with_seconds
from tests.dumper.world import Events
from tests.host.target import eventually
from tests.roundtrip.conftest import Trip
from tests.store.miniature import collect

pytestmark = pytest.mark.criu

#: Keeps a counter in memory, in a closed file that it replaces, in one that it has open, and in the
#: number of segments; none may differ from the others.
JOB = """
import os, sys, time
one, two = sys.argv[1:]
log = open(f"{one}/log", "a", buffering=1)
number = 0
while True:
    number += 1
    with open(f"{one}/count.new", "w") as file:
        file.write(str(number))
    os.rename(f"{one}/count.new", f"{one}/count")
    with open(f"{two}/segment-{number}", "w") as file:
        file.write(f"{number}\\n" * number)
    if number > 5:
        os.unlink(f"{two}/segment-{number - 5}")
    log.write(f"{number}\\n")
    print(number, flush=True)
    time.sleep(0.01)
"""


@dataclass
class World:
    """A job with two data directories."""

    trip: Trip
    registry: Registry
    top: Path

    @property
    def one(self) -> Path:
        return self.top / "one"

    @property
    def two(self) -> Path:
        return self.top / "two"

    def start(self) -> Job:
        words = [sys.executable, "-c", JOB, str(self.one), str(self.two)]
        job = self.registry.start(words, name="data", cwd="/", data=[self.one, self.two])
        assert eventually(lambda: self.number(job) > 7), job.log_path("stderr").read_text()
        return job

    def number(self, job: Job) -> int:
        return int((job.log_path("stdout").read_text().split() or ["0"])[-1])

    def dump(self, job: Job, *, emit: Sink = discard, **options: object) -> DumpResult:
        target = Target(job.pid, job.name, record=job.record())
        chosen = DumpOptions(**options)  # type: ignore[arg-type]
        trip = self.trip
        return dump(trip.repository, trip.loop, target, chosen, criu=trip.criu, emit=emit)

    def restore(self, snapshot: str, **options: object) -> Job:
        chosen = RestoreOptions(**options)  # type: ignore[arg-type]
        trip = self.trip
        restored = restore(
            trip.repository, trip.loop, snapshot, chosen, criu=trip.criu, registry=self.registry
        )
        restored.wait_resident(60)
        assert restored.job is not None
        return restored.job

    def planned(self, snapshot: str) -> dict[str, str]:
        trip = self.trip
        found = check(trip.repository, trip.loop, snapshot, criu=trip.criu, registry=self.registry)
        assert not found.failed, found.failed
        prefix = f"{self.top}/"
        return {
            action.file.path.removeprefix(prefix): action.kind for action in found.files.actions
        }

    def end(self, job: Job) -> None:
        job.kill(9)
        job.wait(20)

    def assert_one_moment(self, job: Job) -> None:
        """A job is killed: memory, files that it had closed and a file that it had open agree."""
        self.end(job)
        last = self.number(job)
        logged = [int(line) for line in (self.one / "log").read_text().split()]
        count = int((self.one / "count").read_text())
        assert logged == list(range(1, logged[-1] + 1))
        # Killed within one turn of the loop.
        assert last <= logged[-1] <= count <= last + 1
        numbers = sorted(int(name.name.split("-")[1]) for name in self.two.iterdir())
        assert numbers[-1] in (count - 1, count) and len(numbers) in (5, 6)
        for number in numbers[:-1]:
            assert (self.two / f"segment-{number}").read_text() == f"{number}\n" * number


@pytest.fixture
def world(trip: Trip, tmp_path: Path) -> Iterator[World]:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="ice-data-") as name:
        made = World(trip, Registry(tmp_path / "jobs"), Path(name))
        made.one.mkdir()
        made.two.mkdir()
        try:
            yield made
        finally:
            for job in made.registry.instances():
                if job.alive:
                    made.end(job)


def still(top: Path) -> dict[str, tuple[object, ...]]:
    """All below a directory, with times, and which names are one file."""
    found: dict[str, tuple[object, ...]] = {}
    first: dict[int, str] = {}
    for path in sorted([top, *top.rglob("*")]):
        about = path.lstat()
        content: object = None
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = path.read_bytes()
        link = path.is_symlink()
        attributes = {} if link else {n: os.getxattr(path, n) for n in os.listxattr(path)}
        same = first.setdefault(about.st_ino, str(path))
        found[str(path)] = (
            oct(about.st_mode),
            about.st_uid,
            about.st_gid,
            about.st_mtime_ns,
            (content, attributes),
            same,
        )
    return found


def fill(top: Path) -> None:
    """Make what the job never touches: everything that a directory may hold."""
    (top / "deep/empty").mkdir(parents=True)
    (top / "deep/closed").write_bytes(os.urandom(3 << 20))
    (top / "deep/hard").hardlink_to(top / "deep/closed")
    (top / "deep/link").symlink_to("closed")
    (top / "deep/owned").write_text("another user's")
    (top / "deep/sparse").touch()
    os.truncate(top / "deep/sparse", 5 << 20)
    with open(top / "deep/sparse", "r+b") as file:
        file.seek(3 << 20)
        file.write(b"far behind")
    (top / "deep/nothing").touch(mode=0o600)
    (top / "deep" / os.fsdecode(b"not \xff utf-8")).write_text("by bytes")
    os.mkfifo(top / "deep/fifo", 0o620)
    os.chown(top / "deep/owned", 12345, 12346)
    (top / "deep/owned").chmod(0o640)
    os.setxattr(top / "deep/closed", "user.kind", b"tested")
    os.utime(top / "deep/closed", ns=(10**18, 10**18 + 123456789))
    (top / "deep").chmod(0o711)
    os.utime(top / "deep/empty", ns=(10**18, 10**18 + 1))
    os.utime(top / "deep", ns=(10**18, 10**18 + 2))


def test_a_job_and_its_files_come_back_from_each_snapshot(world: World) -> None:
    fill(world.one)
    before = still(world.one / "deep")
    job = world.start()
    first = world.dump(job)
    # Closed files change between two snapshots.
    (world.one / "deep/closed").write_bytes(b"replaced")
    shutil.rmtree(world.one / "deep/empty")
    (world.one / "deep/new").mkdir()
    (world.one / "deep/new/file").write_text("new")
    time.sleep(0.3)  # files that changed just before the window are compared by content
    second = world.dump(job)
    later = still(world.one / "deep")
    world.end(job)
    manifest = world.trip.loop.run(world.trip.repository.manifest(second.snapshot))
    assert [one.path for one in read_data(manifest)] == [str(world.one), str(world.two)]
    assert second.sizes.stored < 1 << 20, "what did not change is not stored again"

    planned = world.planned(first.snapshot)
    assert planned["one/deep/closed"] == "replace" and planned["one/deep/new"] == "remove"
    assert "one/deep/owned" not in planned, "what did not change stays"
    restored = world.restore(first.snapshot)
    assert still(world.one / "deep") == before
    world.assert_one_moment(restored)

    restored = world.restore(second.snapshot, mode="lazy")
    assert still(world.one / "deep") == later
    world.assert_one_moment(restored)

    for path in (world.one, world.two):
        shutil.rmtree(path)
    restored = world.restore(first.snapshot)
    assert still(world.one / "deep") == before
    world.assert_one_moment(restored)
    assert not [path for path in world.top.rglob("*") if ".icecore-" in path.name]


def test_a_restore_that_fails_leaves_the_data_as_it_was(world: World, tmp_path: Path) -> None:
    fill(world.one)
    job = world.start()
    snapshot = world.dump(job, stop=True).snapshot
    (world.one / "deep/closed").write_bytes(b"newer")
    (world.one / "added").mkdir()
    (world.one / "added/file").write_text("newer")
    (world.one / "deep/link").unlink()
    before = still(world.top)
    # CRIU starts after the files were exchanged.
    seen = tmp_path / "seen"
    broken = tmp_path / "criu"
    broken.write_text(f"#!/bin/sh\ncat {world.one}/deep/closed | wc -c > {seen}\nexit 1\n")
    broken.chmod(0o755)
    world.trip.criu = replace(world.trip.criu, path=broken)
    with pytest.raises(RestoreFailed):
        world.restore(snapshot)
    assert int(seen.read_text()) == 3 << 20, "the files were exchanged before"
    assert still(world.top) == before


def test_collection_and_copies_know_the_data(world: World, tmp_path: Path) -> None:
    fill(world.one)
    before = still(world.one / "deep")
    job = world.start()
    trip = world.trip
    first = world.dump(job).snapshot
    second = world.dump(job, stop=True).snapshot
    job.wait(20)
    shutil.rmtree(world.one)
    shutil.rmtree(world.two)
    trip.loop.run(trip.repository.forget([first]))
    for _ in range(3):
        trip.loop.run(collect(trip.repository))
    found = trip.loop.run(verify(trip.repository, read_data=1.0))
    assert not found.damages and found.read_chunks, found
    other = trip.loop.run(StoredRepository.create(LocalBackend(tmp_path / "other", create=True)))
    copy(trip.repository, other, trip.loop, [trip.loop.run(trip.repository.find(second))])
    shutil.rmtree(trip.work / "repository" / "shards")
    restored = restore(
        other, trip.loop, second, RestoreOptions(), criu=trip.criu, registry=world.registry
    )
    restored.wait_resident(60)
    assert restored.job is not None
    assert still(world.one / "deep") == before
    world.assert_one_moment(restored.job)
    trip.loop.run(other.close())


def test_a_running_job_keeps_its_data(world: World) -> None:
    job = world.start()
    snapshot = world.dump(job).snapshot
    with pytest.raises(RestoreRefused, match="job data runs, and has the data directory"):
        world.restore(snapshot, instance="other")
    assert job.alive
    world.assert_one_moment(job)


def test_sockets_stay_and_are_not_stored(world: World) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(world.two / "socket"))
        # Not of the job's: its numbers are compared without it.
        job = world.start()
        snapshot = world.dump(job, stop=True).snapshot
        assert "two/socket" not in world.planned(snapshot)
        (world.two / "new").mkdir()
        os.rename(world.two / "socket", world.two / "new/socket")
        assert "two/new" not in world.planned(snapshot), "what has a socket in it is not removed"


def test_more_than_the_budget_fails_and_the_job_runs_on(world: World) -> None:
    job = world.start()
    with pytest.raises(DumpFailed, match="more than the 0 MiB that --data-budget permits"):
        world.dump(job, data_budget=1)
    before = world.number(job)
    assert eventually(lambda: world.number(job) > before)


def test_what_cannot_be_data(world: World) -> None:
    def start(*data: object, identity: Identity | None = None) -> None:
        world.registry.start(["true"], data=[str(path) for path in data], identity=identity)

    with pytest.raises(NotFound, match="there is no directory"):
        start(world.top / "missing")
    world.registry.state.mkdir(mode=0o700)
    for path in ("/", "/proc", world.registry.state, world.registry.state.parent):
        with pytest.raises(UsageError):
            start(path)
    with pytest.raises(UsageError, match="overlap"):
        start(world.one, world.top)
    world.top.chmod(0o755)
    with pytest.raises(UsageError, match="belongs to user 0"):
        start(world.one, identity=Identity.of_user("nobody"))
    world.one.chmod(0o700)
    with pytest.raises(UsageError, match="Permission denied"):
        start(world.one, identity=Identity.of_user("nobody"))


def test_a_difference_lists_the_paths(world: World) -> None:
    fill(world.one)
    job = world.start()
    first = world.dump(job).snapshot
    (world.one / "deep/owned").write_text("changed")
    (world.one / "deep/link").unlink()
    (world.one / "deep/added").touch()
    second = world.dump(job).snapshot
    loop = world.trip.loop
    readers = [
        SnapshotReader.open(world.trip.repository, one, loop.loop) for one in (first, second)
    ]
    found = {(state, path) for state, path, _ in compare(*readers).data}
    deep = world.one / "deep"
    assert {
        ("changed", str(deep / "owned")),
        ("removed", str(deep / "link")),
        ("added", str(deep / "added")),
        ("changed", str(world.one / "count")),
    } <= found
    assert ("changed", str(deep / "closed")) not in found


def test_the_user_of_a_job_reads_its_data(world: World) -> None:
    """A file that the user cannot read fails the snapshot: root does not read it for the user."""
    identity = Identity.of_user("nobody")
    home = world.top / "home"
    home.mkdir()
    world.top.chmod(0o755)
    os.chown(home, identity.user, identity.group)
    secret = home / "secret"
    secret.write_text("root's own")
    secret.chmod(0o600)
    words = ["sh", "-c", "echo there; exec sleep 1000"]
    job = world.registry.start(words, name="theirs", cwd="/", identity=identity, data=[home])
    assert eventually(lambda: "there" in job.log_path("stdout").read_text())
    with pytest.raises(DumpFailed, match=r"cannot read .*secret"):
        world.dump(job)
    assert job.alive
    secret.unlink()
    (home / "own").write_text("theirs")
    os.chown(home / "own", identity.user, identity.group)
    time.sleep(0.3)
    snapshot = world.dump(job, stop=True).snapshot
    job.wait(20)
    (home / "own").write_text("changed since")
    (home / "foreign").write_text("root's own")
    restored = world.restore(snapshot)
    assert (home / "own").read_text() == "theirs" and not (home / "foreign").exists()
    assert (home / "own").stat().st_uid == identity.user
    world.end(restored)


def test_the_command_line(world: World, tmp_path: Path) -> None:
    fill(world.one)
    words = [sys.executable, "-P", "-m", "icecore", "-r", str(tmp_path / "mine")]
    environment = {**os.environ, "ICECORE_STATE": str(tmp_path / "state")}

    def run(*more: object) -> str:
        done = subprocess.run(
            [*words, *map(str, more)],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("init")
    job = [sys.executable, "-c", JOB, world.one, world.two]
    run("run", "-d", "--name", "cli", "--data", world.one, "--data", world.two, "--", *job)
    try:
        assert eventually((world.one / "count").exists)
        snapshot = run("dump", "--stop", "cli").split()[0]
        assert str(world.one) in run("show", snapshot)
        assert "DATA" in run("ls").splitlines()[0]
        assert json.loads(run("--json", "ls"))["data"] > 8 << 20
        run("export", "--data", world.one, snapshot, tmp_path / "out")
        exported, mine = still(tmp_path / "out/deep"), still(world.one / "deep")
        assert [one[:5] for one in exported.values()] == [one[:5] for one in mine.values()]
    finally:
        subprocess.run([*words, "kill", "cli"], env=environment, timeout=60, check=False)


def test_a_restore_for_a_user_changes_nothing_of_others(world: World) -> None:
    """Another user's directory that came into the data is not removed, and the restore is refused."""
    identity = Identity.of_user("nobody")
    home = world.top / "home"
    home.mkdir()
    world.top.chmod(0o755)
    os.chown(home, identity.user, identity.group)
    words = ["sh", "-c", "echo there; exec sleep 1000"]
    job = world.registry.start(words, name="theirs", cwd="/", identity=identity, data=[home])
    assert eventually(lambda: "there" in job.log_path("stdout").read_text())
    (home / "inner").mkdir()
    (home / "inner/file").write_text("root's")
    snapshot = world.dump(job, stop=True).snapshot
    job.wait(20)
    (home / "inner/file").write_text("root's, and newer")
    (home / "inner/added").write_text("root's, too")
    before = still(home)
    with pytest.raises(RestoreRefused, match="belongs to user 0, not to the job's user"):
        world.restore(snapshot)
    assert still(home) == before
    (home / "outer").mkdir()
    (home / "outer/file").write_text("root's")
    for name in ("inner/file", "inner/added"):
        (home / name).unlink()
    shutil.rmtree(home / "inner")
    with pytest.raises(RestoreRefused, match="belongs to user 0"):
        world.restore(snapshot)
    assert (home / "outer/file").read_text() == "root's"


def test_what_is_roots_now_stays_when_a_user_restores(world: World) -> None:
    """Root took a file, and narrowed a directory, after the snapshot."""
    identity = Identity.of_user("nobody")
    home = world.top / "home"
    (home / "conf").mkdir(parents=True)
    (home / "mine").mkdir()
    world.top.chmod(0o755)
    (home / "conf/x").write_text("theirs")
    for path in (home, home / "mine", home / "conf/x"):
        os.chown(path, identity.user, identity.group)
    words = ["sh", "-c", "echo there; exec sleep 1000"]
    job = world.registry.start(words, name="theirs", cwd="/", identity=identity, data=[home])
    assert eventually(lambda: "there" in job.log_path("stdout").read_text())
    snapshot = world.dump(job, stop=True).snapshot
    job.wait(20)
    (home / "conf").chmod(0o700)
    before = still(home)
    with pytest.raises(RestoreRefused, match="belongs to user 0, not to the job's user"):
        world.restore(snapshot)
    assert still(home) == before
    (home / "conf").chmod(0o755)
    (home / "conf/x").unlink()
    (home / "conf/x").write_text("root's")
    with pytest.raises(RestoreRefused, match="belongs to user 0, not to the job's user"):
        world.restore(snapshot)
    assert (home / "conf/x").read_text() == "root's"


def test_what_was_added_is_removed_however_deep(world: World) -> None:
    job = world.start()
    snapshot = world.dump(job, stop=True).snapshot
    job.wait(20)
    there = os.open(world.one, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(1500):
        os.mkdir("a", dir_fd=there)
        below = os.open("a", os.O_RDONLY | os.O_DIRECTORY, dir_fd=there)
        os.close(there)
        there = below
    os.close(there)
    world.restore(snapshot)
    assert not (world.one / "a").exists()
    assert not [path for path in world.one.iterdir() if ".icecore-" in path.name]


#: Writes through a mapping, whose stores need not change the times of the file, and unmaps it.
MAPPER = """
import mmap, os, signal, sys, time
path = sys.argv[1]
with open(path, "wb") as file:
    file.write(bytes(8192))
descriptor = os.open(path, os.O_RDWR)
memory = mmap.mmap(descriptor, 8192)
os.close(descriptor)
memory[:5] = b"first"
signal.signal(signal.SIGUSR1, lambda *_: (memory.__setitem__(slice(0, 6), b"second"), memory.close()))
print("there", flush=True)
while True:
    time.sleep(0.01)
    print(memory.closed, flush=True)
"""


def test_what_was_written_through_a_mapping_that_is_gone(world: World) -> None:
    path = world.one / "mapped"
    words = [sys.executable, "-c", MAPPER, str(path)]
    job = world.registry.start(words, name="mapper", cwd="/", data=[world.one])
    out = job.log_path("stdout")
    assert eventually(lambda: "there" in out.read_text()), job.log_path("stderr").read_text()
    time.sleep(0.3)
    first = world.dump(job).snapshot
    subprocess.run(["kill", "-USR1", str(_command_of(job))], timeout=10, check=True)
    assert eventually(lambda: "True" in out.read_text())
    second = world.dump(job, stop=True).snapshot
    job.wait(20)
    for snapshot, content in ((first, b"first"), (second, b"second"), (first, b"first")):
        restored = world.restore(snapshot)
        assert path.read_bytes().rstrip(b"\0") == content
        world.end(restored)


IDLE = """
import time
print("there", flush=True)
time.sleep(1000)
"""


def test_what_changes_in_the_second_of_the_window(world: World) -> None:
    """The file system records only seconds: changes before and after a look give the same times."""
    with mounted_with_seconds(world.top) as top:
        kept, folder = top / "kept", top / "folder"
        kept.write_bytes(b"before")
        folder.mkdir()
        job = world.registry.start([sys.executable, "-c", IDLE], name="idle", cwd="/", data=[top])
        out = job.log_path("stdout")
        assert eventually(lambda: "there" in out.read_text()), job.log_path("stderr").read_text()
        changed: dict[Path, set[int]] = {kept: set(), folder: set()}

        def mark(value: bytes) -> None:
            if not changed[folder]:
                begin_of_second()
            os.setxattr(folder, "user.mark", value)
            changed[folder].add(folder.stat().st_ctime_ns)

        def write(content: bytes) -> None:
            if not changed[kept]:
                begin_of_second()
            kept.write_bytes(content)
            changed[kept].add(kept.stat().st_ctime_ns)
            time.sleep(0.15)  # longer than finer times need

        events = Events(
            {
                ("dump.data", "begin"): lambda _: mark(b"first"),
                ("dump.data", "end"): lambda _: mark(b"second"),
                ("dump.window", "begin"): lambda _: write(b"first "),
                ("dump.files", "end"): lambda _: write(b"second"),
            }
        )
        first = world.dump(job, emit=events).snapshot
        if max(map(len, changed.values())) > 1:
            pytest.skip("this machine is too slow: the second was over")
        time.sleep(2.5)
        second = world.dump(job, stop=True).snapshot
        job.wait(20)
        for snapshot, content in ((first, b"first "), (second, b"second")):
            os.removexattr(folder, "user.mark")
            kept.write_bytes(b"after")
            restored = world.restore(snapshot)
            assert os.getxattr(folder, "user.mark") == b"second"
            assert kept.read_bytes() == content
            world.end(restored)


def _command_of(job: Job) -> int:
    """The pid of the job's command, the only child of its init."""
    return int(Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()[0])


def acl(user: int, mask: int = 7) -> bytes:
    """An access control list: of the owner, one user, the group, a mask, and others."""
    rows = [(1, 7, -1), (2, 6, user), (4, 5, -1), (16, mask, -1), (32, 0, -1)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *row) for row in rows)


def test_attributes_of_directories_and_programs(world: World) -> None:
    """Access control lists, attributes of users and of root, and capabilities come back; what new
    files inherit from their directory does not stay.
    """
    deep = world.one / "deep"
    fill(world.one)
    os.setxattr(deep, "user.kind", b"directory")
    os.setxattr(deep, "trusted.kind", b"root's own")
    os.setxattr(deep / "empty", "system.posix_acl_access", acl(7, 5))
    os.setxattr(deep, "system.posix_acl_default", acl(8))
    capability = struct.pack("<5I", 0x02000001, 1 << 10, 0, 0, 0)
    os.setxattr(deep / "closed", "security.capability", capability)
    os.setxattr(deep / "owned", "security.capability", capability)
    (deep / "empty").chmod(0o550)
    before = still(deep)
    job = world.start()
    log = world.one / "log"  # the job has it open
    os.setxattr(log, "user.kind", b"open")
    os.setxattr(log, "system.posix_acl_access", acl(11))
    listed = {name: os.getxattr(log, name) for name in os.listxattr(log)}
    snapshot = world.dump(job, stop=True).snapshot
    log.unlink()
    for name in ("closed", "nothing", "fifo"):
        (deep / name).unlink()
    os.setxattr(deep / "empty", "system.posix_acl_access", acl(9))
    os.setxattr(deep, "user.since", b"1")
    os.removexattr(deep, "user.kind")
    changed = still(deep)
    broken = world.trip.work / "criu"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    whole = world.trip.criu
    world.trip.criu = replace(whole, path=broken)
    with pytest.raises(RestoreFailed):
        world.restore(snapshot)
    assert still(deep) == changed
    world.trip.criu = whole
    world.end(world.restore(snapshot))
    assert still(deep) == before
    assert {name: os.getxattr(log, name) for name in os.listxattr(log)} == listed
    shutil.rmtree(world.one)
    trip = world.trip
    found = check(trip.repository, trip.loop, snapshot, criu=trip.criu, registry=world.registry)
    assert [one.message for one in found.warnings if "had capabilities" in one.message] == [
        f"{deep}/owned had capabilities, which a restore sets only on files of root"
    ]
    world.end(world.restore(snapshot))
    after = still(deep)
    content = before[f"{deep}/owned"][4]
    assert isinstance(content, tuple)
    assert content[1].pop("security.capability") == capability
    assert after == before


@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_what_happens_after_the_window_is_no_part_of_the_snapshot(
    world: World, change: str
) -> None:
    fill(world.one)
    deep, log = world.one / "deep", world.one / "log"
    (deep / "latest").symlink_to("step-100")
    before = still(deep)
    job = world.start()
    os.setxattr(log, "user.kind", b"open")
    os.setxattr(log, "system.posix_acl_access", acl(11))
    listed = {name: os.getxattr(log, name) for name in os.listxattr(log)}

    def after(_: Event) -> None:
        if change == "removed":
            world.end(job)
            shutil.rmtree(world.one)
            return
        (deep / "next").symlink_to("step-200")
        (deep / "next").replace(deep / "latest")
        (deep / "link").unlink()
        os.setxattr(log, "user.kind", b"later")
        os.removexattr(log, "system.posix_acl_access")

    snapshot = world.dump(job, emit=Events({("dump.store", "begin"): after})).snapshot
    if change == "replaced":
        world.end(job)
        log.unlink()  # attributes come with files that a restore makes
    assert not (deep / "link").is_symlink()
    restored = world.restore(snapshot)
    assert still(deep) == before
    assert {name: os.getxattr(log, name) for name in os.listxattr(log)} == listed
    world.assert_one_moment(restored)


def test_more_files_than_descriptors(world: World, tmp_path: Path) -> None:
    """A restore writes any number of files in any number of directories, whatever its limits."""
    many = world.one / "many"
    for number in range(400):
        (many / f"{number}").mkdir(parents=True)
        (many / f"{number}/file").write_text(f"{number}")
        (many / f"{number}/other").write_text(f"other {number}")
    before = still(many)
    words = [sys.executable, "-P", "-m", "icecore", "-r", str(tmp_path / "mine")]
    environment = {**os.environ, "ICECORE_STATE": str(tmp_path / "state")}

    def run(*more: object, before: tuple[str, ...] = ()) -> str:
        done = subprocess.run(
            [*before, *words, *map(str, more)],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("init")
    run("run", "-d", "--name", "many", "--cwd", "/", "--data", world.one, "--", "sleep", "1000")
    snapshot = run("dump", "--stop", "many").split()[0]
    for number in range(400):
        (many / f"{number}/file").write_text("changed")
        (many / f"{number}/other").unlink()
    try:
        run("restore", snapshot, before=("prlimit", "--nofile=512:512"))
        assert still(many) == before
        shutil.rmtree(many)
        run("kill", "-s", "KILL", "many")
        run("restore", "--name", "again", snapshot, before=("prlimit", "--nofile=512:512"))
        assert still(many) == before
    finally:
        for name in ("many", "again"):
            stop = [*words, "kill", "-s", "KILL", name]
            subprocess.run(stop, env=environment, timeout=60, check=False, capture_output=True)


def test_a_directory_of_too_many_entries(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory bounds what is listed, also in one flat directory."""
    job = world.start()
    snapshot = world.dump(job).snapshot
    for number in range(300):
        (world.one / f"flat-{number}").touch()
    monkeypatch.setattr("icecore.dumper.data.capture.most_entries", lambda: 200)
    with pytest.raises(DumpFailed, match="more than 200 entries"):
        world.dump(job)
    before = world.number(job)
    assert eventually(lambda: world.number(job) > before)
    world.end(job)
    monkeypatch.setattr("icecore.restorer.files.data.most_entries", lambda: 200)
    with pytest.raises(RestoreRefused, match="more than 200 entries"):
        world.restore(snapshot)
    top = os.open(world.one, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(TooMany):
            walk(top, {}, 200)
        assert len(walk(top, {}, 400).found) > 300
    finally:
        os.close(top)


#: Rewrites large files all the time, in place, and compares them with its memory.
REWRITER = """
import sys
top, number, size = sys.argv[1], 0, 2 << 20
names = [f"{top}/big-{each}" for each in range(3)]
for name in names:
    open(name, "wb").write(bytes(size))
while True:
    for name in names:
        with open(name, "rb") as file:
            head = file.read(8)
            file.seek(size - 8)
            if {head, file.read(8)} != {number.to_bytes(8, "little")}:
                sys.exit(f"{name} does not hold {number}")
    number += 1
    for name in names:
        with open(name, "r+b") as file:
            file.write(number.to_bytes(8, "little"))
            file.seek(size - 8)
            file.write(number.to_bytes(8, "little"))
    print(number, flush=True)
"""


@pytest.fixture
def reflinks(tmp_path: Path) -> Iterator[Path]:
    """A file system that can copy files without copying their blocks."""
    program = shutil.which("mkfs.xfs", path="/usr/sbin:/sbin")
    if program is None:
        pytest.skip("needs mkfs.xfs (apt-get install xfsprogs)")
    image, top = tmp_path / "image", tmp_path / "mounted"
    top.mkdir()
    with open(image, "wb") as file:
        file.truncate(400 << 20)
    subprocess.run([program, "-q", "-m", "reflink=1", image], timeout=60, check=True)
    done = subprocess.run(
        ["mount", "-o", "loop", image, top], timeout=60, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"this machine cannot mount an image of XFS: {done.stderr.strip()}")
    try:
        yield top
    finally:
        subprocess.run(["umount", top], timeout=60, check=True)


def test_files_are_cloned_in_the_window(world: World, reflinks: Path) -> None:
    """Files that always change cost the window nothing where the file system has reflinks, and are
    read after it as they were in it.
    """
    for top, cloned in ((reflinks, True), (world.one, False)):
        job = world.registry.start(
            [sys.executable, "-c", REWRITER, str(top)], name="clones", cwd="/", data=[top]
        )
        assert eventually(lambda: world.number(job) > 3), job.log_path("stderr").read_text()  # noqa: B023
        if not cloned:
            with pytest.raises(DumpFailed, match="more than the 0 MiB"):
                world.dump(job, data_budget=1)
            world.end(job)
            break
        snapshots = [world.dump(job, data_budget=1).snapshot for _ in range(2)]
        world.end(job)
        for snapshot in snapshots:
            (top / "big-0").write_bytes(b"changed")
            restored = world.restore(snapshot)
            before = world.number(restored)
            assert eventually(lambda: world.number(restored) > before + 3), (  # noqa: B023
                restored.log_path("stderr").read_text()
            )
            world.end(restored)
