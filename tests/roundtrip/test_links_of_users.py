"""CRIU opens files and names sockets as root, by paths that lead through directories of the job's
user. No link that the user makes there leads it to something of root's.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from icecore.dumper.data.directories import DataDirectories
from icecore.dumper.dump import dump
from icecore.dumper.observe.files import FoundFile
from icecore.dumper.options import DumpOptions
from icecore.dumper.target import Target
from icecore.errors import RestoreFailed, RestoreRefused
from icecore.host.criu.libraries import RESTORE_LIBRARY
from icecore.host.jobs import temporary
from icecore.host.jobs.identity import Identity
from icecore.host.jobs.job import Job
from icecore.host.jobs.namespaces import Isolation
from icecore.host.jobs.registry import Registry
from icecore.restorer.phases import files
from tests.host.target import eventually
from tests.roundtrip.conftest import SEES_ICECORE, Trip

pytestmark = [
    pytest.mark.criu,
    SEES_ICECORE,
]

PYTHON = shutil.which("python3", path="/usr/bin:/bin") or sys.executable
SECRET = b"a secret!"

#: Has something open in a directory of its own, of the size and mode of root's file.
OPENED = f"""
import os, sys, time
os.makedirs("/tmp/real/in")
file = os.open("/tmp/real/shadow", os.O_RDWR | os.O_CREAT, 0o600); os.write(file, bytes({len(SECRET)}))
os.chmod("/tmp/real/in", 0o700)
if sys.argv[1] == "directory":
    os.close(file); os.chdir("/tmp/real/in")
print("there", flush=True)
while True:
    time.sleep(0.01)
"""

#: Has bound a socket by a name through a link; may remove the name, and lets the link lead elsewhere.
BOUND = """
import os, socket, sys, time
name, link, elsewhere = sys.argv[1:4]
home = os.path.dirname(link)
os.makedirs(f"{home}/real/in"); os.symlink("real", link)
server = socket.socket(socket.AF_UNIX); server.bind(name); server.listen()
if elsewhere:
    os.unlink(name); os.unlink(link); os.symlink(elsewhere, link)
print("there", flush=True)
while True:
    time.sleep(0.01)
"""


@dataclass
class World:
    """Jobs of an ordinary user, and a directory of root's."""

    trip: Trip
    registry: Registry
    home: Path
    roots: Path
    user: Identity

    def start(self, program: str, *words: str, tmp: bool, root: bool = False) -> Job:
        job = self.registry.start(
            [PYTHON, "-c", program, *words],
            name="hostile",
            cwd="/",
            isolation=Isolation(tmp=tmp, root=root),
            identity=self.user,
        )
        assert eventually(lambda: "there" in job.log_path("stdout").read_text()), job.log_path(
            "stderr"
        ).read_text()
        return job

    def dump(self, job: Job) -> str:
        target = Target(job.pid, job.name, record=job.record())
        result = dump(
            self.trip.repository,
            self.trip.loop,
            target,
            DumpOptions(stop=True),
            criu=self.trip.criu,
        )
        job.wait(20)
        return result.snapshot

    def restore(self, snapshot: str) -> Job:
        return self.trip.restore_job(self.registry, snapshot)

    def end(self) -> None:
        for job in self.registry.instances():
            if job.alive:
                job.kill(9)
                job.wait(20)


@pytest.fixture
def world(trip: Trip) -> Iterator[World]:
    user = Identity.of_user("nobody")
    with tempfile.TemporaryDirectory(dir="/var/lib", prefix="icecore-test-") as name:
        top = Path(name)
        top.chmod(0o755)
        for own in ("home", "roots"):
            (top / own).mkdir(mode=0o755)
        os.chown(top / "home", user.user, user.group)
        made = World(trip, Registry(top / "state"), top / "home", top / "roots", user)
        try:
            yield made
        finally:
            made.end()


