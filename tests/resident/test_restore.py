"""Restores of jobs with resident memory: it comes by a GPU worker, or is there still; they go on
where they were, or nothing of them runs.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from icecore.dumper.options import DumpOptions
from icecore.errors import IcecoreError, NotFound, RestoreFailed, RestoreRefused, StoreError
from icecore.events import Event
from icecore.host.kernel import procfs
from icecore.host.resident.client import Agent, Keeper
from icecore.host.resident.protocol import Allocation
from icecore.restorer.fetch.fetcher import PLACE_THREADS
from icecore.restorer.gpu.resident import Resident
from icecore.restorer.gpu.resident_fill import ResidentFill
from icecore.restorer.options import RestoreOptions
from icecore.restorer.place.placers import Placers
from icecore.restorer.restore import restore
from icecore.restorer.restored import Restored
from icecore.store.backend.faulty import Call, FaultyBackend, Outcome
from tests.dumper.failing import members
from tests.dumper.world import Events, Store
from tests.fakes.joined import Job
from tests.fakes.machine import MIB, Machine, until, uuid_of
from tests.programs import driving

pytestmark = pytest.mark.criu

Launch = Callable[..., Job]


def bring_back(
    store: Store, snapshot: str, events: Events | None = None, **options: Any
) -> Restored:
    restored = restore(
        store.repository,
        store.loop,
        snapshot,
        RestoreOptions(workdir=str(store.workdir), **options),
        emit=events or Events(),
    )
    restored.wait_resident(30)
    return restored


#: Mode, and how many processes bring the memory.
ways = pytest.mark.parametrize(("mode", "placers"), [("lazy", 0), ("full", 3)])


def listeners(job: Job) -> int:
    """Sockets of agents that listen: those of the job's processes, and such as nobody looks at any
    more.
    """
    lines = [
        line.split() for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]
    ]
    return sum(
        words[3] == "00010000" and words[-1].startswith(f"{job.machine.directory}/agent-")
        for words in lines
    )


def ended(job: Job) -> None:
    """Nothing of it runs, or is on a GPU."""
    until(lambda: not driving.members(job.folder), 10)
    until(lambda: sum(job.machine.used(gpu) for gpu in range(2)) == 0, 10)


@ways
def test_a_lineage(mode: str, placers: int, store: Store, launch: Launch, joined: Machine) -> None:
    job = launch(gpus=(0, 1), children=1)
    snapshots = [store.dump(job.pid, DumpOptions(stop=number == 2)).snapshot for number in range(3)]
    job.reap()
    for snapshot in (snapshots[2], snapshots[0], snapshots[1]):
        events = Events()
        bring_back(store, snapshot, events, mode=mode, placers=placers)
        job.goes_on()
        # The one that CRIU made, to which somebody may have connected before the process ran, or
        # the request would never be answered.
        assert listeners(job) == len(job.pids)
        assert sum(joined.used(gpu) for gpu in range(2)) == job.resident + len(job.pids) * MIB // 2
        [end] = [
            event.fields
            for event in events.named("restore.resident.memory")
            if event.fields["state"] == "end"
        ]
        assert 7 * job.resident // 8 <= end["bytes"] < job.resident
        assert (end["placers"], end["redone"]) == (placers, 0)
        job.kill()
        ended(job)
    # What is restored can be dumped again, and only what changed is stored.
    bring_back(store, snapshots[1], mode=mode)
    job.goes_on()
    again = store.dump(driving.members(job.folder)[0], DumpOptions(stop=True))
    assert again.sizes.stored < again.sizes.device // 4
    job.reap()
    ended(job)
    bring_back(store, again.snapshot, mode=mode)
    job.goes_on()


def test_other_gpus(store: Store, launch: Launch, joined: Machine) -> None:
    job = launch(gpus=(0,))
    snapshot = store.dump(job.pid, DumpOptions(stop=True)).snapshot
    job.reap()
    bring_back(store, snapshot, gpu_map={uuid_of(0): uuid_of(1)})
    job.goes_on()
    assert (joined.used(0), joined.used(1)) == (0, job.resident + MIB // 2)
    again = store.dump(driving.members(job.folder)[0], DumpOptions(stop=True)).snapshot
    job.reap()
    bring_back(store, again)
    job.goes_on()
    assert joined.used(0) == 0


@pytest.mark.parametrize("changed", [False, True])
@ways
def test_memory_that_is_still_there(
    mode: str, placers: int, changed: bool, store: Store, launch: Launch, joined: Machine
) -> None:
    job = launch(gpus=(0, 1), children=1)
    first = store.dump(job.pid).snapshot
    job.wait_steps(40)
    last = store.dump(job.pid, DumpOptions(stop=True, keep_resident=True)).snapshot
    job.reap()
    assert sum(joined.used(gpu) for gpu in range(2)) == job.resident
    events = Events()
    bring_back(
        store, first if changed else last, events, mode=mode, placers=placers, from_resident=True
    )
    job.goes_on()
    [end] = [
        event.fields
        for event in events.named("restore.resident.memory")
        if event.fields["state"] == "end"
    ]
    # Only the first cell of each buffer changes.
    assert end["fetched"] == (len(job.pids) * job.buffers if changed else 0)
    assert sum(joined.used(gpu) for gpu in range(2)) == job.resident + len(job.pids) * MIB // 2
    job.kill()
    ended(job)
    with pytest.raises(RestoreRefused, match="not held"):
        bring_back(store, last, mode=mode, from_resident=True)
    ended(job)
    bring_back(store, last, mode=mode)
    job.goes_on()


def test_memory_that_was_kept_is_let_go_of_by_another_restore(
    store: Store, launch: Launch, joined: Machine
) -> None:
    job = launch()
    snapshot = store.dump(job.pid, DumpOptions(stop=True, keep_resident=True)).snapshot
    job.reap()
    bring_back(store, snapshot)
    job.goes_on()
    assert joined.used(0) == job.resident + MIB // 2


def test_a_keeper_that_dies_once_its_memory_was_taken(
    store: Store, launch: Launch, joined: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptors are closed: else the memory would be in use for as long as whoever restores
    runs.
    """
    job = launch()
    snapshot = store.dump(job.pid, DumpOptions(stop=True, keep_resident=True)).snapshot
    job.reap()
    taken: list[int] = []

    def take(self: Keeper, token: bytes) -> list[tuple[Allocation, int]]:
        found = ask(self, token)
        taken.append(of_gpus(joined))
        joined.kill_keeper()
        return found

    ask = Keeper.take
    with monkeypatch.context() as patch:
        patch.setattr(Keeper, "take", take)
        with pytest.raises(NotFound):
            bring_back(store, snapshot, from_resident=True)
    assert (taken, of_gpus(joined)) == ([job.buffers], 0)
    ended(job)
    bring_back(store, snapshot)
    job.goes_on()


