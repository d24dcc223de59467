"""Fixtures of the tests with a fake driver."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from icecore.host.gpu.backend import VARIABLE
from icecore.store.runtime.loop import LoopThread
from tests.cli.conftest import cli as cli
from tests.cli.conftest import zygote as zygote
from tests.dumper.world import Store, leftovers
from tests.fakes.world import GPUS, Target, World
from tests.programs import plain_criu
from tests.resident.conftest import new_machine as new_machine
from tests.resident.conftest import programs as programs

Launch = Callable[..., Target]


@pytest.fixture
def nodes() -> bool:
    """Whether the world's device files are some; see `World`."""
    return False


@pytest.fixture
def world(nodes: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A machine with four fake GPUs; what this process starts meets it too."""
    root = Path(tempfile.mkdtemp(prefix="icecore-world-", dir="/dev/shm"))
    made = World(root / "world", nodes=nodes)
    monkeypatch.setenv(VARIABLE, f"fake:{made.root}")
    yield made
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def launch(world: World, tmp_path: Path) -> Iterator[Launch]:
    """Starts targets, and ends them after the test."""
    started: list[Target] = []

    def start(
        gpus: Sequence[str] = GPUS[:1], *, environment: dict[str, str] | None = None, **more: Any
    ) -> Target:
        target = Target(world, tmp_path / f"target-{len(started)}", gpus, **more)
        started.append(target)
        target.start(environment)
        return target

    with plain_criu.adopting():
        yield start
        for target in started:
            target.kill()


@pytest.fixture(scope="session")
def loop() -> Iterator[LoopThread]:
    with LoopThread() as loop:
        yield loop


@pytest.fixture
def workdir(tmp_path: Path, world: World) -> Iterator[Path]:
    path = world.root.parent / "work"
    path.mkdir()
    yield path
    assert not leftovers(path)


@pytest.fixture
def store(tmp_path: Path, loop: LoopThread, workdir: Path) -> Store:
    return Store.make(loop, tmp_path / "repository", workdir, gpu_shared=True)
