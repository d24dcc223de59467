"""Dumps of jobs with resident memory: it stays where it is, only what changed is copied, and
whatever fails, the job runs on with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from icecore.dumper.freeze.claim import Claim
from icecore.dumper.gpu import resident
from icecore.dumper.observe import resident_inspection
from icecore.dumper.observe.inspection import inspect_tree
from icecore.dumper.options import DumpOptions
from icecore.errors import DumpFailed, IcecoreError, PreflightRefused, WindowExceeded
from icecore.events import Event
from icecore.host.criu.program import find_criu
from icecore.host.gpu.working import RING
from icecore.host.kernel import procfs
from icecore.host.resident import client, copyplan
from icecore.host.resident.client import Agent, State
from icecore.host.resident.protocol import Operation
from icecore.host.resident.tree import ResidentTree
from icecore.store.backend.faulty import FaultyBackend, Outcome
from tests import zygote
from tests.dumper import driver
from tests.dumper.failing import members
from tests.dumper.world import Events, Store, leftovers, standing, until_clean
from tests.fakes import job as program
from tests.fakes.job import fresh
from tests.fakes.joined import Job
from tests.fakes.machine import MIB, Machine, until, uuid_of
from tests.moments import Due, at

from .test_restore import bring_back

pytestmark = pytest.mark.criu

Launch = Callable[..., Job]
#: Preloaded: an agent takes a while to begin.
_SLOW = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int pthread_setname_np(pthread_t thread, const char *name)
{
	int (*next)(pthread_t, const char *) = (int (*)(pthread_t, const char *))dlsym(RTLD_NEXT, "pthread_setname_np");
	if (!strcmp(name, "icecore-agent")) {
		close(open(getenv("BEGINS"), O_WRONLY | O_CREAT, 0600));
		usleep(3000000);
	}
	return next(thread, name);
}
"""


def runs_on(job: Job, store: Store) -> None:
    """All its processes run, with the memory they should have; nothing of the dump is left."""
    job.goes_on()
    assert not standing(job.pid) and not leftovers(store.workdir)
    for pid in job.pids:
        assert Agent(job.machine.directory, pid).report().state == State.RUNNING
    until(lambda: not members(store.workdir, "icecore.host.gpu.worker"))
    # Small allocations, and what the job has itself: no copy is left.
    assert sum(job.machine.used(gpu) for gpu in range(2)) == job.resident + len(job.pids) * MIB // 2


