"""Dumps of GPU processes with a fake driver: device memory is told from host memory, and whatever
fails, every process runs on.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from icecore.dumper.freeze.guard import GuardLost
from icecore.dumper.gpu.locking import LOCK_ONE
from icecore.dumper.options import DumpOptions
from icecore.errors import (
    DumpFailed,
    IcecoreError,
    NotFound,
    PreflightRefused,
    StoreError,
    WindowExceeded,
)
from icecore.events import Event
from icecore.host.criu.program import find_criu
from icecore.host.cuda import populate
from icecore.host.cuda.fake import FakeDriver
from icecore.host.kernel import limits, procfs
from icecore.restorer.options import RestoreOptions
from icecore.restorer.restore import restore
from icecore.store.backend.faulty import FaultyBackend, Outcome
from tests import zygote
from tests.dumper import driver
from tests.dumper.failing import CANNOT_STOP, have_criu_fail_to_stop, members
from tests.dumper.world import Events, Store, leftovers, standing, until_clean
from tests.fakes import fake_cuda
from tests.fakes.world import GPUS, MIB, Target, World
from tests.moments import Due, at

from .conftest import Launch

pytestmark = pytest.mark.criu


def runs_on(target: Target, workdir: Path) -> None:
    """All its processes run, on their GPUs, with the memory they should have; nothing of the dump
    is left.
    """
    target.wait_steps(3)
    target.is_right()
    assert not standing(target.pid) and not leftovers(workdir)


def test_three_snapshots_of_two_gpu_processes(store: Store, launch: Launch, world: World) -> None:
    target = launch(GPUS[:2])
    events = Events({("dump.files", "begin"): lambda _: stopped(world)})
    sizes = []
    for number in range(3):
        # The fake driver's memory is in files, of which none is left in the window: with their
        # content they would be stored before it, and in vain.
        last = DumpOptions(pre_copy="on", files="check")
        options = last if number == 2 else DumpOptions(pre_copy="off")
        result = store.dump(target.pid, options, events=events)
        runs_on(target, store.workdir)
        manifest = store.read(result.snapshot).manifest
        assert result.sizes.device == 2 * MIB << 20
        device = [
            (s.key, r.length) for s in manifest.spaces for r in s.regions if r.kind == "device"
        ]
        assert sorted(device) == [(str(p.image_id), MIB << 20) for p in manifest.processes]
        sizes.append(result.sizes)
    # A step changes 16 bytes: what was stored of the device memory before is not stored again.
    assert sizes[1].stored < 1 << 20 and sizes[2].stored < 1 << 20
    assert [gpu["uuid"] for gpu in manifest.requirements.devices] == list(GPUS[:2])
    assert json.loads(manifest.extra["cuda"])["processes"].keys() == {
        str(p.image_id) for p in manifest.processes
    }
    phases = ["dump.gpu.lock", "dump.gpu.checkpoint", "dump.gpu.restore", "dump.gpu.unlock"]
    for name in phases:
        assert [event.fields["state"] for event in events.named(name)] == ["begin", "end"] * 3
    assert events.named("dump.gpu.checkpoint")[1].fields["bytes"] == 2 * MIB << 20


@pytest.mark.parametrize("stop", [False, True])
def test_what_is_temporary_is_noted(stop: bool, store: Store, launch: Launch, world: World) -> None:
    """The driver's mapping; not memory that was the driver's before, and is again afterwards."""
    target = launch(lent=True)
    result = store.dump(target.pid, DumpOptions(stop=stop))
    manifest = store.read(result.snapshot).manifest
    assert result.sizes.device > MIB << 20
    (process,) = json.loads(manifest.extra["cuda"])["processes"].values()
    assert process["temporary"] == [[fake_cuda.DEVICE, fake_cuda.DEVICE + (MIB << 20)]]


@pytest.mark.parametrize("wanted", [True, False])
def test_the_drivers_mapping_is_made_for_it(
    wanted: bool, store: Store, launch: Launch, world: World
) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("on x86-64 only")
    target = launch(mib=populate.SMALLEST >> 20)
    found: list[frozenset[str]] = []

    def look(_: Event) -> None:
        [memory] = [
            m for m in procfs.read_maps(target.pid, vm_flags=True) if m.start == fake_cuda.DEVICE
        ]
        assert memory.length in (
            populate.SMALLEST,
            populate.SMALLEST + mmap.PAGESIZE,
        )  # with what lies beside it, where that is of one kind
        found.append(memory.vm_flags)

    events = Events({("dump.gpu.checkpoint", "end"): look})
    snapshot = store.dump(
        target.pid, DumpOptions(stop=True, populate=wanted), events=events
    ).snapshot
    [done] = [
        event.fields
        for event in events.named("dump.gpu.checkpoint")
        if event.fields["state"] == "end"
    ]
    assert done["populated"] == (populate.SMALLEST if wanted else 0) and "not_populated" not in done
    # With little memory free in pieces of 2 MiB it is of small pages.
    huge = (
        wanted
        and limits.huge_pages() != "never"
        and limits.free_huge_bytes() > 16 * populate.SMALLEST
    )
    assert done["huge"] == populate.SMALLEST if huge else done["huge"] in (0, populate.SMALLEST)
    assert [("hg" in flags) for flags in found] == [
        bool(done["huge"]) and limits.huge_pages() == "madvise"
    ]
    target.reap()
    for mode in ("full", "lazy"):
        restored = restore(
            store.repository, store.loop, snapshot, RestoreOptions(mode=mode), emit=Events()
        )
        restored.wait_resident(30)
        target.wait_steps(5)
        target.is_right()
        target.kill()
        world.clear()


def stopped(world: World) -> None:
    """In the window no GPU holds anything."""
    assert not any(world.on(gpu) for gpu in GPUS)


FAULTS: dict[str, Callable[[World], None]] = {
    "lock refused": lambda world: world.fault("lock", code=801),
    "checkpoint refused": lambda world: world.fault("checkpoint", code=801),
    "checkpoint fails after it was done": lambda world: world.fault(
        "checkpoint", code=999, after=True
    ),
    "restore fails once": lambda world: world.fault("restore", code=999),
    "unlock fails once": lambda world: world.fault("unlock", code=1),
    "helper dies in lock": lambda world: world.fault("lock", die=True),
    "helper dies in checkpoint": lambda world: world.fault("checkpoint", die=True),
    "helper dies in restore": lambda world: world.fault("restore", die=True),
    "helper dies in unlock": lambda world: world.fault("unlock", die=True),
}


def test_a_call_that_fails(due: Due, store: Store, launch: Launch, world: World) -> None:
    target = launch(GPUS[:3], lent=True)
    for fault in due([*FAULTS]):
        with at(fault):
            before = store.snapshots()
            FAULTS[fault](world)
            with pytest.raises(DumpFailed) as caught:
                store.dump(target.pid)
            assert not list((world.root / "faults").iterdir()) and caught.value.cure
            runs_on(target, store.workdir)
            assert store.snapshots() == before
            store.dump(target.pid)
            runs_on(target, store.workdir)


def test_a_lock_that_times_out_is_tried_again(store: Store, launch: Launch, world: World) -> None:
    target = launch(GPUS[:2], lent=True)
    events = Events()
    for _ in range(3):
        world.fault("lock", code=600)
    store.dump(target.pid, events=events)
    assert 3 <= events.named("dump.gpu.lock")[-1].fields["attempts"] <= 4  # two locks an attempt
    runs_on(target, store.workdir)


def test_a_lock_that_never_comes(store: Store, launch: Launch, world: World) -> None:
    target = launch()
    for _ in LOCK_ONE:
        world.fault("lock", code=600)
    with pytest.raises(DumpFailed, match="NOT_READY") as caught:
        store.dump(target.pid)
    assert "--gpu-lock" in caught.value.cure
    runs_on(target, store.workdir)


BREAKS_OFF = [
    ("dump.criu", "end"),
    ("dump.gpu.lock", "end"),
    ("dump.gpu.checkpoint", "end"),
    ("dump.files", "begin"),
]


@pytest.mark.parametrize("who", ["interrupted", "guard", "helper", "guard and helper", "criu"])
def test_a_window_that_breaks_off(who: str, due: Due, store: Store, launch: Launch) -> None:
    target = launch(GPUS[:2], lent=True)

    def hook(event: Event) -> None:
        if who == "interrupted":
            raise KeyboardInterrupt
        for name, word in {
            "guard": "icecore.dumper.freeze.guard_process",
            "helper": "icecore.host.gpu.helper",
            "criu": "dump.log",
        }.items():
            if name in who:
                for pid in members(store.workdir, word):
                    os.kill(pid, signal.SIGKILL)

    for moment in due(BREAKS_OFF):
        with at(*moment):
            before = store.snapshots()
            with pytest.raises((KeyboardInterrupt, IcecoreError)) as caught:
                store.dump(target.pid, events=Events({moment: hook}))
            if who == "guard":
                assert isinstance(caught.value, GuardLost)
            runs_on(target, store.workdir)
            assert store.snapshots() == before
    store.dump(target.pid)
    runs_on(target, store.workdir)


def test_a_window_that_is_too_long(store: Store, launch: Launch, world: World) -> None:
    target = launch(GPUS[:2], lent=True)
    world.fault("checkpoint", code=0, seconds=1.5)
    with pytest.raises(WindowExceeded):
        store.dump(target.pid, DumpOptions(max_window=1.0))
    runs_on(target, store.workdir)


KILLED = [
    *BREAKS_OFF,
    ("dump.gpu.restore", "begin"),
    ("dump.store", "begin"),
]


@pytest.mark.parametrize(
    ("how", "moments", "max_window"),
    # At the last two moments its window is over: it may be stopped for as long as it likes.
    [(signal.SIGKILL, KILLED, 20.0), (signal.SIGSTOP, BREAKS_OFF, 4.0)],
    ids=["killed", "stopped"],
)
def test_a_dumper_that_is_killed_or_stopped(
    how: signal.Signals,
    moments: list[tuple[str, str]],
    max_window: float,
    due: Due,
    store: Store,
    launch: Launch,
) -> None:
    target = launch(GPUS[:2], lent=True)
    for moment in due(moments):
        with at(*moment):
            strike(how, moment, DumpOptions(max_window=max_window), target, store)
            until_clean(store.workdir)
            runs_on(target, store.workdir)
            store.dump(target.pid)
            runs_on(target, store.workdir)


def strike(
    how: signal.Signals, moment: tuple[str, str], options: DumpOptions, target: Target, store: Store
) -> None:
    """Send a dumper a signal at a moment. The job runs on while the dumper still exists."""
    order = {
        "repository": str(store.backend.root),  # type: ignore[attr-defined]
        "workdir": str(store.workdir),
        "pid": target.pid,
        "pause": moment,
        "options": {"max_window": options.max_window, "gpu_shared": True},
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
        target.wait_steps(3)
        target.is_right()
    finally:
        dumper.kill()
        dumper.communicate(timeout=20)


def test_a_store_that_fails(due: Due, store: Store, launch: Launch) -> None:
    target = launch(GPUS[:2], lent=True)
    broken = FaultyBackend(
        store.backend,
        lambda call: Outcome.FAIL if call.name.startswith("snapshots/") else Outcome.PASS,
    )
    for stop in due([False, True]):
        with at("stop" if stop else "no stop"):
            with pytest.raises(StoreError):
                store.through(broken).dump(target.pid, DumpOptions(stop=stop))
            runs_on(target, store.workdir)


def test_a_criu_that_fails(store: Store, launch: Launch, tmp_path: Path) -> None:
    target = launch(GPUS[:2], lent=True)
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "broken.so").touch()
    for folder, error in ((tmp_path / "plugins", DumpFailed), (tmp_path / "none", NotFound)):
        with pytest.raises(error):
            store.dump(target.pid, replace(DumpOptions(), criu_plugins=str(folder)))
        runs_on(target, store.workdir)


@pytest.mark.parametrize("failures", [2, 4])
def test_a_tree_that_criu_cannot_stop(
    failures: int, store: Store, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole dump starts over, up to three times."""
    target = launch(GPUS[:2], lent=True)
    have_criu_fail_to_stop(monkeypatch, failures)
    events = Events()
    try:
        result = store.dump(target.pid, events=events)
        assert failures < 4 and store.snapshots() == [result.snapshot]
    except DumpFailed as error:
        assert failures == 4 and CANNOT_STOP in error.message
    retried = [str(event.fields["error"]) for event in events.named("dump.retry")]
    assert len(retried) == min(failures, 3) and all(CANNOT_STOP in one for one in retried)
    runs_on(target, store.workdir)


