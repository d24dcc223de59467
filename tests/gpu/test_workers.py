"""Children that were forked from a GPU process, with its device files: they are dumped and
restored, and nobody with CUDA state is taken for one.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import pytest

from icecore.dumper.memory import early
from icecore.dumper.observe.gpus import GpuInspection, GpuProcess
from icecore.dumper.observe.inspection import inspect_tree
from icecore.dumper.options import DumpOptions
from icecore.dumper.preflight import gpu_changes, orphans
from icecore.dumper.preflight.gpu_changes import GpusChanged, require_still_orphans
from icecore.dumper.preflight.judge import refuse, warn
from icecore.dumper.preflight.prediction import predict
from icecore.errors import DumpFailed, PreflightRefused
from icecore.host.criu.program import Criu, find_criu
from icecore.host.cuda.api import State
from icecore.host.cuda.fake import FakeDriver
from icecore.host.cuda.threads import has_drivers_threads
from icecore.host.gpu.backend import Backend
from icecore.host.kernel import procfs
from icecore.restorer.options import RestoreOptions
from icecore.restorer.restore import restore
from tests.dumper.world import Events, Stillness, Store, assert_same_memory, standing
from tests.fakes import fake_cuda
from tests.fakes.world import GPUS, MIB, Target, World
from tests.host.criu_harness import crius
from tests.host.target import eventually

from .conftest import Launch

pytestmark = pytest.mark.criu

WORKERS = 4


@pytest.fixture
def nodes() -> bool:
    """Real device files, which CRIU alone cannot dump."""
    for path in ("/dev/fuse", "/dev/loop-control", "/dev/loop0"):
        try:
            os.close(os.open(path, os.O_RDWR))
        except OSError as error:
            pytest.skip(f"{path}: {error}")
    return True


def lines(target: Target, worker: int) -> list[str]:
    path = Path(f"{target.out}.worker.{worker}")
    return path.read_text().split("\n")[:-1] if path.exists() else []


def wait_workers(target: Target, count: int = WORKERS, more: int = 3) -> None:
    """Wait until every worker has made so many steps more than now."""
    before = [len(lines(target, n)) for n in range(1, count + 1)]
    assert eventually(
        lambda: all(len(lines(target, n)) >= before[n - 1] + more for n in range(1, count + 1))
    )


def workers(root: int) -> list[int]:
    return [pid for pid in procfs.tree(root) if pid != root]


def steps_are_whole(target: Target, count: int = WORKERS) -> None:
    """No worker has lost or repeated a step since its last restore at the latest: the steps of a
    snapshot come again.
    """
    for number in range(1, count + 1):
        steps = [int(line.split()[0]) for line in lines(target, number) if line != "done"]
        assert all(
            after == before + 1 or after <= before for before, after in itertools.pairwise(steps)
        ), number


def devices_of(target: Target, worker: int = 1) -> list[str]:
    """The device files of its last step."""
    return lines(target, worker)[-1].split()[1:]


def registers(pid: int) -> list[procfs.Mapping]:
    return [m for m in procfs.read_maps(pid) if m.start == fake_cuda.REGISTERS]


def test_what_a_child_inherits(launch: Launch, world: World) -> None:
    """The world is as it is on a GPU: a child has its parent's device files, open and mapped, and
    no CUDA state.
    """
    target = launch(workers=WORKERS)
    wait_workers(target)
    child = workers(target.pid)[0]
    assert len(devices_of(target)) == 3 and registers(child)[0].flags == procfs.MAP_SHARED
    assert registers(child)[0].path == str(world.root / "dev" / "nvidia0")
    driver = FakeDriver(world.root)
    assert [driver.state(pid) for pid in (target.pid, child)] == [State.RUNNING, State.NOT_CUDA]
    assert [has_drivers_threads(pid) for pid in (target.pid, child)] == [True, False]


def test_preflight_counts_only_who_has_cuda_state(launch: Launch, world: World) -> None:
    target = launch(workers=WORKERS)
    alone = launch()
    found = inspect_tree(target.pid, find_criu(), "/dev/shm", DumpOptions())
    assert found.gpus is not None
    assert [p.pid for p in found.gpus.processes] == [target.pid]
    assert sorted(p.pid for p in found.gpus.orphans) == sorted(workers(target.pid))
    assert [r for r in refuse(found) if r.name.startswith(("gpu", "device"))] == []
    # What the GPU has in use, by whomever, is not counted once more for each child.
    for gpu in world.gpus:
        gpu["used"] = 3 << 30
    world.write()
    found = inspect_tree(target.pid, find_criu(), "/dev/shm", DumpOptions())
    one = inspect_tree(alone.pid, find_criu(), "/dev/shm", DumpOptions())
    assert found.gpus is not None and found.gpus.most_bytes == MIB << 20
    assert predict(found) == predict(one)


@pytest.mark.parametrize("criu", crius())
@pytest.mark.parametrize("mode", ["full", "lazy"])
def test_workers_are_dumped_and_restored(
    mode: Literal["full", "lazy"], criu: Criu, store: Store, launch: Launch, world: World
) -> None:
    """Twice while all run on, then killed, and brought back from both; what was restored is dumped
    again.
    """
    target = launch(workers=WORKERS)
    wait_workers(target)
    taken = []
    for _ in range(2):
        taken.append(store.dump(target.pid, criu=criu).snapshot)
        assert not standing(target.pid)
        target.wait_steps(3)
        wait_workers(target)
        assert len(devices_of(target)) == 3 and "1:3" not in devices_of(target), (
            "in place nothing is taken from them"
        )
    target.kill()
    world.clear()
    for snapshot in (taken[1], taken[0]):
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
        wait_workers(target)
        target.is_right()
        steps_are_whole(target)
        assert devices_of(target) == ["1:3"] * 3
        child = workers(restored.pid)[0]
        (mapping,) = registers(child)
        assert mapping.path.startswith("/dev/zero") and mapping.length == os.sysconf("SC_PAGESIZE")
        if snapshot == taken[1]:
            target.pids = procfs.tree(restored.pid)
            target.kill()
            world.clear()
    again = store.dump(restored.pid, DumpOptions(stop=True), criu=criu).snapshot
    target.pids = [p for p in target.pids if os.path.exists(f"/proc/{p}")]
    target.reap()
    restored = restore(
        store.repository, store.loop, again, RestoreOptions(mode=mode), criu=criu, emit=Events()
    )
    restored.wait_resident(30)
    target.wait_steps(5)
    wait_workers(target)
    target.is_right()
    # They end as a worker does: they close and unmap what they inherited, and exit.
    target.pids = procfs.tree(restored.pid)
    for pid in workers(restored.pid):
        os.kill(pid, signal.SIGTERM)
    assert eventually(lambda: all(lines(target, n)[-1] == "done" for n in range(1, WORKERS + 1)))


def read_early(events: Events) -> dict[str, int]:
    """What works meanwhile → bytes that were read."""
    ends = [one.fields for one in events.named("dump.early") if one.fields["state"] == "end"]
    return {str(one["during"]): int(str(one.get("bytes", 0))) for one in ends}


def test_memory_of_workers_is_read_while_the_driver_works(
    store: Store, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver takes long enough. What the workers share with their parent counts as read."""
    monkeypatch.setattr(early, "_LEAST_BYTES", 1 << 20)
    target = launch(workers=WORKERS)
    wait_workers(target)
    for number in range(3):
        still = Stillness()
        events = Events(
            {
                ("dump.gpu.checkpoint", "begin"): lambda _: time.sleep(0.7),
                ("dump.files", "begin"): lambda _, still=still: still.look(target.pid),  # type: ignore[misc]
            }
        )
        result = store.dump(target.pid, events=events)
        found = read_early(events)
        assert found["driver"] > found.get("criu", 0) > 0
        assert_same_memory(store.read(result.snapshot), still)
        assert number == 0 or result.sizes.changed < 64 << 20
        wait_workers(target)
    assert not standing(target.pid)


