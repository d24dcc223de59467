"""A job whose directories, sockets, FIFOs, lock and pid files are gone goes on after a restore: on
its own machine, and where there never were any.
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

from icecore.dumper.dump import dump
from icecore.dumper.options import DumpOptions
from icecore.dumper.target import Target
from icecore.errors import RestoreFailed, RestoreRefused
from icecore.events import Event, Sink, discard
from icecore.host.jobs.job import Job
from icecore.host.jobs.registry import Registry
from icecore.restorer.options import RestoreOptions
from icecore.restorer.restore import check, restore
from tests.host.target import eventually
from tests.restorer.job_file_places import look
from tests.roundtrip.conftest import Trip

pytestmark = pytest.mark.criu

USER, GROUP = 12345, 12346
#: Answers at its sockets with what it finds through what it has open.
JOB = (
    f"USER, GROUP = {USER}, {GROUP}"
    + """
import fcntl, json, os, socket, tempfile, threading, time
home = os.environ["TMPDIR"]
os.makedirs(f"{home}/run/sockets"); os.makedirs(f"{home}/deep/er/est")
# As of a daemon that was started as root: of other users' processes not every machine lets CRIU read all.
for name in ("run", "run/sockets", "deep"):
    os.chown(f"{home}/{name}", USER, GROUP)
os.chmod(f"{home}/run", 0o2750); os.chmod(f"{home}/deep/er", 0o711)
listener = socket.socket(socket.AF_UNIX); listener.bind(f"{home}/run/sockets/server"); listener.listen()
os.chmod(f"{home}/run/sockets/server", 0o660)
ours = socket.socket(socket.AF_UNIX); ours.connect(f"{home}/run/sockets/server")
theirs, _ = listener.accept()
ours.sendall(b"in the queue")
box = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); box.bind(f"{home}/run/box")
out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); out.connect(f"{home}/run/box")
os.mkfifo(f"{home}/run/fifo"); os.chown(f"{home}/run/fifo", USER, GROUP); os.chmod(f"{home}/run/fifo", 0o620)
fifo = os.open(f"{home}/run/fifo", os.O_RDWR)
os.write(fifo, b"in the fifo")
lock = os.open(f"{home}/run/lock", os.O_RDONLY | os.O_CREAT, 0o640); fcntl.flock(lock, fcntl.LOCK_EX)
data = open(f"{home}/deep/data", "w+b", buffering=0); data.write(b"content")
empty = tempfile.mkdtemp()
with open(f"{home}/run/job.pid", "w") as file:
    file.write(f"{os.getpid()}\\n")
os.chdir(f"{home}/deep/er/est")
folder = os.open(f"{home}/run", os.O_RDONLY)
print("there", flush=True)
while True:
    one, _ = listener.accept()
    what = one.recv(100)
    if what == b"look":
        out.send(b"through the box")
        with open("relative", "w") as file:
            file.write("x")
        said = dict(queue=theirs.recv(100).decode(), box=box.recv(100).decode(),
            fifo=os.read(fifo, 100).decode(), cwd=os.getcwd(), empty=os.listdir(empty),
            folder=sorted(os.listdir(folder)), data=os.pread(data.fileno(), 100, 0).decode(),
            pid=int(open(f"{home}/run/job.pid").read()) == os.getpid())
        one.sendall(json.dumps(said).encode())
    one.close()
"""
)
ASK = """
import socket, sys
with socket.socket(socket.AF_UNIX) as one:
    one.settimeout(20); one.connect(sys.argv[1] + "/run/sockets/server"); one.sendall(b"look")
    print(one.recv(4096).decode())
