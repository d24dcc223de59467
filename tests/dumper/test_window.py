"""The window in all its forms: trees of several processes, in namespaces of their own, with memory
in place or streamed, and what ends it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from icecore.dumper.freeze.guard import DumpGuard, GuardLost
from icecore.dumper.options import DumpOptions
from icecore.dumper.target import Target
from icecore.errors import DumpFailed, MissingTool, UsageError, WindowExceeded
from icecore.host.criu.program import PREFIX, Criu, find_criu
from icecore.host.jobs.job import Job as RunningJob
from icecore.host.jobs.namespaces import Isolation
from icecore.host.jobs.registry import Registry
from icecore.host.kernel import procfs
from icecore.restorer.phases.planning import run_record
from tests.host.criu_round import emptied
from tests.moments import Due, at
from tests.programs import driving

from .conftest import Start
from .failing import Dumper, Job, Witness, fails, members
from .puppet import Puppet
from .world import Events, Stillness, Store, assert_same_memory, leftovers, standing, until_clean

pytestmark = pytest.mark.criu


def watching(root: int) -> tuple[Stillness, Events]:
    """Return a record of the tree and the events that take it in the window."""
    still = Stillness()
    return still, Events({("dump.files", "begin"): lambda _: still.look(root)})


def installed() -> list[Criu]:
    """Return the CRIU in use and, if installed, the second one for tests."""
    found = [find_criu()]
    try:
        found.append(find_criu(f"{PREFIX}-sid"))
    except MissingTool:
        pass
    return list({criu.version: criu for criu in found}.values())


# -- jobs with namespaces of their own


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with emptied(Registry(tmp_path / "state")) as registry:
        yield registry


_JOB = """
import mmap, os, time
m = mmap.mmap(-1, 8 << 20, flags=0x22); m[:] = os.urandom(8 << 20)
child = os.fork()
if child == 0:
    m[:1 << 20] = os.urandom(1 << 20)
n = 0
while True:
    n += 1
    if child:
        print(n, flush=True)
    time.sleep(0.01)
