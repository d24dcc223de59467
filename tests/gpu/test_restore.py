"""Restores of GPU processes with a fake driver: they go on where they were, on the same GPUs or
others, or nothing of them runs.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from icecore.dumper.options import DumpOptions
from icecore.dumper.target import Target as DumpTarget
from icecore.errors import IcecoreError, NotFound, RestoreFailed, RestoreRefused, StoreError
from icecore.events import Event
from icecore.host.criu.program import Criu
from icecore.host.gpu.backend import VARIABLE
from icecore.host.gpu.client import Helper
from icecore.host.jobs.job import Job
from icecore.host.jobs.namespaces import Isolation
from icecore.host.jobs.registry import Registry
from icecore.host.kernel import procfs
from icecore.restorer.files import images
from icecore.restorer.fill import device_file
from icecore.restorer.fill.tree_fill import TreeFill
from icecore.restorer.gpu import devices
from icecore.restorer.guard.guard_process import descendants
from icecore.restorer.options import RestoreOptions
from icecore.restorer.phases import resources
from icecore.restorer.place.members import Family
from icecore.restorer.restore import check, restore
from icecore.restorer.restored import Restored
from icecore.store.backend.faulty import Call, FaultyBackend, Outcome
from icecore.store.backend.local import LocalBackend
from icecore.store.format.contract import Gpus
from icecore.store.format.manifest import Manifest
from tests import zygote
from tests.dumper.world import Events, Store
from tests.fakes import fake_cuda
from tests.fakes.world import GPUS, MIB, Target, World
from tests.host.criu_harness import crius
from tests.programs import driving

from .conftest import Launch

#: Where a target's driver has its mapping; so many that it comes back through a file.
DEVICE, MIBS = fake_cuda.DEVICE, 70

pytestmark = pytest.mark.criu


def bring_back(
    store: Store, snapshot: str, events: Events | None = None, **options: object
) -> Restored:
    restored = restore(
        store.repository,
        store.loop,
        snapshot,
        RestoreOptions(**options),
        emit=events or Events(),  # type: ignore[arg-type]
    )
    restored.wait_resident(30)
    return restored


def goes_on(target: Target) -> None:
    target.wait_steps(5)
    target.is_right()


@pytest.mark.parametrize("placers", [0, 2])
@pytest.mark.parametrize("mode", ["full", "lazy"])
def test_a_lineage_of_two_gpu_processes(
    mode: str, placers: int, store: Store, launch: Launch, world: World
) -> None:
    target = launch(GPUS[:2])
    snapshots = []
    for number in range(3):
        snapshots.append(store.dump(target.pid, DumpOptions(stop=number == 2)).snapshot)
    target.reap()
    for snapshot in (snapshots[2], snapshots[0], snapshots[1]):
        events = Events()
        bring_back(store, snapshot, events, mode=mode, placers=placers)
        goes_on(target)
        assert [world.on(gpu) for gpu in GPUS] == [1, 1, 0, 0]
        ended = events.named("restore.gpu.restore")[-1].fields
        assert (ended["state"], ended["bytes"], ended["processes"]) == ("end", 2 * MIB << 20, 2)
        names = [(event.name, event.fields.get("state")) for event in events.all]
        assert names.index(("restore.gpu.unlock", "end")) < names.index(("restore.running", None))
        target.kill()
        world.clear()
    # What is restored can be dumped again.
    bring_back(store, snapshots[2], mode=mode)
    again = store.dump(driving.members(target.out.parent)[0], DumpOptions(stop=True)).snapshot
    target.reap()
    bring_back(store, again)
    goes_on(target)


def of_the_file(pid: int) -> tuple[int, int]:
    """KiB of the driver's mapping of a target that is of a file without a name, and of huge pages."""
    found, huge = 0, 0
    for mapping in Path(f"/proc/{pid}/smaps").read_text().split("VmFlags"):
        if "(deleted)" in mapping and f"\n{DEVICE >> 24:x}" in mapping:
            found += int(mapping.partition("Size:")[2].split()[0])
            huge += int(mapping.partition("FilePmdMapped:")[2].split()[0]) + int(
                mapping.partition("ShmemPmdMapped:")[2].split()[0]
            )
    return found, huge


