"""What the thread that decides hears from all the others."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import msgspec

from icecore.errors import IcecoreError
from icecore.host.jobs.job import ExitStatus
from icecore.service.record import Taken

#: Signals on which the job is stopped with a snapshot, or to which it is told.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


class Signalled(msgspec.Struct, frozen=True):
    """A signal came, at a time of ``time.monotonic``."""

    number: int
    at: float


class Noticed(msgspec.Struct, frozen=True):
    """The machine is about to go."""

    why: str


class Ended(msgspec.Struct, frozen=True):
    """An instance has ended."""

    instance: str
    status: ExitStatus


class Dumped(msgspec.Struct, frozen=True):
    """A snapshot was taken, or failed.

    Attributes:
        stop: The job was to end with it.
        taken: What it cost; None: it failed.
        error: Why; None also if it was no longer needed.
        committed: When it was committed, by ``time.monotonic``.
    """

    stop: bool
    taken: Taken | None
    error: IcecoreError | None
    committed: float = 0.0


class Asked(BaseException):
    """A signal came before there was a job."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


Message = Signalled | Noticed | Ended | Dumped
Messages = queue.SimpleQueue[Message]


@contextmanager
def signals(messages: Messages) -> Iterator[None]:
    """Turn signals into messages."""

    def told(number: int, frame: FrameType | None) -> None:
        messages.put(Signalled(number, time.monotonic()))

    before = {number: signal.signal(number, told) for number in _heeded()}
    # The service starts it with them blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Early:
    """Turns signals into messages from the beginning of a supervised run."""

    def __init__(self) -> None:
        self.messages: Messages = queue.SimpleQueue()
        self._interrupts = False
        for number in _heeded():
            signal.signal(number, self._told)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Let the first signal interrupt the body, even if it came before.

        Raises:
            Asked: A signal came.
        """
        self._interrupts = True
        try:
            with suppress(queue.Empty):
                message = self.messages.get_nowait()
                assert isinstance(message, Signalled), "there is no job yet"
                raise Asked(message.number)
            yield
        finally:
            self._interrupts = False

    def close(self) -> None:
        """Ignore the signals of service managers and schedulers from now on: the exit status is
        decided, and they may send several.
        """
        for number in SIGNALS:
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_IGN)

    def _told(self, number: int, frame: FrameType | None) -> None:
        if self._interrupts:
            self._interrupts = False
            raise Asked(number)
        self.messages.put(Signalled(number, time.monotonic()))


def _heeded() -> list[int]:
    return [
        number
        for number in SIGNALS
        # nohup(1) ignores it for what it starts.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]
