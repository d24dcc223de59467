"""CRIU is killed alone while its code is in a job: whatever it had changed is put back, and every thread runs on as it was."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from icecore.dumper.options import DumpOptions
from icecore.dumper.target import Target
from icecore.errors import DumpFailed, NotFound
from icecore.host import procfs
from icecore.host.criu import CRIU_LIBRARY

from .world import Store, standing

pytestmark = [pytest.mark.criu, pytest.mark.skipif(not CRIU_LIBRARY.exists(), reason="needs a C compiler when icecore is built")]

HERE = Path(__file__).parent
PROCESSES, THREADS = 3, 5
_FIELDS = ("SigBlk", "SigPnd", "ShdPnd", "TracerPid")


class Rescued:
    """A job of several processes with several threads, and how it was before anything was done to it."""

    def __init__(self, program: Path, counts: Path) -> None:
        self._counts = counts
        self.process = subprocess.Popen([program, str(PROCESSES), str(THREADS), str(counts)], start_new_session=True, stdin=subprocess.DEVNULL)
        self.wait_for_steps([0] * (PROCESSES * THREADS))
        self.pids = procfs.tree(self.process.pid)
        assert len(self.pids) == PROCESSES
        self.before = self.look()

    def steps(self) -> list[int]:
        """How many each thread has made."""
        try:
            data = self._counts.read_bytes()[: 8 * PROCESSES * THREADS]
        except FileNotFoundError:
            data = b""
        return list(struct.unpack(f"<{PROCESSES * THREADS}Q", data)) if len(data) == 8 * PROCESSES * THREADS else [0] * (PROCESSES * THREADS)

    def wait_for_steps(self, since: list[int], seconds: float = 20.0) -> None:
        """Every thread has made one since."""
        end = time.monotonic() + seconds
        while not all(new > old for new, old in zip(self.steps(), since, strict=True)):
            assert self.process.poll() is None, f"it ended: {self.process.returncode}"
            assert time.monotonic() < end, f"threads stand still: {since} {self.steps()}"
            time.sleep(0.005)

    def look(self) -> dict[int, object]:
        """Masks and pending signals of every thread, descriptors and mappings of every process."""
        found: dict[int, object] = {}
        for pid in self.pids:
            for thread in procfs.threads(pid):
                lines = Path(f"/proc/{thread}/status").read_text().splitlines()
                found[thread] = [line for line in lines if line.startswith(_FIELDS)]
            opened = Counter(descriptor.target for descriptor in procfs.descriptors(pid))
            found[-pid] = (opened, [_mapping(line) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()])
        return found

    def is_as_before(self) -> None:
        """It runs, and nothing shows that anybody was there."""
        end = time.monotonic() + 5
        while standing(self.process.pid) and time.monotonic() < end:
            time.sleep(0.01)
        self.wait_for_steps(self.steps())
        assert procfs.tree(self.process.pid) == self.pids
        assert self.look() == self.before


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job's program, and the library that kills CRIU."""
    folder = tmp_path_factory.mktemp("rescue")
    flags = ["gcc", "-std=gnu11", "-O1", "-Wall", "-Wextra"]
    subprocess.run([*flags, "-o", folder / "rescued", HERE / "rescued.c", "-lpthread"], check=True, timeout=60)
    subprocess.run([*flags, "-fPIC", "-shared", "-o", folder / "die_at.so", HERE / "die_at.c", "-ldl"], check=True, timeout=60)
    return folder


@pytest.fixture
def job(programs: Path, tmp_path: Path) -> Iterator[Rescued]:
    """One that runs."""
    made = Rescued(programs / "rescued", tmp_path / "counts")
    yield made
    with suppress(ProcessLookupError):
        os.killpg(made.process.pid, signal.SIGKILL)
    made.process.wait(20)


def _mapping(line: str) -> tuple[str, str]:
    """Address and protection; that CRIU leaves what nobody could read readable, where it is killed in that moment, is known (docs/design.md)."""
    address, protection = line.split()[:2]
    return address, "---p" if protection == "r--p" else protection


def dump(store: Store, job: Rescued) -> None:
    store.dump(Target(job.process.pid, "job"), DumpOptions(pre_copy="off"))


def test_criu_is_killed_between_two_of_its_steps(job: Rescued, programs: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After calls of ptrace(2) all the way through the dump of the first process, and some of the others."""
    told = tmp_path / "told"
    monkeypatch.setenv("LD_PRELOAD", str(programs / "die_at.so"))
    monkeypatch.setenv("DIE_COUNT", str(told))
    monkeypatch.setenv("DIE_AT", "0")
    dump(store, job)
    total = int(told.read_text())
    assert total > 100
    job.is_as_before()
    for number in [*range(30, 115, 5), *range(115, total, total // 10)]:
        monkeypatch.setenv("DIE_AT", str(number))
        with pytest.raises(DumpFailed):
            dump(store, job)
        job.is_as_before()
    monkeypatch.delenv("DIE_AT")
    dump(store, job)
    job.is_as_before()


def test_criu_is_killed_at_any_time(job: Rescued, store: Store) -> None:
    """While its code in the job waits for orders, or carries them out."""

    def kill(seconds: float) -> None:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            with suppress(NotFound):
                tracers = {procfs.status(pid).tracer for pid in job.pids} - {0}
                if tracers:
                    time.sleep(seconds)
                    with suppress(ProcessLookupError):
                        os.kill(tracers.pop(), signal.SIGKILL)
                    return

    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    for _ in range(12):
        killer = threading.Thread(target=kill, args=(chance.uniform(0, 0.03),))
        killer.start()
        with suppress(DumpFailed):
            dump(store, job)
        killer.join(30)
        try:
            job.is_as_before()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