@pytest.mark.parametrize(("mode", "placers"), [("full", 2), ("lazy", 0)])
def test_device_memory_in_a_file(
    mode: str, placers: int, store: Store, launch: Launch, world: World
) -> None:
    """The driver finds it mapped from a file, whatever its mapping was made of at the dump, and
    leaves nothing of that behind.
    """
    target = launch(GPUS[:2], mib=MIBS)
    restored = Events()
    snapshot = store.dump(target.pid, DumpOptions(stop=True, populate=bool(placers))).snapshot
    target.reap()
    for _ in range(2):
        world.fault("restore", code=0, seconds=1.0)
    seen: dict[int, tuple[int, int]] = {}
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            for pid in driving.members(target.out.parent):
                with suppress(OSError):
                    seen[pid] = max(seen.get(pid, (0, 0)), of_the_file(pid))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        bring_back(store, snapshot, restored, mode=mode, placers=placers)
    finally:
        over.set()
        looking.join()
    goes_on(target)
    assert [found for found, _ in seen.values()] == 2 * [MIBS << 10]
    assert {of_the_file(pid) for pid in driving.members(target.out.parent)} == {(0, 0)}
    ended = restored.named("restore.gpu.memory")[-1].fields
    assert (ended["state"], ended["bytes"], ended["placers"], ended["redone"]) == (
        "end",
        2 * MIBS << 20,
        placers,
        0,
    )
    names = [(event.name, event.fields.get("state")) for event in restored.all]
    assert names.index(("restore.gpu.memory", "begin")) < names.index(("restore.criu", "begin"))
    assert not restored.named("restore.warning")


@pytest.mark.parametrize("criu", crius(), ids=lambda criu: ".".join(map(str, criu.version)))
def test_every_criu_maps_the_file(criu: Criu, store: Store, launch: Launch, world: World) -> None:
    target = launch(GPUS[:2], mib=MIBS)
    snapshot = store.dump(target.pid, DumpOptions(stop=True), criu=criu).snapshot
    target.reap()
    events = Events()
    restore(store.repository, store.loop, snapshot, criu=criu, emit=events).wait_resident(30)
    goes_on(target)
    assert events.named("restore.gpu.memory")[-1].fields["bytes"] == 2 * MIBS << 20


def test_the_kernel_has_made_one_mapping_of_device_memory_and_other_memory(
    store: Store, launch: Launch, world: World
) -> None:
    """What lies beside it is no device memory, and stays when the driver takes that away."""
    target = launch(GPUS[:2], mib=MIBS)
    snapshot = store.dump(target.pid, DumpOptions(stop=True, populate=False)).snapshot
    target.reap()
    for mode in ("full", "lazy"):
        events = Events()
        bring_back(store, snapshot, events, mode=mode)
        assert events.named("restore.gpu.memory")[-1].fields["bytes"] == 2 * MIBS << 20
        assert not events.named("restore.warning")
        goes_on(target)
        target.kill()