def test_a_worker_that_is_killed_while_the_driver_works(store: Store, launch: Launch) -> None:
    target = launch(workers=WORKERS)
    wait_workers(target)

    def kill(_: object) -> None:
        time.sleep(0.3)  # it has been read, or is being read
        os.kill(workers(target.pid)[-1], signal.SIGKILL)
        time.sleep(0.3)

    events = Events({("dump.gpu.checkpoint", "begin"): kill})
    first = store.dump(target.pid, events=events).snapshot  # a zombie cannot be killed again
    assert len(events.named("dump.retry")) == 1
    assert not standing(target.pid) and store.snapshots() == [first]
    assert sum(not one.alive for one in store.read(first).manifest.processes) == 1
    wait_workers(target, WORKERS - 1)
    target.wait_steps(3)
    target.pids = [target.pid, *workers(target.pid)]
    store.dump(target.pid)


def test_a_worker_that_is_forked_while_the_dump_begins(
    store: Store, launch: Launch, world: World
) -> None:
    target = launch(workers=1)
    wait_workers(target, 1)

    def fork(_: object) -> None:
        os.kill(target.pid, signal.SIGUSR1)
        assert eventually(lambda: len(workers(target.pid)) == 2)
        wait_workers(target, 2)
        target.pids = procfs.tree(target.pid)

    snapshot = store.dump(
        target.pid, DumpOptions(stop=True), events=Events({("dump.criu", "end"): fork})
    ).snapshot
    target.reap()
    restored = restore(store.repository, store.loop, snapshot, RestoreOptions(), emit=Events())
    restored.wait_resident(30)
    target.wait_steps(3)
    wait_workers(target, 2)
    target.is_right()
    assert devices_of(target, 2) == ["1:3"] * 3
    target.pids = procfs.tree(restored.pid)


