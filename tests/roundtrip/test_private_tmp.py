"""A job with a /tmp of its own (``icecore run --tmp private``): no other process sees it, it is part
of each snapshot, each restored instance has one of its own, and it goes with the job.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
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
from icecore.errors import NotFound, RestoreFailed, RestoreRefused, UsageError
from icecore.events import Event, Sink, discard
from icecore.host.jobs import temporary
from icecore.host.jobs.identity import Identity
from icecore.host.jobs.job import Job
from icecore.host.jobs.namespaces import Isolation
from icecore.host.jobs.registry import Registry
from icecore.restorer.files.data_export import export_data
from icecore.restorer.options import RestoreOptions
from icecore.restorer.restore import check, restore
from tests.dumper.world import Events
from tests.host.target import eventually
from tests.roundtrip.conftest import SEES_ICECORE, Trip

pytestmark = [
    pytest.mark.criu,
    SEES_ICECORE,
]

PYTHON = shutil.which("python3", path="/usr/bin:/bin") or sys.executable

#: Has everything in /tmp that a program may have there: an open file, one that it has deleted, one
#: whose name it has deleted but not the other, a closed one that it replaces, a FIFO, a server on a
#: unix socket, a file that is mapped, and its working directory. Prints whether all of it agrees.
JOB = """
import mmap, os, socket, sys, threading, time
os.makedirs("/tmp/deep/work", exist_ok=True)
os.chdir("/tmp/deep/work")
log = open("/tmp/log", "a", buffering=1)
gone = open("/tmp/gone", "w+"); os.unlink("/tmp/gone")
lost = open("/tmp/lost", "w+"); os.link("/tmp/lost", "/tmp/kept"); os.unlink("/tmp/lost")
with open("/tmp/mapped", "wb") as file:
    file.write(bytes(8192))
memory = mmap.mmap(os.open("/tmp/mapped", os.O_RDWR), 8192)
os.mkfifo("/tmp/fifo", 0o600)
fifo = os.open("/tmp/fifo", os.O_RDWR | os.O_NONBLOCK)
os.symlink("deep", "/tmp/link")
open("/var/tmp/there", "w").write("kept")
server = socket.socket(socket.AF_UNIX); server.bind("/tmp/socket"); server.listen()
def serve():
    while True:
        client, _ = server.accept()
        client.sendall(str(number).encode()); client.close()
number = 0
threading.Thread(target=serve, daemon=True).start()
def ask():
    with socket.socket(socket.AF_UNIX) as own:
        own.connect("/tmp/socket")
        return int(own.recv(100))
while True:
    number += 1
    log.write(f"{number}\\n")
    for file in (gone, lost):
        file.seek(0); file.write(str(number)); file.flush()
    memory[:8] = number.to_bytes(8, "little")
    with open("new", "w") as file:
        file.write(str(number))
    os.rename("new", "/tmp/link/work/count")
    os.write(os.open("/tmp/fifo", os.O_WRONLY), b"x") if number == 1 else None
    found = [int(open("count").read()), int(open("/tmp/kept").read()), ask(), int.from_bytes(open("/tmp/mapped", "rb").read(8), "little")]
    gone.seek(0); found.append(int(gone.read()))
    found.append(len(open("/tmp/log").read().split()))
    if set(found) != {number} or open("/var/tmp/there").read() != "kept":
        print("differ", number, found, flush=True); sys.exit(9)
    print(number, flush=True)
    time.sleep(0.02)
