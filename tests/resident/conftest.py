"""Fixtures: machines with fake GPUs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from icecore.host.gpu.backend import VARIABLE
from icecore.host.resident import keeper
from icecore.store.runtime.loop import LoopThread
from tests import sanitized
from tests.dumper.world import Store, until_clean
from tests.fakes.joined import Job
from tests.fakes.machine import Machine, Target, build
from tests.programs import plain_criu

NewMachine = Callable[..., Machine]


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake libcuda and the programs that use it."""
    if shutil.which("gcc") is None or os.geteuid() != 0:
        pytest.skip("needs gcc, and root to mount a tmpfs for each fake GPU")
    folder = tmp_path_factory.mktemp("fake-cuda")
    build(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _sanitizers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Under `make sanitize`, uses the sanitized preload and keeper, and fails on their reports."""
    if not sanitized.WANTED:
        yield
        return
    folder = tmp_path_factory.mktemp("sanitized")
    sanitized.build(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper, "_FOLDER", folder)
        for name, value in sanitized.options(folder).items():
            patch.setenv(name, value)
        yield
    found = sanitized.reports(folder)
    assert not found, "\n".join(found)


@pytest.fixture
def new_machine(programs: Path) -> Iterator[NewMachine]:
    """Makes machines, and ends them after the test."""
    made: list[Machine] = []

    def make(**how: Any) -> Machine:
        made.append(Machine(programs, **how))
        return made[-1]

    yield make
    for machine in made:
        machine.close()


@pytest.fixture
def machine(new_machine: NewMachine) -> Machine:
    """One GPU of 64 MiB."""
    return new_machine()


@pytest.fixture
def target(machine: Machine) -> Target:
    """A process with the preload and a context on its GPU."""
    process = machine.target()
    process("start()")
    return process


@pytest.fixture
def joined(
    new_machine: NewMachine, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Machine:
    """Two GPUs of 96 MiB (or of the fixture's parameter), which the fake driver knows too."""
    machine = new_machine(gpus=2, memory=getattr(request, "param", 96 << 20), world=True)
    monkeypatch.setenv(VARIABLE, f"fake:{machine.cuda}")
    return machine


@pytest.fixture
def launch(joined: Machine, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts jobs, and ends them after the test."""
    started: list[Job] = []

    def start(kind: type[Job] = Job, **how: Any) -> Job:
        started.append(kind(joined, tmp_path / f"job-{len(started)}", **how))
        return started[-1]

    with plain_criu.adopting():
        yield start
        for one in started:
            one.kill()


@pytest.fixture(scope="session")
def loop() -> Iterator[LoopThread]:
    with LoopThread() as loop:
        yield loop


@pytest.fixture
def store(tmp_path: Path, loop: LoopThread, joined: Machine) -> Iterator[Store]:
    workdir = joined.root / "work"
    workdir.mkdir()
    yield Store.make(loop, tmp_path / "repository", workdir)
    until_clean(workdir)