@pytest.mark.parametrize("state", ["begin", "end"], ids=["before the window", "in the window"])
def test_a_process_that_begins_to_use_cuda_meanwhile(
    state: str, store: Store, launch: Launch, world: World
) -> None:
    """CRIU would stop it with device files that the plugin would dump. The dump starts over, and then includes it."""
    target = launch(workers=1, late=GPUS[1])
    wait_workers(target, 1)
    late = workers(target.pid)[0]
    begun: list[int] = []

    def begin(_: object) -> None:
        if not begun:
            begun.append(late)
            os.kill(late, signal.SIGUSR2)
            assert eventually(lambda: has_drivers_threads(late))

    events = Events({("dump.criu", state): begin})
    snapshot = store.dump(target.pid, events=events).snapshot
    [retry] = events.named("dump.retry")
    assert "has started to use CUDA since the dump began" in str(retry.fields["error"])
    windows = [one for one in events.named("dump.window") if one.fields["state"] == "begin"]
    assert len(windows) == (1 if state == "begin" else 2)
    assert store.snapshots() == [snapshot]
    assert not standing(target.pid)
    target.wait_steps(3)
    target.is_right()


def test_a_process_that_uses_cuda_for_a_moment(store: Store, launch: Launch, world: World) -> None:
    """As nvidia-smi does: the window waits until it has ended, and the dump does not start over."""
    target = launch(workers=1, late=GPUS[1])
    wait_workers(target, 1)
    late = workers(target.pid)[0]

    def begin(_: object) -> None:
        os.kill(late, signal.SIGUSR2)
        assert eventually(lambda: has_drivers_threads(late))
        threading.Timer(0.5, os.kill, (late, signal.SIGKILL)).start()

    events = Events({("dump.criu", "begin"): begin})
    store.dump(target.pid, events=events)
    assert not events.named("dump.retry")
    [criu] = [one for one in events.named("dump.criu") if one.fields["state"] == "end"]
    assert float(criu.fields["seconds"]) >= 0.5
    assert not standing(target.pid)
    target.wait_steps(3)


def with_one_without_context(launch: Launch, world: World) -> tuple[Target, int]:
    """Start two GPU processes, the second of which has no context; return the job and its pid."""
    target = launch([GPUS[0], GPUS[0]])
    other = next(pid for pid in procfs.tree(target.pid) if pid != target.pid)
    world.more["no_context"] = [other]
    world.write()
    return target, other


