"""Whole restores of a real job beside hostile users, who own the directory in which it had files
open.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from icecore.errors import RestoreFailed, RestoreRefused
from icecore.host.jobs.registry import Registry
from icecore.host.kernel import procfs
from icecore.restorer.options import RestoreOptions
from icecore.restorer.restore import restore
from tests.restorer.job_file_places import look
from tests.restorer.test_files_race import CONTENT, SECRET, Ground, attackers
from tests.roundtrip.conftest import Trip
from tests.roundtrip.test_instances import take

pytestmark = pytest.mark.criu

JOB = """
import sys, time
data = open(f"{sys.argv[1]}/data.bin", "r+b", buffering=0)
root = open(f"{sys.argv[1]}/root.bin", "ab", buffering=0)
print("there", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("seconds", "least"),
    [
        pytest.param(0.0, 6, id="short"),
        pytest.param(
            float(os.environ.get("ICECORE_TORTURE_SECONDS", "300")),
            6,
            id="long",
            marks=[pytest.mark.torture, pytest.mark.timeout(7200)],
        ),
    ],
)
def test_a_job_is_given_its_own_files_and_nobody_else_loses_any(
    trip: Trip, tmp_path: Path, seconds: float, least: int
) -> None:
    registry = Registry(tmp_path / "jobs")
    with tempfile.TemporaryDirectory(prefix="icecore-race-") as top:
        os.chmod(top, 0o755)
        ground = Ground(Path(top))
        for name in ("data.bin", "root.bin"):  # size and mode are all that CRIU looks at
            (ground.home / "dir" / name).chmod(0o600)
            (ground.victim / name).write_bytes((SECRET * 9)[: len(CONTENT)])
        job = registry.start(
            [sys.executable, "-c", JOB, str(ground.home / "dir")], name="race", cwd="/"
        )
        until = time.monotonic() + 20
        while "there" not in job.log_path("stdout").read_text():
            assert time.monotonic() < until, job.log_path("stderr").read_text()
            time.sleep(0.01)
        snapshot = take(trip, job, stop=True)
        job.wait(20)
        before = look(ground.victim), look(ground.outside)
        victims = {
            (about.st_dev, about.st_ino)
            for about in (path.stat() for path in ground.victim.rglob("*"))
        }
        outcomes: Counter[str] = Counter()
        end = time.monotonic() + seconds
        with attackers(ground.home, ground.shared, ground.victim, 0.5):
            while sum(outcomes.values()) < least or time.monotonic() < end:
                number = sum(outcomes.values())
                options = RestoreOptions(
                    mode=["full", "lazy"][number % 2],
                    files=["restore", "restore", "restore", "leave", "truncate"][number % 5],
                )  # type: ignore[arg-type]
                try:
                    restored = restore(
                        trip.repository,
                        trip.loop,
                        snapshot,
                        options,
                        criu=trip.criu,
                        registry=registry,
                    )
                except (RestoreFailed, RestoreRefused) as error:
                    outcomes[type(error).__name__] += 1
                else:
                    outcomes["runs"] += 1
                    opened = {
                        (one.device, one.inode)
                        for pid in procfs.tree(restored.pid)
                        for one in procfs.descriptors(pid)
                    }
                    assert restored.job is not None
                    restored.wait_resident(60)
                    restored.job.kill(9)
                    restored.job.wait(20)
                    assert not opened & victims, "the job was given a file of root's"
                assert (look(ground.victim), look(ground.outside)) == before, outcomes
        print(dict(outcomes))
        assert outcomes["runs"] or not seconds, outcomes
        ground.assert_nothing_of_roots_is_theirs()
        assert not [
            path for path in (registry.state / "restores").glob("*") if path.suffix != ".kept"
        ]
