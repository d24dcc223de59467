"""A command line with its own state directory and repository. Jobs that a test started end with the
test.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from icecore.errors import MissingTool
from icecore.host.criu.program import find_criu
from icecore.host.jobs.job import Job
from icecore.host.jobs.registry import Registry
from icecore.store.format import slots
from tests.zygote import CHEAP, Forked, Zygote, shared

SECONDS = 60.0


@dataclass(frozen=True)
class Cli:
    """Runs each command in its own process, in ``folder``."""

    folder: Path
    environment: dict[str, str]
    zygote: Zygote | None = None

    @property
    def registry(self) -> Registry:
        """The registry of the jobs that it started."""
        return Registry(self.folder / "state")

    def command(self, *words: str) -> list[str]:
        """Return the argument vector."""
        return [sys.executable, "-P", "-m", "icecore.cli", *words]

    def start(self, *words: str) -> Forked | subprocess.Popen[str]:
        """Start a command and return its process."""
        if self.zygote is not None and self.zygote.fits(self.environment):
            return self.zygote.start(words, self.environment, str(self.folder))
        return subprocess.Popen(
            self.command(*words),
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self, *words: str, status: int = 0, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command, which has to end with ``status``."""
        environment = {**self.environment, **variables}
        if self.zygote is not None and self.zygote.fits(environment):
            done = self.zygote.run(list(words), environment, str(self.folder), SECONDS)
        else:
            done = subprocess.run(
                self.command(*words),
                env=environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        assert done.returncode == status, (
            f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    def events(self, *words: str, status: int = 0) -> list[dict[str, Any]]:
        """Return the events that a command prints with --json."""
        return [
            json.loads(line)
            for line in self.run("--json", *words, status=status).stdout.splitlines()
        ]

    def one(self, name: str, *words: str, status: int = 0) -> dict[str, Any]:
        """Return the only event of a name that a command prints."""
        found = [event for event in self.events(*words, status=status) if event["event"] == name]
        assert len(found) == 1, found
        return found[0]

    def job(self, name: str) -> Job:
        """Return the current state of a job."""
        return self.registry.find(name)


def until(holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Wait until a condition holds."""
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit, f"not {what} within {seconds} s"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _cheap_passphrases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process, too, make slots that cost little, as commands in forks do."""
    monkeypatch.setattr(slots, "DEFAULT_COST", slots.Cost(*CHEAP))


@pytest.fixture(scope="session")
def zygote() -> Zygote:
    """The parent of the commands that `Cli.run` runs."""
    return shared()


@pytest.fixture
def cli(tmp_path: Path, zygote: Zygote) -> Iterator[Cli]:
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ICECORE_") or name == "ICECORE_CRIU_PREFIX"
    }
    made = Cli(
        tmp_path,
        {
            **own,
            "HOME": str(tmp_path),
            "ICECORE_STATE": str(tmp_path / "state"),
            "ICECORE_REPOSITORY": str(tmp_path / "repository"),
        },
        zygote,
    )
    yield made
    for job in made.registry.instances():
        if job.alive:
            job.kill(signal.SIGKILL)
            job.wait(timeout=30)
        if job.description.keep_resident:  # otherwise its keeper would remain
            made.registry.remove(job)


@pytest.fixture
def needs_criu() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    try:
        find_criu()
    except MissingTool as error:
        pytest.skip(str(error))