@pytest.mark.parametrize("what", ["file", "directory"])
@pytest.mark.parametrize("check", ["before", "after"])
def test_a_link_that_is_made_while_the_snapshot_is_taken(
    world: World, monkeypatch: pytest.MonkeyPatch, what: str, check: str
) -> None:
    (world.roots / "shadow").write_bytes(SECRET)
    (world.roots / "shadow").chmod(0o600)
    (world.roots / "in").mkdir(mode=0o700)
    job = world.start(OPENED, what, tmp=True)
    place = temporary.place(job.directory, "/tmp")

    in_window = DataDirectories.in_window

    def swapped(captures: DataDirectories, found: Sequence[FoundFile]) -> int:
        """What a process of the user outside of the job can do once the job is frozen."""
        if not (place / "real").is_symlink():
            swap()
        return in_window(captures, found)

    def swap() -> None:
        (place / "real").rename(place / "x")
        (place / "real").symlink_to(world.roots)
        os.chown(place / "real", world.user.user, world.user.group, follow_symlinks=False)

    monkeypatch.setattr(DataDirectories, "in_window", swapped)
    snapshot = world.dump(job)
    if check == "before":
        with pytest.raises(RestoreRefused, match="through a symbolic link in its private"):
            world.restore(snapshot)
    else:  # both checks do, alone
        monkeypatch.setattr(files, "require_paths", lambda *_, **__: None)
        with pytest.raises(RestoreFailed, match="is not the file that was checked"):
            world.restore(snapshot)
    assert not any(one.alive for one in world.registry.instances())
    assert (world.roots / "shadow").read_bytes() == SECRET


@pytest.mark.parametrize("tmp", [True, False], ids=["private", "host"])
@pytest.mark.parametrize("how", ["live", "deleted", "up"])
def test_a_socket_is_not_named_through_a_link_of_the_user(
    world: World, tmp: bool, how: str
) -> None:
    home = "/tmp" if tmp else str(world.home)
    names = {"up": f"{home}/link/in/../victim"}
    with socket.socket(socket.AF_UNIX) as victim:
        victim.bind(str(world.roots / "victim"))
        victim.listen()
        before = (world.roots / "victim").stat()
        job = world.start(
            BOUND,
            names.get(how, f"{home}/link/victim"),
            f"{home}/link",
            str(world.roots) if how == "deleted" else "",
            tmp=tmp,
        )
        snapshot = world.dump(job)
        if not tmp and how != "deleted":
            (world.home / "link").unlink()
            (world.home / "link").symlink_to(world.roots)
            (world.roots / "in").mkdir()
        with pytest.raises(RestoreRefused, match="symbolic link") as caught:
            world.restore(snapshot)
        assert caught.value.cure
        after = (world.roots / "victim").stat()
        assert (after.st_ino, after.st_uid, after.st_ctime_ns) == (
            before.st_ino,
            before.st_uid,
            before.st_ctime_ns,
        )


@pytest.mark.parametrize("name", ["link/victim", "link/in/../victim"])
def test_a_link_in_the_shared_memory_of_a_private_root(world: World, name: str) -> None:
    (world.roots / "in").mkdir()
    with socket.socket(socket.AF_UNIX) as victim:
        victim.bind(str(world.roots / "victim"))
        before = (world.roots / "victim").stat()
        words = [f"/dev/shm/{name}", "/dev/shm/link", str(world.roots)]
        snapshot = world.dump(world.start(BOUND, *words, tmp=False, root=True))
        with pytest.raises(RestoreRefused, match="symbolic link"):
            world.restore(snapshot)
        after = (world.roots / "victim").stat()
        assert (after.st_ino, after.st_ctime_ns) == (before.st_ino, before.st_ctime_ns)
    # Without a link in its way the name comes back.
    snapshot = world.dump(
        world.start(BOUND, "/dev/shm/real/in/s", "/dev/shm/link", "", tmp=False, root=True)
    )
    restored = world.restore(snapshot)
    assert Path(f"/proc/{restored.pid}/root/dev/shm/real/in/s").is_socket()


def test_a_socket_is_not_named_where_its_user_may_not(world: World) -> None:
    own = world.home / "own"
    job = world.start(BOUND, str(own / "real/victim"), str(own / "link"), "", tmp=False)
    snapshot = world.dump(job)
    restored = world.restore(snapshot)
    assert (own / "real/victim").stat().st_uid == world.user.user
    world.end()
    assert not restored.alive
    os.chown(own / "real", 0, 0)
    with pytest.raises(RestoreRefused, match="may not make here"):
        world.restore(snapshot)
    # A name that is another user's in a directory that everybody may write to.
    (own / "real").chmod(0o1777)
    os.chown(own / "real/victim", 12345, 12345)
    with pytest.raises(RestoreRefused, match="may not make here"):
        world.restore(snapshot)