"""


def output(job: RunningJob) -> int:
    """Return the lines that it has written."""
    return job.log_path("stdout").read_bytes().count(b"\n")


@pytest.mark.parametrize(
    "isolation",
    [Isolation(), Isolation(network=True), Isolation(root=True), Isolation(pid=False, ipc=False)],
    ids=["pid and ipc", "network", "private root", "the host's"],
)
def test_a_job_in_namespaces_of_its_own(
    isolation: Isolation, registry: Registry, store: Store
) -> None:
    job = registry.start(["python3", "-S", "-c", _JOB], name="job", isolation=isolation)
    end = time.monotonic() + 20
    while output(job) < 3:
        assert time.monotonic() < end
        time.sleep(0.01)
    target = Target(job.pid, "job", record=job.record())
    stored = []
    for _ in range(2):
        still, events = watching(job.pid)
        result = store.dump(target, events=events)
        before = output(job)
        recorded = store.read(result.snapshot)
        assert assert_same_memory(recorded, still) * 4096 > 16 << 20
        manifest = recorded.manifest
        assert len(manifest.processes) == 3
        if isolation.pid:
            assert manifest.processes[0].image_id == 1
            assert all(process.image_id < process.pid for process in manifest.processes)
            assert manifest.requirements.pids == []
        else:
            assert manifest.requirements.pids == sorted(
                t for pid in procfs.tree(job.pid) for t in procfs.threads(pid)
            )
        assert (manifest.namespaces.pid, manifest.namespaces.ipc) == (isolation.pid, isolation.ipc)
        assert manifest.namespaces.mount == isolation.root
        assert manifest.namespaces.network == ("external" if isolation.network else "host")
        assert run_record(manifest) == job.record()
        logs = [file for file in manifest.files if file.path.endswith("/stdout.log")]
        assert len(logs) == 1 and logs[0].policy == "content"
        assert recorded.content("file", logs[0].path).count(b"\n") >= 3
        assert not standing(job.pid)
        end = time.monotonic() + 20
        while output(job) < before + 3:
            assert time.monotonic() < end
            time.sleep(0.01)
        stored.append(result.sizes.stored)
    assert stored[1] < stored[0] / 10


@pytest.mark.parametrize("criu", installed(), ids=lambda criu: ".".join(map(str, criu.version)))
@pytest.mark.parametrize("memory", ["in place", "streamed"])
def test_every_criu_that_is_installed(memory: str, criu: Criu, start: Start, store: Store) -> None:
    running = start("tree")
    still, events = watching(running.pid)
    result = store.dump(running.pid, DumpOptions(memory=memory), events=events, criu=criu)  # type: ignore[arg-type]
    recorded = store.read(result.snapshot)
    assert assert_same_memory(recorded, still) > 1000
    assert recorded.manifest.requirements.criu == ".".join(map(str, criu.version))
    driving.wait_progress(running.state_dir)
    driving.ask_finish(running.program, running.state_dir)
    assert driving.wait_finished(running.program, running.state_dir).passed


# -- a tree that changes


def test_a_process_that_forks_all_the_time(puppet: Puppet, store: Store) -> None:
    puppet.do(
        "def churn():\n"
        "    while True:\n"
        "        child = os.fork()\n"
        "        if child == 0:\n"
        "            time.sleep(0.005); os._exit(0)\n"
        "        os.waitpid(child, 0)\n"
        "import threading; threading.Thread(target=churn, daemon=True).start()"
    )
    taken = 0
    for _ in range(4):
        still, events = watching(puppet.pid)
        try:
            result = store.dump(puppet.pid, events=events)
        except DumpFailed:
            assert not standing(puppet.pid) and not leftovers(store.workdir)
            continue
        taken += 1
        assert_same_memory(store.read(result.snapshot), still)
    assert taken
    puppet.do("pass")


def test_a_stopped_process_stays_stopped(puppet: Puppet, store: Store) -> None:
    puppet.do("child = os.fork()\nif child == 0: time.sleep(1000)")
    child = puppet.number("child")
    os.kill(child, signal.SIGSTOP)
    still, events = watching(puppet.pid)
    result = store.dump(puppet.pid, events=events)
    assert_same_memory(store.read(result.snapshot), still)
    assert procfs.status(child).state == "T"
    os.kill(child, signal.SIGCONT)


# -- a streamed dump fails like any other


STREAMED = DumpOptions(memory="streamed")


def test_a_streamed_window_that_takes_too_long(job: Job, witness: Witness) -> None:
    events = Events({("dump.files", "begin"): lambda _: time.sleep(1.0)})
    options = DumpOptions(memory="streamed", max_window=0.3)
    fails(job, witness, lambda: witness.store.dump(job.pid, options, events=events), WindowExceeded)
    fails(
        job,
        witness,
        lambda: witness.store.dump(job.pid, DumpOptions(memory="streamed", max_window=0.001)),
        WindowExceeded,
    )
    witness.next_dump_is_good()
    job.is_well()


def test_a_window_that_takes_too_long_while_no_other_thread_runs(
    job: Job, witness: Witness, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = threading.Timer
    monkeypatch.setattr(threading, "Timer", lambda _, expire: timer(60.0, expire))
    events = Events({("dump.files", "begin"): lambda _: time.sleep(0.6)})
    fails(
        job,
        witness,
        lambda: witness.store.dump(job.pid, DumpOptions(max_window=0.3), events=events),
        WindowExceeded,
    )
    witness.next_dump_is_good()
    job.is_well()


def test_criu_or_the_guard_killed_in_a_streamed_window(
    due: Due, job: Job, witness: Witness
) -> None:
    def dump(word: str) -> None:
        def kill(_: object) -> None:
            for pid in members(witness.store.workdir, word):
                os.kill(pid, signal.SIGKILL)

        events = Events({("dump.files", "begin"): kill})
        witness.store.dump(job.pid, STREAMED, events=events)

    guard = "icecore.dumper.freeze.guard_process"
    for word, error in due([("dump.log", DumpFailed), (guard, GuardLost)]):
        with at(word):
            fails(job, witness, partial(dump, word), error)
            witness.next_dump_is_good()
            job.has_found_no_error()
    job.is_well()


def test_a_dumper_that_is_killed_while_memory_is_streamed(
    due: Due, job: Job, witness: Witness
) -> None:
    for delay in due([0.0, 0.03, 0.06]):
        with at(delay, "s"):
            dumper = Dumper(witness.store, job, memory="streamed")
            try:
                dumper.until("dump.window", "begin")
                time.sleep(delay)
            finally:
                dumper.end(signal.SIGKILL)
            job.runs(time.time_ns())
            until_clean(witness.store.workdir)
            witness.next_dump_is_good()
            job.has_found_no_error()
    job.is_well()


def test_a_streamed_tree_cannot_be_stopped(job: Job, store: Store) -> None:
    with pytest.raises(UsageError, match="cannot hold the tree"):
        store.dump(job.pid, DumpOptions(memory="streamed", stop=True))
    assert not standing(job.pid)


# -- the guard alone


def test_a_guard_without_a_criu_ends_with_its_dumper(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for ready in (False, True):
        guard = DumpGuard(str(folder))
        if ready:
            guard.wait_ready()
        guard.release()
        guard.release()
        assert not procfs.exists(guard.pid)
    assert folder.is_dir()  # removed by its maker


def test_a_guard_outlives_signals_of_the_terminal(tmp_path: Path) -> None:
    guard = DumpGuard(str(tmp_path))
    try:
        guard.wait_ready()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            os.kill(guard.pid, number)
        time.sleep(0.05)
        assert os.getsid(guard.pid) == guard.pid
        assert guard.prepare(["false"], 10) == 1
        with pytest.raises(DumpFailed, match="cannot be started"):
            guard.prepare(["/no/such/program"], 10)
    finally:
        guard.release()


#: What a guard runs here: it waits as CRIU does, serves, and waits for the hang-up.
_SERVES = """
import os, socket, subprocess, sys
pages, status, hold = sys.argv[1:]
if subprocess.run([hold], env={"CRTOOLS_SCRIPT_ACTION": "pre-dump"}).returncode:
    sys.exit(7)
