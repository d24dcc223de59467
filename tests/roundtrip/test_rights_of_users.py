"""A snapshot remembers the user's identity, and what the user could open, when it was taken.
Restored for that user, it brings back no rights that were revoked since, and changes no other
user's files.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from icecore.dumper.dump import dump
from icecore.dumper.options import DumpOptions
from icecore.dumper.target import Target
from icecore.errors import RestoreRefused
from icecore.events import Event, Sink, discard
from icecore.host.jobs.identity import Identity
from icecore.host.jobs.job import Job
from icecore.host.jobs.registry import Registry
from icecore.host.kernel import procfs
from icecore.restorer.files.plan import FilesMode
from icecore.restorer.options import RestoreOptions
from icecore.restorer.restore import restore
from tests.host.target import eventually
from tests.roundtrip.conftest import SEES_ICECORE, Trip

pytestmark = [
    pytest.mark.criu,
    SEES_ICECORE,
    pytest.mark.skipif(os.geteuid() != 0, reason="root starts the jobs of others"),
]

PYTHON = shutil.which("python3", path="/usr/bin:/bin") or sys.executable
OLD, NEW = b"members: nobody\n", b"members: others\n"
ANOTHER = 12345

#: Has files open, each with its flags.
OPENS = """
import os, sys, time
files = [os.open(path, int(flags)) for path, flags in zip(sys.argv[1::2], sys.argv[2::2])]
print("there", flush=True)
while True:
    time.sleep(0.01)
"""


@dataclass
class World:
    """Jobs of an ordinary user, and a directory of root's."""

    trip: Trip
    registry: Registry
    folder: Path
    user: Identity

    def file(self, name: str, mode: int, user: int = 0) -> Path:
        path = self.folder / name
        path.write_bytes(OLD)
        os.chown(path, user, user)
        path.chmod(mode)
        return path

    def start(self, *words: str, user: Identity | None = None) -> Job:
        job = self.registry.start(
            [PYTHON, "-c", OPENS, *words], name="users", cwd="/", identity=user or self.user
        )
        assert eventually(lambda: "there" in job.log_path("stdout").read_text()), job.log_path(
            "stderr"
        ).read_text()
        return job

    def dump(self, job: Job, **options: bool) -> str:
        target = Target(job.pid, job.name, record=job.record())
        wanted = DumpOptions(stop=True, **options)  # type: ignore[arg-type]
        trip = self.trip
        result = dump(trip.repository, trip.loop, target, wanted, criu=trip.criu)
        job.wait(20)
        return result.snapshot

    def restore(
        self,
        snapshot: str,
        identity: Identity | None,
        emit: Sink = discard,
        files: FilesMode = "auto",
    ) -> Job:
        trip, options = self.trip, RestoreOptions(identity=identity, files=files)
        restored = restore(
            trip.repository,
            trip.loop,
            snapshot,
            options,
            criu=trip.criu,
            registry=self.registry,
            emit=emit,
        )
        restored.wait_resident(60)
        assert restored.job is not None
        return restored.job

    def end(self) -> None:
        for job in self.registry.instances():
            if job.alive:
                job.kill(9)
                job.wait(20)


@pytest.fixture
def world(trip: Trip) -> Iterator[World]:
    with tempfile.TemporaryDirectory(dir="/var/lib", prefix="icecore-test-") as name:
        top = Path(name)
        top.chmod(0o755)
        (top / "files").mkdir()
        made = World(trip, Registry(top / "state"), top / "files", Identity.of_user("nobody"))
        try:
            yield made
        finally:
            made.end()


