"""Help for tests that make a dump fail: a job that notes its steps, a witness to what the
repository must still hold, and a dumper that can be killed.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from icecore.dumper.phases import freeze
from icecore.dumper.phases.preflight import Accepted
from icecore.dumper.phases.prepare import Ready
from icecore.dumper.phases.request import Request
from icecore.errors import DumpFailed
from icecore.store.backend.local import LocalBackend
from icecore.store.maintenance.check import check
from tests import zygote
from tests.programs import driving

from . import driver
from .world import Events, Stillness, Store, assert_same_memory, leftovers, standing, words_of

SECONDS = 1.0
#: Events that say that a dump found something wrong with what an earlier one stored.
_COMPLAINTS = {"dump.parent_damaged", "dump.hints_missing", "store.base_damaged", "index.damaged"}

#: Waits as CRIU does, then fails as CRIU does if a process ends before it is stopped.
_RESTLESS = """
CRTOOLS_SCRIPT_ACTION=pre-dump "$0"
echo 'Error (compel/src/lib/infect.c:1): Unseizable non-zombie 7 found, state R, err -1/10' > "$1"
exit 1
"""
#: What the error says then.
CANNOT_STOP = "a process ended while the tree was being frozen"


def have_criu_fail_to_stop(patch: pytest.MonkeyPatch, times: int) -> None:
    """Have CRIU fail as it does if processes come and go, in the next windows of this process."""
    real, failing = freeze._criu_command, iter(range(times))

    def command(
        request: Request, accepted: Accepted, ready: Ready, group: Path | None
    ) -> list[str]:
        for _ in failing:
            return ["sh", "-c", _RESTLESS, "{hold}", str(ready.images / "dump.log")]
        return real(request, accepted, ready, group)

    patch.setattr(freeze, "_criu_command", command)


class Job:
    """A memory-pattern process that notes when it makes a step."""

    def __init__(self, running: driving.Running) -> None:
        self.running = running
        self.pid = running.pid

    def runs(self, since_ns: int, seconds: float = SECONDS) -> None:
        """Check that the job made a step within ``seconds`` of that time and is not traced."""
        at = driving.wait_step(self.running.state_dir, since_ns, timeout_s=20)
        assert at - since_ns <= seconds * 1e9, f"it stood still for {(at - since_ns) / 1e9:.2f} s"
        while standing(
            self.pid
        ):  # CRIU may freeze it only now; it lets go when it finds the socket closed
            assert time.time_ns() - since_ns <= seconds * 1e9, "it stands still"
            time.sleep(0.002)

    def has_found_no_error(self) -> None:
        """Check that the job, which checks a page in each step, has found none changed."""
        said = driving.progress(self.running.state_dir)
        assert said is not None and not said.errors, said

    def is_well(self) -> None:
        """Have the job check all its data. It then ends."""
        driving.ask_finish(self.running.program, self.running.state_dir)
        said = driving.wait_finished(self.running.program, self.running.state_dir)
        assert said.passed, said.errors

    def stopped_since(self, until_ns: int, seconds: float = 20.0) -> None:
        """Wait until the job stands still."""
        end = time.monotonic() + seconds
        while not standing(self.pid):
            assert time.monotonic() < end
            time.sleep(0.001)


class Witness:
    """An earlier snapshot, and what it must still hold after every failure."""

    def __init__(self, store: Store, pid: int) -> None:
        self.store = store
        self.pid = pid
        self.still = Stillness()
        events = Events({("dump.files", "begin"): lambda _: self.still.look(pid)})
        self.first = store.dump(pid, events=events).snapshot
        self.verify(1)

    def verify(self, snapshots: int) -> None:
        """Check that the repository opens, lists this many snapshots, passes a check of all its
        bytes, and that the first snapshot is what it was.
        """
        fresh = self.store.through(self.store.backend)
        report = self.store.loop.run(check(fresh.repository, read_data=1.0, register=False))
        assert report.sound and report.snapshots == snapshots, report.damages
        assert len(fresh.snapshots()) == snapshots
        assert assert_same_memory(fresh.read(self.first), self.still) > 8 * 256

    def open_sessions(self) -> list[str]:
        """Return the ids of sessions that are still open."""
        fresh = self.store.through(self.store.backend)
        return [
            session.id
            for session in self.store.loop.run(fresh.repository.log.newest()).state.sessions
        ]

    def next_dump_is_good(self) -> None:
        """Check that the next dump is good, although the program has changed since."""
        before = len(self.store.snapshots())
        still = Stillness()
        events = Events({("dump.files", "begin"): lambda _: still.look(self.pid)})
        fresh = self.store.through(self.store.backend)
        result = fresh.dump(self.pid, events=events)
        assert_same_memory(fresh.read(result.snapshot), still)
        assert not events.names() & _COMPLAINTS
        self.verify(before + 1)


def fails(
    job: Job, witness: Witness, act: Callable[[], object], error: type[BaseException] = DumpFailed
) -> BaseException:
    """Check that ``act`` raises ``error``, that the job then runs, that nothing is left behind, and
    that the repository is as it was.
    """
    before = len(witness.store.snapshots())
    with pytest.raises(error) as caught:
        act()
    at = time.time_ns()
    assert not standing(job.pid)
    assert not leftovers(witness.store.workdir)
    job.runs(at)
    witness.verify(before)
    return caught.value


def members(workdir: Path, word: str) -> list[int]:
    """Return the processes whose command line or working directory names both."""
    found = []
    own, folder, wanted = str(os.getpid()), str(workdir).encode(), word.encode()
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and entry != own:
            try:
                words = words_of(entry)
            except (FileNotFoundError, ProcessLookupError):
                continue
            if folder in words and wanted in words:
                found.append(int(entry))
    return found


class Dumper:
    """A dumper in a process of its own.

    Args:
        pause: The event at which it pauses.
        powerless: It has no capabilities.
        wrapped: What starts it.
        descriptors: How many it may have; 0: as many as this process.
        options: Of the dump.
    """

    def __init__(
        self,
        store: Store,
        job: Job,
        pause: tuple[str, str] | None = None,
        *,
        powerless: bool = False,
        wrapped: Sequence[str] = (),
        descriptors: int = 0,
        **options: object,
    ) -> None:
        assert isinstance(store.backend, LocalBackend)
        order = {
            "repository": str(store.backend.root),
            "workdir": str(store.workdir),
            "pid": job.pid,
            "pause": pause,
            "powerless": powerless,
            "descriptors": descriptors,
            "options": options,
        }
        self.process: zygote.Forked | subprocess.Popen[bytes]
        if wrapped:
            self.process = subprocess.Popen(
                [*wrapped, sys.executable, "-P", driver.__file__, json.dumps(order)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
            )
        else:
            self.process = zygote.program(driver.PROGRAM, json.dumps(order))

    def until(self, *moment: str, seconds: float = 20.0) -> list[str]:
        """Read the dumper's events until this one."""
        end = time.monotonic() + seconds
        assert self.process.stdout is not None
        while True:
            ready, _, _ = select.select(
                [self.process.stdout], [], [], max(0.0, end - time.monotonic())
            )
            line = self.process.stdout.readline() if ready else b""
            assert line, f"{moment} did not come"
            said: list[str] = json.loads(line)
            if said[: len(moment)] == list(moment):
                return said

    def end(self, number: int) -> int:
        """Send the dumper a signal, wait for its end and return its status."""
        self.process.send_signal(number)
        self.process.communicate(timeout=20)
        return self.process.returncode
