"""Jobs started by `icecore run`: one snapshot, several instances at once, each with its own logs
and a known exit status.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from icecore.dumper.dump import dump
from icecore.dumper.options import DumpOptions
from icecore.dumper.target import Target
from icecore.errors import DumpFailed, NotFound, RestoreFailed
from icecore.events import Event, Sink, discard
from icecore.host.criu.libraries import RESTORE_LIBRARY
from icecore.host.jobs.job import Job
from icecore.host.jobs.namespaces import Isolation
from icecore.host.jobs.registry import Registry
from icecore.host.jobs.restoring import Restoring
from icecore.host.kernel import procfs
from icecore.restorer.guard.guard_process import descendants
from icecore.restorer.options import RestoreOptions
from icecore.restorer.restore import restore
from icecore.restorer.restored import Restored
from tests.host.target import eventually
from tests.roundtrip.conftest import Trip

pytestmark = pytest.mark.criu

needs_library = pytest.mark.skipif(
    not RESTORE_LIBRARY.exists(), reason="needs a C compiler when icecore is built"
)

#: Chains a hash over its own memory, one line a step, with a child that does the same; ends with 7
#: once the file is there.
CHAIN = """
import hashlib, mmap, os, sys, time
memory = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory[:] = bytes(range(256)) * (len(memory) // 256)
child = os.fork()
if not child:
    while True:
        time.sleep(0.01)
link, step = b"", 0
while not os.path.exists(sys.argv[1]):
    step += 1
    at = step * 4099 % (len(memory) - 64)
    link = hashlib.blake2b(link + memory[at : at + 64], digest_size=16).digest()
    memory[at : at + 16] = link
    print(step, link.hex(), flush=True)
    time.sleep(0.005)
os.kill(child, 9)
sys.exit(7)
"""

#: Threads that sleep, and one that ends them all as soon as the file is there.
THREADS = """
import os, sys, threading, time
for _ in range(100):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
print("there", flush=True)
while not os.path.exists(sys.argv[1]):
    pass
os._exit(7)
"""


def expected(steps: int) -> list[str]:
    """What the job prints in its first steps."""
    memory = bytearray(bytes(range(256)) * ((8 << 20) // 256))
    link, lines = b"", []
    for step in range(1, steps + 1):
        at = step * 4099 % (len(memory) - 64)
        link = hashlib.blake2b(link + memory[at : at + 64], digest_size=16).digest()
        memory[at : at + 16] = link
        lines.append(f"{step} {link.hex()}")
    return lines


def lines(job: Job) -> list[str]:
    """What an instance has printed so far, whole lines."""
    return job.log_path("stdout").read_text().split("\n")[:-1]


def wait_lines(job: Job, more_than: int, seconds: float = 20.0) -> list[str]:
    """Wait until an instance has printed more than so many lines."""
    until = time.monotonic() + seconds
    while len(found := lines(job)) <= more_than:
        assert time.monotonic() < until, (
            f"{job.instance} printed {len(found)} lines; {job.log_path('stderr').read_text()}"
        )
        time.sleep(0.01)
    return found


def take(
    trip: Trip, job: Job, *, stop: bool = False, parent: str = "", emit: Sink = discard
) -> str:
    target = Target(job.pid, job.name, parent, record=job.record())
    return dump(
        trip.repository, trip.loop, target, DumpOptions(stop=stop), criu=trip.criu, emit=emit
    ).snapshot


def bring_back(
    trip: Trip, registry: Registry, snapshot: str, emit: Sink = discard, **options: object
) -> Restored:
    return restore(
        trip.repository,
        trip.loop,
        snapshot,
        RestoreOptions(**options),  # type: ignore[arg-type]
        criu=trip.criu,
        registry=registry,
        emit=emit,
    )


ISOLATIONS = {
    "default": Isolation(),
    "network": Isolation(network=True),
    "root": Isolation(root=True),
    "everything": Isolation(network=True, root=True),
}


@pytest.mark.parametrize("mode", ["full", "lazy"])
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_two_instances_of_one_snapshot_beside_the_original(
    isolation: str, mode: str, trip: Trip, registry: Registry, tmp_path: Path
) -> None:
    end = tmp_path / "end"
    command = [sys.executable, "-c", CHAIN, str(end)]
    original = registry.start(command, name="chain", isolation=ISOLATIONS[isolation])
    wait_lines(original, 20)
    take(trip, original)
    wait_lines(original, 40)
    snapshot = take(trip, original)
    printed = len(lines(original))
    restored = [bring_back(trip, registry, snapshot, mode=mode) for _ in range(2)]
    instances = [r.job for r in restored if r.job is not None]
    assert len({job.instance for job in [original, *instances]}) == 3
    for r in restored:
        r.wait_resident(30)
    seen = [wait_lines(job, printed + 20) for job in [original, *instances]]
    end.touch()
    for job in [original, *instances]:
        assert job.wait(20).exit_code == 7
    for job, before in zip([original, *instances], seen, strict=True):
        found = lines(job)
        assert found == expected(len(found))
        assert len(found) >= len(before)


@needs_library  # the job kills its child, which CRIU may not have let go of
@pytest.mark.parametrize("mode", ["full", "lazy"])
def test_a_job_that_ends_before_it_is_noted_down(
    mode: str, trip: Trip, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ran: what it wrote and how it ended stay."""
    end, started = tmp_path / "end", Restoring.started
    job = registry.start([sys.executable, "-c", CHAIN, str(end)], name="chain")
    wait_lines(job, 10)
    snapshot = take(trip, job, stop=True)

    def late(self: Restoring, pid: int) -> Job:
        until = time.monotonic() + 20
        while procfs.exists(pid):  # the guard reaps it
            assert time.monotonic() < until
            time.sleep(0.01)
        return started(self, pid)

    monkeypatch.setattr(Restoring, "started", late)
    end.touch()
    restored = bring_back(trip, registry, snapshot, mode=mode)
    restored.wait_resident(30)
    assert restored.job is not None
    again = registry.find(restored.job.instance)
    assert (again.state, again.wait(1).exit_code, restored.wait(1).exit_code) == ("ended", 7, 7)
    found = lines(again)
    assert found == expected(len(found)) and len(found) >= len(lines(job))
    registry.remove(again)


def held() -> list[int]:
    """The processes of a tree that is built, once CRIU's script has come to where it waits for the
    word; the job's init first.
    """
    found: list[int] = []

    def waits() -> bool:
        for pid in descendants(os.getpid()):
            with suppress(OSError, NotFound):
                if b"CRTOOLS_SCRIPT_ACTION=pre-resume" in Path(f"/proc/{pid}/environ").read_bytes():
                    found[:] = [
                        one for one in procfs.children(procfs.status(pid).parent) if one != pid
                    ]
        return bool(found)

    assert eventually(waits, 30)
    [root] = found
    assert procfs.status(root).own_pid == 1
    return procfs.tree(root)


def killing_a_member(event: Event) -> None:
    """Kill a process that CRIU holds, at the end of the tree."""
    if event.name == "restore.memory" and event.fields["state"] == "end":
        os.kill(held()[-1], signal.SIGKILL)


def test_a_process_that_is_killed_before_any_runs_is_a_restore_that_failed(
    trip: Trip, registry: Registry, tmp_path: Path
) -> None:
    """For want of memory, say: the job would run without it. CRIU then waits for the end of the
    job's init, which waits for processes that CRIU traces.
    """
    job = registry.start([sys.executable, "-c", CHAIN, str(tmp_path / "end")], name="chain")
    wait_lines(job, 10)
    snapshot = take(trip, job, stop=True)
    before, instances, printed = (
        set(descendants(os.getpid())),
        len(registry.instances()),
        len(lines(job)),
    )
    with pytest.raises(
        RestoreFailed, match=r"Unable to detach.*waits for processes that have ended"
    ):
        bring_back(trip, registry, snapshot, killing_a_member)
    assert set(descendants(os.getpid())) <= before
    assert len(registry.instances()) == instances and len(lines(job)) == printed


@needs_library
def test_a_job_whose_threads_end_with_it_the_moment_it_runs(
    trip: Trip, registry: Registry, tmp_path: Path
) -> None:
    """CRIU lets go of the first thread first, and finds the others gone."""
    end = tmp_path / "end"
    job = registry.start([sys.executable, "-c", THREADS, str(end)], name="threads")
    wait_lines(job, 0)
    snapshot = take(trip, job, stop=True)
    end.touch()
    for mode in ("full", "lazy"):
        restored = bring_back(trip, registry, snapshot, mode=mode)
        restored.wait_resident(30)
        assert restored.job is not None and restored.job.wait(20).exit_code == 7


def test_the_exit_status_of_a_stopped_and_restored_job(
    trip: Trip, registry: Registry, tmp_path: Path
) -> None:
    end = tmp_path / "end"
    job = registry.start([sys.executable, "-c", CHAIN, str(end)], name="chain")
    wait_lines(job, 10)
    snapshot = take(trip, job, stop=True)
    assert not job.alive
    again = bring_back(trip, registry, snapshot).job
    assert again is not None
    wait_lines(again, 20)
    second = take(trip, again, stop=True)
    third = bring_back(trip, registry, second).job
    assert third is not None
    wait_lines(third, 30)
    end.touch()
    assert third.wait(20).exit_code == 7
    found = lines(third)
    assert found == expected(len(found))


#: Prints what it is told, and ends if it is told to.
TOLD = """
import signal, time
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda told, frame: print(signal.Signals(told).name, flush=True))
print("there", flush=True)
while True:
    time.sleep(0.01)
"""


def test_a_signal_that_comes_in_the_window_is_for_the_instance_that_runs(
    trip: Trip, registry: Registry
) -> None:
    job = registry.start([sys.executable, "-c", TOLD], name="told")
    wait_lines(job, 0)

    told, over = threading.Event(), threading.Event()

    def hear(event: Event) -> None:
        if event.name == "dump.window":
            if event.fields["state"] == "begin":
                over.clear()
                threading.Thread(target=tell).start()
            else:
                over.set()

    def tell() -> None:
        while not over.is_set():
            if procfs.status(job.pid).state == "t":  # at once: CRIU looks soon
                job.kill(signal.SIGTERM)
                job.kill(signal.SIGUSR1)
                told.set()
                return

    target = Target(job.pid, job.name, record=job.record())
    options = DumpOptions(before="true")
    for _ in range(10):  # a window may be over before this process looks
        stored = dump(trip.repository, trip.loop, target, options, criu=trip.criu, emit=hear)
        if told.wait(1):
            break
    snapshot = stored.snapshot
    assert eventually(lambda: sorted(lines(job)[1:]) == ["SIGTERM", "SIGUSR1"])
    job.kill(9)
    job.wait(10)
    restored = bring_back(trip, registry, snapshot).job
    assert restored is not None
    time.sleep(0.5)
    assert lines(restored) == ["there"]
    restored.kill(signal.SIGUSR1)
    assert wait_lines(restored, 1) == ["there", "SIGUSR1"]


#: Has a file of its own in /proc open until another file is there.
OWN_STATUS = """
import os, sys, time
status = open("/proc/self/status")
step = 0
while True:
    if status and os.path.exists(sys.argv[1]):
        status.close()
        status = None
    step += 1
    print(step, status is None, flush=True)
    time.sleep(0.01)
"""


def test_a_file_of_the_job_in_the_machines_proc_prevents_the_snapshot(
    trip: Trip, registry: Registry, tmp_path: Path
) -> None:
    """In the machine's /proc, a restored job has other pids."""
    job = registry.start([sys.executable, "-c", OWN_STATUS, str(tmp_path / "close")], name="status")
    wait_lines(job, 3)
    with pytest.raises(DumpFailed, match="/status open, which a restore would not find"):
        take(trip, job)
    wait_lines(job, len(lines(job)) + 3)


def test_a_file_of_the_job_in_the_machines_proc_that_is_closed_again(
    trip: Trip, registry: Registry, tmp_path: Path
) -> None:
    """The dump is made once more, by the same command."""
    job = registry.start([sys.executable, "-c", OWN_STATUS, str(tmp_path / "close")], name="status")
    wait_lines(job, 3)
    retries: list[str] = []

    def close(event: Event) -> None:
        if event.name == "dump.retry":
            retries.append(str(event.fields["error"]))
            (tmp_path / "close").touch()
            assert eventually(lambda: lines(job)[-1].endswith("True"))

    snapshot = take(trip, job, emit=close)
    assert len(retries) == 1 and "/status open" in retries[0]
    job.kill(signal.SIGKILL)
    job.wait(10)
    restored = bring_back(trip, registry, snapshot)
    assert restored.job is not None
    wait_lines(restored.job, len(lines(restored.job)) + 3)


def test_a_file_of_the_job_in_a_proc_of_its_own_is_restored(
    trip: Trip, registry: Registry, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", OWN_STATUS, str(tmp_path / "close")]
    job = registry.start(command, name="status", isolation=ISOLATIONS["root"])
    wait_lines(job, 3)
    snapshot = take(trip, job)
    job.kill(signal.SIGKILL)
    job.wait(10)
    restored = bring_back(trip, registry, snapshot)
    assert restored.job is not None
    assert wait_lines(restored.job, len(lines(restored.job)) + 3)[-1].endswith("False")