def of_gpus(machine: Machine) -> int:
    """How many descriptors of device memory this process has."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            place = os.fstat(int(number)).st_dev
            found += any(place == os.stat(gpu).st_dev for gpu in machine.cuda.glob("gpu*"))
    return found


@pytest.mark.parametrize("told", [True, False])
def test_no_lease_ends_before_what_is_still_there_is_what_it_was(
    told: bool, store: Store, launch: Launch, joined: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper has all of it, though not as it was in the snapshot: who took it from there would
    run with that.
    """
    monkeypatch.setattr("icecore.dumper.gpu.resident._LEASE_GRACE", 0.5)
    if not told:
        monkeypatch.setattr(Agent, "hold", lambda self, lease: None)
    job = launch()
    first = store.dump(job.pid, DumpOptions(max_window=0.5)).snapshot
    job.wait_steps(40)
    store.dump(job.pid, DumpOptions(stop=True, keep_resident=True))
    job.reap()

    run = ResidentFill.run

    def late(self: ResidentFill, progress: Any) -> None:
        time.sleep(4.0)
        run(self, progress)

    with monkeypatch.context() as patched:
        patched.setattr(ResidentFill, "run", late)
        if told:
            bring_back(store, first, from_resident=True)
            job.goes_on()
        else:
            with pytest.raises(RestoreFailed, match="runs already"):
                bring_back(store, first, from_resident=True)
            ended(job)