for stage in ("post-dump", "status-ready"):
    subprocess.run([hold], env={"CRTOOLS_SCRIPT_ACTION": stage}, check=True)
os.write(int(status), b"\\0")
socket.socket(fileno=int(pages)).recv(1)
"""
_SERVER = ["python3", "-c", _SERVES, "{pages}", "{status}", "{hold}"]


def test_a_guard_hangs_up_when_the_limit_has_passed(tmp_path: Path) -> None:
    guard = DumpGuard(str(tmp_path))
    try:
        assert guard.prepare(_SERVER, 20) is None
        time.sleep(1.5)  # the limit starts later
        began = time.monotonic()
        guard.go(0.2)
        assert guard.frozen(20) is None
        assert guard._expect("ended", 20)["status"] == 0
        assert time.monotonic() - began > 1.0
    finally:
        guard.release()


def test_a_guard_that_is_stopped_while_criu_waits(tmp_path: Path) -> None:
    """The attempt fails. What it started ends by itself, also if it goes on without being told to."""
    guard = DumpGuard(str(tmp_path))
    try:
        guard.wait_ready()
        os.kill(guard.pid, signal.SIGSTOP)
        with pytest.raises(DumpFailed, match="no answer"):
            guard.prepare(_SERVER, 0.2)
        os.kill(guard.pid, signal.SIGCONT)
    finally:
        guard.release()
    guard = DumpGuard(str(tmp_path))
    try:
        assert guard.prepare([*_SERVER[:-1], "true"], 20) == 0
    finally:
        guard.release()


def test_two_dumps_of_one_tree_at_the_same_time(job: Job, witness: Witness) -> None:
    """One waits for the other's window: for it, the tree would be frozen and traced."""
    outcomes: list[object] = []

    def one() -> None:
        try:
            outcomes.append(witness.store.through(witness.store.backend).dump(job.pid).snapshot)
        except Exception as error:  # noqa: BLE001 - looked at below
            outcomes.append(error)

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not standing(job.pid) and not leftovers(witness.store.workdir)
    assert len(outcomes) == 2 and all(isinstance(outcome, str) for outcome in outcomes), outcomes
    witness.next_dump_is_good()
    job.is_well()


def test_a_dump_that_begins_in_the_window_of_another(job: Job, witness: Witness) -> None:
    outcomes: list[object] = []

    def other() -> None:
        try:
            outcomes.append(witness.store.through(witness.store.backend).dump(job.pid).snapshot)
        except Exception as error:  # noqa: BLE001 - looked at below
            outcomes.append(error)

    thread = threading.Thread(target=other)

    def begin(_: object) -> None:
        thread.start()
        time.sleep(0.2)  # it would have looked at the tree by then

    witness.store.dump(job.pid, events=Events({("dump.files", "begin"): begin}))
    thread.join(30)
    assert len(outcomes) == 1 and isinstance(outcomes[0], str), outcomes
    job.is_well()
