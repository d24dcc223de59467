"""Prevent a job from running without a lease, even if its supervisor dies.

The supervisor tells its watchdog of each renewal of the lease. After
`icecore.store.log.lease.PAUSE_SECONDS` without a renewal it stops the job's processes, and continues
them at the next one. If the supervisor is killed, the watchdog ends the job at that time,
unless another supervisor of this node has taken the job over. So the job does not run once another
node can have the lease.

A file lists the processes that it has stopped. Only the next watchdog of the job continues them,
because it knows when the lease was renewed.

Run as ``python -m icecore.service.supervision.watchdog STATE NAME INSTANCE SECONDS RENEWED``; standard input is
a pipe whose other end the supervisor holds. RENEWED is the time of the last renewal, by
`icecore.store.log.lease_clock.now`.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from icecore.errors import IcecoreError
from icecore.host.jobs.job import Job
from icecore.host.kernel import freezer, procfs
from icecore.private import create_private
from icecore.service.record import FOLDER, is_watched
from icecore.store.log.lease_clock import now

_LOOK_SECONDS = 0.25
_RENEWED, _DISARMED = b"r", b"d"
_MESSAGE = struct.Struct("<cd")
_PASSES = 50
#: How long the end of a job waits for processes that its init does not end.
_END_SECONDS = 10.0


class Watchdog:
    """The watchdog of one instance, as the supervisor sees it.

    Args:
        state: icecore's state directory.
        job: The instance.
        renewed: When the lease was last renewed, by `icecore.store.log.lease_clock.now`.
    """

    def __init__(self, state: Path, job: Job, renewed: float) -> None:
        from icecore.store.log import lease  # the watchdog's own process does not need it

        self._process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "icecore.service.supervision.watchdog"),
                *(str(state), job.name, job.instance, str(lease.PAUSE_SECONDS), str(renewed)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def renewed(self, at: float) -> None:
        """Report the time of a renewal of the lease."""
        self._say(_RENEWED, at)

    def disarm(self) -> None:
        """Let the job live without a supervisor, or end the watchdog of one that has ended."""
        self._say(_DISARMED)
        self.leave()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def leave(self) -> None:
        """Make the watchdog act as if this process had been killed."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def _say(self, word: bytes, at: float = 0.0) -> None:
        with suppress(OSError, ValueError):
            os.write(self._pipe, _MESSAGE.pack(word, at))


class Stopped:
    """The stopped processes of a job that have to be continued, recorded in a file.

    Args:
        path: The file. One that cannot be read counts as empty.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._known = msgspec.json.decode(path.read_bytes(), type=dict[int, int])
        except (OSError, msgspec.DecodeError):
            self._known = {}

    def stop(self, job: Job) -> None:
        """Stop all running processes of a job, parents first."""
        for pid in _each(job):
            try:
                about = procfs.status(pid)
                if about.state == "T":
                    continue
                self._keep({**self._known, pid: about.start_time})  # before: this may be killed
                os.kill(pid, signal.SIGSTOP)
            except (IcecoreError, ProcessLookupError):  # it has ended
                continue

    def go_on(self) -> None:
        """Continue them."""
        for pid, start in self._known.items():
            with suppress(IcecoreError, ProcessLookupError):
                if procfs.start_time(pid) == start:
                    os.kill(pid, signal.SIGCONT)
        if self._known:
            self._keep({})

    def _keep(self, known: dict[int, int]) -> None:
        self._known = known
        new = self._path.with_suffix(".new")
        with suppress(OSError):
            with open(create_private(new), "wb") as file:
                file.write(msgspec.json.encode(known))
            os.replace(new, self._path)


def _each(job: Job) -> Iterator[int]:
    """Yield each process of a job once, except its init, and also processes that are forked meanwhile.
    The init forwards signals, including SIGCONT.
    """
    seen = {job.pid}
    for _ in range(_PASSES):
        if not job.alive:
            return
        try:
            fresh = [pid for pid in procfs.tree(job.pid) if pid not in seen]
        except IcecoreError:  # it forks as we look
            continue
        if not fresh:
            return
        seen.update(fresh)
        yield from fresh


def resume_all(job: Job) -> None:
    """Continue all processes of a job."""
    for pid in _each(job):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def lives(job: Job) -> bool:
    """Return whether a process of a job runs, even if its init has ended."""
    return job.alive or (job.group is not None and bool(freezer.processes(job.group)))


def end(job: Job) -> None:
    """End a job at once, even if it is stopped, or if its init has ended already."""
    with suppress(IcecoreError):
        job.kill(signal.SIGKILL)
    if job.alive:  # an init that is stopped would never collect its children
        with suppress(ProcessLookupError):
            os.kill(job.pid, signal.SIGCONT)
    if job.group is not None:
        freezer.kill_group(job.group, _END_SECONDS)


class _Watch:
    """The main loop of the watchdog process."""

    def __init__(
        self, state: Path, name: str, instance: str, seconds: float, renewed: float
    ) -> None:
        self._state = state
        self._name = name
        self._instance = instance
        self._seconds = seconds
        self._job = Job.load(state / "jobs" / instance)
        self._renewed = renewed
        self._stopped = Stopped(state / FOLDER / f"{name}.stopped")
        self._orphaned = False

    def run(self) -> None:
        """Watch until the job ends or the watchdog is disarmed."""
        if now() - self._renewed < self._seconds:
            self._stopped.go_on()
        poll = select.poll()
        poll.register(0, select.POLLIN)
        while lives(self._job):
            for _ in [] if self._orphaned else poll.poll(_LOOK_SECONDS * 1000):
                said = os.read(0, _MESSAGE.size)
                if not said:
                    self._orphaned = True
                    break
                word, at = _MESSAGE.unpack(said)
                if word == _DISARMED:
                    self._stopped.go_on()
                    return
                self._renewed = at
                if now() - at < self._seconds:
                    self._stopped.go_on()
            if self._orphaned:
                if is_watched(self._state, self._name, self._instance):
                    return
                select.select([], [], [], _LOOK_SECONDS)
            if now() - self._renewed < self._seconds:
                continue
            if self._orphaned:
                end(self._job)
                return
            self._stopped.stop(self._job)


def main() -> None:
    """Entry point of the process."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # sent to all processes of a node or of a batch job
    with suppress(IcecoreError):
        _Watch(Path(sys.argv[1]), sys.argv[2], sys.argv[3], *map(float, sys.argv[4:6])).run()


if __name__ == "__main__":
    main()
