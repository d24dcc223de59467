"""Jobs of users who are not root, started, dumped and restored by root: with their credentials and
limits, and without anything of root's.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from icecore.errors import NotFound, RestoreRefused, UsageError
from icecore.events import Event
from icecore.host.criu.libraries import CRIU_LIBRARY, RESTORE_LIBRARY
from icecore.host.jobs.identity import Identity, limits_of
from icecore.host.jobs.job import Job
from icecore.host.jobs.namespaces import Isolation
from icecore.host.jobs.registry import Registry
from icecore.host.jobs.start import StartFailed
from icecore.host.kernel import cgroups, procfs
from icecore.host.kernel.peer import Peer
from icecore.restorer.owner import owner_of
from icecore.restorer.phases.planning import run_record
from tests.host.target import eventually
from tests.roundtrip.conftest import Trip
from tests.roundtrip.test_instances import bring_back, lines, take, wait_lines

PYTHON = shutil.which("python3", path="/usr/bin:/bin") or ""

pytestmark = [
    pytest.mark.criu,
    pytest.mark.skipif(os.geteuid() != 0, reason="root starts the jobs of others"),
    pytest.mark.skipif(not PYTHON, reason="needs a Python that other users can execute"),
    pytest.mark.skipif(
        not CRIU_LIBRARY.exists() or not RESTORE_LIBRARY.exists(),
        reason="needs a C compiler when icecore is built",
    ),
]

#: Not in the user database, and in it.
STRANGER, NOBODY = 12345, 65534
NOFILE = resource.RLIMIT_NOFILE

#: Counts, into its output and a file that only its user can reach, and says as what it runs.
COUNT = """
import ctypes, json, os, resource, sys, time
home = sys.argv[1]
libc = ctypes.CDLL(None)
# A file of /proc that is open in a snapshot is not found by a restore of a job with pids of its own.
def umask():
    mask = os.umask(0)
    os.umask(mask)
    return f"{mask:04o}"
def capabilities():
    head, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert not libc.capget(head, data)
    effective, permitted, inheritable = (data[i] | data[i + 3] << 32 for i in range(3))
    ambient = sum(1 << one for one in range(64) if libc.prctl(47, 1, one, 0, 0) == 1)
    return [f"{one:016x}" for one in (inheritable, permitted, effective, ambient)]
held = open(f"{home}/private")
file = open(f"{home}/out", "a")
child = os.fork()
if not child:
    while True:
        time.sleep(0.01)
step = 0
while True:
    step += 1
    file.write(f"{step}\\n")
    file.flush()
    about = {
        "step": step,
        "ids": [*os.getresuid(), *os.getresgid()],
        "groups": sorted(os.getgroups()),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in ("RLIMIT_NOFILE", "RLIMIT_CORE", "RLIMIT_STACK")},
        "umask": umask(),
        "capabilities": capabilities(),
        "descriptors": {name: os.readlink(f"/proc/self/fd/{name}") for name in map(str, range(64)) if os.path.exists(f"/proc/self/fd/{name}")},
        "read": os.pread(held.fileno(), 100, 0).decode(),
    }
    print(json.dumps(about), flush=True)
    time.sleep(0.02)
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can enter; pytest's own are root's."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="icecore-users-") as made:
        os.chmod(made, 0o755)
        yield Path(made)


@pytest.fixture
def registry(place: Path) -> Iterator[Registry]:
    made = Registry(place / "state")
    yield made
    for job in made.instances():
        if job.alive:
            job.kill(9)
            job.wait(10)


def make_home(place: Path, user: int) -> Path:
    home = place / f"home{user}"
    home.mkdir(mode=0o700)
    (home / "private").write_text("mine")
    for path in (home, home / "private"):
        os.chown(path, user, user)
    return home


def lowered(user: int) -> Identity:
    """A user with groups and limits of its own."""
    own = Identity.of_process(os.getpid())
    limits = {
        **own.limits,
        NOFILE: (300, 400),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_STACK: (4 << 20, 8 << 20),
    }
    return replace(
        own,
        user=user,
        group=user,
        groups=(7, 9, user),
        name=str(user),
        limits=limits,
        umask=0o027,
        nice=3,
    )


