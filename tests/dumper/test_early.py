"""The early scan on real trees: what it may read, what it leaves, and that its result counts only
where CRIU agrees.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from icecore.dumper.dump import DumpResult
from icecore.dumper.memory.early import Early, EarlyScan, share_out
from icecore.dumper.observe.held import HeldTree
from icecore.dumper.observe.standing import observe
from icecore.dumper.options import DumpOptions
from icecore.errors import DumpFailed, WindowExceeded
from icecore.events import Event
from icecore.host.criu.images import RseqAreas
from icecore.host.kernel import procfs, ptrace
from icecore.sizes import PAGE
from tests.host.target import eventually
from tests.programs import driving

from .conftest import Start
from .failing import Job, Witness
from .puppet import Puppet
from .world import Events, Stillness, Store, assert_same_memory, leftovers, standing

pytestmark = pytest.mark.criu

_MIB = 1 << 20
_TRIES = 10
_SEIZE = 0x4206  # PTRACE_SEIZE


def watching(root: int) -> tuple[Stillness, Events]:
    """Return a record of the tree and the events that take it in the window."""
    still = Stillness()
    return still, Events({("dump.files", "begin"): lambda _: still.look(root)})


def read_early(events: Events) -> int:
    """Bytes."""
    return sum(
        int(str(e.fields.get("bytes", 0)))
        for e in events.named("dump.early")
        if e.fields["state"] == "end"
    )


def dumped_early(
    store: Store, pid: int, options: DumpOptions | None = None
) -> tuple[DumpResult, Stillness, Events]:
    """Dump until the early scan came in time: on a busy machine CRIU may be done before this
    process is woken.
    """
    for _ in range(_TRIES):
        still, events = watching(pid)
        result = store.dump(pid, options, events=events)
        if events.named("dump.early"):
            return result, still, events
    raise AssertionError(f"CRIU was done before it was noticed, {_TRIES} times")


@pytest.mark.parametrize("pre_copy", ["off", "on"])
def test_most_memory_is_read_while_criu_works(pre_copy: str, start: Start, store: Store) -> None:
    running = start("memory-pattern", "--mib", "64")
    options = DumpOptions(pre_copy=pre_copy)  # type: ignore[arg-type]
    for number in range(3):
        result, still, events = dumped_early(store, running.pid, options)
        assert read_early(events) >= 64 * _MIB
        assert assert_same_memory(store.read(result.snapshot), still) * PAGE >= 64 * _MIB
        assert number == 0 or result.sizes.changed < 16 * _MIB
        driving.change(running.state_dir, number + 1, 10, 1)
    assert not standing(running.pid)


def test_a_tree_of_processes_with_threads(start: Start, store: Store) -> None:
    running = start("training")
    result, still, events = dumped_early(store, running.pid)
    assert read_early(events) > 0
    assert_same_memory(store.read(result.snapshot), still)
    assert HeldTree(running.pid).threads() == {}


def test_code_and_stacks_are_left_for_later(puppet: Puppet, store: Store) -> None:
    puppet.do("data = private(16 * MIB); put(data, os.urandom(MIB) * 16)")
    puppet.do("code = private(64 * MIB, protection=7); put(code, os.urandom(MIB) * 64)")
    puppet.do(
        "hidden = private(16 * MIB); put(hidden, os.urandom(MIB) * 16); libc.mprotect(hidden, 8 * MIB, 0)"
    )
    result, still, events = dumped_early(store, puppet.pid)
    assert 32 * _MIB <= read_early(events) < 64 * _MIB
    assert_same_memory(store.read(result.snapshot), still)


def test_with_a_ring_for_asynchronous_io_nothing_is_read_early(
    puppet: Puppet, store: Store
) -> None:
    puppet.do("data = private(16 * MIB); put(data, os.urandom(MIB) * 16)")
    puppet.do("ring = ctypes.c_ulong(); assert libc.syscall(206, 4, ctypes.byref(ring)) == 0")
    result, still, events = dumped_early(store, puppet.pid)
    assert read_early(events) == 0
    assert_same_memory(store.read(result.snapshot), still)


def test_what_was_read_of_other_threads_does_not_count(job: Job, tmp_path: Path) -> None:
    threads = {pid: procfs.threads(pid) for pid in procfs.tree(job.pid)}
    seen = observe(job.pid, procfs.MapsReader()), RseqAreas(tmp_path)
    assert Early(threads, {}, {}, *seen).holds()
    assert not Early({**threads, job.pid: [*threads[job.pid], 1 << 22]}, {}, {}, *seen).holds()
    assert not Early({1 << 22: [1 << 22]}, {}, {}, *seen).holds()


def test_a_thread_that_its_tracer_lets_run_is_held() -> None:
    """CRIU runs code of its own in one process after the other."""
    code = (
        "import os, time; pid = os.fork(); print(pid, flush=True) if pid else None; time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as root:
        assert root.stdout is not None
        pids = [root.pid, int(root.stdout.readline())]
        tree = HeldTree(root.pid)
        try:
            for pid in pids:
                assert ptrace.request(_SEIZE, pid)
            assert ptrace.interrupt(pids[1]) and ptrace.wait(pids[1], block=True)
            assert tree.threads() == {}, "the root runs"
            assert ptrace.interrupt(pids[0]) and ptrace.wait(pids[0], block=True)
            assert ptrace.request(ptrace.CONT, pids[1])
            assert eventually(lambda: not procfs.status(pids[1]).stopped)
            assert HeldTree(root.pid).threads() == {}, "it was not seen stopped"
            assert tree.threads() == {pid: [pid] for pid in pids}
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(ProcessLookupError):
                ptrace.wait(pids[1], block=True)


def test_what_differs_once_criu_is_done_is_read_again(puppet: Puppet) -> None:
    """CRIU's log is open in a process while CRIU's code runs there, and private mappings without
    access are readable, so that neighbours are one.
    """
    puppet.do(
        "open('mapped', 'wb').write(bytes(8192)); kept, log = open('kept', 'w'), open('log', 'w')"
    )
    puppet.do(
        "fd = os.open('mapped', os.O_RDONLY); at = libc.mmap(None, 8192, 1, 2, fd, 0); os.close(fd)"
    )
    seen = observe(puppet.pid, procfs.MapsReader())
    puppet.do("assert libc.mprotect(at + 4096, 4096, 0) == 0; log.close()")

    def names() -> set[str]:
        found = seen.find_files(DumpOptions())
        assert all(os.path.exists(file.reach) for file in found)
        return {os.path.basename(file.about.path) for file in found}

    assert {"kept", "mapped", "log"} & names() == {"kept", "mapped"}
    puppet.do("assert libc.mprotect(at + 4096, 4096, 1) == 0")
    assert {"kept", "mapped", "log"} & names() == {"kept", "mapped"}


def test_threads_are_shared_out_by_size() -> None:
    def shares(sizes: dict[int, int]) -> dict[int, int]:
        return dict(share_out(lambda pid, threads: (pid, threads), sizes, 4))

    assert shares({}) == {}
    assert shares({1: 0, 2: 5 << 30}) == {1: 4, 2: 4}
    assert shares(dict.fromkeys(range(8), 1 << 20)) == dict.fromkeys(range(8), 1)
    assert shares({1: 9, 2: 1, 3: 1, 4: 9, 5: 1}) == {1: 4, 2: 1, 3: 1, 4: 4, 5: 1}


def test_a_tree_that_runs_or_was_stopped_by_somebody_else_is_not_held(job: Job) -> None:
    assert HeldTree(job.pid).threads() == {}
    pids = procfs.tree(job.pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert HeldTree(job.pid).threads() == {}
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert HeldTree(1 << 22).threads() == {}


def test_threads_that_differ_at_the_end_have_everything_read_again(
    start: Start, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a thread does not exist in reality, because CRIU holds all threads."""
    running = start("memory-pattern", "--mib", "32")
    monkeypatch.setattr(Early, "holds", lambda self: False)
    result, still, events = dumped_early(store, running.pid)
    assert read_early(events) >= 32 * _MIB
    assert_same_memory(store.read(result.snapshot), still)


