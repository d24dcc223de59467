"""Resident memory that is stored before the window: what is at rest and has no room on its GPU; the
snapshot is of the window all the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from icecore.dumper.gpu import resident_precopy
from icecore.dumper.options import DumpOptions
from icecore.errors import DumpFailed, IcecoreError, StoreError
from icecore.events import Event
from icecore.host.gpu.working import Worker
from icecore.host.resident.client import Agent, Keeper
from icecore.store.backend.faulty import FaultyBackend, Outcome
from tests.dumper.world import Events, Store
from tests.fakes.joined import Job
from tests.fakes.machine import MIB, Machine

from .test_dump import fault, rewrite, runs_on
from .test_restore import bring_back

pytestmark = pytest.mark.criu

Launch = Callable[..., Job]


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """These GPUs are small."""
    monkeypatch.setattr(resident_precopy, "_LEAST_ROOM", MIB)


#: GPUs on which copies of 32 MiB have 7 MiB of room.
small = pytest.mark.parametrize("joined", [560 * MIB], indirect=True)
ON = DumpOptions(pre_copy="on")


def ends(events: Events) -> dict[str, dict[str, object]]:
    """What phases said at their ends."""
    return {
        event.name: {"bytes": 0, **event.fields}
        for event in events.all
        if event.fields.get("state") == "end"
    }


def stored_before(events: Events) -> int:
    """Bytes."""
    return int(str(ends(events)["dump.resident.precopy"]["bytes"]))


@pytest.mark.parametrize(
    ("joined", "gpus", "children", "least"),
    [(560 * MIB, (0,), 0, 21 * MIB), (572 * MIB, (0, 1), 1, 35 * MIB)],
    indirect=["joined"],
)
def test_what_is_at_rest(
    store: Store, launch: Launch, joined: Machine, gpus: tuple[int, ...], children: int, least: int
) -> None:
    """All that has no room, but for the cells that change, is stored before, a portion after the
    other; what is left has room on the GPU.
    """
    job = launch(gpus=gpus, children=children, mib=8, buffers=4)
    events = Events()
    result = store.dump(job.pid, ON, events=events)
    copied = ends(events)["dump.resident.copy"]
    assert least <= stored_before(events) <= result.pre_copied
    assert 0 < int(str(copied["bytes"])) <= job.resident - least and copied["in_window"] == 0
    runs_on(job, store)
    stopped = store.dump(job.pid, DumpOptions(stop=True)).snapshot
    job.reap()
    for snapshot in (result.snapshot, stopped):
        bring_back(store, snapshot)
        job.goes_on()
        job.kill()


@small
def test_what_changes_until_the_window(store: Store, launch: Launch, joined: Machine) -> None:
    """It is stored as it was in the window, finds room, and the next time nothing of it is stored
    before; when it has come to rest, it is again.
    """
    job = launch(gpus=(0,), mib=8, buffers=4)
    written: dict[int, bytes] = {}
    events = Events(
        {("dump.resident.precopy", "end"): lambda event: written.update(rewrite(job, (0,)))}
    )
    result = store.dump(job.pid, ON, events=events)
    changed = sum(map(len, written.values()))
    assert changed == 4 * 7 * MIB
    assert stored_before(events) >= 20 * MIB
    assert (
        int(str(ends(events)["dump.resident.copy"]["bytes"])) >= changed
        and ends(events)["dump.resident.copy"]["in_window"] == 0
    )
    runs_on(job, store)
    recorded = store.read(result.snapshot)
    space = recorded.space("device", str(job.pid))
    found = {region.start: bytearray(region.length) for region in space.regions}
    for address, data in recorded.runs(space):
        start = max(one for one in found if one <= address)
        found[start][address - start : address - start + len(data)] = data
    assert {start: bytes(data[MIB:]) for start, data in found.items()} == written

    stored = []
    for _ in range(2):
        dirty(job)
        events = Events()
        store.dump(job.pid, ON, events=events)
        stored.append(stored_before(events))
    # Of what was restless not a cell; it was at rest then, so that it is taken again.
    assert stored[0] <= 4 * MIB and stored[1] >= 20 * MIB
    runs_on(job, store)


def dirty(job: Job) -> None:
    """Something else in every cell, but the first of each buffer."""
    for held in job.machine.keeper.processes():
        for one, descriptor in job.machine.keeper.take(held.token):
            for at in range(MIB, one.size, MIB):
                os.pwrite(descriptor, os.urandom(64), at)
            os.close(descriptor)


def put(job: Job, value: int) -> None:
    """The same byte in the last three cells of each buffer."""
    for held in job.machine.keeper.processes():
        for one, descriptor in job.machine.keeper.take(held.token):
            os.pwrite(descriptor, bytes([value]) * (3 * MIB), one.size - 3 * MIB)
            os.close(descriptor)


@small
def test_what_is_written_as_it_is_copied(
    store: Store, launch: Launch, joined: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both looks and the window see one content, the copy got another: the snapshot has what was
    there in the window.
    """
    job = launch(gpus=(0,), mib=8, buffers=4)
    assert not Agent(joined.directory, job.pid).report().counts.unheld
    put(job, 7)
    stage, copies = Worker.stage, []

    def meanwhile(worker: Worker, *words: Any, **more: Any) -> Any:
        in_window = bool(words[3] or words[4])  # there is room in the host's memory, too
        put(job, 7 if in_window else 9)
        try:
            return stage(worker, *words, **more)
        finally:
            put(job, 7)
            copies.append(in_window)

    monkeypatch.setattr(Worker, "stage", meanwhile)
    events = Events()
    snapshot = store.dump(job.pid, ON, events=events).snapshot
    assert copies.count(False) >= 3 and stored_before(events) > 20 * MIB
    recorded = store.read(snapshot)
    space = recorded.space("device", str(job.pid))
    ends_at = sorted(region.start + region.length for region in space.regions)
    found = bytearray()
    for address, data in recorded.runs(space):
        for at in range(0, len(data), 4096):
            if min(one for one in ends_at if one > address + at) - (address + at) <= 3 * MIB:
                found += data[at : at + 4096]
    assert found == bytes([7]) * (4 * 3 * MIB)
    runs_on(job, store)