#: Has open a directory, and a file of one byte, that no longer have names.
UNNAMED = """
import os, sys, time
home, what = sys.argv[1:]
os.makedirs(f"{home}/d/in", mode=0o711)
if what == "directory":
    os.chdir(f"{home}/d/in"); os.rmdir(f"{home}/d/in")
else:
    file = open(f"{home}/d/in/victim", "w+"); file.write("x"); file.flush()
    os.unlink(f"{home}/d/in/victim")
    if what == "file":
        os.rmdir(f"{home}/d/in")
print("there", flush=True)
while True:
    time.sleep(0.01)
    if what == "directory":
        os.stat(".")
    else:
        file.seek(0); assert file.read() == "x"
"""


@pytest.mark.parametrize("root", [False, True], ids=["host", "private root"])
@pytest.mark.parametrize("what", ["directory", "file", "file in a directory"])
def test_what_has_no_name_is_not_made_through_a_link_of_the_user(
    world: World, what: str, root: bool
) -> None:
    """CRIU makes it for a moment under the name that it had."""
    home = world.home / "own"
    snapshot = world.dump(world.start(UNNAMED, str(home), what, tmp=False, root=root))
    restored = world.restore(snapshot)
    link = "cwd" if what == "directory" else "fd/3"
    main = restored.main_process()
    assert os.readlink(f"/proc/{main}/{link}").endswith(" (deleted)")
    assert os.stat(f"/proc/{main}/{link}").st_uid == world.user.user
    world.end()
    assert not any(home.rglob("*cr.*")), "what CRIU made is gone"
    (home / "d").rename(home / "away")
    (home / "d").symlink_to(world.roots)
    (world.roots / "in").mkdir(mode=0o755)
    (world.roots / "in/victim").write_bytes(SECRET)
    before = [path.stat() for path in (world.roots, world.roots / "in", world.roots / "in/victim")]
    # If the directory of the file is recorded, the link is noticed before CRIU starts.
    recorded = what == "file in a directory"
    with pytest.raises(RestoreRefused if recorded else RestoreFailed):
        world.restore(snapshot)
    after = [path.stat() for path in (world.roots, world.roots / "in", world.roots / "in/victim")]
    assert [(one.st_uid, one.st_mode, one.st_ctime_ns) for one in before] == [
        (one.st_uid, one.st_mode, one.st_ctime_ns) for one in after
    ]


#: Changes to the directory of a relative socket name, through a link to root's directory, as CRIU
#: does.
RELATIVE = """
import ctypes, os, socket, sys
folder, user = sys.argv[1], int(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)
def attempt(*words):
    return words[0](*words[1:]), os.strerror(ctypes.get_errno())
before = os.open(".", os.O_RDONLY)
assert libc.chdir(folder.encode()) == 0
print(*attempt(libc.unlinkat, -100, b"victim", 0))
print(*attempt(libc.fchownat, -100, b"victim", user, user, 0))
with socket.socket(socket.AF_UNIX) as bound:
    try:
        bound.bind("new")
    except PermissionError as error:
        print(error.strerror)
assert libc.fchdir(before) == 0
print(libc.unlinkat(-100, b"own", 0))
"""


#: Binds a socket as CRIU does, replaces its name by a link to a file of root's, and gives it away.
EXCHANGED = """
import ctypes, os, socket, sys
name, victim, user = sys.argv[1], sys.argv[2], int(sys.argv[3])
libc = ctypes.CDLL(None, use_errno=True)
AT_FDCWD = -100
with socket.socket(socket.AF_UNIX) as bound:
    bound.bind(name)
    print(os.stat(name).st_uid)
    os.rename(name, name + ".away")
    os.symlink(victim, name)
    print(libc.fchownat(AT_FDCWD, name.encode(), user, user, 0), os.strerror(ctypes.get_errno()))
    print(libc.fchmodat(AT_FDCWD, name.encode(), 0o666, 0), os.strerror(ctypes.get_errno()))
print(libc.unlinkat(AT_FDCWD, victim.encode(), 0))
print(*os.getresuid(), *os.getgroups())
"""


