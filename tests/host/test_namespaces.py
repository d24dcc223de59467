"""Jobs in their namespaces, dumped and restored by the real CRIU: beside the original, twice at
once, after a kill, and again.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import socket
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from icecore.dumper.phases.commit import recorded_run
from icecore.errors import Damaged, RestoreRefused, UsageError
from icecore.host.criu.program import Criu
from icecore.host.jobs.job import ExitStatus, Job
from icecore.host.jobs.namespaces import (
    OWN_FILES,
    Isolation,
    RestoreNamespaces,
    RunRecord,
    bindable_mounts,
)
from icecore.host.jobs.registry import Registry
from icecore.host.kernel import procfs
from icecore.restorer.phases.planning import run_record
from icecore.store.format.contract import RUN, RunFiles, encode_records
from tests.recorded import manifest_with, through_manifest

from .criu_round import (
    dump,
    dumps_internet_sockets,
    emptied,
    installed,
    output,
    restore_tree,
    until,
)

pytestmark = pytest.mark.criu

ISOLATIONS = [
    pytest.param(Isolation(), id="pid+ipc"),
    pytest.param(Isolation(network=True), id="network"),
    pytest.param(Isolation(root=True), id="root"),
    pytest.param(Isolation(network=True, root=True), id="network+root"),
]


@pytest.fixture(params=installed(), ids=lambda criu: ".".join(map(str, criu.version)))
def criu(request: pytest.FixtureRequest) -> Criu:
    found: Criu = request.param
    return found


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with emptied(Registry(tmp_path / "state")) as registry:
        yield registry


COUNTER = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
number = 0
while True:
    number += 1
    print(number, flush=True)
    if number % 10 == 0:
        print("error", number, file=sys.stderr, flush=True)
    time.sleep(0.01)
"""


def start(registry: Registry, program: str, isolation: Isolation, name: str = "job") -> Job:
    return registry.start(
        [sys.executable, "-S", "-c", textwrap.dedent(program)],
        name=name,
        isolation=isolation,
        cwd="/",
    )


def last(job: Job) -> int:
    """The counter's newest complete line; 0 before the first."""
    lines = output(job).rsplit("\n", 2)
    return int(lines[-2]) if len(lines) > 1 else 0


def goes_on(job: Job) -> None:
    seen = last(job)
    until(lambda: last(job) > seen + 3)


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_two_instances_beside_the_original(
    registry: Registry, tmp_path: Path, criu: Criu, isolation: Isolation
) -> None:
    job = start(registry, COUNTER, isolation)
    until(lambda: last(job) >= 20)
    record = dump(criu, job, tmp_path / "images")
    frozen_at = last(job)
    first = restore_tree(criu, registry, record, tmp_path / "images", lineage="l1")
    second = restore_tree(criu, registry, record, tmp_path / "images", name="second")
    assert [found.name for found in registry.instances()] == ["job", "job-2", "second"]
    assert (
        first.description.restored_from,
        first.description.lineage,
        first.description.command,
    ) == (
        "s1",
        "l1",
        record.command,
    )
    for instance in (job, first, second):
        goes_on(instance)
    for instance in (first, second):
        numbers = [int(line) for line in output(instance).split("\n")[:-1]]
        assert numbers == list(
            range(numbers[0], numbers[-1] + 1)
        )  # its own log, in order, nobody else's lines
        assert 20 < numbers[0] <= frozen_at + 1
        main = instance.main_process()
        assert procfs.status(main).own_pid == 2
        with open(f"/proc/{main}/fdinfo/1") as file:
            flags = int(next(line for line in file if line.startswith("flags:")).split()[1], 8)
        assert flags & os.O_APPEND and flags & os.O_ACCMODE == os.O_WRONLY
    # The ends of the three are told apart, though none of them is this process's child.
    first.kill(signal.SIGUSR1)
    second.kill(signal.SIGTERM)
    assert first.wait(10) == ExitStatus(code=7)
    assert registry.find("second").wait(10) == ExitStatus(signal=signal.SIGTERM)
    assert job.alive
    goes_on(job)
    assert (job.directory / "status").read_text() == ""


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_after_a_kill_and_again_from_the_restored_one(
    registry: Registry, tmp_path: Path, criu: Criu, isolation: Isolation
) -> None:
    job = start(registry, COUNTER, isolation)
    until(lambda: last(job) >= 5)
    record = dump(criu, job, tmp_path / "1")
    job.kill(signal.SIGKILL)
    assert job.wait(10) == ExitStatus(signal=signal.SIGKILL)
    restored = restore_tree(criu, registry, record, tmp_path / "1")
    goes_on(restored)
    again = dump(criu, restored, tmp_path / "2")
    seen = last(restored)
    restored.kill(signal.SIGKILL)
    restored.wait(10)
    # What the first two had of their own is gone: a snapshot needs none of it.
    old = registry.ended()
    assert len(old) == 2
    for one in old:
        registry.remove(one)
    third = restore_tree(criu, registry, again, tmp_path / "2")
    goes_on(third)
    assert int(output(third).split("\n")[0]) <= seen + 1
    third.kill(signal.SIGUSR1)
    assert third.wait(10) == ExitStatus(code=7)


