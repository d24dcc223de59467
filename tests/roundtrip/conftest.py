"""What the round trips share: a repository on this machine, CRIU, compiled programs, and the
reaping of restored trees.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from icecore.dumper.dump import DumpResult, dump
from icecore.dumper.options import DumpOptions
from icecore.dumper.target import Target
from icecore.host.criu.program import Criu, find_criu
from icecore.host.jobs import temporary
from icecore.host.jobs.job import Job
from icecore.host.jobs.registry import Registry
from icecore.host.kernel.limits import kernel_version
from icecore.restorer.options import RestoreOptions
from icecore.restorer.restore import restore
from icecore.restorer.restored import Restored
from icecore.store.backend.local import LocalBackend
from icecore.store.log.repository import StoredRepository
from icecore.store.runtime.loop import LoopThread
from tests.programs import driving, plain_criu
from tests.programs.catalogue import Program, missing

#: Of tests with a private /tmp.
SEES_ICECORE = pytest.mark.skipif(
    bool(temporary.hidden_from_criu(temporary.POINTS, "/", Path("/"))),
    reason="icecore is installed in /tmp, which a private /tmp hides from CRIU",
)
#: Programs whose point is their size.
_IN_FULL = ("sparse",)


@dataclass
class Trip:
    """A repository and the CRIU that a round trip uses."""

    repository: StoredRepository
    loop: LoopThread
    criu: Criu
    work: Path
    cache: Path

    def start(
        self, program: Program, *, own_namespaces: bool = False, full: bool = False
    ) -> driving.Running:
        """Start a program in its quick size (but for ``full``, and those whose point is their
        size), or skip where this machine cannot.
        """
        if lacking := missing(program):
            pytest.skip(f"this machine has no {', '.join(lacking)}")
        sockets = program.clients != "none"
        if sockets and not self.criu.dumps_internet_sockets(kernel_version()):
            pytest.skip(
                f"CRIU {self.criu.version} cannot dump internet sockets on Linux {platform.release()}"
            )
        state = self.work / "state"
        state.mkdir()
        arguments = program.arguments if full or program.name in _IN_FULL else program.quick
        running = driving.start(
            program, state, self.cache, arguments, own_namespaces=own_namespaces
        )
        driving.wait_ready(program, state)
        return running

    def restore_job(self, registry: Registry, snapshot: str) -> Job:
        """Restore a job of `icecore run` with the defaults, and wait until its memory is loaded."""
        restored = restore(
            self.repository,
            self.loop,
            snapshot,
            RestoreOptions(),
            criu=self.criu,
            registry=registry,
        )
        restored.wait_resident(60)
        assert restored.job is not None
        return restored.job

    def dump(self, pid: int, **options: object) -> DumpResult:
        """Dump a tree into the repository; one that is stopped by it is reaped, so that its pids
        are free.
        """
        target = Target.of_process(pid, "job")
        tree = driving.tree_of(pid)
        result = dump(self.repository, self.loop, target, DumpOptions(**options), criu=self.criu)  # type: ignore[arg-type]
        until = time.monotonic() + 20
        for one in tree[1:] if options.get("stop") else []:
            while os.path.exists(f"/proc/{one}"):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(one, os.WNOHANG)
                assert time.monotonic() < until, f"process {one} is still there"
                time.sleep(0.002)
        return result

    def restore(self, snapshot: str, **options: object) -> Restored:
        """Restore a snapshot from it; the tree's end is waited for by the restorer."""
        chosen = RestoreOptions(detach=False, **options)  # type: ignore[arg-type]
        return restore(self.repository, self.loop, snapshot, chosen, criu=self.criu)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("binaries")


@pytest.fixture
def trip(tmp_path: Path, cache: Path) -> Iterator[Trip]:
    if os.geteuid() != 0:
        pytest.skip("CRIU needs root")
    with LoopThread() as loop, plain_criu.adopting():
        repository = loop.run(_create(tmp_path / "repository"))
        yield Trip(repository, loop, find_criu(), tmp_path, cache)
        loop.run(repository.close())


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """A registry, whose jobs end with the test."""
    made = Registry(tmp_path / "jobs")
    yield made
    for job in made.instances():
        if job.alive:
            job.kill(signal.SIGKILL)
            job.wait(20)


async def _create(path: Path) -> StoredRepository:
    return await StoredRepository.create(LocalBackend(path, create=True))