@pytest.mark.parametrize("children", [0, 1])
def test_three_snapshots(store: Store, launch: Launch, joined: Machine, children: int) -> None:
    job = launch(gpus=(0, 1), children=children)
    sizes = []
    for number in range(3):
        events = Events()
        result = store.dump(
            job.pid, DumpOptions(pre_copy="on" if number == 2 else "off"), events=events
        )
        runs_on(job, store)
        sizes.append(result.sizes)
        [end] = [
            event.fields
            for event in events.named("dump.resident.copy")
            if event.fields["state"] == "end"
        ]
        assert end["bytes"] == (job.resident if number == 0 else len(job.pids) * job.buffers * MIB)
        [end] = [
            event.fields
            for event in events.named("dump.gpu.checkpoint")
            if event.fields["state"] == "end"
        ]
        assert end["bytes"] == len(job.pids) * MIB // 2  # all that the driver moved
        manifest = store.read(result.snapshot).manifest
        known = json.loads(manifest.extra["resident"])
        assert known["directory"] == str(joined.directory)
        assert all(
            about["left"] == {"small_bytes": MIB // 2} for about in known["processes"].values()
        )
        spaces = {space.key: space for space in manifest.spaces if space.kind == "device"}
        assert (
            spaces.keys()
            == known["processes"].keys()
            == {str(p.image_id) for p in manifest.processes}
        )
        for key, space in spaces.items():
            assert [(r.start, r.length, r.name) for r in space.regions] == [
                (address, size, device)
                for _, address, size, _, device, _ in known["processes"][key]["allocations"]
            ]
    # All of it has changed a little, and the faster the machine the more: as deltas, not once more.
    assert max(sizes[1].stored, sizes[2].stored) < sizes[0].device // 2
    assert sizes[2].device > 2 * MIB  # without the zeros


def test_what_is_stored_is_what_was_there(store: Store, launch: Launch) -> None:
    """Of every snapshot, against the program's own account of so many steps."""
    job = launch(gpus=(0,), buffers=2)
    for _ in range(2):
        snapshot = store.dump(job.pid).snapshot
        recorded = store.read(snapshot)
        space = recorded.space("device", str(job.pid))
        memory = {}
        for address, data in recorded.runs(space):
            memory[address] = data
        lines = recorded.space("file", str(job.outs[0]))
        some = sum(data.count(b"\n") for _, data in recorded.runs(lines))
        buffers = [bytearray(program.fresh(number, 4)) for number in range(2)]
        steps = program.steps(buffers)
        for _ in range(some):
            next(steps)
        images = []
        for region in space.regions:
            image = bytearray(region.length)
            for address, data in memory.items():
                if region.start <= address < region.start + region.length:
                    image[address - region.start : address - region.start + len(data)] = data
            images.append(bytes(image))
        # A step may be done and not written down yet.
        if {bytes(one) for one in buffers} != set(images):
            next(steps)
        assert {bytes(one) for one in buffers} == set(images)
        job.goes_on()


def test_preflight_knows_what_is_resident(launch: Launch, joined: Machine) -> None:
    job = launch(gpus=(0,))
    until(
        lambda: (
            inspect_tree(job.pid, find_criu(), "/dev/shm", DumpOptions()).gpus.processes[0].contexts
        )
    )  # type: ignore[union-attr]
    found = inspect_tree(job.pid, find_criu(), "/dev/shm", DumpOptions())
    assert found.resident is not None and found.gpus is not None
    assert found.resident.bytes == job.resident
    assert found.gpus.processes[0].contexts == {uuid_of(0): job.resident + MIB // 2}
    assert found.gpus.device_bytes == MIB // 2
    assert found.resident.copies == (
        {uuid_of(0): 0},
        {uuid_of(0): job.resident},
        0,
    )  # the worker has a context on so small a GPU
    assert found.resident.most_window_seconds == 0.0  # it goes on beside the driver's part


@pytest.mark.parametrize("unseen", [False, True])
def test_memory_that_comes_after_the_look(
    unseen: bool, store: Store, launch: Launch, joined: Machine, tmp_path: Path
) -> None:
    """The driver would restore into other memory than the keeper holds. If the process has an agent
    when the dump inspects it, the snapshot contains the memory. Otherwise the dump starts over.
    """
    late = tmp_path / "late"
    job = launch(late=str(late), unseen=unseen)

    def now(event: Event) -> None:
        late.touch()
        job.wait_steps(3)
        assert joined.used(0) >= job.resident

    events = Events({("dump.preflight", "end"): now})
    snapshot = store.dump(job.pid, DumpOptions(stop=True), events=events).snapshot
    retries = [str(event.fields["error"]) for event in events.named("dump.retry")]
    assert len(retries) == unseen
    assert all("has resident memory now that" in error for error in retries)
    job.reap()
    bring_back(store, snapshot)
    job.goes_on()


def test_a_job_whose_memory_was_all_released(store: Store, launch: Launch, tmp_path: Path) -> None:
    """It has an agent still. If it gets memory between the look and the window, the dump starts over."""
    late = tmp_path / "late"
    job = launch(late=str(late), freed=True)
    for _ in range(2):
        snapshot = store.dump(job.pid).snapshot
        job.goes_on()
    job.kill()
    bring_back(store, snapshot)
    job.goes_on()

    def now(event: Event) -> None:
        late.touch()
        job.wait_steps(3)

    events = Events({("dump.criu", "begin"): now})
    store.dump(job.pid, events=events)
    assert "has resident memory now that" in str(events.named("dump.retry")[0].fields["error"])
    runs_on(job, store)
    snapshot = store.dump(job.pid, DumpOptions(stop=True)).snapshot
    job.reap()
    bring_back(store, snapshot)
    job.goes_on()


@pytest.mark.parametrize("what", ["report", "processes"])
def test_whoever_does_not_tell_is_not_dumped(
    what: str, store: Store, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not known to be resident would go the driver's way, and be lost."""
    job = launch()
    monkeypatch.setattr(resident_inspection, "_REPORT_SECONDS", 0.2)

    def silent(self: object, **_: object) -> None:
        raise client.ResidentFailed("it did not answer", 16)

    monkeypatch.setattr(client.Agent if what == "report" else client.Keeper, what, silent)
    with pytest.raises(PreflightRefused) as caught:
        store.dump(job.pid)
    assert [name for name, _, _ in caught.value.reasons] == [
        "gpu-resident" if what == "report" else "gpu-outside"
    ]
    job.goes_on()


def test_two_dumps_whose_windows_meet(store: Store, launch: Launch, joined: Machine) -> None:
    """The second does not begin; and if it did, it would not undo what the first has done."""
    job = launch()
    other = ResidentTree(joined.directory, {job.pid: job.pid})

    def meanwhile(event: Event) -> None:
        with pytest.raises(DumpFailed, match="another dump holds process"):
            Claim([job.pid], 0.2)
        with pytest.raises(client.ResidentFailed):
            other.take_away(lambda pids, seconds: None, lambda pids: None, seconds=0.2)

    events = Events(
        {
            ("dump.resident.unmap", "end"): meanwhile,
            ("dump.store", "begin"): lambda event: Claim([job.pid], 0.0).release(),
        }
    )
    snapshot = store.dump(job.pid, events=events).snapshot
    runs_on(job, store)
    job.kill()
    bring_back(store, snapshot)
    job.goes_on()


def test_nobody_else_dumps_any_of_its_gpu_processes(store: Store, launch: Launch) -> None:
    """Nor looks at their memory, whichever process of the tree is its root."""
    job = launch(children=1)
    refused: list[tuple[str, int]] = []

    def meanwhile(event: Event) -> None:
        for pid in job.pids:
            with pytest.raises(DumpFailed, match="another dump holds process"):
                Claim([pid], 0.2)
            refused.append((event.name, pid))

    store.dump(
        job.pid,
        events=Events(
            {
                ("dump.resident.prepare", "begin"): meanwhile,
                ("dump.resident.unmap", "end"): meanwhile,
            }
        ),
    )
    assert len(job.pids) == 2
    assert refused == [
        (name, pid) for name in ("dump.resident.prepare", "dump.resident.unmap") for pid in job.pids
    ]
    runs_on(job, store)


@pytest.mark.parametrize("who", ["helper", "keeper"])
def test_who_dies_while_a_stopped_job_is_stored(
    who: str, store: Store, launch: Launch, joined: Machine
) -> None:
    """Neither is needed any more: the snapshot is there, and the memory is free."""
    job = launch(gpus=(0, 1), children=1)

    def kill(event: Event) -> None:
        if who == "keeper":
            joined.kill_keeper()
        for pid in members(store.workdir, "icecore.host.gpu.helper") if who == "helper" else ():
            os.kill(pid, signal.SIGKILL)

    events = Events({("dump.store", "begin"): kill})
    snapshot = store.dump(job.pid, DumpOptions(stop=True), events=events).snapshot
    job.reap()
    assert not events.named("dump.warning") and sum(joined.used(gpu) for gpu in range(2)) == 0
    if who == "helper":
        bring_back(store, snapshot)
        job.goes_on()


def test_what_a_keeper_that_a_dump_started_keeps(
    store: Store, launch: Launch, joined: Machine
) -> None:
    """It outlives the process through whose root it was found."""
    job = launch(gpus=(0, 1))
    joined.kill_keeper()
    snapshot = store.dump(job.pid, DumpOptions(stop=True, keep_resident=True)).snapshot
    job.reap()
    time.sleep(3)  # it looks every second
    assert sum(joined.used(gpu) for gpu in range(2)) == job.resident
    bring_back(store, snapshot, from_resident=True)
    job.goes_on()


def tell_used(machine: Machine) -> None:
    """Have the fake NVML say how much of each GPU is in use."""
    known = json.loads((machine.cuda / "inventory.json").read_text())
    for number, one in enumerate(known["gpus"]):
        one["used"] = machine.used(number)
    (machine.cuda / "inventory.json").write_text(json.dumps(known))


@pytest.mark.parametrize("joined", [600 * MIB], indirect=True)
def test_what_is_foreseen_is_what_is_copied(
    store: Store, launch: Launch, joined: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the window, by the rule of the window: what is copied on GPUs and into the host's
    memory, and what there is no room for.
    """
    job = launch(gpus=(0, 1), mib=20, buffers=4)  # 40 MiB on each, and 23 of room
    monkeypatch.setattr(resident_inspection, "_WORKER_BYTES", 0)  # the fake has no context
    monkeypatch.setattr("icecore.host.kernel.limits.memory_available", lambda: 20 * MIB)
    tell_used(joined)
    options, events = DumpOptions(staging_bytes=4 * MIB), Events()
    until(
        lambda: inspect_tree(job.pid, find_criu(), "/dev/shm", options).gpus.processes[0].contexts
    )  # type: ignore[union-attr]
    store.dump(job.pid, options, events=events)
    ends = {event.name: event.fields for event in events.all if event.fields.get("state") == "end"}
    looked, prepared, copied = (
        ends[f"dump.{name}"] for name in ("preflight", "resident.prepare", "resident.copy")
    )
    assert looked["resident_bytes"] == job.resident == copied["bytes"]
    assert looked["no_room"] == copied["in_window"] and 16 * MIB < looked["no_room"] < 40 * MIB
    assert 4 * MIB < prepared["pinned"] - 32 * MIB < 10 * MIB
    runs_on(job, store)


def pool_of(machine: Machine, size: int) -> tuple[int, int]:
    """The address and a descriptor of an allocation, by its size."""
    [held] = machine.keeper.processes()
    until(lambda: any(one.size == size for one in machine.keeper.allocations(held.token)))
    found = (0, -1)
    for one, descriptor in machine.keeper.take(held.token):
        if one.size == size:
            found = (one.address, descriptor)
        else:
            os.close(descriptor)
    return found


@pytest.mark.parametrize("joined", [700 * MIB], indirect=True)
def test_a_pool_that_is_mostly_zeros(
    store: Store, launch: Launch, joined: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros cost neither room aside nor time; what is written to them, and what becomes zeros
    again, is in the snapshot.
    """
    monkeypatch.setattr(resident, "_LIKELY_ZEROS", MIB)
    monkeypatch.setattr(resident_inspection, "_WORKER_BYTES", 0)  # the fake has no context
    monkeypatch.setattr("icecore.host.kernel.limits.memory_available", lambda: 20 * MIB)
    job = launch(gpus=(0,), mib=4, buffers=3, pool=100)
    tell_used(joined)
    used, cell = job.resident - 99 * MIB, 57 * MIB
    taken = []
    for content in (bytes(MIB), os.urandom(MIB), bytes(MIB)):
        _, pool = pool_of(joined, 100 * MIB)
        os.pwrite(pool, content, cell)
        os.close(pool)
        events = Events()
        result = store.dump(job.pid, DumpOptions(staging_bytes=4 * MIB), events=events)
        ends = {
            event.name: event.fields for event in events.all if event.fields.get("state") == "end"
        }
        [predicted] = [event.fields for event in events.all if event.name == "dump.predicted"]
        assert ends["dump.preflight"]["no_room"] > 50 * MIB and predicted["no_room"] == 0
        assert predicted["window_seconds"] <= ends["dump.preflight"]["window_seconds"]
        prepared, copied = ends["dump.resident.prepare"], ends["dump.resident.copy"]
        assert (
            prepared["looked"] == job.resident
            and prepared["changed"] <= used + MIB
            and copied["bytes"] <= used + MIB
        )
        assert result.sizes.changed < used + 40 * MIB
        taken.append((result.snapshot, content))
    runs_on(job, store)
    job.kill()
    for snapshot, content in taken:
        bring_back(store, snapshot)
        _, pool = pool_of(joined, 100 * MIB)
        assert os.pread(pool, MIB, cell) == content
        assert os.pread(pool, MIB, 0) == fresh(99, 1) and not any(os.pread(pool, 8 * MIB, 58 * MIB))
        os.close(pool)
        job.goes_on()
        job.kill()


def fault(machine: Machine, name: str, text: str) -> None:
    (machine.cuda / name).write_text(text)


FAULTS: dict[str, tuple[str, str]] = {
    **{
        f"worker {how} in {call}": (f"worker-faults/{call}", how)
        for call in ("map", "fingerprints", "copy")
        for how in ("die", "fails")
    },
    "lock refused": ("faults/1", json.dumps({"call": "lock", "code": 801})),
    "checkpoint refused": ("faults/1", json.dumps({"call": "checkpoint", "code": 801})),
    "restore fails once": ("faults/1", json.dumps({"call": "restore", "code": 999})),
    "helper dies in lock": ("faults/1", json.dumps({"call": "lock", "die": True})),
    "helper dies in checkpoint": ("faults/1", json.dumps({"call": "checkpoint", "die": True})),
    "helper dies in restore": ("faults/1", json.dumps({"call": "restore", "die": True})),
    "helper dies in unlock": ("faults/1", json.dumps({"call": "unlock", "die": True})),
}


def test_what_fails_costs_a_snapshot(
    due: Due, store: Store, launch: Launch, joined: Machine
) -> None:
    job = launch(gpus=(0, 1), children=1)

    def breaking(name: str) -> Callable[[Event], None]:
        return lambda _: fault(joined, *FAULTS[name])

    for name in due([*FAULTS]):
        with at(name):
            before = store.snapshots()
            # The look before the window may fail: that costs nothing.
            events = Events({("dump.resident.unmap", "begin"): breaking(name)})
            with pytest.raises(IcecoreError):
                store.dump(job.pid, events=events)
            assert not list((joined.cuda / "faults").iterdir())
            runs_on(job, store)
            assert store.snapshots() == before
            store.dump(job.pid)
            runs_on(job, store)


MOMENTS = [
    ("dump.resident.unmap", "end"),
    ("dump.gpu.lock", "end"),
    ("dump.gpu.checkpoint", "end"),
    ("dump.files", "begin"),
    ("dump.gpu.restore", "end"),
]
#: Once its window is over, a dumper may be stopped for as long as it likes.
STOPPED = [moment for moment in MOMENTS if moment[0] != "dump.gpu.restore"]


@pytest.mark.parametrize("who", ["interrupted", "guard", "helper", "worker", "keeper"])
def test_whoever_dies(who: str, due: Due, store: Store, launch: Launch, joined: Machine) -> None:
    job = launch(gpus=(0, 1), children=1)

    def hook(event: Event) -> None:
        if who == "interrupted":
            raise KeyboardInterrupt
        if who == "keeper":
            joined.kill_keeper()
            return
        word = {
            "guard": "icecore.dumper.freeze.guard_process",
            "helper": "icecore.host.gpu.helper",
            "worker": "icecore.host.gpu.worker",
        }[who]
        for pid in members(store.workdir, word):
            os.kill(pid, signal.SIGKILL)

    def is_held(pid: int) -> bool:
        return Agent(joined.directory, pid).report().counts.unheld == 0

    for moment in due(MOMENTS):
        with at(*moment):
            before = store.snapshots()
            try:
                store.dump(job.pid, events=Events({moment: hook}))
            except (KeyboardInterrupt, IcecoreError):
                assert store.snapshots() == before
            if who == "keeper":
                joined.start_keeper()
                until(lambda: all(map(is_held, job.pids)))
            runs_on(job, store)
            store.dump(job.pid)
            runs_on(job, store)


@pytest.mark.parametrize(
    "moment",
    [
        "dump.preflight",
        "dump.resident.prepare",
        "dump.criu",
        "dump.resident.unmap",
        "dump.gpu.checkpoint",
    ],
)
@pytest.mark.parametrize("who", ["the job", "a rank"])
def test_a_process_that_ends_is_said_to_have_ended(
    store: Store, launch: Launch, who: str, moment: str
) -> None:
    """Whatever was asked of it then, and did not answer."""
    job = launch(gpus=(0, 1), children=1)
    victim = job.pid if who == "the job" else next(pid for pid in job.pids if pid != job.pid)

    def kill(_: Event) -> None:
        os.kill(victim, signal.SIGKILL)
        until(lambda: not procfs.exists(victim) or procfs.is_over(victim))

    with pytest.raises(DumpFailed, match=f"process {victim}.* ended during the dump") as caught:
        store.dump(job.pid, events=Events({(moment, "end"): kill}))
    assert caught.value.cure and not store.snapshots()


def test_a_window_that_is_too_long(store: Store, launch: Launch, joined: Machine) -> None:
    job = launch()
    fault(joined, "faults/1", json.dumps({"call": "checkpoint", "code": 0, "seconds": 2.0}))
    with pytest.raises(WindowExceeded):
        store.dump(job.pid, DumpOptions(max_window=1.5))
    runs_on(job, store)


@pytest.mark.parametrize(
    ("how", "moments", "max_window"),
    [(signal.SIGKILL, [*MOMENTS, ("dump.store", "begin")], 20.0), (signal.SIGSTOP, STOPPED, 2.0)],
    ids=["killed", "stopped"],
)
def test_a_dumper_that_is_killed_or_stopped(
    how: signal.Signals,
    moments: list[tuple[str, str]],
    max_window: float,
    due: Due,
    store: Store,
    launch: Launch,
    joined: Machine,
) -> None:
    job = launch(gpus=(0, 1), children=1)
    for moment in due(moments):
        with at(*moment):
            strike(how, moment, max_window, job, store)
            until_clean(store.workdir)
            runs_on(job, store)
            store.dump(job.pid)
            runs_on(job, store)


def strike(
    how: signal.Signals, moment: tuple[str, str], max_window: float, job: Job, store: Store
) -> None:
    """Send a dumper a signal at a moment. The job runs on while the dumper still exists."""
    order = {
        "repository": str(store.backend.root),  # type: ignore[attr-defined]
        "workdir": str(store.workdir),
        "pid": job.pid,
        "pause": moment,
        "options": {"max_window": max_window},
    }
    dumper = zygote.program(driver.PROGRAM, json.dumps(order), stderr=False)
    try:
        assert dumper.stdout is not None
        for line in dumper.stdout:
            if json.loads(line)[:2] == [*moment]:
                break
        else:
            pytest.fail("it ended early")
        dumper.send_signal(how)
        time.sleep(0.1)
        job.goes_on()
    finally:
        dumper.kill()
        dumper.communicate(timeout=20)


def test_a_store_that_fails(due: Due, store: Store, launch: Launch) -> None:
    job = launch(gpus=(0, 1))
    broken = FaultyBackend(
        store.backend,
        lambda call: Outcome.FAIL if call.name.startswith("snapshots/") else Outcome.PASS,
    )
    for stop in due([False, True]):
        with at("stop" if stop else "no stop"):
            with pytest.raises(IcecoreError):
                store.through(broken).dump(job.pid, DumpOptions(stop=stop))
            runs_on(job, store)


@pytest.mark.parametrize("keep", [False, True])
def test_a_dump_that_stops_the_job(
    store: Store, launch: Launch, joined: Machine, keep: bool
) -> None:
    job = launch(gpus=(0, 1))
    result = store.dump(job.pid, DumpOptions(stop=True, keep_resident=keep))
    assert store.snapshots() == [result.snapshot]
    job.reap()
    assert sum(joined.used(gpu) for gpu in range(2)) == (job.resident if keep else 0)


@pytest.mark.parametrize("room", [None, 4 * MIB])
def test_staging(
    store: Store, launch: Launch, joined: Machine, room: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has no room on the device gets pinned memory, also beyond the bound on staging; where
    the host lacks that, it is stored in the window.
    """
    job = launch(gpus=(0,), mib=20, buffers=4)
    if room is not None:
        monkeypatch.setattr("icecore.host.kernel.limits.memory_available", lambda: 2 * room)
    events = Events()
    result = store.dump(job.pid, DumpOptions(staging_bytes=4 * MIB), events=events)
    [end] = [
        event.fields
        for event in events.named("dump.resident.copy")
        if event.fields["state"] == "end"
    ]
    if room is None:
        assert end["in_window"] == 0
    else:  # half of what the driver's own part leaves
        assert job.resident - room <= end["in_window"] < job.resident
    runs_on(job, store)
    assert 0 <= result.sizes.device - 7 * job.resident // 8 < MIB


@pytest.mark.parametrize("joined", [700 * MIB], indirect=True)
def test_little_is_pinned_if_the_job_allocates_nothing_more(
    store: Store, launch: Launch, joined: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a pool that was allocated in advance: its GPU has room for what changes, not for all."""
    monkeypatch.setattr(copyplan, "THROUGH", 4 * MIB)
    job = launch(gpus=(0,), mib=20, buffers=4)
    pinned = []
    for _ in range(3):
        events = Events()
        result = store.dump(job.pid, DumpOptions(staging_bytes=16 * MIB), events=events)
        sizes = store.read(result.snapshot).manifest.sizes
        assert isinstance(sizes.resident_changed, int)
        [end] = [
            event.fields
            for event in events.named("dump.resident.prepare")
            if event.fields["state"] == "end"
        ]
        pinned.append(end["pinned"] - RING * MIB)
        [copied] = [
            event.fields
            for event in events.named("dump.resident.copy")
            if event.fields["state"] == "end"
        ]
        assert copied["in_window"] == 0 and copied["bytes"] == sizes.resident_changed
        assert sizes.resident_changed <= sizes.changed
    assert pinned[0] == pinned[1] > 16 * MIB  # nearly all had changed, and may have again
    assert pinned[2] == 4 * MIB
    runs_on(job, store)


def rewrite(job: Job, gpus: tuple[int, ...]) -> dict[int, bytes]:
    """As a kernel of the job would: all but the first cell of each buffer, where its steps are; by
    address what is there now.
    """
    written = {}
    for held in job.machine.keeper.processes():
        for one, descriptor in job.machine.keeper.take(held.token):
            if one.device in map(uuid_of, gpus):
                written[one.address] = program.fresh(100 + len(written), one.size // MIB - 1)
                os.pwrite(descriptor, written[one.address], MIB)
            os.close(descriptor)
    return written


@pytest.mark.parametrize("gpus", [(0, 1), (0,)])
def test_what_changes_unforeseen_finds_room(
    store: Store, launch: Launch, joined: Machine, gpus: tuple[int, ...]
) -> None:
    """On whichever GPU, although nearly nothing had changed in the parent."""
    job = launch(gpus=(0, 1), mib=12, buffers=4)
    for _ in range(2):
        store.dump(job.pid)
    written = rewrite(job, gpus)
    events = Events()
    result = store.dump(job.pid, DumpOptions(stop=True, staging_bytes=4 * MIB), events=events)
    ends = {event.name: event.fields for event in events.all if event.fields.get("state") == "end"}
    changed = sum(map(len, written.values()))
    assert changed == len(gpus) * 2 * 11 * MIB
    prepared = ends["dump.resident.prepare"]
    assert (
        prepared["looked"] == job.resident
        and 0 <= prepared["changed"] - changed <= job.buffers * MIB
    )
    assert (prepared["pinned"] - 32 * MIB < job.resident) == (gpus == (0,))
    assert (
        ends["dump.resident.copy"]["in_window"] == 0
        and ends["dump.resident.copy"]["bytes"] >= changed
    )
    job.reap()
    bring_back(store, result.snapshot)
    [held] = joined.keeper.processes()
    found = {}
    for one, descriptor in joined.keeper.take(held.token):
        found[one.address] = os.pread(descriptor, one.size, MIB)
        os.close(descriptor)
    assert {address: found[address] for address in written} == written
    job.goes_on()


@pytest.mark.parametrize("why", ["map", "older preload"])
def test_a_look_that_fails_costs_no_snapshot(
    store: Store, launch: Launch, joined: Machine, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then there is room for as much as changed in the parent, and the rest is stored in the
    window.
    """
    job = launch(gpus=(0, 1), mib=8, buffers=4)
    for _ in range(2):
        store.dump(job.pid)
    written = rewrite(job, (0, 1))
    if why == "older preload":
        operations = {one.name: one for one in Operation} | {
            "AGENT_LOOK": 80
        }  # which this one does not know either
        monkeypatch.setattr(client, "Operation", SimpleNamespace(**operations))
    else:
        fault(joined, f"worker-faults/{why}", "fails")
    events = Events()
    result = store.dump(job.pid, DumpOptions(staging_bytes=4 * MIB), events=events)
    ends = {event.name: event.fields for event in events.all if event.fields.get("state") == "end"}
    assert ("Invalid argument" if why == "older preload" else f"{why}: fails") in str(
        ends["dump.resident.prepare"]["not_looked"]
    )
    assert "looked" not in ends["dump.resident.prepare"]
    assert 0 < ends["dump.resident.copy"]["in_window"] < ends["dump.resident.copy"]["bytes"]
    runs_on(job, store)
    recorded = store.read(result.snapshot)
    stored = dict(recorded.runs(recorded.space("device", str(job.pid))))
    assert sum(map(len, stored.values())) >= sum(map(len, written.values())) * 3 // 4


def test_a_worker_that_dies_as_it_looks(store: Store, launch: Launch, joined: Machine) -> None:
    job = launch()
    store.dump(job.pid)
    fault(joined, "worker-faults/fingerprints", "die")
    with pytest.raises(IcecoreError, match="worker ended"):
        store.dump(job.pid)
    runs_on(job, store)
    store.dump(job.pid)
    runs_on(job, store)


@pytest.mark.parametrize("with_parent", [False, True])
def test_a_dump_that_fails_while_the_worker_hangs(
    store: Store, launch: Launch, with_parent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pre-copy fails while the devices are prepared beside it. The dump neither waits for the
    worker nor allocates memory for copies.
    """
    monkeypatch.setattr("icecore.host.gpu.working._END_SECONDS", 0.5)
    job, hangs = launch(), threading.Event()
    if with_parent:
        store.dump(job.pid)
    regions: list[int] = []

    def hang(_: Event) -> None:
        for pid in members(store.workdir, "icecore.host.gpu.worker"):
            os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(resident, "HostRegion", regions.append)
        hangs.set()

    def fail(_: Event) -> None:
        assert hangs.wait(20)
        time.sleep(0.5)  # by now, the preparation waits for the worker
        raise OSError("pre-copy fails")

    actions = {("dump.resident.prepare", "begin"): hang, ("dump.precopy", "begin"): fail}
    began = time.monotonic()
    with pytest.raises(OSError, match="pre-copy fails"):
        store.dump(job.pid, DumpOptions(pre_copy="on"), events=Events(actions))
    assert time.monotonic() - began < 15 and regions == []
    monkeypatch.undo()
    runs_on(job, store)
    store.dump(job.pid)
    runs_on(job, store)


def test_devices_that_cannot_be_prepared_end_pre_copy(store: Store, launch: Launch) -> None:
    job, failed = launch(), threading.Event()

    def fail(_: Event) -> None:
        failed.set()
        raise DumpFailed("not prepared")

    def wait(_: Event) -> None:
        assert failed.wait(20)
        time.sleep(0.2)

    actions = {("dump.resident.prepare", "begin"): fail, ("dump.precopy", "begin"): wait}
    with pytest.raises(DumpFailed, match="not prepared"):
        store.dump(job.pid, DumpOptions(pre_copy="on"), events=Events(actions))
    runs_on(job, store)
    with pytest.raises(DumpFailed, match="abandoned"):
        held, stop = Claim([job.pid], 0.0), threading.Event()
        try:
            stop.set()
            Claim([job.pid], 60.0, stop)
        finally:
            held.release()
    store.dump(job.pid)
    runs_on(job, store)


def test_a_worker_that_does_not_let_go_is_ended(
    due: Due, store: Store, launch: Launch, joined: Machine
) -> None:
    """With it the snapshot; the memory is the job's."""
    job = launch(gpus=(0, 1))
    for begins, said in due(
        [("dump.resident.prepare", "worker ended"), ("dump.resident.unmap", "does not let go")]
    ):
        with at(begins):
            events = Events(
                {(begins, "begin"): lambda _: fault(joined, "worker-faults/unmap", "fails")}
            )
            with pytest.raises(IcecoreError, match=said):
                store.dump(job.pid, events=events)
            assert joined.used(0) + joined.used(1) == job.resident + MIB // 2
            runs_on(job, store)
            store.dump(job.pid)
            runs_on(job, store)


@pytest.mark.parametrize("stop", [False, True])
def test_what_is_freed_while_the_dump_stores_is_free(
    store: Store, launch: Launch, joined: Machine, stop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has let go of it; nobody is asked who stands still."""
    asked: list[str] = []
    real = Agent.look

    def spy(self: Agent, seconds: float) -> None:
        asked.append(procfs.status(self.pid).state)
        real(self, seconds)

    monkeypatch.setattr(Agent, "look", spy)
    job = launch(gpus=(0, 1))
    held = []

    def hook(event: Event) -> None:
        for pid in members(store.workdir, "icecore.host.gpu.worker"):
            held.append(
                [
                    line
                    for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
                    if f"{joined.cuda}/gpu" in line
                ]
            )

    hooks = {
        ("dump.store", "begin"): hook,
        ("dump.resident.copy", "end"): hook,
        ("dump.resident.unmap", "begin"): lambda event: asked.clear(),
    }
    store.dump(job.pid, DumpOptions(stop=stop), events=Events(hooks))
    assert [bool(some) for some in held] == [True, False]
    assert bool(asked) is not stop and not set(asked) & {"t", "T"}


def test_a_process_without_a_keeper(store: Store, launch: Launch, joined: Machine) -> None:
    """Nobody would have its memory while it is taken away: another is started."""
    job = launch()
    joined.kill_keeper()
    store.dump(job.pid, DumpOptions(max_window=10.0))
    runs_on(job, store)


def test_a_worker_that_ended_costs_no_window(store: Store, launch: Launch) -> None:
    job = launch()

    def kill(_: Event) -> None:
        for pid in members(store.workdir, "icecore.host.gpu.worker"):
            os.kill(pid, signal.SIGKILL)
            until(partial(procfs.is_over, pid))
        time.sleep(0.2)  # its client hears of it

    events = Events({("dump.criu", "begin"): kill})
    with pytest.raises(DumpFailed, match="worker ended before the window"):
        store.dump(job.pid, events=events)
    assert not events.named("dump.resident.unmap")
    runs_on(job, store)


class Late(Job):
    """One of `tests.fakes.late`, with an agent that takes three seconds to begin."""

    def __init__(self, machine: Machine, folder: Path, *, how: str) -> None:
        folder.mkdir(parents=True)
        self.machine, self.folder, self.outs = machine, folder, [folder / "lines"]
        self.late, self.begins, source = folder / "late", folder / "begins", folder / "slow.c"
        source.write_text(_SLOW)
        subprocess.run(
            ["gcc", "-w", "-shared", "-fPIC", "-o", str(folder / "slow.so"), str(source)],
            check=True,
            timeout=60,
        )
        preloads = f"{folder / 'slow.so'}:{machine.environment()['LD_PRELOAD']}"
        self._start(
            "late.py",
            {"late": str(self.late), "how": how},
            LD_PRELOAD=preloads,
            BEGINS=str(self.begins),
        )


@pytest.mark.parametrize("how", ["create", "two"])
def test_memory_is_resident_only_where_an_agent_listens(
    store: Store, launch: Launch, how: str
) -> None:
    """The dump would take it for the driver's, and the next one give the job what it held then."""
    job = launch(Late, how=how)

    def late(_: Event) -> None:
        job.late.touch()
        until(job.begins.exists)
        time.sleep(0.5)  # time for the second thread

    with suppress(
        DumpFailed
    ):  # it has memory that it did not have: its preload says so, or cannot yet
        store.dump(job.pid, events=Events({("dump.criu", "end"): late}))
    job.wait_steps(20)
    until(lambda: job.lines()[-1].endswith("right"))
    store.dump(job.pid)
    job.wait_steps(20)
    assert {line.split()[1] for line in job.lines()} == {"nothing", "right"}


def test_memory_of_a_process_that_has_no_agent(store: Store, launch: Launch) -> None:
    """What the keeper has of it is mapped, whoever tells."""
    job = launch()
    agent = Agent(job.machine.directory, job.pid)
    assert not agent.report().counts.unheld
    agent.directory.joinpath(f"agent-{job.pid}").unlink()
    assert resident_inspection.has_mapped(job.pid)
    with pytest.raises(PreflightRefused, match="its agent does not listen"):
        store.dump(job.pid)