@small
def test_what_is_freed_meanwhile(
    store: Store, launch: Launch, joined: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is stored, and the job has the memory at once; what the second look does not
    find is left out.
    """
    job = launch(gpus=(0,), mib=8, buffers=4)
    fetch, portions = Keeper.fetch, []

    def lost(keeper: Keeper, token: bytes, identities: list[int]) -> dict[int, int]:
        found = fetch(keeper, token, identities)
        portions.append(len(identities))
        if len(portions) == 2:  # the second look: one is gone
            os.close(found.pop(identities[0]))
        return found

    monkeypatch.setattr(Keeper, "fetch", lost)
    events = Events()
    snapshot = store.dump(job.pid, DumpOptions(pre_copy="on", stop=True), events=events).snapshot
    stored = stored_before(events)
    assert 16 * MIB <= stored <= 24 * MIB
    job.reap()
    bring_back(store, snapshot)
    job.goes_on()


@small
@pytest.mark.parametrize("options", [DumpOptions(), DumpOptions(pre_copy="off")])
def test_where_it_is_not_worth_it(
    store: Store, launch: Launch, joined: Machine, options: DumpOptions
) -> None:
    job = launch(gpus=(0,), mib=8, buffers=4)
    events = Events()
    store.dump(job.pid, options, events=events)
    assert not events.named("dump.resident.precopy")
    assert ends(events)["dump.resident.copy"]["bytes"] == job.resident


def test_a_gpu_without_room(store: Store, launch: Launch, joined: Machine) -> None:
    """Not even for a portion: all is left for the window."""
    job = launch(gpus=(0,))
    events = Events()
    store.dump(job.pid, ON, events=events)
    assert stored_before(events) == 0 and "not_stored" not in ends(events)["dump.resident.precopy"]
    assert ends(events)["dump.resident.copy"]["bytes"] == job.resident
    runs_on(job, store)


@small
@pytest.mark.parametrize("call", ["map", "fingerprints", "copy", "allocate"])
def test_a_worker_that_fails(store: Store, launch: Launch, joined: Machine, call: str) -> None:
    """It costs what would have been stored before, and nothing else."""
    job = launch(gpus=(0,), mib=8, buffers=4)
    events = Events(
        {
            ("dump.resident.precopy", "begin"): lambda event: fault(
                joined, f"worker-faults/{call}", "fails"
            )
        }
    )
    result = store.dump(job.pid, ON, events=events)
    told = ends(events)
    if call == "allocate":  # of half as much, then
        assert (
            "not_stored" not in told["dump.resident.precopy"] and stored_before(events) > 20 * MIB
        )
    else:
        assert f"{call}: fails" in str(told["dump.resident.precopy"]["not_stored"])
        assert stored_before(events) == 0 and told["dump.resident.copy"]["bytes"] == job.resident
    runs_on(job, store)
    assert 0 <= result.sizes.device - 7 * job.resident // 8 < 2 * MIB


@small
def test_a_worker_that_dies(store: Store, launch: Launch, joined: Machine) -> None:
    job = launch(gpus=(0,), mib=8, buffers=4)
    events = Events(
        {
            ("dump.resident.precopy", "begin"): lambda event: fault(
                joined, "worker-faults/copy", "die"
            )
        }
    )
    with pytest.raises(IcecoreError, match="worker ended"):
        store.dump(job.pid, ON, events=events)
    runs_on(job, store)
    store.dump(job.pid, ON)
    runs_on(job, store)


@small
def test_a_store_that_fails(store: Store, launch: Launch, joined: Machine) -> None:
    """Before anything is stopped."""
    job = launch(gpus=(0,), mib=8, buffers=4)
    faulty = FaultyBackend(store.backend)
    broken = store.through(faulty)

    def break_it(event: Event) -> None:
        faulty.plan = lambda call: Outcome.FAIL

    events = Events({("dump.resident.precopy", "begin"): break_it})
    with pytest.raises((StoreError, DumpFailed)):
        broken.dump(job.pid, ON, events=events)
    runs_on(job, store)
    store.dump(job.pid)
