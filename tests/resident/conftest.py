"""Fixtures: machines with fake GPUs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .machine import Machine, Target, build

NewMachine = Callable[..., Machine]


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake libcuda and the programs that use it."""
    if shutil.which("gcc") is None or os.geteuid() != 0:
        pytest.skip("needs gcc, and root to mount a tmpfs for each fake GPU")
    folder = tmp_path_factory.mktemp("fake-cuda")
    build(folder)
    return folder


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
