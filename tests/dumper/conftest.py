"""Fixtures for tests of whole dumps."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from icecore.store.runtime.loop import LoopThread
from tests.programs import driving
from tests.programs.catalogue import PROGRAMS, missing

from .failing import Job, Witness
from .puppet import Puppet
from .world import Store, leftovers


class Start(Protocol):
    """Starts a program, in its small size unless arguments are given, and waits until it is ready."""

    def __call__(self, name: str, *arguments: str) -> driving.Running: ...


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("binaries")


@pytest.fixture
def start(tmp_path: Path, cache: Path) -> Iterator[Start]:
    """Start programs; end them after the test."""
    started: list[driving.Running] = []

    def start_one(name: str, *arguments: str) -> driving.Running:
        program = PROGRAMS[name]
        if lacking := missing(program):
            pytest.skip(f"this machine has no {', '.join(lacking)}")
        state_dir = tmp_path / str(len(started))  # short: programs bind sockets below it
        state_dir.mkdir()
        running = driving.start(program, state_dir, cache, arguments or program.quick)
        started.append(running)
        driving.wait_ready(program, state_dir)
        return running

    yield start_one
    for running in started:
        driving.stop(running)


@pytest.fixture
def puppet(tmp_path: Path) -> Iterator[Puppet]:
    folder = tmp_path / "puppet"
    folder.mkdir()
    puppet = Puppet(folder)
    yield puppet
    puppet.end()


@pytest.fixture(scope="session")
def loop() -> Iterator[LoopThread]:
    with LoopThread() as loop:
        yield loop


@pytest.fixture
def workdir() -> Iterator[Path]:
    """Make a directory on tmpfs for CRIU's images. After the test it must be empty, and no process
    may work in it.
    """
    path = Path(tempfile.mkdtemp(prefix="icecore-test-", dir="/dev/shm"))
    yield path
    left = leftovers(path)
    shutil.rmtree(path, ignore_errors=True)
    assert not left


@pytest.fixture
def store(tmp_path: Path, loop: LoopThread, workdir: Path) -> Store:
    """Make an empty repository on disk."""
    return Store.make(loop, tmp_path / "repository", workdir)


@pytest.fixture
def job(start: Start) -> Job:
    return Job(start("memory-pattern", "--mib", "8"))


@pytest.fixture
def witness(store: Store, job: Job) -> Witness:
    """Make a witness with one snapshot of the job."""
    return Witness(store, job.pid)
