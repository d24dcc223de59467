"""What was measured of a supervised job, kept on its node so that a new supervisor knows it.

``STATE/schedules/NAME.json`` belongs to one supervisor at a time: the one that holds the lock on
``NAME.lock``.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from icecore.host.jobs import reserved
from icecore.host.jobs.logs import Stream
from icecore.private import create_private, private_state
from icecore.service.interval import Cost, FailureRate

FOLDER = reserved.FOLDER
#: Weight of the newest measurement in a moving average.
_NEWEST = 0.3
_KEPT = 64
_LOCK_SECONDS = 1.0
_MOST_RECORDS = 1000


class Taken(msgspec.Struct, frozen=True):
    """One snapshot that the supervisor took. Times in seconds, sizes in bytes.

    ``phases`` are the seconds of phases of the dump (docs/reference/events.md); ``freeze`` is the
    part of the window until CRIU had done its work. ``job_time`` is the job's own time
    (`icecore.service.supervision.failures`); 0: an older version recorded this.
    """

    at: float
    window: float
    seconds: float
    committing: float
    stored: int
    snapshot: str
    phases: dict[str, float] = {}
    job_time: float = 0.0


class Series(msgspec.Struct, frozen=True):
    """Failures that a job has not got past yet (`icecore.service.supervision.failures`).

    Attributes:
        past: The job's time at which it has got past them.
        count: How many they are; those before the last supervisor gave up do not count.
        started: When the job first started anew, by its own time; None: it was always restored.
        candidates: The snapshots from before the first failure; None: they were not looked for yet.
        anew: The job had none, so it is started anew once its candidates are used up.
        tried: Snapshot → how often the job failed from it, or it could not be restored; an empty
            string stands for the start.
        ran: The longest that an instance ran until it failed, in seconds.
    """

    past: float
    count: int
    started: float | None
    candidates: list[str] | None
    anew: bool
    tried: dict[str, int]
    ran: float = 0.0


class Basis(msgspec.Struct, frozen=True):
    """What the interval between a job's snapshots is computed from, besides what was measured.

    Attributes:
        every: The interval that its supervisor was given, in seconds; 0: it computes it.
        max_overhead, max_loss, slow_down, failure_seconds: See the configuration's ``schedule``.
    """

    every: float
    max_overhead: float
    max_loss: float
    slow_down: float
    failure_seconds: float


class Measured(msgspec.Struct, frozen=True):
    """What is known of a job.

    Attributes:
        taken: The newest snapshots, oldest first.
        stop_seconds: Moving average of the longest time that stopping the job with a snapshot
            takes: a periodic snapshot may have to be stored first.
        window_seconds, background_seconds, commit_seconds: Moving averages over its snapshots.
        failures: How often it has failed.
        ran_seconds: How long it has run under supervision.
        interval_seconds: From one periodic snapshot to the next; 0: none are taken.
        due: Unix time of the next periodic snapshot; 0: none is.
        notice_seconds: Time that the job has from a notice until it must be gone; 0: not known.
        basis: Of the interval; None: no periodic snapshots are taken, or an older version recorded
            this.
        shortened: How many snapshots ``taken`` had, if only the last is left; 0: it is whole.
        series: The failures that the job has not got past yet; None: it has, or an older version
            recorded this. If ``shortened``, it names no snapshots.
    """

    taken: list[Taken] = []
    stop_seconds: float = 0.0
    window_seconds: float = 0.0
    background_seconds: float = 0.0
    commit_seconds: float = 0.0
    failures: int = 0
    ran_seconds: float = 0.0
    interval_seconds: float = 0.0
    due: float = 0.0
    notice_seconds: float = 0.0
    basis: Basis | None = None
    shortened: int = 0
    series: Series | None = None

    @property
    def snapshots(self) -> int:
        """How many of the newest snapshots are known."""
        return self.shortened or len(self.taken)

    def shorter(self) -> Measured:
        """Return the same with the last snapshot only."""
        series = self.series
        if series is not None:  # it may name as many snapshots as the job has
            series = msgspec.structs.replace(series, candidates=None, tried={})
        return msgspec.structs.replace(
            self, taken=self.taken[-1:], shortened=self.snapshots, series=series
        )

    def after(self, done: Taken) -> Measured:
        """Return what is known once a snapshot was taken."""
        background = max(0.0, done.seconds - done.window)
        before_stop = done.committing if self.interval_seconds else 0.0

        def average(before: float, now: float) -> float:
            return now if not self.taken else before + _NEWEST * (now - before)

        return msgspec.structs.replace(
            self,
            taken=[*self.taken, done][-_KEPT:],
            stop_seconds=average(self.stop_seconds, before_stop + done.seconds),
            window_seconds=average(self.window_seconds, done.window),
            background_seconds=average(self.background_seconds, background),
            commit_seconds=average(self.commit_seconds, done.committing),
        )

    def cost(self, slow_down: float) -> Cost | None:
        """Return what a snapshot costs the job; None: none was taken yet."""
        if not self.taken:
            return None
        return Cost(self.window_seconds, self.background_seconds, self.commit_seconds, slow_down)

    def rate(self, prior_seconds: float) -> FailureRate:
        """Return how often the job fails."""
        return FailureRate(prior_seconds, self.failures, self.ran_seconds)


class Record:
    """The record of one job, under its lock.

    Args:
        state: icecore's state directory.
        name: The job's name.
    """

    def __init__(self, state: Path, name: str) -> None:
        self._state = state
        self._folder = state / FOLDER
        self._name = name
        self._path = self._folder / f"{name}.json"
        self._lock_path = reserved.lock_path(state, name)
        self._shown = self._folder / f"{name}.shown"
        self._lock = self._showing = -1
        self._held = False
        self.measured = read(state, name)

    def lock(self) -> bool:
        """Take the lock for as long as this process lives; False: another supervisor has it."""
        private_state(self._state, FOLDER)
        self._lock = os.open(
            self._lock_path,
            os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
        )
        end = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    self.close()
                    return False
                time.sleep(0.05)  # a watchdog may just be looking
        os.ftruncate(self._lock, 0)
        self._held = True
        reserved.hold(self._lock_path)
        return True

    def watches(self, instance: str) -> None:
        """Write down which instance has a watchdog of this supervisor's."""
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, instance.encode(), 0)

    def shown(self, instance: str) -> dict[Stream, int] | None:
        """Return how much of an instance's output was shown, in bytes; None: it is not known."""
        try:
            named, *counts = self._shown.read_text().split()
            out, err = map(int, counts)
        except (OSError, ValueError):
            return None
        return {"stdout": out, "stderr": err} if named == instance else None

    def show(self, instance: str, shown: Mapping[Stream, int]) -> None:
        """Write down how much of an instance's output was shown, for the next supervisor."""
        with suppress(OSError):
            if self._showing < 0:
                self._showing = create_private(self._shown)
            counts = " ".join(f"{shown.get(stream, 0):020}" for stream in ("stdout", "stderr"))
            os.pwrite(self._showing, f"{instance} {counts}\n".encode(), 0)

    def save(self, measured: Measured) -> None:
        """Keep what is known; where it cannot be written, for this process only: it is advice."""
        self.measured = measured
        new = self._folder / f"{self._name}.new"
        with suppress(OSError):
            with open(create_private(new), "wb") as file:
                file.write(msgspec.json.encode(measured))
            os.replace(new, self._path)

    def close(self) -> None:
        """Release the lock."""
        if self._held:
            self._held = False
            reserved.release(self._lock_path)
        for descriptor in (self._lock, self._showing):
            if descriptor >= 0:
                os.close(descriptor)
        self._lock = self._showing = -1