def fails_early(
    job: Job, witness: Witness, act: Callable[[], object], error: type[BaseException]
) -> BaseException:
    """Check as `failing.fails` does, once the early scan came in time. Dumps in which it did not
    are good.
    """
    for _ in range(_TRIES):
        try:
            act()
        except error as caught:
            at = time.time_ns()
            assert not standing(job.pid) and not leftovers(witness.store.workdir)
            job.runs(at)
            witness.verify(len(witness.store.snapshots()))
            return caught
    raise AssertionError(f"CRIU was done before it was noticed, {_TRIES} times")


def test_an_early_scan_that_fails_fails_the_dump(
    job: Job, witness: Witness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: EarlyScan, *about: object) -> None:
        raise DumpFailed("a page could not be read")

    monkeypatch.setattr(EarlyScan, "_plan", broken)
    error = fails_early(job, witness, lambda: witness.store.dump(job.pid), DumpFailed)
    assert "a page could not be read" in str(error)
    monkeypatch.undo()
    witness.next_dump_is_good()


def test_a_window_that_is_abandoned_meanwhile(job: Job, witness: Witness) -> None:
    held: list[int] = []

    def dawdle(_: Event) -> None:
        held.extend(standing(job.pid))
        time.sleep(1.0)

    events = Events({("dump.early", "begin"): dawdle})
    for _ in range(_TRIES):
        fails_early(
            job,
            witness,
            lambda: witness.store.dump(job.pid, DumpOptions(max_window=0.6), events=events),
            WindowExceeded,
        )
        if held:  # otherwise a busy machine took longer than that to begin
            break
    assert held
    witness.next_dump_is_good()
