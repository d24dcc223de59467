"""CRIU holds every thread but the driver's: what the driver takes away meanwhile nobody touches,
and whatever breaks, nobody is held for ever.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from icecore.dumper.freeze.window import Window
from icecore.dumper.gpu import devices as dumping
from icecore.dumper.options import DumpOptions
from icecore.errors import DumpFailed, IcecoreError, RestoreFailed, WindowExceeded
from icecore.events import Event
from icecore.host.criu.program import Criu
from icecore.host.cuda.fake import FakeDriver
from icecore.host.kernel import procfs
from icecore.restorer.guard.client import RestoreGuard
from icecore.restorer.options import RestoreOptions
from icecore.restorer.restore import restore
from tests.dumper.failing import members
from tests.dumper.world import Events, Store
from tests.fakes.world import GPUS, World
from tests.host.criu_harness import crius

from .conftest import Launch
from .test_dump import runs_on

pytestmark = pytest.mark.criu


@pytest.mark.parametrize("criu", crius(), ids=lambda criu: ".".join(map(str, criu.version)))
def test_threads_that_use_memory_of_the_driver(
    criu: Criu, store: Store, launch: Launch, world: World
) -> None:
    target = launch(GPUS[:2], lent=True)
    snapshots = []
    for number in range(3):
        snapshots.append(store.dump(target.pid, DumpOptions(stop=number == 2), criu=criu).snapshot)
        if number < 2:
            target.wait_steps(5)
    target.reap()
    for snapshot in snapshots[1:]:
        for mode in ("full", "lazy"):
            restored = restore(
                store.repository,
                store.loop,
                snapshot,
                RestoreOptions(mode=mode),
                criu=criu,
                emit=Events(),
            )
            restored.wait_resident(30)
            target.wait_steps(5)
            target.is_right()
            target.kill()
            world.clear()


def test_the_limit_passes_while_the_driver_works(
    store: Store, launch: Launch, world: World
) -> None:
    """The helper undoes what it does once its call has ended; the dumper may not go on then."""
    target = launch(GPUS[:2], lent=True)
    world.fault("checkpoint", code=0, seconds=4.0)
    for _ in range(2):
        world.fault("restore", code=0, seconds=0.5)
    with pytest.raises(WindowExceeded):
        store.dump(target.pid, DumpOptions(max_window=1.0))
    runs_on(target, store.workdir)


@pytest.mark.parametrize("stop", [False, True])
def test_a_criu_that_fails_while_it_holds(
    stop: bool, store: Store, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits until the driver has brought everything back, which nobody but the helper knows of."""
    target = launch(GPUS[:2], lent=True)
    checkpoint = dumping.Devices.checkpoint

    def without_images(self: dumping.Devices, seconds: float, held: Callable[[], None]) -> bool:
        assert self._helper.hold(self.pids, seconds)
        for images in store.workdir.glob("icecore-dump-*"):
            images.rename(images.with_name("gone"))
            shutil.rmtree(images.with_name("gone"))
        return checkpoint(self, seconds, held)

    monkeypatch.setattr(dumping.Devices, "checkpoint", without_images)
    began = time.monotonic()
    with pytest.raises(DumpFailed) as caught:
        store.dump(target.pid, DumpOptions(max_window=30.0, stop=stop))
    assert not isinstance(caught.value, WindowExceeded) and time.monotonic() - began < 25
    runs_on(target, store.workdir)


def test_a_process_in_which_the_driver_has_no_thread(
    store: Store, launch: Launch, world: World
) -> None:
    target = launch(GPUS[:2], lent=True)
    for _ in range(2):  # for the mapping's sake it is asked for once more, which may fail
        world.fault("restore-thread")
    with pytest.raises(DumpFailed, match="restore-thread"):
        store.dump(target.pid, DumpOptions(max_window=20.0))
    world.clear_faults()
    runs_on(target, store.workdir)


def test_a_dumper_that_ends_just_before_criu_freezes_the_tree(
    store: Store, launch: Launch, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is held yet when the helper looks; what comes to hold it later must not wait for it."""
    target = launch(GPUS[:2], lent=True)
    for _ in range(2):
        world.fault("unlock", code=0, seconds=0.5)
    go = Window.go

    def late(self: Window) -> None:
        pids = members(store.workdir, "dump.log")
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)

        def on() -> None:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

        go(self)
        threading.Timer(0.2, on).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(Window, "go", late)
    began = time.monotonic()
    with pytest.raises((KeyboardInterrupt, IcecoreError)):
        store.dump(target.pid, DumpOptions(max_window=60.0))
    assert time.monotonic() - began < 45
    runs_on(target, store.workdir)


def end_helper(store: Store) -> Callable[[Event], None]:
    def end(_: Event) -> None:
        for pid in members(store.workdir, "icecore.host.gpu.helper"):
            os.kill(pid, signal.SIGKILL)

    return end


def test_a_job_is_stopped_without_its_helper(store: Store, launch: Launch) -> None:
    target = launch(GPUS[:2], lent=True)
    result = store.dump(
        target.pid,
        DumpOptions(stop=True),
        events=Events({("dump.store", "end"): end_helper(store)}),
    )
    assert store.snapshots() == [result.snapshot]
    target.reap()


@pytest.mark.parametrize("mode", ["full", "lazy"])
def test_nothing_runs_of_a_restore_whose_helper_dies(
    mode: str, store: Store, launch: Launch, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRIU does not heed what a plugin answers in a restore, and the guard may be slow."""
    kill = RestoreGuard.kill
    monkeypatch.setattr(RestoreGuard, "kill", lambda self: (time.sleep(0.5), kill(self)))
    target = launch(GPUS[:2], lent=True)
    snapshot = store.dump(target.pid, DumpOptions(stop=True)).snapshot
    target.reap()
    world.clear()
    written = [len(target.lines(n)) for n in range(2)]
    world.fault("restore", die=True, seconds=0.3)
    switches: dict[tuple[int, int], list[int]] = {}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.0005):
            for pid in target.pids:
                with suppress(OSError, IcecoreError):
                    drivers = FakeDriver(world.root).restore_thread(pid)
                    for thread in set(procfs.threads(pid)) - {drivers}:
                        text = Path(f"/proc/{pid}/task/{thread}/status").read_text()
                        if "TracerPid:\t0\n" in text:
                            continue  # killed, and on its way out
                        count = sum(map(int, re.findall(r"ctxt_switches:\s*(\d+)", text)))
                        switches.setdefault((pid, thread), []).append(count)

    watching = threading.Thread(target=watch)
    events = Events({("restore.gpu.restore", "begin"): lambda _: watching.start()})
    with pytest.raises(RestoreFailed):
        restore(store.repository, store.loop, snapshot, RestoreOptions(mode=mode), emit=events)
    over.set()
    watching.join()
    assert len(switches) > 2 and all(
        len(seen) > 10 and seen[-1] - seen[0] < 10 for seen in switches.values()
    )
    assert [len(target.lines(n)) for n in range(2)] == written
