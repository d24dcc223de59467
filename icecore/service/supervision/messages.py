"""What the thread that decides hears from all the others."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from icecore.errors import IcecoreError
from icecore.host.jobs.job import ExitStatus
from icecore.service.record import Taken

#: Signals on which the job is stopped with a snapshot, or to which it is told.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Signalled:
    """A signal came, at a time of ``time.monotonic``."""

    number: int
    at: float


@dataclass(frozen=True)
class Noticed:
    """The machine is about to go."""

    why: str


@dataclass(frozen=True)
class Ended:
    """An instance has ended."""

    instance: str
    status: ExitStatus


@dataclass(frozen=True)
class Dumped:
    """A snapshot was taken, or failed.

    Attributes:
        stop: The job was to end with it.
        taken: What it cost; None: it failed.
        error: Why; None also if it was no longer needed.
    """

    stop: bool
    taken: Taken | None
    error: IcecoreError | None


Message = Signalled | Noticed | Ended | Dumped
Messages = queue.SimpleQueue[Message]


@contextmanager
def signals(messages: Messages) -> Iterator[None]:
    """Turn signals into messages."""

    def told(number: int, frame: FrameType | None) -> None:
        messages.put(Signalled(number, time.monotonic()))

    heeded = [
        number
        for number in SIGNALS
        # nohup(1) ignores it for what it starts.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, told) for number in heeded}
    # The service starts it with them blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
