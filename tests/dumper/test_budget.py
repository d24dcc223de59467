"""The bound on the CPU time of a dump's work while the job runs."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
import types
from typing import cast

import msgspec
import pytest

from icecore.dumper import storing
from icecore.dumper.memory.budget import CpuBudget, OwnSeconds
from icecore.dumper.memory.pipeline import CellStore, Pipeline, SpaceSink
from icecore.dumper.memory.staging import Staging
from icecore.dumper.observe.inspection import Inspection
from icecore.dumper.options import DumpOptions
from icecore.dumper.phases.ahead import look_ahead
from icecore.errors import UsageError
from icecore.events import Event
from icecore.host.kernel import cpu
from icecore.service.api import requests

from .conftest import Store
from .puppet import Puppet
from .world import Events

_WAIT = 30.0


class Clock:
    """Time that passes while a thread works or pauses, and CPU time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cores: float) -> None:
        self.now = self.used = 100.0
        self.budget = CpuBudget(lambda: self.used, lambda: self.now)
        monkeypatch.setattr(self.budget._lifted, "wait", self.sleep)
        self.budget.bound(cores)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def work(self, seconds: float, threads: int = 1) -> None:
        self.now += seconds
        self.used += seconds * threads
        self.budget.pause()


@pytest.mark.parametrize("cores", [0.02, 0.25, 1.5])
def test_work_that_pauses_gets_what_is_allowed(
    cores: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, cores)
    for _ in range(1000):
        clock.work(0.003, threads=2)
    assert clock.used - 100 == pytest.approx(cores * (clock.now - 100), rel=0.01)


def test_what_was_not_used_is_not_saved_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 0.5)
    clock.work(0.01)
    clock.now += 3600
    began, used = clock.now, clock.used
    for _ in range(100):
        clock.work(0.01)
    assert clock.used - used <= 0.5 * (clock.now - began) + 0.05


def test_work_that_does_not_pause_makes_the_rest_pause_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, 0.5)
    clock.used += 0.4
    clock.budget.pause()
    assert clock.now - 100 == pytest.approx(0.8)


def test_threads_that_a_calling_program_starts_later_delay_no_piece_of_work_by_more_than_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, 0.5)
    pauses = []
    for _ in range(20):
        clock.used += 8.0  # theirs
        began = clock.now
        clock.work(0.01)
        pauses.append(clock.now - began - 0.01)
    assert pauses == pytest.approx([1.0] * 20)
    # Once they have ended, the bound is that of the dump's own work again.
    began, used = clock.now, clock.used
    for _ in range(1000):
        clock.work(0.003)
    assert clock.used - used == pytest.approx(0.5 * (clock.now - began), rel=0.01)


def test_no_pause_is_longer_than_a_thread_can_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1e-14)
    clock.work(1.0)
    assert clock.now - 100 == pytest.approx(2.0)


def test_nothing_is_bounded_before_it_is_asked_for_and_in_the_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, 0.5)
    clock.budget.lift()
    clock.work(5.0, threads=4)
    assert clock.now == 105 and clock.budget.cores is None
    clock.budget.resume()  # what was used meanwhile does not count
    clock.budget.pause()
    assert clock.now == 105 and clock.budget.cores == 0.5
    fresh = CpuBudget()
    fresh.resume()
    assert fresh.cores is None