def test_a_placer_that_hangs_costs_the_restore_and_nothing_else(
    store: Store, launch: Launch, joined: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = launch()
    snapshot = store.dump(job.pid, DumpOptions(stop=True)).snapshot
    job.reap()
    firsts: list[int] = []
    fill_of = Resident._fill_of

    def prepared(self: Resident, by_device: Any) -> ResidentFill:
        fill = fill_of(self, by_device)
        assert self._placers is not None
        firsts.append(self._placers._family.pid)  # those of host memory may end meanwhile
        for placer in self._placers.all:
            placer.wait_ready()  # else the restorer does its work
        return fill

    def stop(_: Event) -> None:
        os.kill(children(firsts[0])[-1], signal.SIGSTOP)

    events = Events({("restore.resident.memory", "begin"): stop})
    with monkeypatch.context() as patched:
        patched.setattr(Resident, "_fill_of", prepared)
        with pytest.raises(RestoreFailed, match="placer process"):
            bring_back(store, snapshot, events, placers=2, stall_seconds=2.0)
    ended(job)
    assert not members(store.workdir, "icecore.restorer.place.placer_process")
    bring_back(store, snapshot)
    job.goes_on()


@pytest.mark.parametrize(
    ("fault", "mode", "placers"),
    [
        *(
            ("restore", "full", 0),
            ("allocate", "lazy", 2),
            ("copy", "full", 2),
            ("copy", "lazy", 0),
            ("digests", "full", 2),
        ),
        *(
            ("worker dies", "full", 2),
            ("worker dies", "lazy", 0),
            ("store", "full", 0),
            ("helper", "lazy", 2),
        ),
    ],
)
def test_a_restore_that_fails(
    fault: str,
    mode: str,
    placers: int,
    store: Store,
    launch: Launch,
    joined: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "icecore.restorer.fetch.fetcher.PLACE_THREADS", 0 if fault == "digests" else PLACE_THREADS
    )
    job = launch(gpus=(0, 1), children=1)
    snapshot = store.dump(job.pid, DumpOptions(stop=True)).snapshot
    job.reap()
    through = store
    if fault == "store":
        reads = 0

        def plan(call: Call) -> Outcome:
            nonlocal reads
            reads += call.name.startswith("shards/")
            return Outcome.FAIL if call.name.startswith("shards/") and reads > 12 else Outcome.PASS

        through = store.through(FaultyBackend(store.backend, plan))
    elif fault in ("restore", "helper"):
        how = '"die": true' if fault == "helper" else '"code": 801'
        (joined.cuda / "faults" / "1").write_text(f'{{"call": "restore", {how}}}')
    else:
        name, how = ("copy", "die") if fault == "worker dies" else (fault, "fails")
        (joined.cuda / "worker-faults" / name).write_text(how)
    with pytest.raises(StoreError if fault == "store" else RestoreFailed):
        bring_back(through, snapshot, mode=mode, placers=placers, attempts=1)
    ended(job)
    for name in ("host.gpu.worker", "restorer.place.placer_process"):
        until(lambda: not members(store.workdir, f"icecore.{name}"))  # noqa: B023
    bring_back(store, snapshot, mode=mode)
    job.goes_on()


@pytest.mark.parametrize(
    ("fault", "digested", "redone"), [("prepare-digests", False, 0), ("digests-wrong", True, 1)]
)
def test_digests(
    fault: str,
    digested: bool,
    redone: int,
    store: Store,
    launch: Launch,
    joined: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the GPU cannot make them placers verify; what has another one than its cell is fetched
    again.
    """
    monkeypatch.setattr(
        "icecore.restorer.fetch.fetcher.PLACE_THREADS", 0
    )  # no thread does its placer's work while that loads
    job = launch()
    snapshot = store.dump(job.pid, DumpOptions(stop=True)).snapshot
    job.reap()
    (joined.cuda / "worker-faults" / fault).write_text("yes")
    events = Events()
    bring_back(store, snapshot, events, placers=2)
    job.goes_on()
    assert not (joined.cuda / "worker-faults" / fault).exists()
    [end] = [
        event.fields
        for event in events.named("restore.resident.memory")
        if event.fields["state"] == "end"
    ]
    assert (end["digested"], end["redone"]) == (digested, redone)


def children(pid: int) -> list[int]:
    """Of a process that may just have ended."""
    with suppress(NotFound):
        return procfs.children(pid)
    return []


@pytest.mark.parametrize("who", ["one", "all"])
def test_placers_that_are_killed(
    who: str, store: Store, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = launch(gpus=(0, 1), children=1)
    snapshot = store.dump(job.pid, DumpOptions(stop=True)).snapshot
    job.reap()
    made: list[Placers] = []
    fill_of = Resident._fill_of

    def prepared(self: Resident, by_device: Any) -> ResidentFill:
        fill = fill_of(self, by_device)
        assert self._placers is not None
        made.append(self._placers)  # host memory has others
        return fill

    def send(number: int, pids: list[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, number)

    def kill(_: Event) -> None:
        [placers] = made
        # The restorer does the work of a placer that is not ready itself.
        until(lambda: all(placer.ready for placer in placers.all))
        first = placers._family.pid
        *others, last = children(first)
        if who == "one":  # the others leave work to it
            send(signal.SIGSTOP, others)
            send(signal.SIGKILL, [last])
            threading.Timer(1.0, send, (signal.SIGCONT, others)).start()
        else:
            send(signal.SIGKILL, [first])  # all end with it
            until(lambda: all(map(procfs.is_over, [*others, last])))

    events = Events({("restore.resident.memory", "begin"): kill})
    with monkeypatch.context() as patched:
        patched.setattr(Resident, "_fill_of", prepared)
        bring_back(store, snapshot, events, placers=3)
    job.goes_on()
    [end] = [
        event.fields
        for event in events.named("restore.resident.memory")
        if event.fields["state"] == "end"
    ]
    assert end["redone"] > 0
    assert not members(store.workdir, "icecore.restorer.place.placer_process")


@pytest.mark.parametrize("joined", [900 * MIB], indirect=True)
def test_copies_that_were_made_on_the_device(store: Store, launch: Launch, joined: Machine) -> None:
    """They are the worker's: with it they are lost, and with them the snapshot; else they are
    stored while the job runs on.
    """
    job = launch(gpus=(0, 1), children=1)

    def kill(_: Event) -> None:
        for pid in members(store.workdir, "icecore.host.gpu.worker"):
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(IcecoreError, match="worker ended"):
        store.dump(job.pid, events=Events({("dump.store", "begin"): kill}))
    job.goes_on()
    used: list[int] = []
    look = Events(
        {("dump.store", "begin"): lambda _: used.append(sum(joined.used(gpu) for gpu in range(2)))}
    )
    snapshot = store.dump(job.pid, events=look).snapshot
    assert used == [2 * job.resident + len(job.pids) * MIB // 2]
    store.dump(job.pid, DumpOptions(stop=True))
    job.reap()
    ended(job)
    bring_back(store, snapshot)
    job.goes_on()


def test_a_gpu_without_room(store: Store, launch: Launch, joined: Machine) -> None:
    job = launch(gpus=(0,), mib=20, buffers=3)
    snapshot = store.dump(job.pid, DumpOptions(stop=True)).snapshot
    job.reap()
    other = launch(gpus=(0,), mib=20, buffers=2)
    with pytest.raises(
        IcecoreError, match=r"(?i)out.of.memory"
    ):  # said by the keeper's worker or by the driver, whoever comes last
        bring_back(store, snapshot)
    assert not driving.members(job.folder)
    other.goes_on()
    other.kill()
    until(lambda: joined.used(0) == 0)
    bring_back(store, snapshot)
    job.goes_on()
