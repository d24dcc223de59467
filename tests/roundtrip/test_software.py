"""Real software, dumped under load, killed, and restored from each snapshot: what it prints is what
an undisturbed run prints.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from icecore.dumper.dump import dump
from icecore.dumper.target import Target
from icecore.errors import NotFound
from icecore.host.jobs.job import Job
from icecore.host.jobs.namespaces import Isolation
from icecore.host.jobs.registry import Registry
from tests.host.target import eventually
from tests.roundtrip.conftest import Trip
from tests.roundtrip.software import SOFTWARE, Software
from tests.roundtrip.software_parallel import PARALLEL

pytestmark = pytest.mark.criu

_ALL = SOFTWARE | PARALLEL
#: Those of the ordinary run; the others are torture.
_ALWAYS = ("multiprocessing", "node")
_SECONDS = 120.0


@dataclass
class Workshop:
    """Starts, dumps and restores jobs of one kind, each run in a directory of its own."""

    trip: Trip
    place: Path
    software: Software
    registry: Registry = field(init=False)

    def __post_init__(self) -> None:
        self.registry = Registry(self.place / "jobs")

    def start(self, name: str) -> Job:
        home = self.home(name)
        (home / "tmp").mkdir(parents=True)
        (home / "tmp").chmod(0o1777)
        for path, text in self.software.files.items():
            (home / path).write_text(text)
        variables = {
            "home": str(home),
            "TMPDIR": str(home / "tmp"),
            "PATH": os.environ["PATH"],
            "LC_ALL": "C.UTF-8",
        }
        prepared = subprocess.run(
            ["bash", "-ec", self.software.prepare], env={**os.environ, **variables}, cwd=home,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS,
        )  # fmt: skip
        assert prepared.returncode == 0, prepared.stderr
        return self.registry.start(
            ["bash", "-ec", self.software.script],
            name=name,
            cwd=str(home),
            environment=variables,
            isolation=Isolation(network=self.software.network),
            data=[home / self.software.data] if self.software.data else [],
        )

    def home(self, name: str) -> Path:
        return self.place / name

    def step(self, job: Job) -> int:
        if self.software.marks:
            return len(list(self.home(job.name).glob(self.software.marks)))
        return job.log_path("stdout").read_bytes().count(b"\n")

    def reaches(self, job: Job, part: float) -> bool:
        """Wait until a part of the steps is done."""
        return eventually(
            lambda: self.step(job) >= part * self.software.lines or not job.alive, _SECONDS
        )

    def dump(self, job: Job) -> str:
        assert job.alive, outcome(job)
        target = Target(job.pid, job.name, record=job.record())
        trip = self.trip
        return dump(trip.repository, trip.loop, target, criu=trip.criu).snapshot

    def restore(self, snapshot: str) -> Job:
        return self.trip.restore_job(self.registry, snapshot)

    def finished(self, job: Job) -> str:
        """Wait for its end and return what it printed."""
        status = job.wait(_SECONDS)
        assert status.code == 0, outcome(job)
        return job.log_path("stdout").read_text()


def outcome(job: Job) -> str:
    """Return the end of what a job wrote to its standard error, and how it ended."""
    return f"{job.state}: {job.log_path('stderr').read_text()[-2000:]}"


@pytest.fixture
def workshop(trip: Trip, public: Path, request: pytest.FixtureRequest) -> Iterator[Workshop]:
    made = Workshop(trip, public, _ALL[request.param])
    if lacking := [name for name in made.software.needs if shutil.which(name) is None]:
        pytest.skip(f"this machine has no {', '.join(lacking)}")
    try:
        yield made
    finally:
        for one in made.registry.instances():
            if one.alive:
                one.kill(signal.SIGKILL)
            with suppress(TimeoutError):
                one.wait(10)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "workshop",
    [pytest.param(name, marks=[] if name in _ALWAYS else [pytest.mark.torture]) for name in _ALL],
    indirect=True,
)
def test_software(workshop: Workshop) -> None:
    expected = workshop.finished(workshop.start("undisturbed"))
    assert len(expected.splitlines()) == workshop.software.lines
    job = workshop.start("job")
    snapshots = []
    for part in (0.2, 0.4):
        assert workshop.reaches(job, part)
        snapshots.append(workshop.dump(job))
    assert workshop.reaches(job, 0.5)
    with suppress(NotFound):  # a short job may have ended while its snapshot was stored
        job.kill(signal.SIGKILL)
    job.wait(30)
    for snapshot in snapshots:
        shutil.rmtree(workshop.home("job") / "tmp", ignore_errors=True)
        again = workshop.restore(snapshot)
        assert workshop.finished(again) == expected