@pytest.mark.parametrize(
    "moment",
    [("dump.criu", "begin"), ("dump.window", "begin"), ("dump.gpu.checkpoint", "begin")],
    ids=lambda moment: moment[0],
)
def test_a_process_without_a_context_that_ends(
    moment: tuple[str, str], store: Store, launch: Launch, world: World
) -> None:
    """Until all processes are locked, it is left out; after that, the dump starts over."""
    target, other = with_one_without_context(launch, world)

    def end(_: object) -> None:
        os.kill(other, signal.SIGKILL)
        assert eventually(lambda: procfs.is_over(other))

    events = Events({moment: end})
    snapshot = store.dump(target.pid, events=events).snapshot
    assert len(events.named("dump.retry")) == (moment[0] == "dump.gpu.checkpoint")
    assert store.snapshots() == [snapshot]
    assert not standing(target.pid)


def test_a_job_whose_processes_end_one_by_one(store: Store, launch: Launch, world: World) -> None:
    """It has ended when the dump would start over."""
    target, other = with_one_without_context(launch, world)

    def ending(pid: int) -> Callable[[object], None]:
        def end(_: object) -> None:
            os.kill(pid, signal.SIGKILL)
            assert eventually(lambda: not procfs.exists(pid) or procfs.is_over(pid))

        return end

    events = Events(
        {("dump.gpu.checkpoint", "begin"): ending(other), ("dump.retry", ""): ending(target.pid)}
    )
    with pytest.raises(DumpFailed, match=f"process {target.pid}.* ended during the dump"):
        store.dump(target.pid, events=events)
    assert len(events.named("dump.retry")) == 1 and store.snapshots() == []


def test_a_command_that_fails_is_not_excused_by_a_process_that_ends(
    store: Store, launch: Launch, world: World, tmp_path: Path
) -> None:
    target, other = with_one_without_context(launch, world)
    ran = tmp_path / "ran"
    command = f"echo >> {ran}; kill -9 {other}; sleep 0.2; echo not now; exit 1"
    events = Events()
    with pytest.raises(DumpFailed, match="not now"):
        store.dump(target.pid, DumpOptions(before=command), events=events)
    assert ran.read_text() == "\n" and not events.named("dump.retry")
    assert store.snapshots() == []


@pytest.mark.parametrize("state", ["begin", "end"], ids=["before the window", "in the window"])
def test_a_process_without_a_context(
    state: str, store: Store, launch: Launch, world: World
) -> None:
    """It shares no device memory and has none that is moved, until it has a context."""
    target = launch([GPUS[0], GPUS[0]])
    other = next(pid for pid in procfs.tree(target.pid) if pid != target.pid)
    world.more["no_context"] = [other]
    for gpu in world.gpus:
        gpu["used"] = 3 << 30
    world.write()
    found = inspect_tree(target.pid, find_criu(), "/dev/shm", DumpOptions())
    assert found.gpus is not None and found.gpus.most_bytes == MIB << 20
    assert [p.pid for p in found.gpus.without_context] == [other]
    assert [r for r in refuse(found) if r.name.startswith("gpu")] == []
    store.gpu_shared = False
    store.dump(target.pid)

    def begin(_: object) -> None:
        world.more["no_context"] = []
        world.write()

    events = Events({("dump.criu", state): begin})
    with pytest.raises(PreflightRefused, match="gpu-shared"):
        store.dump(target.pid, events=events)
    assert bool(events.named("dump.window")) == (state == "end")
    assert len(events.named("dump.retry")) == 1
    assert not standing(target.pid)
    target.wait_steps(3)


def test_a_device_file_that_the_driver_has_left_open(
    store: Store, launch: Launch, world: World
) -> None:
    target = launch(also=["a device file"])
    with pytest.raises(DumpFailed, match="left device files open"):
        store.dump(target.pid)
    assert not standing(target.pid)
    target.wait_steps(3)
    target.is_right()


def test_nvml_beside_cuda(store: Store, launch: Launch, world: World) -> None:
    """Its descriptors stay open through a checkpoint; a restore takes them, which is said."""
    target = launch(also=["a device file", "NVML"])
    events = Events()
    snapshot = store.dump(target.pid, DumpOptions(stop=True), events=events).snapshot
    assert [
        "nvmlInit" in str(event.fields["message"])
        for event in events.named("dump.warning")
        if event.fields["name"] == "nvml"
    ] == [True]
    target.reap()
    restored = restore(store.repository, store.loop, snapshot, RestoreOptions(), emit=Events())
    restored.wait_resident(30)
    target.wait_steps(3)
    target.is_right()