@pytest.mark.parametrize("status", [0, 3])
def test_the_driver_does_not_wait_for_the_end_of_criu(
    status: int, store: Store, launch: Launch, tmp_path: Path
) -> None:
    """What CRIU says in the end still decides."""
    target = launch(GPUS[:2], lent=True)
    found, slow, seconds = find_criu(), tmp_path / "criu", 3.0
    slow.write_text(
        f'#!/bin/sh\n{found.path} "$@"\n[ "$1" = dump ] && sleep {seconds} && exit {status}\n'
    )
    slow.chmod(0o755)
    running: list[float] = []
    events = Events({("dump.gpu.unlock", "end"): lambda _: running.append(time.monotonic())})
    try:
        result = store.dump(
            target.pid, events=events, criu=msgspec.structs.replace(found, path=slow)
        )
        assert (
            not status
            and store.snapshots() == [result.snapshot]
            and result.window_seconds < seconds
        )
    except DumpFailed as error:
        assert f"status {status}" in error.message and status and not store.snapshots()
    assert time.monotonic() - running[0] > seconds - 0.5
    runs_on(target, store.workdir)


def test_a_dump_that_stops_the_job(store: Store, launch: Launch, world: World) -> None:
    target = launch(GPUS[:2], lent=True)
    result = store.dump(target.pid, DumpOptions(stop=True))
    assert store.snapshots() == [result.snapshot] and not any(world.on(gpu) for gpu in GPUS)
    assert not leftovers(store.workdir)


def test_the_driver_is_asked_before_anything_is_locked(
    store: Store, launch: Launch, world: World
) -> None:
    """Threads and states that contradict each other: `tests/gpu/test_workers.py`."""
    target = launch()
    helper = FakeDriver(world.root)
    helper.lock(target.pid, 10)
    try:
        with pytest.raises(PreflightRefused, match=r"reports that process \d+ is locked"):
            store.dump(target.pid)
    finally:
        helper.unlock(target.pid)
    runs_on(target, store.workdir)
    assert not store.snapshots()