"""


@dataclass
class World:
    """Jobs whose state lies where they see it."""

    trip: Trip
    registry: Registry

    def start(self, **options: object) -> Job:
        isolation = options.pop("isolation", Isolation(tmp=True))
        job = self.registry.start(
            [PYTHON, "-c", JOB], name="own", cwd="/", isolation=isolation, **options
        )  # type: ignore[arg-type]
        self.goes_on(job)
        return job

    def number(self, job: Job) -> int:
        return int((job.log_path("stdout").read_text().split() or ["0"])[-1])

    def goes_on(self, job: Job) -> None:
        before = self.number(job)
        assert eventually(lambda: self.number(job) > before + 5), (
            job.log_path("stdout").read_text()[-500:] + job.log_path("stderr").read_text()
        )

    def dump(self, job: Job, *, stop: bool = False, emit: Sink = discard) -> str:
        target = Target(job.pid, job.name, record=job.record())
        options = DumpOptions(stop=stop)
        trip = self.trip
        result = dump(trip.repository, trip.loop, target, options, criu=trip.criu, emit=emit)
        if stop:
            job.wait(20)
        return result.snapshot

    def restore(self, snapshot: str, instance: str = "", files: str = "auto") -> Job:
        trip, options = self.trip, RestoreOptions(instance=instance, files=files)  # type: ignore[arg-type]
        restored = restore(
            trip.repository, trip.loop, snapshot, options, criu=trip.criu, registry=self.registry
        )
        restored.wait_resident(60)
        assert restored.job is not None
        return restored.job

    def end(self, job: Job) -> None:
        job.kill(9)
        job.wait(20)


def exported_names(world: World, snapshot: str) -> set[str]:
    trip, folder = world.trip, world.registry.state / "export"
    export_data(trip.repository, trip.loop, snapshot, "/tmp", folder)
    return set(os.listdir(folder))


def inside(job: Job) -> Path:
    return Path(f"/proc/{job.pid}/root/tmp")


@pytest.fixture
def world(trip: Trip) -> Iterator[World]:
    with tempfile.TemporaryDirectory(dir="/var/lib", prefix="icecore-test-") as name:
        made = World(trip, Registry(Path(name) / "state"))
        try:
            yield made
        finally:
            for job in made.registry.instances():
                if job.alive:
                    made.end(job)


@pytest.mark.parametrize("root", [False, True], ids=["view", "root"])
def test_a_private_tmp_travels_with_its_job(world: World, root: bool) -> None:
    job = world.start(isolation=Isolation(tmp=True, root=root))
    there = temporary.place(job.directory, "/tmp")
    assert (there / "deep/work/count").exists() and not Path("/tmp/deep/work/count").exists()
    first = world.dump(job)
    world.goes_on(job)
    # An export has what the directory had: not the names that the job has removed.
    exported = exported_names(world, first)
    assert "kept" in exported and not {"lost", "gone"} & exported, exported
    assert not [name for name in exported if "link_remap" in name]
    # A second instance beside the original has its own.
    beside = world.restore(first, "beside")
    world.goes_on(beside)
    world.goes_on(job)
    assert os.stat(inside(beside) / "log").st_ino != os.stat(inside(job) / "log").st_ino
    # Snapshots of what was restored, without its first snapshot's files.
    second = world.dump(beside, stop=True)
    world.end(job)
    assert not there.exists() and not temporary.place(beside.directory, "/tmp").exists()
    for snapshot, files in ((second, "auto"), (first, "leave")):
        restored = world.restore(snapshot, "again", files)
        world.goes_on(restored)
        top = inside(restored)
        assert (top.stat().st_mode & 0o7777, (top / "fifo").is_fifo()) == (0o1777, True)
        assert os.readlink(top / "link") == "deep"
        mounts = Path(f"/proc/{restored.pid}/mountinfo").read_text().splitlines()
        options = [line.split()[5] for line in mounts if line.split()[4] in temporary.POINTS]
        assert len(options) == 2 and all("nosuid,nodev" in one for one in options)
        with socket.socket(socket.AF_UNIX) as own:
            own.connect(str(top / "socket"))
            assert int(own.recv(100)) > 0
        assert not [name for name in os.listdir(top) if "link_remap" in name]
        world.end(restored)
        assert not temporary.place(restored.directory, "/tmp").exists()


def test_a_job_that_ends_right_after_the_window(world: World) -> None:
    """Its /tmp is removed while the snapshot is stored."""
    job = world.start()
    top = temporary.place(job.directory, "/tmp")

    def end(_: Event) -> None:
        world.end(job)
        assert not top.exists()

    snapshot = world.dump(job, emit=Events({("dump.store", "begin"): end}))
    restored = world.restore(snapshot)
    world.goes_on(restored)
    assert os.readlink(inside(restored) / "link") == "deep"


def test_the_tmp_of_a_users_job(world: World) -> None:
    nobody = Identity.of_user("nobody")
    job = world.start(identity=nobody)
    assert (inside(job).stat().st_uid, inside(job).stat().st_gid) == (0, 0)
    snapshot = world.dump(job, stop=True)
    # Another machine has another state directory, and none of the instances.
    shutil.rmtree(world.registry.state)
    world.registry = Registry(world.registry.state.with_name("other"))
    restored = world.restore(snapshot)
    world.goes_on(restored)
    assert (inside(restored).stat().st_uid, inside(restored).stat().st_gid) == (0, 0)
    for path in (inside(restored) / "deep", inside(restored) / "link"):
        assert path.lstat().st_uid == nobody.user
    reached = subprocess.run(
        ["setpriv", f"--reuid={nobody.user}", "--clear-groups", "ls",
         str(temporary.place(restored.directory, "/tmp"))],
        capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    assert "Permission denied" in reached.stderr, "only root enters the way there"


def test_a_user_does_not_touch_files_of_others_in_tmp(world: World) -> None:
    """A set-user-ID program of the job has its temporary files there, as in the host's /tmp."""
    nobody = Identity.of_user("nobody")
    job = world.start(identity=nobody)
    top = inside(job)
    (top / "of-root").write_text("secret")
    (top / "of-root").chmod(0o644)  # a dump reads it with the rights of the user
    for words in (["rm", "-f"], ["mv", "-t", f"{top}/deep"]):
        done = as_user(nobody, *words, f"{top}/of-root")
        assert done.returncode and "not permitted" in done.stderr, done.stderr
    assert as_user(nobody, "chmod", "0777", str(top)).returncode
    (top / "spare").touch()  # a name that the job does not use
    os.chown(top / "spare", nobody.user, -1)
    assert as_user(nobody, "rm", f"{top}/spare").returncode == 0, "its own"
    restored = world.restore(world.dump(job, stop=True))
    world.goes_on(restored)
    assert (inside(restored) / "of-root").stat().st_uid == 0
    assert as_user(nobody, "rm", "-f", f"{inside(restored)}/of-root").returncode


