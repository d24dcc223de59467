"""Real programs dumped by plain CRIU and imported, for tests of the restorer that need nothing of
the dumper.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from icecore.dumper.importer import ImportResult, import_images
from icecore.errors import MissingTool
from icecore.events import Event
from icecore.host.criu.program import Criu, find_criu
from icecore.restorer.options import RestoreOptions
from icecore.restorer.restore import restore
from icecore.restorer.restored import Restored
from icecore.store.log.repository import StoredRepository
from tests.programs import driving, plain_criu
from tests.programs.catalogue import PROGRAMS, Program
from tests.restorer.places import Place, repository_place


def criu_or_skip() -> Criu:
    """The machine's CRIU; the test is skipped where there is none, or no root."""
    if os.geteuid() != 0:
        pytest.skip("CRIU needs root")
    try:
        return find_criu()
    except MissingTool as error:
        pytest.skip(str(error))


@dataclass
class Dumped:
    """A program that was dumped and killed, and its images imported."""

    place: Place
    criu: Criu
    running: driving.Running
    images: Path
    result: ImportResult
    events: list[Event]

    @property
    def state_dir(self) -> Path:
        return self.running.state_dir

    @property
    def program(self) -> Program:
        return self.running.program

    @property
    def workdir(self) -> Path:
        """Where restores put their temporary files: nobody else's are there."""
        return self.place.root.parent / "work"

    def restore(
        self,
        options: RestoreOptions | None = None,
        repository: StoredRepository | None = None,
        emit: Callable[[Event], None] | None = None,
    ) -> Restored:
        self.workdir.mkdir(exist_ok=True)
        return restore(
            repository or self.place.repository,
            self.place.loop,
            self.result.snapshot,
            replace(options or RestoreOptions(), workdir=str(self.workdir)),
            criu=self.criu,
            emit=emit or self.events.append,
        )

    def verdict(self) -> driving.Progress:
        """What the restored program finds when it verifies everything."""
        driving.ask_finish(self.program, self.state_dir)
        return driving.wait_finished(self.program, self.state_dir)

    def kill(self, pid: int) -> None:
        driving.kill_tree(pid)

    def remains(self) -> list[str]:
        """What a restore left behind: processes of the tree, and temporary files."""
        left = [f"process {pid}" for pid in driving.members(self.state_dir)]
        return left + [str(path) for path in self.workdir.iterdir()]


def await_gone(pids: Sequence[int], seconds: float = 10) -> None:
    """Wait until the processes do not exist."""
    end = time.monotonic() + seconds
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        assert time.monotonic() < end, f"{pids} do not go away"
        time.sleep(0.005)


@contextlib.contextmanager
def dumped(
    name: str, state_dir: Path, cache: Path, arguments: Sequence[str] | None = None
) -> Iterator[Dumped]:
    """Run a program, dump it with CRIU alone (which kills it), and import the images."""
    criu = criu_or_skip()
    program = PROGRAMS[name]
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(repository_place())
        running = driving.start(
            program, state_dir, cache, program.quick if arguments is None else arguments
        )
        stack.callback(driving.stop, running)
        driving.wait_ready(program, state_dir)
        images = place.root.parent / "images"
        images.mkdir()
        plain_criu.dump(criu.path, running.pid, images, program.criu_options)
        result = import_images(place.repository, place.loop, images)
        yield Dumped(place, criu, running, images, result, [])
        shutil.rmtree(images)