@pytest.mark.parametrize("as_root", [False, True], ids=["user", "administrator"])
def test_files_of_others_are_not_put_back(world: World, as_root: bool) -> None:
    read = world.file("group", 0o644)
    written = world.file("shared.log", 0o666, ANOTHER)
    own = world.file("own", 0o644, world.user.user)
    words = [str(read), str(os.O_RDONLY), str(written), str(os.O_RDWR), str(own), str(os.O_RDWR)]
    snapshot = world.dump(world.start(*words), with_files=True)
    written.write_bytes(NEW + NEW)
    own.write_bytes(NEW)
    identity = None if as_root else world.user
    world.restore(snapshot, identity)
    assert (written.read_bytes(), own.read_bytes()) == (NEW + NEW, OLD)
    assert written.stat().st_uid == ANOTHER
    world.end()
    read.write_bytes(NEW)
    os.utime(read, (1, 1))
    with pytest.raises(RestoreRefused, match="was modified since"):
        world.restore(snapshot, identity)
    read.unlink()
    with pytest.raises(RestoreRefused, match="belonged to user 0"):
        world.restore(snapshot, identity)
    assert not read.exists()


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY])
def test_a_file_that_the_user_may_not_open_any_more(world: World, flags: int) -> None:
    path = world.file("file", 0o646)
    snapshot = world.dump(world.start(str(path), str(flags)))
    path.chmod(0o640)
    with pytest.raises(RestoreRefused, match="whose job had it open, may not") as caught:
        world.restore(snapshot, world.user)
    assert "as root" in str(caught.value.cure)
    path.chmod(0o646)
    world.folder.chmod(0o700)
    with pytest.raises(RestoreRefused, match="may not"):
        world.restore(snapshot, world.user)
    world.restore(snapshot, None)


def test_a_file_that_its_owner_has_made_read_only(world: World) -> None:
    (folder := world.folder / "own").mkdir()
    os.chown(folder, world.user.user, world.user.group)
    path = world.file("own/pack", 0o644, world.user.user)
    job = world.start(str(path), str(os.O_RDWR))
    path.chmod(0o444)
    snapshot = world.dump(job)
    path.write_bytes(NEW)
    world.restore(snapshot, world.user)
    assert path.read_bytes() == OLD
    world.end()
    folder.chmod(0)
    with pytest.raises(RestoreRefused):
        world.restore(snapshot, world.user)


def test_an_administrator_who_asks_for_it_has_files_of_others_put_back(world: World) -> None:
    written = world.file("shared.log", 0o666, ANOTHER)
    roots = world.file("roots.log", 0o666)
    words = [str(written), str(os.O_RDWR), str(roots), str(os.O_RDWR)]
    snapshot = world.dump(world.start(*words))
    for path in (written, roots):
        path.write_bytes(NEW)
    events: list[Event] = []
    world.restore(snapshot, None, emit=events.append)
    assert (written.read_bytes(), roots.read_bytes()) == (NEW, NEW)
    told = [str(one.fields["message"]) for one in events if one.name == "restore.warning"]
    assert [path.name for path in (roots, written) if any(str(path) in one for one in told)] == [
        "roots.log",
        "shared.log",
    ]
    world.end()
    world.restore(snapshot, None, files="restore")
    assert (written.read_bytes(), roots.read_bytes()) == (OLD, NEW)


def test_a_missing_file_in_a_directory_of_roots(world: World) -> None:
    path = world.file("own.sh", 0o644, world.user.user)
    snapshot = world.dump(world.start(str(path), str(os.O_RDWR)))
    path.unlink()
    with pytest.raises(RestoreRefused, match="may not make it there now"):
        world.restore(snapshot, world.user)
    assert not path.exists()
    world.restore(snapshot, None)
    assert path.read_bytes() == OLD


def test_a_group_that_the_user_has_left(world: World) -> None:
    before = replace(world.user, groups=(*world.user.groups, ANOTHER))
    snapshot = world.dump(world.start(user=before))
    with pytest.raises(RestoreRefused, match=f"group {ANOTHER}"):
        world.restore(snapshot, world.user)
    job = world.restore(snapshot, before)
    assert str(ANOTHER) in groups_of(job.main_process())
    world.end()
    world.restore(snapshot, None)


def test_a_set_user_id_program(world: World) -> None:
    if os.statvfs(world.folder).f_flag & os.ST_NOSUID:
        pytest.skip("set-user-ID bits count nothing here")
    program = world.folder / "sleep"
    shutil.copy("/bin/sleep", program)
    program.chmod(0o4755)
    job = world.registry.start([str(program), "1000"], name="setuid", cwd="/", identity=world.user)
    assert eventually(lambda: procfs.status(job.main_process()).user == 0)
    snapshot = world.dump(job)
    with pytest.raises(RestoreRefused, match="runs as user root"):
        world.restore(snapshot, world.user)
    assert procfs.status(world.restore(snapshot, None).main_process()).user == 0


def groups_of(pid: int) -> list[str]:
    """Return the supplementary groups of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line for line in lines if line.startswith("Groups:")).split()[1:]
