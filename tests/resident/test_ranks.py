"""Dumps and restores of ranks that write into each other's device memory: stored once, brought back
as one memory, and all go on where they were.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest
from msgspec.structs import replace

from icecore.dumper.observe import resident_inspection
from icecore.dumper.observe.gpus import GpuInspection
from icecore.dumper.observe.inspection import inspect_tree
from icecore.dumper.options import DumpOptions
from icecore.dumper.preflight import checks_gpu
from icecore.dumper.preflight.judge import refuse
from icecore.errors import Damaged, IcecoreError, RestoreFailed
from icecore.host.criu.program import find_criu
from icecore.host.cuda import nccl
from icecore.host.cuda.fake import FakeDriver
from icecore.host.resident.client import Agent
from icecore.host.resident.protocol import Counts
from icecore.store.format.contract import RESIDENT, read_resident
from tests.dumper.world import Events, Store
from tests.fakes.joined import Job, Ring
from tests.fakes.machine import MIB, Machine, until, uuid_of
from tests.moments import Due, at
from tests.programs import driving

from .test_restore import bring_back, ended

pytestmark = pytest.mark.criu

Launch = Callable[..., Job]


def in_use(joined: Machine) -> int:
    return sum(joined.used(gpu) for gpu in range(2))


@pytest.mark.parametrize(
    ("mode", "how"),
    [("full", {}), ("lazy", {"let_go": True}), ("lazy", {"ipc": True})],
    ids=["kept", "let go", "ipc"],
)
def test_a_lineage(
    store: Store, launch: Launch, joined: Machine, mode: str, how: dict[str, bool]
) -> None:
    job = launch(Ring, **how)
    snapshots = []
    for number in range(3):
        events = Events()
        snapshots.append(store.dump(job.pid, DumpOptions(stop=number == 2), events=events).snapshot)
        if number < 2:
            job.goes_on()
            assert in_use(joined) == job.resident + MIB
        [end] = [
            event.fields
            for event in events.named("dump.resident.copy")
            if event.fields["state"] == "end"
        ]
        assert 0 < end["bytes"] < job.resident, (
            "what holds zeros, or what the parent holds, is not copied"
        )
        [end] = [
            event.fields
            for event in events.named("dump.resident.prepare")
            if event.fields["state"] == "end"
        ]
        assert end["looked"] == job.resident, end
        [end] = [
            event.fields
            for event in events.named("dump.gpu.checkpoint")
            if event.fields["state"] == "end"
        ]
        assert end["bytes"] == MIB, "two small allocations: nothing shared is left for the driver"
    manifest = store.read(snapshots[0]).manifest
    assert (
        sum(r.length for s in manifest.spaces if s.kind == "device" for r in s.regions)
        == job.resident
    )
    recorded = read_resident(manifest)
    assert recorded is not None
    (first, one), (second, two) = sorted(recorded.processes.items())
    for process, other in ((one, second), (two, first)):
        owners = [imported.owner for imported in process.imports]
        assert owners == [other] or (
            "ipc" in how and not owners
        )  # it had just closed it, to open it again
    job.reap()
    for snapshot in (snapshots[2], snapshots[0], snapshots[1]):
        bring_back(store, snapshot, mode=mode)
        job.goes_on()
        assert in_use(joined) == job.resident + MIB
        job.kill()
        ended(job)
    bring_back(store, snapshots[1], mode=mode)
    again = store.dump(driving.members(job.folder)[0], DumpOptions(stop=True)).snapshot
    job.reap()
    ended(job)
    bring_back(store, again, mode=mode)
    job.goes_on()


@pytest.mark.parametrize("ipc", [False, True])
def test_on_the_other_ones_gpu(store: Store, launch: Launch, joined: Machine, ipc: bool) -> None:
    job = launch(Ring, ranks=2, ipc=ipc)
    snapshot = store.dump(job.pid, DumpOptions(stop=True)).snapshot
    job.reap()
    bring_back(store, snapshot, gpu_map={uuid_of(0): uuid_of(1), uuid_of(1): uuid_of(0)})
    job.goes_on()
    assert in_use(joined) == job.resident + MIB


@pytest.mark.parametrize(("changed", "ipc"), [(False, False), (True, False), (True, True)])
def test_memory_that_is_still_there(
    store: Store, launch: Launch, joined: Machine, changed: bool, ipc: bool
) -> None:
    job = launch(Ring, ipc=ipc)
    first = store.dump(job.pid).snapshot
    job.wait_steps(20)
    last = store.dump(job.pid, DumpOptions(stop=True, keep_resident=True)).snapshot
    job.reap()
    assert in_use(joined) == job.resident
    events = Events()
    bring_back(store, first if changed else last, events, from_resident=True)
    job.goes_on()
    [end] = [
        event.fields
        for event in events.named("restore.resident.memory")
        if event.fields["state"] == "end"
    ]
    assert bool(end["fetched"]) == changed
    store.dump(driving.members(job.folder)[0], DumpOptions(stop=True, keep_resident=True))
    job.reap()
    assert in_use(joined) == job.resident


FAULTS = {
    "a checkpoint refused": ("faults/1", json.dumps({"call": "checkpoint", "code": 801})),
    "a helper that dies": ("faults/1", json.dumps({"call": "checkpoint", "die": True})),
    "a worker that dies": ("worker-faults/fingerprints", "die"),
}


def test_what_fails_costs_a_snapshot(
    due: Due, store: Store, launch: Launch, joined: Machine
) -> None:
    job = launch(Ring)
    for name in due([*FAULTS]):
        with at(name):
            before = store.snapshots()
            place, text = FAULTS[name]
            (joined.cuda / place).write_text(text)
            with pytest.raises(IcecoreError):
                store.dump(job.pid)
            job.goes_on()
            assert in_use(joined) == job.resident + MIB and store.snapshots() == before
            store.dump(job.pid)
            job.goes_on()


def test_a_restore_that_fails(store: Store, launch: Launch, joined: Machine) -> None:
    job = launch(Ring)
    snapshot = store.dump(job.pid, DumpOptions(stop=True)).snapshot
    job.reap()
    (joined.cuda / "worker-faults" / "copy").write_text("fails")
    with pytest.raises(RestoreFailed):
        bring_back(store, snapshot, attempts=1)
    ended(job)
    bring_back(store, snapshot)
    job.goes_on()


def test_through_the_driver_alone_it_would_be_lost(joined: Machine) -> None:
    """What the fake driver does with memory that is shared while it checkpoints, as the real one
    does.
    """
    one, two = joined.target(False), joined.target(False)
    one("start(0)")
    two("start(1)")
    path = str(joined.root / "two")
    two(f"listen({path!r})")
    handle = one("create(2 * MIB)[1]")
    assert one(f"send({path!r}, {handle})") == 0
    two("mapped(received(), 2 * MIB, 1)")
    driver = FakeDriver(joined.cuda)
    driver.lock(two.pid, 5)
    driver.checkpoint(two.pid)
    with pytest.raises(IcecoreError, match="801"):
        driver.restore(two.pid, {})


def test_a_damaged_account_of_it(store: Store, launch: Launch) -> None:
    job = launch(Ring)
    manifest = store.read(store.dump(job.pid).snapshot).manifest
    known = json.loads(manifest.extra[RESIDENT])
    for about in known["processes"].values():
        about["imports"] = [[identity, owner, 99] for identity, owner, _ in about["imports"]]
    with pytest.raises(Damaged):
        read_resident(
            msgspec.structs.replace(manifest, extra={**manifest.extra, RESIDENT: json.dumps(known)})
        )


def refusals(pid: int) -> dict[str, str]:
    return {
        one.name: f"{one.message} {one.cure}"
        for one in refuse(inspect_tree(pid, find_criu(), "/dev/shm", DumpOptions()))
        if one.name.startswith("gpu")
    }


SETTINGS: dict[str, tuple[dict[str, str], str]] = {
    "what run --gpu --resident sets": (dict(nccl.PARKED), ""),
    "no peers": (dict(nccl.SNAPSHOTABLE), ""),
    "nobody knows whether by cuMem": (
        {**nccl.PARKED, "NCCL_CUMEM_ENABLE": "-2"},
        "NCCL_CUMEM_ENABLE=1",
    ),
    "multicast": ({**nccl.PARKED, "NCCL_NVLS_ENABLE": "1"}, "NCCL_NVLS_ENABLE=0"),
    "shared host memory": (
        {**nccl.PARKED, "NCCL_CUMEM_HOST_ENABLE": "1"},
        "NCCL_CUMEM_HOST_ENABLE=0",
    ),
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_nccl_between_ranks(launch: Launch, settings: str) -> None:
    environment, cure = SETTINGS[settings]
    job = launch(Ring, nccl=environment)
    found = refusals(job.pid)
    assert list(found) == (["gpu-nccl"] if cure else []) and cure in found.get("gpu-nccl", "")


def test_nccl_with_a_rank_that_is_not_under_the_preload(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = launch(Ring, nccl=dict(nccl.PARKED))
    assert refusals(job.pid) == {}
    other = next(pid for pid in job.pids if pid != job.pid)
    with monkeypatch.context() as patch:
        patch.setattr(
            resident_inspection,
            "resident_directory",
            lambda pid: "" if pid == other else str(job.machine.directory),
        )
        assert "NCCL_P2P_DISABLE=1" in refusals(job.pid)["gpu-nccl"]
    with monkeypatch.context() as patch:  # as if it had found the driver's calls in another way
        patch.setattr(Counts, "unpack", lambda _: Counts(resident=1))
        assert "did not come through the preload" in refusals(job.pid)["gpu-nccl"]
    ask = Agent.report
    with monkeypatch.context() as patch:  # out of an older snapshot, with an older preload
        patch.setattr(Agent, "report", lambda agent, **_: replace(ask(agent), version=1))
        assert "NCCL_P2P_DISABLE=1" in refusals(job.pid)["gpu-nccl"]


@pytest.mark.parametrize("what", ["multicast", "a pool", "host memory", "an outsider"])
def test_sharing_that_is_refused(joined: Machine, what: str) -> None:
    one, two = joined.target(), joined.target()
    one("start(0)")
    two("start(1)")
    path = str(joined.root / "two")
    two(f"listen({path!r})")
    handle = one(f"create(2 * MIB, 0, 1, {3 if what == 'host memory' else 1})[1]")
    assert one("alloc(2 * MIB)[0]") == 0
    until(lambda: one.agent.exists)
    assert refusals(one.pid) == {}
    if what == "multicast":
        assert one("vm('cuMulticastCreate', ctypes.byref(ctypes.c_ulonglong()), None)") == 0
        assert "NCCL_NVLS_ENABLE=0" in refusals(one.pid)["gpu-multicast"]
        return
    if what == "a pool":
        assert (
            one("vm('cuMemPoolExportToShareableHandle', ctypes.byref(ctypes.c_int()), None, 1, 0)")
            == 0
        )
        assert "gpu-sharing" in refusals(one.pid)
        return
    assert one(f"send({path!r}, {handle})") == 0
    assert two("mapped(received(), 2 * MIB, 1)")
    if what == "host memory":
        assert "NCCL_CUMEM_HOST_ENABLE=0" in refusals(one.pid)[
            "gpu-sharing"
        ] and "gpu-sharing" in refusals(two.pid)
    else:
        assert (
            str(two.pid) in refusals(one.pid)["gpu-outside"]
            and str(one.pid) in refusals(two.pid)["gpu-outside"]
        )


def test_ranks_on_one_gpu(joined: Machine) -> None:
    """They may share by CUDA IPC what the driver has; that they do not, the preload knows."""
    parent = joined.target()
    parent("start(0)")
    assert parent("ipc_handle(alloc(2 * MIB)[1])[0]") == 0, "which a window takes away"
    for exports, refused in ((0, False), (1, True)):
        if exports:
            assert parent("alloc(MIB)[0]") == parent("ipc_handle(alloc(4096)[1])[0]") == 0
        assert parent("alloc(2 * MIB)[0]") == 0
        found = inspect_tree(parent.pid, find_criu(), "/dev/shm", DumpOptions())
        assert found.gpus is not None and found.resident is not None
        [process] = found.gpus.processes
        assert found.resident.reports[parent.pid].counts.ipc_exports == exports
        twin = replace(process, pid=parent.pid + 1, contexts={uuid_of(0): 1})
        here = replace(process, contexts={uuid_of(0): 1})
        reports = dict.fromkeys((parent.pid, parent.pid + 1), found.resident.reports[parent.pid])
        both = replace(
            found,
            gpus=replace(found.gpus, processes=[here, twin]),
            resident=replace(found.resident, reports=reports),
        )
        assert bool(checks_gpu.shared(both)) == refused
        assert checks_gpu.shared(replace(both, resident=found.resident)), (
            "one of them is not under the preload"
        )


def test_a_process_that_has_allocated_nothing(joined: Machine) -> None:
    """Like the process in which PyTorch saves checkpoints, it has a context. So it has an agent, which
    reports what it shares.
    """
    target = joined.target()
    made = joined.target()
    for one in (target, made):
        one("start(0)")
    assert made("alloc(2 * MIB)[0]") == 0
    gpus = _gpus(made.pid)
    both = [
        replace(gpus.processes[0], pid=one.pid, contexts={uuid_of(0): 1}) for one in (made, target)
    ]
    gpus = replace(gpus, processes=both)
    inspection = inspect_tree(made.pid, find_criu(), "/dev/shm", DumpOptions())

    def refusals() -> list[str]:
        _, found = resident_inspection.inspect_resident(gpus, 0)
        assert found is not None and set(found.reports) == {made.pid, target.pid}
        return [
            one.name for one in checks_gpu.shared(replace(inspection, gpus=gpus, resident=found))
        ]

    assert not refusals()
    # Memory of the driver's, which a window does not take away.
    assert target("ipc_handle(alloc(4096)[1])[0]") == 0
    assert refusals() == ["gpu-shared"]


def _gpus(pid: int) -> GpuInspection:
    found = inspect_tree(pid, find_criu(), "/dev/shm", DumpOptions()).gpus
    assert found is not None
    return found


def test_a_rank_that_died(store: Store, launch: Launch, joined: Machine) -> None:
    """Whoever has its memory keeps it, also in a snapshot."""
    job = launch(Ring, ranks=2, let_go=True)
    driving.kill_tree(next(pid for pid in job.pids if pid != job.pid))
    until(lambda: in_use(joined) == (2 * job.mib + 2) * MIB + MIB // 2)
    snapshot = store.dump(job.pid, DumpOptions(stop=True)).snapshot
    job.reap()
    ended(job)
    recorded = read_resident(store.read(snapshot).manifest)
    assert recorded is not None
    [process] = recorded.processes.values()
    assert (
        sorted(one.size for one in process.allocations) == [2 * MIB, job.mib * MIB, job.mib * MIB]
        and not process.imports
    )
    restored = bring_back(store, snapshot)
    assert Agent(joined.directory, restored.pid).report().counts.imported == 1
    assert in_use(joined) == (2 * job.mib + 2) * MIB + MIB // 2
