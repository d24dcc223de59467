"""Shows what the instances of a supervised job write."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from icecore.host.jobs.job import Job
from icecore.host.jobs.logs import LogPiece, Stream
from icecore.service.record import Record
from icecore.service.supervision.instances import Begun, Tell

#: Time for what an instance has written to be shown once it has ended.
DRAIN_SECONDS = 30.0
#: How long a job that has to leave waits for a reader that has stopped reading.
_STUCK_SECONDS = 5.0
_JOIN_SECONDS = 0.1
_RETRY_SECONDS = 0.5
_READER_SECONDS = 0.02
#: Nobody will ever read what is written.
_GONE = frozenset({errno.EPIPE, errno.EBADF})


class Output:
    """Follows one instance after the other.

    Args:
        write: Gets the output.
        record: Remembers how much of it was shown.
    """

    def __init__(self, write: Callable[[Job, LogPiece], None], record: Record, tell: Tell) -> None:
        self._write = write
        self._record = record
        self._tell = tell
        self._follower: threading.Thread | None = None
        self._told = False
        self._showed = 0.0

    def follow(self, begun: Begun) -> None:
        """Show what an instance writes from now on, in a thread."""
        job, seen = begun
        self._tell(
            "run.following",
            instance=job.instance,
            seen={stream: seen.get(stream, 0) for stream in ("stdout", "stderr")},
        )
        self._follower = threading.Thread(
            target=self._follow, args=(job, dict(seen)), name="follow", daemon=True
        )
        self._follower.start()

    def drain(self, *, hurried: bool = False) -> None:
        """Wait until all that an instance has written is shown.

        Args:
            hurried: Give up early if nothing more can be shown.
        """
        if self._follower is None:
            return
        began = time.monotonic()
        while self._follower.is_alive():
            now = time.monotonic()
            stuck = hurried and now - max(began, self._showed) > _STUCK_SECONDS
            if stuck or now - began > DRAIN_SECONDS:
                return
            self._follower.join(_JOIN_SECONDS)

    def is_patient(self, error: OSError) -> bool:
        """Wait before output that could not be written is tried again; False: nobody reads it."""
        if error.errno in _GONE:
            return False
        if isinstance(error, BlockingIOError):  # the reader is slow
            time.sleep(_READER_SECONDS)
            return True
        if not self._told:
            self._told = True
            self._tell("run.output_failed", error=str(error))
        time.sleep(_RETRY_SECONDS)
        return True

    def _follow(self, job: Job, seen: dict[Stream, int]) -> None:
        shown: dict[Stream, int] = {"stdout": 0, "stderr": 0, **seen}
        for piece in job.logs_after(seen, follow=True):
            with suppress(OSError):  # nobody reads it; it is in the job's logs
                self._write(job, piece)
            self._showed = time.monotonic()
            shown[piece.stream] += piece.removed + len(piece.data)
            self._record.show(job.instance, shown)