def start_count(registry: Registry, place: Path, user: int, **options: Any) -> Job:
    home = make_home(place, user)
    command = [PYTHON, "-c", COUNT, str(home)]
    return registry.start(command, name="count", identity=lowered(user), cwd=home, **options)


def said(job: Job) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(job)]


def stop(trip: Trip, job: Job) -> str:
    """Dump a job and end it; return the snapshot's id once its pids are free."""
    tree = procfs.tree(job.pid)
    snapshot = take(trip, job, stop=True)
    job.wait(20)

    def gone() -> bool:
        for pid in tree:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return not any(map(procfs.exists, tree))

    eventually(gone)
    return snapshot


def process_of(user: int, *command: str, **how: Any) -> subprocess.Popen[bytes]:
    """Start a process of a user, without icecore."""
    return subprocess.Popen(
        [*command], user=user, group=user, extra_groups=[7], start_new_session=True, **how
    )


# -- the round trip


@pytest.mark.parametrize(
    ("isolation", "user", "mode"),
    [
        (Isolation(), STRANGER, "full"),
        (Isolation(), NOBODY, "lazy"),
        (Isolation(root=True), STRANGER, "lazy"),
        (Isolation(root=True), NOBODY, "full"),
        (Isolation(pid=False), STRANGER, "full"),
        (Isolation(network=True), STRANGER, "lazy"),
    ],
)
def test_a_job_of_another_user_comes_back_as_that_user(
    isolation: Isolation, user: int, mode: str, trip: Trip, registry: Registry, place: Path
) -> None:
    job = start_count(registry, place, user, isolation=isolation)
    wait_lines(job, 10)
    take(trip, job)
    wait_lines(job, 20)
    snapshot = stop(trip, job)
    printed = len(lines(job))
    restored = bring_back(trip, registry, snapshot, mode=mode)
    restored.wait_resident(30)
    assert restored.job is not None and restored.limits == []
    wait_lines(restored.job, printed + 10)
    found = said(restored.job)
    assert [one["step"] for one in found] == [*range(1, len(found) + 1)]
    first = found[0]
    assert first["ids"] == [user] * 6 and first["groups"] == sorted({7, 9, user})
    assert first["limits"] == {
        "RLIMIT_NOFILE": [300, 400],
        "RLIMIT_CORE": [0, 0],
        "RLIMIT_STACK": [4 << 20, 8 << 20],
    }
    assert first["umask"] == "0027" and first["read"] == "mine"
    assert set(first["capabilities"]) == {"0" * 16}
    for one in found:  # before as after
        assert {k: v for k, v in one.items() if k not in ("step", "descriptors")} == {
            k: v for k, v in first.items() if k not in ("step", "descriptors")
        }
    kept = [int(line) for line in (place / f"home{user}" / "out").read_text().split()]
    assert kept == [*range(1, len(kept) + 1)]
    main = restored.job.main_process()
    assert os.getpriority(os.PRIO_PROCESS, main) == 3
    assert restored.job.description.user == user
    assert restored.job.log_path("stdout").stat().st_uid == user
    assert restored.job.status_path.stat().st_uid == 0
    restored.job.kill(9)
    assert restored.job.wait(10).signal == 9


def test_the_owner_is_in_the_manifest_and_decides(
    trip: Trip, registry: Registry, place: Path
) -> None:
    job = start_count(registry, place, STRANGER)
    wait_lines(job, 5)
    snapshot = stop(trip, job)
    manifest = trip.loop.run(trip.repository.manifest(snapshot))
    record = run_record(manifest)
    assert record is not None and (record.user, record.user_name) == (STRANGER, str(STRANGER))
    assert owner_of(manifest, record) == STRANGER
    assert job.may_be_touched_by(STRANGER) and job.may_be_touched_by(0)
    assert not job.may_be_touched_by(NOBODY)
    with pytest.raises(RestoreRefused, match=f"of user {STRANGER}, and user nobody restores it"):
        bring_back(trip, registry, snapshot, identity=lowered(NOBODY))
    restored = bring_back(trip, registry, snapshot, identity=lowered(STRANGER))
    assert restored.job is not None
    wait_lines(restored.job, 10)