def test_another_state_directory(registry: Registry, tmp_path: Path, criu: Criu) -> None:
    job = start(registry, COUNTER, Isolation())
    until(lambda: last(job) >= 5)
    record = dump(criu, job, tmp_path / "images")
    job.kill(signal.SIGKILL)
    job.wait(10)
    shutil.rmtree(registry.state)
    with emptied(Registry(tmp_path / "elsewhere")) as other:
        restored = restore_tree(criu, other, record, tmp_path / "images")
        goes_on(restored)
        assert os.readlink(f"/proc/{restored.pid}/exe") == f"{restored.directory}/icecore-init"


def test_logs_that_were_put_back_go_on_where_they_were(
    registry: Registry, tmp_path: Path, criu: Criu
) -> None:
    job = start(registry, COUNTER, Isolation())
    until(lambda: last(job) >= 5)
    record = dump(criu, job, tmp_path / "images")
    job.kill(signal.SIGKILL)
    job.wait(10)
    with registry.restoring(record, snapshot="s1") as new:
        logs = {
            path: new.redirected[path]
            for path in (record.files["stdout.log"], record.files["stderr.log"])
        }
        assert set(logs) == {str(job.log_path("stdout")), str(job.log_path("stderr"))}
        assert set(logs.values()) == {new.job.log_path("stdout"), new.job.log_path("stderr")}
        assert new.job.state == "starting"
    assert not new.job.directory.exists()  # left before it had started


def test_the_restored_one_is_found_though_its_restorer_died(
    registry: Registry, tmp_path: Path, criu: Criu
) -> None:
    job = start(registry, COUNTER, Isolation(root=True))
    until(lambda: last(job) >= 5)
    record = dump(criu, job, tmp_path / "images")
    orphan = restore_tree(criu, registry, record, tmp_path / "images", note=False, name="orphan")
    assert orphan.pid == 0
    Job(
        orphan.directory, replace(orphan.description, owner=(orphan.description.owner[0], 1))
    ).save()
    found = registry.find("orphan")
    assert found.alive and found.pid not in (0, job.pid)
    found.kill(signal.SIGUSR1)
    assert found.wait(10) == ExitStatus(code=7)


def test_connections_inside_a_private_network(
    registry: Registry, tmp_path: Path, criu: Criu
) -> None:
    if not dumps_internet_sockets(criu):
        pytest.skip(f"CRIU {criu.version} asks this kernel for socket options that it refuses")
    program = """
    import socket, time
    server = socket.create_server(("127.0.0.1", 80))
    client = socket.create_connection(("127.0.0.1", 80))
    peer, _ = server.accept()
    number = 0
    while True:
        number += 1
        client.sendall(number.to_bytes(8, "big"))
        assert int.from_bytes(peer.recv(8, socket.MSG_WAITALL), "big") == number
        print(number, flush=True)
        time.sleep(0.01)
    """
    job = start(registry, program, Isolation(network=True))
    until(lambda: last(job) >= 5)
    record = dump(criu, job, tmp_path / "images")
    first = restore_tree(criu, registry, record, tmp_path / "images")
    second = restore_tree(criu, registry, record, tmp_path / "images")
    for instance in (job, first, second):
        goes_on(instance)
    networks = {os.stat(f"/proc/{instance.pid}/ns/net").st_ino for instance in (job, first, second)}
    assert len(networks) == 3 and os.stat("/proc/self/ns/net").st_ino not in networks


def test_what_a_private_root_holds_is_each_instances_own(
    registry: Registry, tmp_path: Path, criu: Criu
) -> None:
    program = """
    import mmap, os, pty, sys, time
    # Shared memory by name, a terminal of its own, and a lock on a file of the host.
    shared = open("/dev/shm/counter", "w+b")
    shared.truncate(1 << 20)
    memory = mmap.mmap(shared.fileno(), 1 << 20)
    ours, theirs = pty.openpty()
    assert os.ttyname(theirs) == "/dev/pts/0"
    number = 0
    while True:
        number += 1
        memory[:8] = number.to_bytes(8, "big")
        os.write(ours, b"%d\\n" % number)
        assert int(os.read(theirs, 100)) == number
        while os.read(ours, 1) != b"\\n":
            pass  # the terminal's echo
        time.sleep(0.01)
        assert int.from_bytes(open("/dev/shm/counter", "rb").read(8), "big") == number
        assert os.readlink("/proc/self") == str(os.getpid()) == "2"
        print(number, flush=True)
    """
    job = start(registry, program, Isolation(root=True))
    until(lambda: last(job) >= 5 or not job.alive)
    assert job.alive, output(job, "stderr")
    record = dump(criu, job, tmp_path / "images")
    first = restore_tree(criu, registry, record, tmp_path / "images")
    second = restore_tree(criu, registry, record, tmp_path / "images")
    for instance in (job, first, second):
        goes_on(instance)
    assert not os.path.exists("/dev/shm/counter")