def test_nvml_alone(store: Store, launch: Launch, world: World) -> None:
    """A metrics logger: no process of its tree has CUDA state."""
    target = launch(also=["a device file", "NVML"], gpuless=True)
    found = inspect_tree(target.pid, find_criu(), "/dev/shm", DumpOptions())
    assert found.gpus is not None and not found.gpus.processes and found.gpus.most_bytes == 0
    assert [w.name for w in warn(found) if w.name == "nvml"] == ["nvml"]
    snapshot = store.dump(target.pid, DumpOptions(stop=True)).snapshot
    target.reap()
    manifest = store.read(snapshot).manifest
    assert "cuda" not in manifest.extra and not manifest.requirements.devices
    (world.root / "inventory.json").unlink()  # the machine that it is restored on needs no GPU
    restored = restore(store.repository, store.loop, snapshot, RestoreOptions(), emit=Events())
    restored.wait_resident(30)
    target.wait_steps(3)
    assert any(d.target == "/dev/null" and d.number > 2 for d in procfs.descriptors(restored.pid))


@pytest.mark.parametrize("wrong", ["threads of unknown names", "threads without state"])
def test_what_the_driver_contradicts_is_refused(wrong: str) -> None:
    ours = os.getpid()
    one = GpuProcess(ours, threads=wrong == "threads without state")
    state = State.NOT_CUDA if one.threads else State.RUNNING
    found = (
        GpuInspection(Backend("/dev/nvidia"), [one], orphans=[])
        if one.threads
        else GpuInspection(Backend("/dev/nvidia"), [], orphans=[one])
    )
    with nullcontext() if one.threads else pytest.raises(GpusChanged):
        require_still_orphans(found, {ours: state})
    assert [r.name for r in orphans.misjudged(found, {ours: state})] == ["gpu-state"]
    right = State.NOT_CUDA if state is State.RUNNING else State.RUNNING
    assert orphans.misjudged(found, {ours: right}) == []


def test_an_orphan_that_has_started_to_use_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = os.getpid()
    found = GpuInspection(Backend("/dev/nvidia"), [], orphans=[GpuProcess(ours, threads=False)])
    monkeypatch.setattr(gpu_changes, "has_drivers_threads", lambda pid: True)
    require_still_orphans(found, {ours: State.NOT_CUDA})
    with pytest.raises(GpusChanged, match=f"process {ours} has started to use CUDA") as caught:
        require_still_orphans(found, {ours: State.RUNNING})
    assert not caught.value.unclear
    monkeypatch.setattr(gpu_changes, "has_drivers_threads", lambda pid: False)
    with pytest.raises(GpusChanged) as caught:
        require_still_orphans(found, {ours: State.RUNNING})
    assert caught.value.unclear


@pytest.mark.parametrize("reaped", [False, True], ids=["a zombie", "gone"])
def test_an_orphan_that_used_cuda_and_has_ended(reaped: bool) -> None:
    with subprocess.Popen(["true"]) as process:
        assert eventually(lambda: procfs.is_zombie(process.pid))
        if reaped:
            process.wait(10)
        one = GpuProcess(process.pid, threads=False)
        states = {process.pid: State.RUNNING}
        require_still_orphans(GpuInspection(Backend("/dev/nvidia"), [], orphans=[one]), states)
        assert states == {process.pid: State.NOT_CUDA}


@pytest.mark.parametrize(
    ("death", "words"), [("the job", "job job (process {root}) ended"), ("a worker", "")]
)
def test_a_process_that_ends_during_the_dump(
    death: str, words: str, store: Store, launch: Launch, world: World
) -> None:
    target = launch(workers=1)
    wait_workers(target, 1)
    victim = target.pid if death == "the job" else workers(target.pid)[0]

    def kill(_: object) -> None:
        os.kill(victim, signal.SIGKILL)
        assert eventually(
            lambda: procfs.is_over(victim) if os.path.exists(f"/proc/{victim}") else True
        )

    events = Events({("dump.criu", "end"): kill})
    if words:
        with pytest.raises(DumpFailed) as caught:
            store.dump(target.pid, events=events)
        assert words.format(root=target.pid) in caught.value.message and caught.value.cure
    else:
        store.dump(target.pid, events=events)
        target.wait_steps(3)
        target.is_right()