def test_limits_that_cannot_be_raised_are_lowered_and_named(
    trip: Trip, registry: Registry, place: Path
) -> None:
    job = start_count(registry, place, STRANGER)
    wait_lines(job, 5)
    snapshot = stop(trip, job)
    events: list[Event] = []
    low = lowered(STRANGER)
    low = replace(low, limits={**low.limits, NOFILE: (100, 200)})
    restored = bring_back(trip, registry, snapshot, events.append, identity=low)
    assert restored.job is not None
    assert restored.limits == ["open files 200 instead of 400"]
    assert [e.fields["short"] for e in events if e.name == "restore.limits"] == [restored.limits]
    assert limits_of(restored.job.main_process())[NOFILE] == (200, 200)


def test_a_job_cannot_start_with_higher_limits_than_can_be_given(
    registry: Registry, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from icecore.host.kernel import limits

    everything = limits.capabilities()
    monkeypatch.setattr(limits, "capabilities", lambda: everything - {"CAP_SYS_RESOURCE"})
    _, hard = resource.getrlimit(NOFILE)
    high = replace(lowered(STRANGER), limits={NOFILE: (300, hard + 1000)})
    events: list[Event] = []
    job = registry.start(
        ["sleep", "100"], identity=high, cwd="/", environment={"PATH": "/bin"}, emit=events.append
    )
    assert [e.fields["short"] for e in events if e.name == "run.limits"] == [
        [f"open files {hard} instead of {hard + 1000}"]
    ]
    assert limits_of(job.main_process())[NOFILE] == (300, hard)


# -- trees of several users


def test_a_tree_whose_processes_are_of_several_users(
    trip: Trip, registry: Registry, place: Path
) -> None:
    code = (
        "import os, time\n"
        "if not os.fork():\n"
        f"    os.setgroups([9]); os.setresgid({NOBODY}, {NOBODY}, {NOBODY}); os.setresuid({NOBODY}, {NOBODY}, {NOBODY})\n"
        "while True:\n"
        "    print(os.getuid(), flush=True); time.sleep(0.02)\n"
    )
    job = registry.start([PYTHON, "-c", code], name="two", cwd=place)
    eventually(lambda: {"0", str(NOBODY)} <= set(lines(job)))
    snapshot = stop(trip, job)
    before = len(lines(job))
    restored = bring_back(trip, registry, snapshot)
    assert restored.job is not None
    wait_lines(restored.job, before + 10)
    assert {"0", str(NOBODY)} == set(lines(restored.job)[before:])
    manifest = trip.loop.run(trip.repository.manifest(snapshot))
    assert owner_of(manifest, run_record(manifest)) == 0


def test_a_set_user_id_program_of_a_job(trip: Trip, registry: Registry, place: Path) -> None:
    """It keeps root's rights, is dumped and restored with them, and it ends with the job."""
    if os.statvfs(place).f_flag & os.ST_NOSUID:
        pytest.skip("set-user-ID bits count nothing here")
    program = place / "sleep"
    shutil.copy("/bin/sleep", program)
    program.chmod(0o4755)
    command = ["/bin/sh", "-c", f"{program} 1000 & while :; do echo x; sleep 0.05; done"]
    job = registry.start(command, name="setuid", identity=lowered(STRANGER), cwd=place)
    eventually(lambda: len(roots_below(job)) == 1)
    snapshot = stop(trip, job)
    restored = bring_back(trip, registry, snapshot)
    assert restored.job is not None
    (raised,) = roots_below(restored.job)
    manifest = trip.loop.run(trip.repository.manifest(snapshot))
    record = run_record(manifest)
    assert owner_of(manifest, record) == STRANGER
    restored.job.kill(15)
    restored.job.wait(10)
    assert not procfs.exists(raised)


def roots_below(job: Job) -> list[int]:
    """The processes of root's below a job's init."""
    with suppress(NotFound):
        return [pid for pid in procfs.tree(job.pid)[1:] if procfs.status(pid).user == 0]
    return []


# -- nothing is gained


#: Tries what it must not be able to do; prints what it could.
GAIN = """
import ctypes, os, sys
state, init = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
gained = []
def attempt(what, call):
    try:
        call()
    except (OSError, ValueError):
        return
    gained.append(what)
attempt("list the state directory", lambda: os.listdir(state))
attempt("list the init's descriptors", lambda: os.listdir(f"/proc/{init}/fd"))
attempt("signal the init", lambda: os.kill(int(init), 9))
attempt("become root", lambda: os.setuid(0))
attempt("get a group", lambda: os.setgroups([0]))
attempt("raise a limit", lambda: __import__("resource").setrlimit(7, (4000, 4000)))
for path in ("/proc/self/fd/1", "/proc/self/fd/2"):
    named = os.readlink(path)
    attempt(f"remove {named}", lambda: os.unlink(named))
    attempt(f"see the directory of {named}", lambda: os.listdir(os.path.dirname(named)))
if libc.ptrace(16, int(init), 0, 0) == 0:
    gained.append("trace the init")
if libc.syscall(101 if os.uname().machine == "x86_64" else 117, 0x4206, int(init), 0, 0) == 0:
    gained.append("seize the init")
open_ = [(name, os.readlink(f"/proc/self/fd/{name}")) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
gained += [f"descriptor {one}" for one in open_ if int(one[0]) > 2]
status = open("/proc/self/status").read()
for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
    if int(status.partition(name + ":")[2].split()[0], 16):
        gained.append(name)
try:
    gained += [line for line in open("/proc/keys") if " _ses" in line and f" {os.getuid()} " not in line]
except OSError:
    pass
print("gained:", gained, flush=True)
os.write(1, b"to /dev/stdout as well\\n") if os.access("/dev/stdout", os.W_OK) else print("no /dev/stdout")
import time; time.sleep(1000)
"""


@pytest.mark.parametrize("isolation", [Isolation(), Isolation(pid=False), Isolation(root=True)])
def test_a_job_gains_nothing(isolation: Isolation, registry: Registry, place: Path) -> None:
    with open(place / "secret", "w") as inherited:
        os.set_inheritable(inherited.fileno(), True)
        # The launcher's pid is not known before: a job in the host's pid namespace sees its parent.
        code = GAIN.replace("state, init = sys.argv[1:]", "state, init = sys.argv[1], os.getppid()")
        job = registry.start(
            [PYTHON, "-c", code, str(registry.state)],
            name="gain",
            identity=replace(lowered(STRANGER), groups=(STRANGER,)),
            isolation=isolation,
            cwd=place,
        )
        found = wait_lines(job, 1)
    assert found == ["gained: []", "to /dev/stdout as well"], job.log_path("stderr").read_text()
    assert job.alive and procfs.status(job.pid).user == 0
    assert stat.S_IMODE(job.directory.stat().st_mode) == 0o700


def test_the_bounding_set_and_no_new_privs_are_the_callers(registry: Registry, place: Path) -> None:
    kill_only = 1 << 5
    bound = replace(lowered(STRANGER), bounding=kill_only, no_new_privs=True)
    job = registry.start(["sleep", "100"], identity=bound, cwd=place)
    fields = procfs.status_fields(job.main_process())
    assert int(fields["CapBnd"][0], 16) == kill_only and fields["NoNewPrivs"] == ["1"]


def test_program_and_directory_are_found_with_the_users_rights(
    registry: Registry, place: Path
) -> None:
    home = make_home(place, STRANGER)
    mine, roots = home / "bin", place / "roots"
    for directory, mode, owner in ((mine, 0o700, STRANGER), (roots, 0o700, 0)):
        directory.mkdir(mode=mode)
        program = directory / "tool"
        program.write_text(f"#!/bin/sh\necho {directory.name}\n")
        program.chmod(0o755)
        for path in (directory, program):
            os.chown(path, owner, owner)

    def start(name: str, cwd: Path = home, path: str = f"{roots}:{mine}:/bin") -> Job:
        return registry.start(
            [name], identity=lowered(STRANGER), cwd=cwd, environment={"PATH": path}
        )

    job = start("tool")
    job.wait(10)
    assert lines(job) == ["bin"]
    with pytest.raises(NotFound, match="no program"):
        start("tool", path=str(roots))
    with pytest.raises(UsageError, match="Permission denied"):
        start(str(roots / "tool"))
    with pytest.raises(StartFailed, match="entering the working directory: Permission denied"):
        start("tool", cwd=roots)
    with pytest.raises(NotFound, match="no directory"):
        start("tool", cwd=home / "none")
    assert [one.name for one in registry.instances()] == ["tool"]  # what failed left nothing


@pytest.mark.parametrize("what", ["directory", "program"])
def test_links_that_are_swapped_while_a_job_starts_lead_nowhere(
    what: str, registry: Registry, place: Path
) -> None:
    home, roots = make_home(place, STRANGER), place / "roots"
    roots.mkdir(mode=0o700)
    for directory in (home, roots):
        tool = directory / "tool"
        tool.write_text("#!/bin/sh\npwd\n")
        tool.chmod(0o755 if directory == home else 0o700)
        os.chown(tool, directory.stat().st_uid, -1)
    link, enough = home / "link", threading.Event()

    def swap() -> None:
        number = 0
        while not enough.is_set():
            number += 1
            target = (home, roots)[number % 2] / ("tool" if what == "program" else "")
            new = home / "new"
            new.symlink_to(target)
            new.replace(link)

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        eventually(link.exists)
        ran = 0
        for _ in range(12):
            with suppress(StartFailed, UsageError, NotFound):
                job = registry.start(
                    [str(link) if what == "program" else str(home / "tool")],
                    identity=lowered(STRANGER),
                    cwd=link if what == "directory" else home,
                )
                job.wait(10)
                ran += 1
                assert lines(job) in ([str(home)], []) or what == "program"
                assert str(roots) not in lines(job)
    finally:
        enough.set()
        swapping.join()
    assert ran


# -- identities


def test_the_identity_of_a_process() -> None:
    process = process_of(STRANGER, "sleep", "100")
    try:
        found = Identity.of_process(process.pid)
        assert (found.user, found.group, found.groups) == (STRANGER, STRANGER, (7,))
        assert found.limits == limits_of("self") and found.name == str(STRANGER)
        assert found.cgroups == cgroups.groups_of()
        with pytest.raises(UsageError, match="is not of user 0"):
            Identity.of_process(process.pid, user=0)
    finally:
        process.kill()
        process.wait(10)
    with pytest.raises(NotFound):
        Identity.of_process(process.pid)


def test_a_pid_that_is_reused_is_not_believed() -> None:
    """The descriptor is of the process that was, whatever has its pid now."""
    gone = process_of(STRANGER, "true")
    pidfd = os.pidfd_open(gone.pid)
    other = process_of(NOBODY, "sleep", "100")
    try:
        gone.wait(10)
        with pytest.raises(NotFound, match="has ended"):
            Identity.of_process(other.pid, pidfd=pidfd)
    finally:
        os.close(pidfd)
        other.kill()
        other.wait(10)


def test_a_client_of_a_socket(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place / "socket"))
        os.chmod(place / "socket", 0o666)
        server.listen()
        code = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({str(place / 'socket')!r})"
        client = process_of(STRANGER, PYTHON, "-c", f"{code}; s.recv(1)")
        accepted, _ = server.accept()
        with accepted:
            peer = Peer.of(accepted)
            assert Identity.of_peer(peer).user == STRANGER
            peer.close()
        client.wait(10)
        client = process_of(STRANGER, PYTHON, "-c", code)
        client.wait(10)
        accepted, _ = server.accept()
        with accepted, pytest.raises((NotFound, UsageError)):
            Identity.of_peer(Peer.of(accepted))