def as_user(user: Identity, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user who can read the /proc of any process."""
    return subprocess.run(
        ["setpriv", f"--reuid={user.user}", "--clear-groups", "--inh-caps=+sys_ptrace",
         "--ambient-caps=+sys_ptrace", *words],
        capture_output=True, text=True, timeout=20,
    )  # fmt: skip


def test_a_restore_that_fails_leaves_nothing(world: World) -> None:
    job = world.start()
    snapshot = world.dump(job, stop=True)
    before = {one.instance for one in world.registry.instances()}
    broken = world.registry.state / "criu"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    whole = world.trip.criu
    world.trip.criu = replace(whole, path=broken)
    with pytest.raises(RestoreFailed):
        world.restore(snapshot)
    broken.rename(world.trip.work / "criu")
    world.trip.criu = replace(whole, path=world.trip.work / "criu")
    with pytest.raises(RestoreRefused, match="in which CRIU does not find"):
        world.restore(snapshot)
    assert set(os.listdir(world.registry.state / "jobs")) == before


def test_what_a_job_with_its_own_tmp_would_not_see(world: World, trip: Trip) -> None:
    hidden = Registry(trip.work / "state")
    with pytest.raises(UsageError, match="logs are in"):
        hidden.start(["true"], cwd="/", isolation=Isolation(tmp=True))
    with pytest.raises(UsageError, match="the working directory"):
        world.registry.start(["true"], cwd=trip.work, isolation=Isolation(tmp=True))
    with pytest.raises(UsageError, match="the data directory"):
        world.registry.start(["true"], cwd="/", data=[trip.work], isolation=Isolation(tmp=True))
    program = trip.work / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    with pytest.raises(NotFound, match="no program") as caught:
        world.registry.start([str(program)], cwd="/", isolation=Isolation(tmp=True))
    assert "--tmp private" in caught.value.cure
    assert not any((world.registry.state / "jobs").iterdir())
    snapshot = world.dump(world.start(), stop=True)
    with pytest.raises(RestoreRefused, match="logs would be in"):
        restore(
            trip.repository, trip.loop, snapshot, RestoreOptions(), criu=trip.criu, registry=hidden
        )
    found = check(trip.repository, trip.loop, snapshot, criu=trip.criu, registry=world.registry)
    assert not found.failed and not found.files.actions


def test_without_mount_namespaces(world: World) -> None:
    """Where the kernel makes no mount namespace the command is refused, with a cure."""
    words = [sys.executable, "-P", "-m", "icecore", "run", "--cwd", "/", "--pid", "host"]
    words += ["--ipc", "host", "--tmp", "private", "--", "true"]
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c",
         'echo 0 > /proc/sys/user/max_mnt_namespaces && exec "$@"', "sh", *words],
        env={**os.environ, "ICECORE_STATE": str(world.registry.state)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0 and "max_mnt_namespaces" in done.stderr, done.stderr


def test_what_is_left_is_removed_however_deep(world: World) -> None:
    """Nobody waits for the job, whose directories are as deep as it likes, with links out of them."""
    outside = world.registry.state.parent / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    words = "import os, sys\nos.symlink(sys.argv[1], '/tmp/out')\n"
    words += "for _ in range(1500):\n    os.mkdir('/tmp/a') or os.chdir('/tmp/a') if _ == 0 else (os.mkdir('a'), os.chdir('a'))\n"
    job = world.registry.start(
        [PYTHON, "-c", words, str(outside)], name="deep", cwd="/", isolation=Isolation(tmp=True)
    )
    place = temporary.place(job.directory, "/tmp")
    assert eventually(lambda: job.state == "ended"), job.log_path("stderr").read_text()
    assert (place / "a/a/a").is_dir() and (place / "out").is_symlink()
    world.registry.thaw_left()
    assert not place.exists() and (outside / "file").read_text() == "kept"
    assert job.log_path("stderr").read_text() == ""