"""


@dataclass
class Wiped:
    """A job that was dumped and ended, and all that it made was removed.

    Attributes:
        top: Holds only the job's directory.
        before: What was in it.
    """

    trip: Trip
    registry: Registry
    snapshot: str
    top: Path
    before: dict[str, tuple[object, ...]]

    @property
    def home(self) -> Path:
        return self.top / "home"

    def restore(self, emit: Sink = discard, **options: object) -> Job:
        restored = restore(
            self.trip.repository,
            self.trip.loop,
            self.snapshot,
            RestoreOptions(**options),  # type: ignore[arg-type]
            criu=self.trip.criu,
            registry=self.registry,
            emit=emit,
        )
        restored.wait_resident(60)
        assert restored.job is not None
        return restored.job

    def assert_found_all(self, said: str) -> None:
        found = eval(said, {"true": True})
        assert found == {
            "queue": "in the queue",
            "box": "through the box",
            "fifo": "in the fifo",
            "cwd": str(self.home / "deep/er/est"),
            "empty": [],
            "folder": ["box", "fifo", "job.pid", "lock", "sockets"],
            "data": "content",
            "pid": True,
        }


@pytest.fixture
def wiped(trip: Trip, tmp_path: Path) -> Iterator[Wiped]:
    registry = Registry(tmp_path / "jobs")
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="ice-") as name:
        top = Path(name)
        top.chmod(0o711)
        home = top / "home"
        home.mkdir()
        os.chown(home, USER, GROUP)
        words = ["env", f"TMPDIR={home}", sys.executable, "-c", JOB]
        job = registry.start(words, name="wiped", cwd="/")
        try:
            out, err = job.log_path("stdout"), job.log_path("stderr")
            assert eventually(lambda: "there" in out.read_text()), err.read_text()
            target = Target(job.pid, job.name, record=job.record())
            before = look(home, inodes=False)
            snapshot = dump(
                trip.repository, trip.loop, target, DumpOptions(stop=True), criu=trip.criu
            ).snapshot
            job.wait(20)
            shutil.rmtree(home)
            yield Wiped(trip, registry, snapshot, top, before)
        finally:
            for one in registry.instances():
                if one.alive:
                    one.kill(9)
                    one.wait(10)


@pytest.mark.parametrize("mode", ["full", "lazy"])
def test_a_job_goes_on_after_all_that_it_made_was_removed(wiped: Wiped, mode: str) -> None:
    found = check(wiped.trip.repository, wiped.trip.loop, wiped.snapshot, criu=wiped.trip.criu)
    assert not found.failed
    planned = {folder.path.removeprefix(f"{wiped.top}/") for folder in found.files.folders}
    empty = {name for name in wiped.before if name.startswith("tmp")}
    assert planned == {
        *("home", "home/run", "home/run/sockets", "home/deep", "home/deep/er", "home/deep/er/est"),
        *(f"home/{name}" for name in empty),
    }
    kinds = {Path(action.file.path).name: action.kind for action in found.files.actions}
    assert kinds == {"data": "create", "lock": "create", "fifo": "fifo", "job.pid": "create"}
    assert not wiped.home.exists(), "a dry run makes nothing"
    wiped.restore(mode=mode)
    # Sockets come from CRIU: their mode and owner, too.
    assert look(wiped.home, inodes=False) == wiped.before
    about = wiped.home.stat()
    assert (about.st_uid, about.st_gid) == (USER, GROUP)
    done = subprocess.run(
        [sys.executable, "-c", ASK, wiped.home], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    wiped.assert_found_all(done.stdout)


def test_a_job_goes_on_where_there_never_was_anything_of_it(wiped: Wiped) -> None:
    # Another machine's file systems: nothing of the job, and not even the directory above.
    script = """
mount --make-rprivate / && mount -t tmpfs none /var && mkdir -m 1777 /var/tmp || exit
"$@" && exec nsenter --mount="/proc/$(cat "$STARTED")/ns/mnt" "$PYTHON" -c "$ASK" "$HOME_OF_JOB"
"""
    code = f"""
import sys
from pathlib import Path
from icecore import api
from icecore.repository import Repository
with Repository.open({str(wiped.trip.work / "repository")!r}) as repository:
    restored = api.restore({wiped.snapshot!r}, repository)
    restored.wait_resident(60)
    Path(sys.argv[1]).write_text(str(restored.pid))
"""
    started = wiped.trip.work / "started"
    environment = {
        **os.environ,
        "ICECORE_STATE": str(wiped.registry.state),
        "STARTED": str(started),
        "PYTHON": sys.executable,
        "ASK": ASK,
        "HOME_OF_JOB": str(wiped.home),
    }
    words = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", code]
    done = subprocess.run(
        [*words, str(started)], env=environment, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    wiped.assert_found_all(done.stdout)
    assert list(wiped.top.iterdir()) == []


@pytest.mark.parametrize(
    "step", [("restore.images", "end"), ("restore.criu", "end"), ("restore.memory", "begin")]
)
def test_a_restore_that_fails_leaves_nothing_that_it_made(
    wiped: Wiped, step: tuple[str, str]
) -> None:
    def emit(event: Event) -> None:
        if (event.name, event.fields.get("state")) == step:
            assert (wiped.home / "run/fifo").is_fifo()
            raise RestoreFailed("broken off")

    with pytest.raises(RestoreFailed, match="broken off"):
        wiped.restore(emit)
    assert list(wiped.top.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("run", "a file"),
        ("run/fifo", "a file"),
        ("deep/er/est", "another mode"),
        ("run/job.pid", "another pid"),
    ],
)
def test_what_exists_is_not_changed(wiped: Wiped, name: str, what: str) -> None:
    place = wiped.home / name
    place.parent.mkdir(parents=True)
    if what == "another mode":
        place.mkdir(mode=0o700)
    else:
        place.write_text("1")
    before = look(wiped.top)
    if what == "another pid":
        (wiped.home / "run").chmod(0o2750)
        before = look(wiped.top)
        wiped.restore()
        assert place.read_text() == "1"
        assert {one: look(wiped.top)[one] for one in before} == before
        return
    with pytest.raises(RestoreRefused, match=name):
        wiped.restore()
    assert look(wiped.top) == before


def test_a_directory_that_its_owner_may_not_make_is_refused_before_criu_starts(
    wiped: Wiped,
) -> None:
    wiped.home.mkdir()
    os.chown(wiped.home, USER + 7, USER + 7)  # neither the owner nor root alone may write there
    events: list[Event] = []
    with pytest.raises(RestoreFailed, match=f"cannot make {wiped.home}") as caught:
        wiped.restore(events.append)
    assert caught.value.cure
    assert "restore.criu" not in {event.name for event in events}
    assert list(wiped.home.iterdir()) == []


def test_a_socket_of_the_job_is_where_it_was(wiped: Wiped) -> None:
    wiped.restore()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        one.connect(str(wiped.home / "run/box"))
        one.send(b"to the box")