def test_a_held_file_lock_and_a_socket_to_outside(
    registry: Registry, tmp_path: Path, criu: Criu
) -> None:
    program = f"""
    import fcntl, socket, time
    lock = open({str(tmp_path / "lock")!r}, "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    log = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    log.connect({str(tmp_path / "log")!r})
    number = 0
    while True:
        number += 1
        try:
            log.send(b"%d" % number, socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass  # nobody reads at the moment
        print(number, flush=True)
        time.sleep(0.01)
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as daemon:
        daemon.bind(str(tmp_path / "log"))
        daemon.settimeout(10)
        job = start(registry, program, Isolation())
        until(lambda: last(job) >= 5)
        record = dump(criu, job, tmp_path / "images")
        job.kill(signal.SIGKILL)
        job.wait(10)
        number = last(job)
        restored = restore_tree(criu, registry, record, tmp_path / "images")
        goes_on(restored)
        while int(daemon.recv(100)) <= number:
            pass


# -- without CRIU


RECORD = RunRecord(
    name="job",
    command=["a", "b\udcff"],
    cwd="/",
    isolation=Isolation(root=True),
    files={
        name: f"/run/icecore/job/{name}"
        for name in ("stdout.log", "stderr.log", "status", "icecore-init")
    },
    binds=["/sys"],
    init=b"\x7fELF\x00\xff",
)


def text_of(record: RunRecord) -> str:
    return encode_records(run=recorded_run(record, {}))[RUN]


def test_records_survive_the_manifest() -> None:
    assert through_manifest(RECORD) == RECORD
    assert text_of(RECORD).isascii()


def test_records_of_instances_with_copies() -> None:
    own = replace(RECORD, files_to="/srv/own", copies=["/data/out"])
    assert through_manifest(own) == own
    assert "copies" not in json.loads(text_of(RECORD)), "an icecore that knows of none can read it"


def test_a_record_names_the_files_of_an_instance() -> None:
    assert RECORD.files.keys() == OWN_FILES.keys()
    files = [field.encode_name for field in msgspec.structs.fields(RunFiles)]
    assert files == list(OWN_FILES)


def test_which_paths_are_an_instances_own() -> None:
    assert (
        RECORD.is_own("/run/icecore/job/stdout.log")
        and RECORD.is_own("/dev/shm/x")
        and RECORD.is_own("/dev/pts/0")
    )
    assert not any(RECORD.is_own(path) for path in ("/dev/shmx", "/tmp/x", "/dev/null", "/sys/x"))
    shared = replace(
        RECORD, isolation=Isolation(), files={name: f"/state/{name}" for name in RECORD.files}
    )
    assert (
        shared.is_own("/state/stdout.log")
        and not shared.is_own("/dev/shm/x")
        and not shared.is_own("/state/other")
    )


@pytest.mark.parametrize(
    "change",
    [
        {"isolation": {"pid": True, "other": 1}},
        {"files": {}},
        {"files": {name: name for name in RECORD.files}},
        {"init": "!"},
        {"name": None, "surplus": 1},
        {"files_to": "own", "copies": ["/out"]},
        {"files_to": "/own", "copies": ["/a/../out"]},
        {"files_to": "/own", "copies": [1]},
    ],
)
def test_what_is_no_record_is_refused(change: dict[str, object]) -> None:
    changed = json.dumps({**json.loads(text_of(RECORD)), **change})
    for text in (changed, "", "[]", "{}", "1"):
        with pytest.raises(Damaged):
            run_record(manifest_with({RUN: text}))


def test_a_missing_mount_is_refused(registry: Registry) -> None:
    with pytest.raises(RestoreRefused, match="/no/such/mount"):
        registry.restoring(replace(RECORD, binds=["/sys", "/no/such/mount"]), snapshot="s1")
    assert registry.instances() == []


def test_a_name_that_is_taken_is_refused(registry: Registry) -> None:
    registry.start(["sleep", "60"], name="taken")
    with pytest.raises(UsageError, match="runs"):
        registry.restoring(RECORD, snapshot="s1", name="taken")


def test_a_restored_init_that_is_gone(registry: Registry) -> None:
    with registry.restoring(RECORD, snapshot="s1") as new:
        new.started(1 << 30)
    [job] = registry.instances()  # with its logs
    assert job.state == "ended"


def test_building_a_root_leaves_this_process_where_it_is(tmp_path: Path) -> None:
    before = procfs.namespaces(os.getpid())
    mounts = Path("/proc/self/mountinfo").read_text()
    for name in RECORD.files:
        (tmp_path / name).touch()
    gc.collect()  # what earlier tests left to be closed
    open_before = len(os.listdir("/proc/self/fd"))
    with RestoreNamespaces(
        replace(RECORD, isolation=Isolation(network=True, root=True), binds=bindable_mounts()),
        tmp_path,
    ) as made:
        assert made.prefix[0].endswith("nsenter")
        assert len(made.pass_fds) == 2
        assert Path("/proc/self/mountinfo").read_text() == mounts
    assert procfs.namespaces(os.getpid()) == before
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert Path("/proc/self/mountinfo").read_text() == mounts