@pytest.mark.parametrize("mode", ["full", "lazy"])
def test_a_driver_that_overtakes_the_fetching_waits(
    mode: str, store: Store, launch: Launch, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = launch(GPUS[:2], mib=MIBS)
    snapshot = store.dump(target.pid, DumpOptions(stop=True)).snapshot
    target.reap()
    rows, waited = itertools.count(), threading.Event()

    def add(self: device_file._Process, there: Sequence[int]) -> None:
        if next(rows) == 3:
            until_attached(self)
            time.sleep(1.0)
            assert self.member is not None and not self.member.gone
            waited.set()
        elif there[-1] > MIBS // 2:
            waited.wait(20)
        put(self, there)

    put = device_file._Process.add
    monkeypatch.setattr(device_file._Process, "add", add)
    events = Events()
    bring_back(store, snapshot, events, mode=mode)
    goes_on(target)
    assert waited.is_set()
    began, ended = (event.at for event in events.named("restore.gpu.restore"))
    assert ended - began > 0.5
    assert events.named("restore.memory")[-1].fields["faults"]


@pytest.mark.parametrize("mode", ["full", "lazy"])
def test_the_drivers_time_begins_when_its_memory_is_there(
    mode: str, store: Store, launch: Launch, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it waits for the store is not its own."""
    target = launch(GPUS[:2], mib=MIBS)
    snapshot = store.dump(target.pid, DumpOptions(stop=True)).snapshot
    target.reap()
    began = threading.Event()

    def add(self: device_file._Process, there: Sequence[int]) -> None:
        assert began.wait(20)
        while time.monotonic() < begun[0] + 4:
            time.sleep(0.05)
        put(self, there)

    def begin(self: Helper, pid: int, gpus: Mapping[str, str]) -> Future[Any]:
        begun.append(time.monotonic())
        began.set()
        return ask(self, pid, gpus)

    begun: list[float] = []
    put, ask = device_file._Process.add, Helper.begin_restore
    with monkeypatch.context() as patched:
        patched.setattr(devices, "CALL_SECONDS", 3.0)
        patched.setattr(device_file._Process, "add", add)
        patched.setattr(Helper, "begin_restore", begin)
        events = Events()
        bring_back(store, snapshot, events, mode=mode, threads=2)
    goes_on(target)
    before, after = (event.at for event in events.named("restore.gpu.restore"))
    assert after - before > 3


@pytest.mark.parametrize("placers", [0, 2])
def test_whether_all_device_memory_is_there(
    placers: int, store: Store, launch: Launch, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is placed through page faults; the driver's time begins then."""
    target = launch(GPUS[:2])
    snapshot = store.dump(target.pid, DumpOptions(stop=True)).snapshot
    target.reap()
    seen: list[bool] = []
    fillings: list[TreeFill] = []

    def opened(self: TreeFill) -> None:
        fillings.append(self)
        seen.append(self.has_device_memory())
        begin(self)

    begin = TreeFill.open
    monkeypatch.setattr(TreeFill, "open", opened)
    bring_back(store, snapshot, placers=placers)
    goes_on(target)
    assert any(fillings[0]._device) and seen == [False] and fillings[0].has_device_memory()


def test_a_driver_that_hangs_is_not_waited_for(
    store: Store, launch: Launch, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = launch(GPUS[:2])
    snapshot = store.dump(target.pid, DumpOptions(stop=True)).snapshot
    target.reap()
    world.fault("restore", code=0, seconds=5.0)
    monkeypatch.setattr(devices, "CALL_SECONDS", 1.0)
    with pytest.raises(RestoreFailed, match="after all its memory was loaded"):
        bring_back(store, snapshot)
    gone(target, 10.0)


def until_attached(process: device_file._Process) -> None:
    end = time.monotonic() + 20
    while process.member is None:
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("fault", "mode"),
    [
        ("store", "full"),
        ("store early", "lazy"),
        ("helper", "lazy"),
        ("process", "full"),
        ("criu", "full"),
        ("criu", "lazy"),
    ],
)
def test_a_restore_that_fails_while_the_driver_waits(
    fault: str,
    mode: str,
    store: Store,
    launch: Launch,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody survives it, and nobody has run before."""
    target = launch(GPUS[:2], mib=MIBS)
    snapshot = store.dump(target.pid, DumpOptions(stop=True)).snapshot
    target.reap()
    rows, struck, free = itertools.count(), threading.Event(), list[int]()

    def strike() -> None:
        assert {procfs.status(pid).tracer > 0 for pid in driving.members(target.out.parent)} == {
            True
        }
        if fault == "process":
            os.kill(driving.members(target.out.parent)[-1], signal.SIGKILL)
        elif fault != "store":
            os.kill(
                started("criu" if fault == "criu" else "icecore.host.gpu.helper")[0], signal.SIGKILL
            )
        while fault == "criu" and (left := driving.members(target.out.parent)):
            free.extend(pid for pid in left if is_free(pid))
        struck.set()

    def add(self: device_file._Process, there: Sequence[int]) -> None:
        if fault != "store early" and next(rows) == 3:
            until_attached(self)
            time.sleep(0.3)
            strike()
        put(self, there)

    def read(self: LocalBackend, *arguments: Any) -> Any:
        if (fault == "store" and struck.is_set()) or (
            fault == "store early" and threading.current_thread().name.startswith("place-")
        ):
            struck.set()
            raise StoreError("it is broken")
        return read_into(self, *arguments)

    put, read_into = device_file._Process.add, LocalBackend.read_into
    with monkeypatch.context() as patched:
        patched.setattr(device_file._Process, "add", add)
        patched.setattr(LocalBackend, "read_into", read)
        with pytest.raises(StoreError if fault.startswith("store") else RestoreFailed):
            bring_back(store, snapshot, mode=mode, threads=1 if fault == "store" else 0)
    assert struck.is_set() and not free
    gone(target, 10.0)
    assert not any("device-file" in thread.name for thread in threading.enumerate())
    world.clear()
    bring_back(store, snapshot, mode=mode)
    goes_on(target)


def test_memory_that_the_driver_does_not_take_away_is_restored_without_a_file(
    store: Store, launch: Launch, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file's mapping must not stay in a process: it could not be dumped again."""
    target = launch(GPUS[:2], mib=MIBS, also=["large"])
    snapshot = store.dump(target.pid, DumpOptions(stop=True)).snapshot
    target.reap()
    known = resources.read_gpus

    def everything(manifest: Manifest) -> Gpus | None:
        found = known(manifest)
        assert found is not None
        ranges = [process.temporary for process in found.processes.values()]
        assert ranges == 2 * [[(DEVICE, DEVICE + (MIBS << 20))]]
        lazy = {
            int(s.key): [(r.start, r.start + r.length) for r in s.regions if r.lazy]
            for s in manifest.spaces
            if s.kind == "process"
        }
        return replace(
            found,
            processes={
                image: replace(process, temporary=lazy[image])
                for image, process in found.processes.items()
            },
        )

    monkeypatch.setattr(resources, "read_gpus", everything)
    events = Events()
    bring_back(store, snapshot, events)
    goes_on(target)
    assert [event.fields["name"] for event in events.named("restore.warning")] == ["device-memory"]
    assert not events.named("restore.failed")
    states = [
        event.fields["state"] for event in events.named("restore.gpu.memory")
    ]  # of the first attempt, which may break while the file is being filled
    assert (states[0], states.count("begin")) == ("begin", 1) and states[-1] in ("end", "failed")
    again = store.dump(driving.members(target.out.parent)[0], DumpOptions(stop=True)).snapshot
    target.reap()
    bring_back(store, again)
    goes_on(target)


def test_a_sink_that_fails_once_as_device_memory_begins_ends_the_restore(
    store: Store, launch: Launch, world: World
) -> None:
    """It is told in a thread of its own, and the driver waits for the memory."""
    target = launch(GPUS[:2], mib=MIBS)
    snapshot = store.dump(target.pid, DumpOptions(stop=True)).snapshot
    target.reap()
    broken: list[Event] = []

    class Once(Events):
        def __call__(self, event: Event) -> None:
            if event.name == "restore.gpu.memory" and not broken:
                broken.append(event)
                raise BrokenPipeError("nobody reads")
            super().__call__(event)

    with pytest.raises(BrokenPipeError):
        bring_back(store, snapshot, Once())
    gone(target, 20)
    bring_back(store, snapshot)
    goes_on(target)


def test_where_there_can_be_no_file_userfaultfd_does_it(
    store: Store, launch: Launch, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = launch(GPUS[:2], mib=MIBS)
    snapshot = store.dump(target.pid, DumpOptions(stop=True)).snapshot
    target.reap()

    def refuse(size: int) -> int:
        raise PermissionError(errno.EPERM, "fsopen: no")

    monkeypatch.setattr(device_file.huge_file, "create", refuse)
    events = Events()
    bring_back(store, snapshot, events)
    goes_on(target)
    assert [
        "fsopen: no" in str(event.fields["message"]) for event in events.named("restore.warning")
    ] == [True]
    assert not events.named("restore.gpu.memory") and not events.named("restore.failed")


def test_a_mapping_with_few_bytes_is_placed(
    store: Store, launch: Launch, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In huge pages it would take much more memory than it has bytes."""
    target = launch(GPUS[:2], mib=MIBS)
    snapshot = store.dump(target.pid, DumpOptions(stop=True)).snapshot
    target.reap()
    monkeypatch.setattr(images, "SPARE", -0.9)
    ahead: list[int] = []
    place_zeros = Family.place_zeros

    def spy(family: Family, start: int, end: int, stop: Callable[[], bool]) -> None:
        ahead.append(end - start)
        place_zeros(family, start, end, stop)

    monkeypatch.setattr(Family, "place_zeros", spy)
    events = Events()
    bring_back(store, snapshot, events, placers=2)
    goes_on(target)
    assert sum(ahead) == 2 * MIBS << 20  # the driver reads all of it
    ended = events.named("restore.memory")[-1].fields
    assert (
        not events.named("restore.gpu.memory")
        and int(str(ended["bytes"])) > 2 * MIBS << 20
        and ended["placers"] == 2
    )


#: A process that exits (PF_EXITING, linux/sched.h).
_EXITING = 4


def is_free(pid: int) -> bool:
    """Whether a process may run: nobody traces it, and it has not been killed. One that is taking
    its memory down is not traced any more, and runs.
    """
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        pending = int(status.partition("SigPnd:")[2].split()[0], 16) | int(
            status.partition("ShdPnd:")[2].split()[0], 16
        )
        dead = (
            status.partition("State:")[2].split()[0] in "ZX" or pending >> (signal.SIGKILL - 1) & 1
        )
        flags = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6])
        return (
            not dead
            and not flags & _EXITING
            and status.partition("TracerPid:")[2].split()[0] == "0"
        )
    return False


def started(name: str) -> list[int]:
    """The processes below this one that run a program or module of that name."""
    found = []
    for pid in descendants(os.getpid()):
        with suppress(NotFound):
            if name in [Path(word).name for word in procfs.command_line(pid)]:
                found.append(pid)
    return found


def gone(target: Target, seconds: float) -> None:
    until = time.monotonic() + seconds
    while driving.members(target.out.parent):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_placer_that_ends_while_memory_is_written(
    store: Store, launch: Launch, world: World
) -> None:
    target = launch(GPUS[:2], mib=MIBS)
    snapshot = store.dump(target.pid, DumpOptions(stop=True)).snapshot
    target.reap()

    def strike(event: Event) -> None:
        # The last of each kind; those of host memory may have ended meanwhile.
        found = started("icecore.restorer.place.placer_process")
        for first in found:
            with suppress(NotFound, ProcessLookupError):
                for last in procfs.children(first)[-1:]:
                    os.kill(last, signal.SIGKILL)

    bring_back(store, snapshot, Events({("restore.gpu.restore", "begin"): strike}), placers=2)
    goes_on(target)


def test_memory_from_far_away(
    store: Store, launch: Launch, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = launch(GPUS[:2], mib=MIBS)
    events = Events()
    snapshot = store.dump(target.pid, DumpOptions(stop=True)).snapshot
    target.reap()
    monkeypatch.setattr(LocalBackend, "direct", False)
    bring_back(store, snapshot, events)
    goes_on(target)
    assert events.named("restore.gpu.memory")[-1].fields["bytes"] == 2 * MIBS << 20


def test_other_gpus(store: Store, launch: Launch, world: World) -> None:
    target = launch(GPUS[:2])
    snapshot = store.dump(target.pid, DumpOptions(stop=True)).snapshot
    target.reap()
    bring_back(store, snapshot, gpu_map={GPUS[0]: GPUS[3]})
    goes_on(target)
    assert [world.on(gpu) for gpu in GPUS] == [0, 1, 0, 1]
    target.kill()
    world.clear()
    world.gpus = world.gpus[2:]  # another machine: the GPUs that it had are not there
    world.write()
    bring_back(store, snapshot)
    goes_on(target)
    assert [world.on(gpu) for gpu in GPUS] == [0, 0, 1, 1]


def test_what_a_machine_lacks(store: Store, launch: Launch, world: World) -> None:
    target = launch(GPUS[:2])
    snapshot = store.dump(target.pid, DumpOptions(stop=True)).snapshot
    target.reap()

    def lacks(**options: object) -> dict[str, str]:
        found = check(store.repository, store.loop, snapshot, RestoreOptions(**options))  # type: ignore[arg-type]
        return {
            one.name: f"{one.message} ({one.cure})"
            for one in found.checks
            if not one.met and one.name.startswith("gpu")
        }

    whole, driver = list(world.gpus), world.driver
    assert lacks() == {}
    assert "twice" in lacks(gpu_map={"0": "2", "1": "2"})["gpu"]
    assert "names no GPU of this machine" in lacks(gpu_map={"0": "7"})["gpu"]
    world.gpus[3] = {**world.gpus[3], "name": "Fake H100"}
    world.gpus[2] = {**world.gpus[2], "memory": 1 << 30}
    world.write()
    assert "Fake H200 is needed" in lacks(gpu_map={GPUS[0]: GPUS[3]})["gpu"]
    assert "8192 MiB are needed" in lacks(gpu_map={GPUS[0]: "GPU-00000002"})["gpu"]
    world.gpus = [{**whole[0], "used": 8 << 30}]
    world.write()
    assert "there is no GPU for" in lacks()["gpu"]
    with pytest.raises(RestoreRefused, match="there is no GPU for"):
        bring_back(store, snapshot)
    world.gpus = [{**gpu, "used": 8 << 30} for gpu in whole]
    world.write()
    assert list(lacks()) == ["gpu-memory"]
    world.gpus, world.driver = whole, "570.10"
    world.write()
    assert driver in lacks()["gpu-driver"]
    assert "580" in lacks(gpu_map={"0": "2"})["gpu"]
    assert not driving.members(target.out.parent)


@pytest.mark.parametrize("mode", ["full", "lazy"])
@pytest.mark.parametrize("fault", ["restore", "unlock", "helper", "store"])
def test_a_restore_that_fails(
    fault: str, mode: str, store: Store, launch: Launch, world: World
) -> None:
    target = launch(GPUS[:2])
    snapshot = store.dump(target.pid, DumpOptions(stop=True)).snapshot
    target.reap()
    through = store
    if fault == "store":
        reads = 0

        def plan(call: Call) -> Outcome:
            nonlocal reads
            reads += call.name.startswith("shards/")
            return Outcome.FAIL if call.name.startswith("shards/") and reads > 12 else Outcome.PASS

        through = store.through(FaultyBackend(store.backend, plan))
    elif fault == "helper":
        world.fault("restore", die=True)
    else:
        world.fault(fault, code=801)
    with pytest.raises(StoreError if fault == "store" else RestoreFailed):
        bring_back(through, snapshot, mode=mode, attempts=1)
    gone(target, 10.0)
    world.clear()
    bring_back(store, snapshot, mode=mode)
    goes_on(target)


def test_what_fails_before_criu_is_started_is_told_at_once(
    store: Store, launch: Launch, world: World
) -> None:
    """Nobody hears of an end before anybody listens, and nobody waits for it."""
    target = launch()
    snapshot = store.dump(target.pid, DumpOptions(stop=True)).snapshot
    target.reap()
    began = time.monotonic()
    with pytest.raises((IcecoreError, OSError), match="/none"):
        bring_back(store, snapshot, criu_plugins="/none")
    assert time.monotonic() - began < 30  # it was a minute
    assert not started("guard_process.py")
    bring_back(store, snapshot)
    goes_on(target)


_RESTORER = """
import asyncio, json, os, sys, time
from pathlib import Path
from icecore.restorer.options import RestoreOptions
from icecore.restorer.restore import restore
from icecore.store.backend.local import LocalBackend
from icecore.store.runtime.loop import LoopThread
from icecore.store.log.repository import StoredRepository

order = json.loads(sys.argv[1])
def emit(event):
    if [event.name, event.fields.get("state")] == order["pause"]:
        print("paused", flush=True)
        time.sleep(60)
async def reopen():
    return await StoredRepository.open(LocalBackend(Path(order["repository"])))
with LoopThread() as loop:
    restore(loop.run(reopen()), loop, order["snapshot"], RestoreOptions(mode=order["mode"]), emit=emit)
"""


@pytest.mark.parametrize("mode", ["full", "lazy"])
@pytest.mark.parametrize(
    "pause", [["restore.gpu.restore", "begin"], ["restore.gpu.unlock", "begin"]]
)
def test_a_restorer_that_is_killed(
    pause: list[str], mode: str, store: Store, launch: Launch, world: World
) -> None:
    """Nothing of the tree stays behind without its device memory."""
    target = launch(GPUS[:2])
    snapshot = store.dump(target.pid, DumpOptions(stop=True)).snapshot
    target.reap()
    order = {
        "repository": str(store.backend.root),
        "snapshot": snapshot,
        "mode": mode,
        "pause": pause,
    }  # type: ignore[attr-defined]
    with zygote.program(_RESTORER, json.dumps(order), stderr=False) as restorer:
        assert restorer.stdout is not None
        assert restorer.stdout.readline() == b"paused\n"
        restorer.kill()
    gone(target, 10.0)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    made = Registry(tmp_path / "jobs")
    yield made
    for job in made.instances():
        if job.alive:
            job.kill(9)
            job.wait(10)


def test_two_instances_on_two_gpus_beside_the_original(
    store: Store, world: World, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a private root, with its own pids: as `icecore run --gpu` starts them."""
    world.move(tmp_path)
    monkeypatch.setenv(VARIABLE, f"fake:{world.root}")
    order = json.dumps(Target(world, tmp_path / "target", mib=MIBS, out="/dev/stdout").order)
    code = f"import sys; sys.argv[1:] = [{order!r}]; exec(open({str(Path(fake_cuda.__file__))!r}).read())"
    job = registry.start(
        [sys.executable, "-S", "-c", code], name="gpu", isolation=Isolation(root=True, network=True)
    )
    wait_lines(job, 5)
    snapshot = store.dump(DumpTarget(job.pid, job.name, record=job.record())).snapshot
    restored = []
    for number in (1, 2):
        events = Events()
        restored.append(
            restore(
                store.repository,
                store.loop,
                snapshot,
                RestoreOptions(mode="full", gpu_map={"0": str(number)}),
                registry=registry,
                emit=events,
            )
        )
        assert events.named("restore.gpu.memory")[-1].fields["bytes"] == MIBS << 20
    jobs = [one.job for one in restored if one.job is not None]
    assert len(jobs) == 2
    for one in (job, *jobs):
        wait_lines(one, 40)
        lines = one.log_path("stdout").read_text().split("\n")[:-1]
        assert lines == fake_cuda.expected(len(lines), MIBS)
    assert [world.on(gpu) for gpu in GPUS] == [1, 1, 1, 0]


def wait_lines(job: Job, count: int) -> None:
    until = time.monotonic() + 20
    while len(job.log_path("stdout").read_text().split("\n")) <= count:
        assert time.monotonic() < until, job.log_path("stderr").read_text()
        time.sleep(0.01)
