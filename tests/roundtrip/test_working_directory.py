"""Dumps where the root's working directory (of jobs: /) is another's too, or cannot be written to:
CRIU needs nothing in it (icecore/host/criu/proc.c).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from icecore.dumper.dump import DumpResult, dump
from icecore.dumper.target import Target
from icecore.host.criu.libraries import CRIU_LIBRARY
from icecore.host.kernel import procfs
from tests.host.target import eventually
from tests.roundtrip.conftest import Trip

pytestmark = [
    pytest.mark.criu,
    pytest.mark.skipif(
        not CRIU_LIBRARY.exists(), reason="needs a C compiler when icecore is built"
    ),
]

_COUNT = "import itertools, time\nfor number in itertools.count(): print(number, flush=True); time.sleep(0.01)"
_LETTERS = 7  # of the directory's name in /run, of which nothing is left
_LEFT = "proc.crtools"  # by a CRIU that was killed: docs/explanation/dump.md


@dataclass(frozen=True)
class Counting:
    """It counts, as process 1 of a pid namespace that sees the host's /proc, as the init of a job
    is.
    """

    pid: int
    log: Path

    def count(self) -> int:
        return self.log.read_text().count("\n")

    def dump(self, trip: Trip) -> DumpResult:
        return dump(
            trip.repository, trip.loop, Target.of_process(self.pid, self.log.stem), criu=trip.criu
        )

    def goes_on(self) -> None:
        before = self.count()
        assert eventually(lambda: self.count() > before)


@contextmanager
def counting(folder: Path, log: Path) -> Iterator[Counting]:
    with open(log, "wb") as out:
        words = [
            "unshare",
            "--pid",
            "--fork",
            "--kill-child",
            "setsid",
            sys.executable,
            "-u",
            "-c",
            _COUNT,
        ]
        process = subprocess.Popen(
            words, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
    try:
        assert eventually(lambda: log.read_text().count("\n") > 3)
        [pid] = procfs.children(process.pid)
        yield Counting(pid, log)
    finally:
        process.kill()
        process.wait(30)


def test_a_directory_that_another_criu_left_is_nothing_to_it(trip: Trip, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    (folder / _LEFT).mkdir(parents=True)
    with counting(folder, tmp_path / "one.log") as one:
        assert one.dump(trip).sizes.logical
        one.goes_on()
    assert [path.name for path in folder.iterdir()] == [_LEFT]


def test_a_directory_that_cannot_be_written_to(trip: Trip, tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", folder], check=True, timeout=20
    )
    try:
        with counting(folder, tmp_path / "one.log") as one:
            assert one.dump(trip).sizes.logical
            one.goes_on()
    finally:
        subprocess.run(["umount", "-l", folder], check=True, timeout=20)


def test_jobs_of_one_directory_are_dumped_at_once(trip: Trip, tmp_path: Path) -> None:
    before, folder = set(Path("/run").iterdir()), tmp_path / "shared"
    folder.mkdir()
    with (
        counting(folder, tmp_path / "one.log") as one,
        counting(folder, tmp_path / "two.log") as two,
        ThreadPoolExecutor(2) as pool,
    ):
        for _ in range(5):
            taken = [pool.submit(job.dump, trip) for job in (one, two)]
            assert all(done.result(60).sizes.logical for done in taken)
        one.goes_on()
        two.goes_on()
    assert not list(folder.iterdir())
    made = [path for path in set(Path("/run").iterdir()) - before if len(path.name) == _LETTERS]
    assert eventually(
        lambda: not any(path.exists() for path in made)
    )  # other tests' are gone in a moment