@pytest.mark.parametrize(
    ("wrapper", "words"),
    [
        (["unshare", "--net"], "namespaces of its own .net."),
        (["unshare", "--user"], "namespaces of its own .user"),
        (["setpriv", "--ruid", str(STRANGER)], "has several uids"),
    ],
)
def test_a_process_in_a_sandbox_or_of_two_users_is_refused(wrapper: list[str], words: str) -> None:
    process = subprocess.Popen([*wrapper, "sleep", "100"])
    try:
        eventually(lambda: procfs.command_line(process.pid)[:1] == ["sleep"])
        with pytest.raises(UsageError, match=words):
            Identity.of_process(process.pid)
    finally:
        process.kill()
        process.wait(10)


def test_identities_by_name() -> None:
    nobody = Identity.of_user("nobody")
    assert (nobody.user, nobody.name) == (NOBODY, "nobody")
    stranger = Identity.of_user(str(STRANGER))
    assert (stranger.user, stranger.group, stranger.groups) == (STRANGER, STRANGER, (STRANGER,))
    assert stranger.environment() == {
        "HOME": "/",
        "USER": str(STRANGER),
        "LOGNAME": str(STRANGER),
    }
    assert Identity.of_user("nobody:7").groups == (7,)
    for wrong in ("nobody-of-that-name", "nobody:no-such-group"):
        with pytest.raises(NotFound):
            Identity.of_user(wrong)
    for wrong in ("", ":7", "nobody:", "4294967295"):
        with pytest.raises(UsageError):
            Identity.of_user(wrong)