def as_criu(world: World, program: str, *words: str, cwd: str = "/") -> list[str]:
    """Run a program as CRIU runs for a job of the user; return the lines of its output."""
    # The library acts only in CRIU, which has this function.
    criu = world.home.parent / "criu.so"
    subprocess.run(
        ["gcc", "-shared", "-o", criu, "-x", "c", "-"],
        input=b"void print_on_level(unsigned level, const char *format, ...) {}",
        check=True,
        timeout=60,
    )
    user = world.user.user
    done = subprocess.run(
        [PYTHON, "-c", program, *words],
        env={
            "LD_PRELOAD": f"{RESTORE_LIBRARY} {criu}",
            "ICECORE_NAMES": f"{user} {user} {user}",
        },
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_relative_name_does_not_lead_to_a_directory_of_roots(world: World) -> None:
    (victim := world.roots / "victim").write_bytes(SECRET)
    (own := world.home.parent / "own").write_bytes(SECRET)
    (link := world.home / "link").symlink_to(world.roots)
    before = victim.stat()
    words = (str(link), str(world.user.user))
    assert as_criu(world, RELATIVE, *words, cwd=str(world.home.parent)) == [
        "-1 Permission denied",
        "-1 Operation not permitted",
        "Permission denied",
        "0",
    ]
    assert victim.stat() == before and not own.exists()


@pytest.mark.parametrize("where", ["home", "tmp"])
def test_the_name_of_a_socket_is_exchanged_while_criu_gives_it_away(
    world: World, where: str
) -> None:
    (victim := world.roots / "victim").write_bytes(SECRET)
    victim.chmod(0o600)
    folder = world.home
    if where == "tmp":
        (folder := world.home.parent / "tmp").mkdir()
        folder.chmod(0o1777)
    user = world.user.user
    groups = " ".join(map(str, os.getgroups()))
    denied = "-1 Operation not permitted"
    assert as_criu(world, EXCHANGED, str(folder / "s"), str(victim), str(user)) == [
        str(user),
        denied,
        denied,
        "0",
        f"0 0 0 {groups}".strip(),
    ]
    assert not victim.exists(), "in root's own directories CRIU acts as root"


#: Enters the private directory of a job of its user, and adds to it until it cannot.
ADDS = """
import os, sys
os.chdir(f"/proc/{sys.argv[1]}/root/tmp")
for number in range(1 << 40):
    try:
        os.mkdir(f"new-{number}")
    except OSError as error:
        print(type(error).__name__, flush=True)
        sys.exit(3)
    if not number:
        print("in", flush=True)
"""


def test_a_process_that_goes_on_adding_to_what_is_removed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = world.start(OPENED, "file", tmp=True)
    adder = subprocess.Popen(
        ["setpriv", f"--reuid={world.user.user}", f"--regid={world.user.group}",
         "--clear-groups", PYTHON, "-c", ADDS, str(job.main_process())],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert adder.stdout is not None and adder.stdout.readline() == "in\n"
        job.kill(9)
        assert eventually(lambda: job.state == "ended")
        held = []
        remove = temporary.remove

        def removed(directory: Path, seconds: float) -> None:
            held.append(_is_locked(world.registry.state / "lock"))
            remove(directory, seconds)

        monkeypatch.setattr(temporary, "remove", removed)
        other = world.registry.start(["true"], name="other", cwd="/")
        other.wait(20)
        assert adder.wait(60) == 3
        assert adder.stdout.read() in ("PermissionError\n", "FileNotFoundError\n")
        world.registry.remove(job)
        assert held and not any(held), "other commands do not wait for a removal"
        assert not job.directory.exists()
    finally:
        adder.kill()
        adder.wait(20)
        assert adder.stdout is not None
        adder.stdout.close()


def _is_locked(path: Path) -> bool:
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_processes_that_outlive_their_init_keep_their_tmp(world: World) -> None:
    job = world.registry.start(
        [PYTHON, "-c", OPENED, "file"],
        name="left",
        cwd="/",
        isolation=Isolation(pid=False, tmp=True),
        identity=world.user,
    )
    if job.group is None:
        pytest.skip("this machine gives a job no cgroup")
    assert eventually(lambda: "there" in job.log_path("stdout").read_text())
    command, place = job.main_process(), temporary.place(job.directory, "/tmp")
    descriptor = os.pidfd_open(command)
    try:
        os.kill(job.pid, 9)
        assert eventually(lambda: job.state == "ended")
        world.registry.thaw_left()
        assert (place / "real/shadow").exists() and Path(f"/proc/{command}/root/tmp/real").exists()
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        assert eventually(lambda: world.registry.thaw_left() or not place.exists())
    finally:
        os.close(descriptor)
