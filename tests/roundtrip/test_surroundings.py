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
from icecore.host.kernel import procfs
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


@pytest.mark.parametrize("name", ["deep/er/est", "run", "run/fifo"])
def test_what_is_swapped_before_criu_opens_it_is_not_given_to_the_job(
    wiped: Wiped, name: str
) -> None:
    """Who controls a directory could give the job a directory or FIFO that it may not reach."""
    victim = wiped.top / "victim"

    def emit(event: Event) -> None:
        if (event.name, event.fields.get("state")) != ("restore.criu", "begin"):
            return
        place = wiped.home / name
        if place.is_fifo():
            os.mkfifo(victim)
        else:
            shutil.copytree(place, victim, copy_function=lambda *_: None)
            for left in {"lock", "fifo", "job.pid"} & set(os.listdir(place)):
                os.link(place / left, victim / left)
            for other in ("sockets",):
                (victim / other).mkdir(exist_ok=True)
        victim.chmod(place.stat().st_mode & 0o7777)
        place.rename(wiped.top / "away")
        place.symlink_to(victim)

    with pytest.raises(RestoreFailed, match="which is not the file that was checked"):
        wiped.restore(emit)
    assert not any(job.alive for job in wiped.registry.instances())


PROGRAM = 'import ctypes, sys, time; ctypes.CDLL(sys.argv[1]); print("there", flush=True); time.sleep(1000)'


def _library(place: Path, answer: int) -> None:
    source = place.with_suffix(".c")
    source.write_text(f"int answer(void) {{ return {answer}; }}\n")
    words = ["cc", "-shared", "-fPIC", "-Wl,--build-id=sha1", "-o", place, source]
    subprocess.run(words, check=True, timeout=60)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_library_is_compared_by_build_id_and_never_replaced(trip: Trip, tmp_path: Path) -> None:
    registry = Registry(tmp_path / "jobs")
    folder = tmp_path / "lib"
    folder.mkdir()
    library, other = folder / "one.so", tmp_path / "other.so"
    _library(library, 1)
    job = registry.start([sys.executable, "-c", PROGRAM, str(library)], name="library", cwd="/")
    try:
        assert eventually(lambda: "there" in job.log_path("stdout").read_text())
        target = Target(job.pid, job.name, record=job.record())

        def taken(**options: bool) -> str:
            chosen = DumpOptions(**options)  # type: ignore[arg-type]
            return dump(trip.repository, trip.loop, target, chosen, criu=trip.criu).snapshot

        def restored(snapshot: str, **options: str) -> None:
            chosen = RestoreOptions(**options)  # type: ignore[arg-type]
            found = restore(
                trip.repository, trip.loop, snapshot, chosen, criu=trip.criu, registry=registry
            )
            assert found.job is not None
            assert any(
                os.path.basename(mapping.path) == "one.so"
                for mapping in procfs.read_maps(found.pid)
            ) or any(
                os.path.basename(mapping.path) == "one.so"
                for child in procfs.tree(found.pid)
                for mapping in procfs.read_maps(child)
            )
            found.job.kill(9)
            found.job.wait(20)

        plain, carried = taken(), taken(with_files=True)
        job.kill(9)
        job.wait(20)
        content = library.read_bytes()
        os.utime(library, ns=(1, 1))
        restored(plain)  # the same build, installed at another time
        _library(other, 2)
        assert other.stat().st_size == len(content)
        shutil.copy(other, library)
        expected, actual = (
            subprocess.run(
                ["readelf", "-n", path], capture_output=True, text=True, timeout=20, check=True
            ).stdout.split("Build ID: ")[1][:40]
            for path in (_written(tmp_path / "first.so", content), other)
        )
        for snapshot in (plain, carried):
            with pytest.raises(RestoreRefused, match=f"{library}.*{expected}.*{actual}") as caught:
                restored(snapshot)
            assert "--files-to" in caught.value.cure
        assert library.read_bytes() == other.read_bytes()
        restored(carried, files_to=str(tmp_path / "copies"))
        assert library.read_bytes() == other.read_bytes(), "it is covered, not replaced"
        shutil.rmtree(folder)
        with pytest.raises(RestoreRefused, match=f"{library}: it is missing"):
            restored(plain)
        restored(carried)
        assert library.read_bytes() == content
        assert library.stat().st_mode & 0o7777 == 0o755
    finally:
        for one in registry.instances():
            if one.alive:
                one.kill(9)
                one.wait(10)


def _written(place: Path, content: bytes) -> Path:
    place.write_bytes(content)
    return place


LINKED = """
import os, socket, sys
home = sys.argv[1]
os.makedirs(f"{home}/real/in"); os.symlink("real", f"{home}/link")
listener = socket.socket(socket.AF_UNIX); listener.bind(f"{home}/link/in/server"); listener.listen()
os.chdir(f"{home}/link"); box = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); box.bind("box")
os.chdir("/")
print("there", flush=True)
while True:
    one, _ = listener.accept(); one.sendall(box.getsockname().encode()); one.close()
"""


def test_a_socket_whose_name_leads_through_a_link(trip: Trip, tmp_path: Path) -> None:
    registry = Registry(tmp_path / "jobs")
    # Only root can make links there: CRIU follows no other.
    with tempfile.TemporaryDirectory(dir="/var/lib", prefix="ice-") as name:
        home = Path(name)
        job = registry.start([sys.executable, "-c", LINKED, name], name="linked", cwd="/")
        try:
            assert eventually(lambda: "there" in job.log_path("stdout").read_text())
            target = Target(job.pid, job.name, record=job.record())
            snapshot = dump(
                trip.repository, trip.loop, target, DumpOptions(stop=True), criu=trip.criu
            ).snapshot
            job.wait(20)
            wiped = Wiped(trip, registry, snapshot, home, {})
            shutil.rmtree(home / "real")
            restored = wiped.restore()
            with socket.socket(socket.AF_UNIX) as one:
                one.settimeout(20)
                one.connect(str(home / "link/in/server"))
                assert one.recv(64) == b"box"
            restored.kill(9)
            restored.wait(20)
            (home / "link").unlink()  # no other directory is made in its place
            with pytest.raises(RestoreRefused, match="its directory is missing"):
                wiped.restore()
        finally:
            for each in registry.instances():
                if each.alive:
                    each.kill(9)
                    each.wait(10)