# -- cgroups


@pytest.fixture
def group() -> Iterator[tuple[str, str]]:
    """A new cgroup: its hierarchy and path."""
    names = cgroups.groups_of()
    for one in cgroups.hierarchies():
        if one.name not in ("pids", "") or one.root != "/":
            continue
        made = one.point / f"icecore-test-{os.getpid()}"
        with suppress(OSError):
            made.mkdir()
            try:
                # A group of version 2 may not take processes.
                with subprocess.Popen(["sleep", "1"]) as probe:
                    (made / "cgroup.procs").write_text(str(probe.pid))
                    probe.kill()
            except OSError:
                made.rmdir()
                continue
            assert one.name in names
            yield one.name, f"/{made.name}"
            end = time.monotonic() + 10
            while made.exists() and time.monotonic() < end:
                with suppress(OSError):  # until its last process is reaped
                    made.rmdir()
            return
    pytest.skip("no cgroup can be made here")


def test_a_job_starts_and_comes_back_in_the_cgroup_of_its_caller(
    group: tuple[str, str], trip: Trip, registry: Registry, place: Path
) -> None:
    name, path = group
    inside = replace(lowered(STRANGER), cgroups={**cgroups.groups_of(), name: path})
    home = make_home(place, STRANGER)
    job = registry.start([PYTHON, "-c", COUNT, str(home)], name="count", identity=inside, cwd=home)
    wait_lines(job, 5)
    for pid in procfs.tree(job.pid):
        assert cgroups.groups_of(pid)[name] == path
    snapshot = stop(trip, job)
    for identity, expected in ((inside, path), (None, cgroups.groups_of()[name])):
        restored = bring_back(trip, registry, snapshot, identity=identity)
        assert restored.job is not None
        for pid in procfs.tree(restored.job.pid):
            assert cgroups.groups_of(pid)[name] == expected
        restored.job.kill(9)
        restored.job.wait(10)


