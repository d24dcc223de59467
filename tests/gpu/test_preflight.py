"""What would lose a GPU job is refused before the first lock, with the settings that cure it; what
would not is let through.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from icecore.dumper.observe.inspection import inspect_tree
from icecore.dumper.options import DumpOptions
from icecore.dumper.preflight.judge import refuse
from icecore.host.criu.program import find_criu
from icecore.host.cuda import holder, nccl
from icecore.host.kernel import limits
from tests.fakes.world import GPUS, Target, World

from .conftest import Launch

pytestmark = pytest.mark.criu


def refusals(target: Target, **options: object) -> dict[str, str]:
    """Name → cure of what the GPU checks refuse."""
    found = refuse(inspect_tree(target.pid, find_criu(), "/dev/shm", DumpOptions(**options)))  # type: ignore[arg-type]
    return {r.name: r.cure for r in found if r.name.startswith("gpu")}


def inventory(**more: object) -> Callable[[World], None]:
    def change(world: World) -> None:
        world.driver = str(more.pop("driver", world.driver))
        for gpu in world.gpus:
            gpu.update(more.get("gpu", {}))  # type: ignore[call-overload]
        world.write()

    return change


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gpu-driver", inventory(driver="560.35.03"), "570"),
        ("gpu-driver", lambda world: (world.root / "inventory.json").unlink(), "icecore[gpu]"),
        ("gpu-mig", inventory(gpu={"mig": True}), "nvidia-smi -mig 0"),
    ],
)
def test_the_machine(
    name: str, change: Callable[[World], None], words: str, launch: Launch, world: World
) -> None:
    target = launch()
    assert refusals(target) == {}
    change(world)
    found = refusals(target)
    assert list(found) == [name] and words in found[name]


def test_without_the_plugin(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = launch()
    monkeypatch.setattr(holder, "PLUGIN", tmp_path / "libicecore-devices.so")
    assert "C compiler" in refusals(target)["gpu-plugin"]


def test_mps(launch: Launch, world: World) -> None:
    target = launch()
    world.more["mps"] = [target.pid]
    world.write()
    assert "nvidia-cuda-mps-control" in refusals(target)["gpu-mps"]


def test_memory_that_the_driver_cannot_move(launch: Launch, world: World) -> None:
    assert refusals(launch(also=["driver's own"])) == {}
    assert "cudaMalloc" in refusals(launch(also=["managed"]))["gpu-managed"]
    sharing = launch(also=["ipc"])
    try:
        cure = refusals(sharing)["gpu-ipc"]
        assert "610" in cure and "run --gpu" in cure
        inventory(driver="610.20")(world)
        assert refusals(sharing) == {}
    finally:
        for path in Path("/dev/shm").glob("cuda.shm.0.*.1"):
            with suppress(FileNotFoundError):
                path.unlink()


@pytest.mark.parametrize("gpus", [[GPUS[0], GPUS[0]], GPUS[:2]], ids=["one GPU", "a GPU each"])
def test_processes_that_may_share_device_memory(
    gpus: list[str], launch: Launch, world: World
) -> None:
    target = launch(gpus)
    cure = refusals(target)["gpu-shared"]
    assert "run --gpu" in cure and "--gpu-shared" in cure
    assert refusals(target, gpu_shared=True) == {}
    inventory(driver="610.20")(world)
    assert refusals(target) == {}


SETTINGS: dict[str, tuple[dict[str, str], list[str]]] = {
    "nothing": (
        {},
        [
            "NCCL_P2P_DISABLE=1",
            "NCCL_CUMEM_HOST_ENABLE=0",
            "NCCL_NVLS_ENABLE=0",
            "NCCL_RAS_ENABLE=0",
        ],
    ),
    "what run --gpu sets": (dict(nccl.SNAPSHOTABLE), []),
    "sockets": (
        {
            "NCCL_P2P_LEVEL": "LOC",
            "NCCL_SHM_DISABLE": "1",
            "NCCL_NVLS_ENABLE": "0",
            "NCCL_RAS_ENABLE": "0",
        },
        [],
    ),
    "P2P on": ({**nccl.SNAPSHOTABLE, "NCCL_P2P_DISABLE": "0"}, ["NCCL_P2P_DISABLE=1"]),
    "SHM in its default form": (
        {**nccl.SNAPSHOTABLE, "NCCL_CUMEM_HOST_ENABLE": "1"},
        ["NCCL_CUMEM_HOST_ENABLE=0", "NCCL_SHM_DISABLE=1"],
    ),
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_nccl_between_processes(settings: str, launch: Launch) -> None:
    environment, cures = SETTINGS[settings]
    found = refusals(launch(GPUS[:2], also=["nccl"], environment=environment), gpu_shared=True)
    assert ("gpu-nccl" in found) == bool(cures)
    assert all(cure in found["gpu-nccl"] for cure in cures) and (
        not cures or "run --gpu" in found["gpu-nccl"]
    )


def test_nccl_that_is_only_loaded(launch: Launch) -> None:
    assert refusals(launch(also=["nccl"])) == {}, (
        "one process with one GPU has nobody to share with"
    )
    assert refusals(launch(GPUS[:2]), gpu_shared=True) == {}


def test_nccl_that_a_process_without_a_context_has_loaded(launch: Launch, world: World) -> None:
    """For example torchrun's agent, which is not a rank."""
    target = launch([GPUS[0], GPUS[0]], also=["nccl"])
    assert "NCCL_P2P_DISABLE=1" in refusals(target, gpu_shared=True)["gpu-nccl"]
    world.more["no_context"] = [target.pid]
    world.write()
    assert refusals(target) == {}


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_nccl_with_a_peer_in_another_tree(
    family: socket.AddressFamily, host: str, launch: Launch
) -> None:
    try:
        peer = socket.create_server((host, 0), family=family)
    except OSError as error:
        pytest.skip(f"{host}: {error}")
    with peer:
        also = [f"nccl to {'v6 ' if family == socket.AF_INET6 else ''}{peer.getsockname()[1]}"]
        assert "NCCL_P2P_DISABLE=1" in refusals(launch(also=also))["gpu-nccl"]
        with peer.accept()[0]:
            assert refusals(launch(also=also, environment=dict(nccl.SNAPSHOTABLE))) == {}


def test_nccl_set_by_its_configuration_file(launch: Launch, tmp_path: Path) -> None:
    file = tmp_path / "nccl.conf"
    file.write_text(
        "# ours\n" + "\n".join(f"{key} = {value}" for key, value in nccl.SNAPSHOTABLE.items())
    )
    assert (
        refusals(
            launch(GPUS[:2], also=["nccl"], environment={"NCCL_CONF_FILE": str(file)}),
            gpu_shared=True,
        )
        == {}
    )


def test_more_device_memory_than_the_window_or_the_host_can_take(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = launch()
    assert "--max-window" in refusals(target, max_window=0.0005)["gpu-window"]
    assert refusals(target, max_window=0.0005, stop=True) == {}
    monkeypatch.setattr(
        limits, "memory_available", lambda: 1 << 20
    )  # no test shall fill the machine
    assert "host memory" in refusals(target)["gpu-memory"]
