"""Keeps a job from running without a lease, whatever becomes of its supervisor.

The supervisor tells its watchdog of each renewal of the lease. After
`icecore.store.log.lease.PAUSE_SECONDS` without one the watchdog stops the job's processes, and
continues them at the next. If the supervisor is killed, the watchdog ends the job at that time,
unless another supervisor of this node has taken the job over. So the job does not run once another
node can have the lease.

Run as ``python -m icecore.service.watchdog STATE NAME INSTANCE SECONDS``; standard input is a pipe
whose other end the supervisor holds.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from icecore.errors import IcecoreError
from icecore.host.jobs.job import Job
from icecore.host.kernel import procfs
from icecore.service.record import is_watched
from icecore.store.log import lease

_LOOK_SECONDS = 0.25
_RENEWED, _DISARMED = b".", b"d"
_PASSES = 50


class Watchdog:
    """The watchdog of one instance, as the supervisor sees it.

    Args:
        state: icecore's state directory.
        job: The instance.
    """

    def __init__(self, state: Path, job: Job) -> None:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "icecore.service.watchdog"),
                *(str(state), job.name, job.instance, str(lease.PAUSE_SECONDS)),
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

    def renewed(self) -> None:
        """Tell it of a renewal of the lease."""
        self._say(_RENEWED)

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
        """Let it act as if this process had been killed."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def _say(self, word: bytes) -> None:
        with suppress(OSError, ValueError):
            os.write(self._pipe, word)


def signal_tree(job: Job, number: int, *, only: set[int] | None = None) -> set[int]:
    """Send a signal to all processes of a job, parents first, until there are no more.

    Args:
        only: Of these alone.

    Returns:
        Whom it was sent to. With SIGSTOP: those that did not stand still before.
    """
    sent: set[int] = set()
    for _ in range(_PASSES):
        if not job.alive:
            break
        try:
            fresh = [pid for pid in procfs.tree(job.pid) if pid not in sent]
        except IcecoreError:  # it forks as we look
            continue
        fresh = [pid for pid in fresh if only is None or pid in only]
        if not fresh:
            break
        for pid in fresh:
            sent.add(pid)
            with suppress(IcecoreError, ProcessLookupError):
                if number == signal.SIGSTOP and procfs.status(pid).state == "T":
                    continue
                os.kill(pid, number)
    return sent


def end(job: Job) -> None:
    """End a job at once, also one that stands still."""
    with suppress(IcecoreError):
        job.kill(signal.SIGKILL)
    if job.alive:  # an init that is stopped would never collect its children
        with suppress(ProcessLookupError):
            os.kill(job.pid, signal.SIGCONT)


class _Watch:
    """What the watchdog's process does."""

    def __init__(self, state: Path, name: str, instance: str, seconds: float) -> None:
        self._state = state
        self._name = name
        self._instance = instance
        self._seconds = seconds
        self._job = Job.load(state / "jobs" / instance)
        self._renewed = lease.now()
        self._stopped: set[int] = set()
        self._orphaned = False

    def run(self) -> None:
        """Watch until the job ends, or until nobody needs it."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        while self._job.alive:
            for _ in [] if self._orphaned else poll.poll(_LOOK_SECONDS * 1000):
                said = os.read(0, 4096)
                if _DISARMED in said:
                    self._go_on()
                    return
                if not said:
                    self._orphaned = True
                elif _RENEWED in said:
                    self._renewed = lease.now()
                    self._go_on()
            if self._orphaned:
                if is_watched(self._state, self._name, self._instance):
                    return
                select.select([], [], [], _LOOK_SECONDS)
            if lease.now() - self._renewed < self._seconds:
                continue
            if self._orphaned:
                end(self._job)
                return
            self._stopped |= signal_tree(self._job, signal.SIGSTOP)

    def _go_on(self) -> None:
        if self._stopped:
            signal_tree(self._job, signal.SIGCONT, only=self._stopped)
            self._stopped = set()


def main() -> None:
    """Entry point of the process."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # sent to all processes of a node or of a batch job
    with suppress(IcecoreError):
        _Watch(Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])).run()


if __name__ == "__main__":
    main()