def test_a_cgroup_that_is_gone(registry: Registry, place: Path) -> None:
    mounted = [one.name for one in cgroups.hierarchies()]
    if not mounted:
        pytest.skip("no cgroups are mounted")
    gone = replace(lowered(STRANGER), cgroups={mounted[0]: "/icecore-never-was"})
    with pytest.raises(UsageError, match="there is no cgroup /icecore-never-was any more"):
        registry.start(["true"], identity=gone, cwd=place)
    assert registry.instances() == []


#: Has no file open besides its output.
_PLAIN_COUNT = """
import time
for step in range(10**9):
    print(step, flush=True)
    time.sleep(0.02)
"""


def test_a_job_whose_cgroup_is_gone_comes_back_in_that_of_its_restorer(
    group: tuple[str, str], trip: Trip, registry: Registry, place: Path
) -> None:
    name, path = group
    own = cgroups.groups_of()
    inside = replace(lowered(STRANGER), cgroups={**own, name: path})
    job = registry.start([PYTHON, "-c", _PLAIN_COUNT], name="count", identity=inside, cwd=place)
    wait_lines(job, 5)
    snapshot = stop(trip, job)
    for gone in (f"{path}-was", f"{path} (deleted)"):
        identity = replace(inside, cgroups={**own, name: gone})
        events: list[Event] = []
        restored = bring_back(trip, registry, snapshot, events.append, identity=identity)
        assert restored.job is not None
        for pid in procfs.tree(restored.job.pid):
            assert cgroups.groups_of(pid)[name] == own[name]
        (warning,) = [one.fields for one in events if one.fields.get("name") == "cgroup"]
        assert str(warning["message"]) == (
            f"the cgroup {gone.removesuffix(' (deleted)')} has been removed;"
            " the job runs in that of its restorer"
        )
        wait_lines(restored.job, 5)
        restored.job.kill(9)
        restored.job.wait(10)