def read(state: Path, name: str) -> Measured:
    """Return what is known of a job. A record that cannot be read counts as none: it is advice."""
    try:
        return _read(state, name)
    except OSError:
        return Measured()


def _read(state: Path, name: str) -> Measured:
    data = (state / FOLDER / f"{name}.json").read_bytes()
    try:
        return msgspec.json.decode(data, type=Measured)
    except msgspec.DecodeError:
        return Measured()


class Records:
    """What is known of a node's jobs; a record is read again once it has changed.

    Args:
        state: The node's state directory.
    """

    def __init__(self, state: Path) -> None:
        self._state = state
        #: Job → the identity of its record and what was in it. Threads share it.
        self._read: dict[str, tuple[tuple[int, ...], Measured]] = {}

    def of(self, name: str) -> Measured:
        """Return what is known of a job, as `read` does, but only its last snapshot."""
        try:
            about = os.stat(self._state / FOLDER / f"{name}.json")
            # It is only ever replaced as a whole.
            identity = (about.st_dev, about.st_ino, about.st_size, about.st_ctime_ns)
            known = self._read.get(name)
            if known is None or known[0] != identity:
                # A node may have many jobs, and a service lives for long.
                known = identity, _read(self._state, name).shorter()
        except OSError:
            self._read.pop(name, None)
            return Measured()
        if len(self._read) >= _MOST_RECORDS:
            self._read.clear()
        self._read[name] = known
        return known[1]


def is_watched(state: Path, name: str, instance: str) -> bool:
    """Return whether a supervisor on this node holds the lock of a job, and has a watchdog of its
    own beside the instance.
    """
    try:
        descriptor = os.open(reserved.lock_path(state, name), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, 256, 0) == instance.encode()
    else:
        return False
    finally:
        os.close(descriptor)