def test_the_window_wakes_threads_that_pause() -> None:
    used = 0.0
    budget = CpuBudget(lambda: used)
    budget.bound(1e-6)
    used = 1.0
    threads = [threading.Thread(target=budget.pause, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    budget.lift()
    for thread in threads:
        thread.join(_WAIT)
        assert not thread.is_alive()


def test_the_threads_of_a_calling_program_do_not_count() -> None:
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            sum(range(1000))

    other = threading.Thread(target=spin, daemon=True)
    other.start()
    assert other.native_id is not None
    read = OwnSeconds([other.native_id])
    began, process = read(), time.process_time()
    first = cpu.thread_seconds(other.native_id)
    assert first is not None
    end = time.monotonic() + _WAIT
    while (cpu.thread_seconds(other.native_id) or 0.0) < first + 0.3:
        assert time.monotonic() < end
        time.sleep(0.01)
    own, all_of_it = read() - began, time.process_time() - process
    over.set()
    other.join(_WAIT)
    assert all_of_it - own >= 0.29
    assert read() >= began  # a thread that has ended keeps what it had used


def test_a_process_that_is_added_counts_from_its_beginning() -> None:
    read = OwnSeconds()
    code = "import time\nwhile time.process_time() < 0.2: pass\nprint(1, flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as busy:
        assert busy.stdin is not None and busy.stdout is not None
        assert busy.stdout.readline() == b"1\n"
        own = read() - time.process_time()
        read.add(busy.pid)
        assert read() - time.process_time() >= own + 0.19
        busy.stdin.close()


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan"), 1e-6, 1e-14, 0.0099])
def test_a_share_that_is_none(share: float) -> None:
    with pytest.raises(UsageError, match="background_cpu"):
        DumpOptions(background_cpu=share)
    for request in (requests.DumpRequest, requests.Supervise):
        body = b'{"background_cpu": %s}' % (b"2" if math.isnan(share) else b"%.17g" % share)
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(body, type=request)


@pytest.mark.parametrize("share", [0, 0.01, 1])
def test_a_share_that_is_allowed(share: float) -> None:
    assert DumpOptions(background_cpu=share).background_cpu == share
    for request in (requests.DumpRequest, requests.Supervise):
        body = b'{"background_cpu": %g}' % share
        assert msgspec.json.decode(body, type=request).background_cpu == share


def test_a_share_that_is_not_checked_is_at_least_a_hundredth() -> None:
    options, budget = DumpOptions(pre_copy="off"), CpuBudget()
    object.__setattr__(options, "background_cpu", 1e-14)
    found = types.SimpleNamespace(processes=[], private_bytes=0)
    look_ahead(options, cast("Inspection", found), [], budget)
    assert budget.cores == pytest.approx(0.01 * cpu.usable_cores())


def test_an_encoding_thread_whose_pause_fails_ends_the_dump_and_not_only_itself() -> None:
    class Failing(CpuBudget):
        def pause(self) -> None:
            raise OverflowError("as planned")

    class Sink:
        def store(self, *_: object) -> None: ...
        def length(self, row: int) -> int:
            return row

    found: list[BaseException] = []

    def drain() -> None:
        staging = Staging(8 << 20)
        with staging, Pipeline(cast("CellStore", None), staging, 2, Failing()) as pipeline:
            try:
                pipeline.put(cast("SpaceSink", Sink()), 0, staging.acquire())
                pipeline.drain()
            except OverflowError as error:
                found.append(error)

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    thread.join(_WAIT)
    assert not thread.is_alive() and str(found[0]) == "as planned"


def test_what_runs_is_seen() -> None:
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            sum(range(100))

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    seen = cpu.look_at([os.getpid(), 1 << 22])
    over.set()
    thread.join(_WAIT)
    assert seen.busy == {os.getpid()}
    assert 0 <= seen.idle <= cpu.usable_cores()


class Recording(CpuBudget):
    """Notes the bound at each piece of work."""

    phase = ""
    found: list[tuple[str, float | None]]

    def pause(self) -> None:
        Recording.found.append((Recording.phase, self.cores))
        super().pause()


_PHASES = ("dump.precopy", "dump.window", "dump.store")


def _enter(event: Event) -> None:
    Recording.phase = event.name if event.fields["state"] == "begin" else ""


def _fill(puppet: Puppet, mib: int) -> None:
    puppet.do(f"area = private({mib} * MIB); put(area, os.urandom(MIB) * {mib})")
    puppet.do(f"for cell in range({mib}): put(area + cell * MIB, cell.to_bytes(8, 'little'))")


@pytest.mark.criu
@pytest.mark.parametrize("stop", [False, True])
def test_the_bound_holds_until_the_window_and_after_it(
    stop: bool, puppet: Puppet, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --stop, nothing is bounded: the job ends."""
    monkeypatch.setattr(storing, "CpuBudget", Recording)
    Recording.found, Recording.phase = [], ""
    _fill(puppet, 32)
    options = DumpOptions(pre_copy="on", background_cpu=0.5, stop=stop)
    hooks = {(name, state): _enter for name in _PHASES for state in ("begin", "end")}
    store.dump(puppet.pid, options, events=Events(hooks))
    cores = 0.5 * cpu.usable_cores()
    seen = {name: {bound for phase, bound in Recording.found if phase == name} for name in _PHASES}
    assert seen == {
        "dump.precopy": {None if stop else cores},
        "dump.window": {None},
        "dump.store": {None if stop else cores},
    }


@pytest.mark.criu
def test_pre_copy_uses_no_more_cpu_time_than_it_may(puppet: Puppet, store: Store) -> None:
    """CPU time is compared with the time that passed: a loaded machine only makes that longer."""
    _fill(puppet, 256)
    at: list[tuple[float, float]] = []

    def look(_event: Event) -> None:
        at.append((time.process_time(), time.monotonic()))

    events = Events({("dump.precopy", state): look for state in ("begin", "end")})
    store.dump(puppet.pid, DumpOptions(pre_copy="on", background_cpu=0.05), events=events)
    used, passed = (after - before for before, after in zip(*at, strict=True))
    # What the last pieces of work have used is not waited for.
    assert used <= 0.05 * cpu.usable_cores() * passed + 0.2
