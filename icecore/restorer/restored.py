"""A tree that a restore has brought back: how far it is, and how it ends."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future

import msgspec

from icecore.host.jobs.job import ExitStatus, Job
from icecore.host.jobs.logs import Stream


class Restored(msgspec.Struct):
    """A restored tree.

    Attributes:
        snapshot: The snapshot that it was restored from.
        pid: Its root process, in the pid namespace of the caller.
        job: The instance, for jobs that `icecore run` started.
        seconds_to_running: From the call until the tree ran.
        seconds_to_resident: From the call until all memory was loaded; None until then.
        log_sizes: Bytes in the logs of ``job`` before it ran; the restored instance has written
            what follows them.
        limits: The limits (setrlimit(2)) that are lower than they were when it was dumped, because
            they cannot be raised here; a sentence each.
    """

    snapshot: str
    pid: int
    job: Job | None
    seconds_to_running: float
    seconds_to_resident: float | None = None
    log_sizes: Mapping[Stream, int] = msgspec.field(default_factory=dict)
    limits: list[str] = msgspec.field(default_factory=list)
    _loaded: Future[float] = msgspec.field(default_factory=Future)
    _exit: Future[int] = msgspec.field(default_factory=Future)

    def wait_resident(self, timeout: float | None = None) -> float:
        """Wait until all memory is loaded; until then a lazily restored tree dies with this
        process.

        Returns:
            `seconds_to_resident`.

        Raises:
            RestoreFailed, Damaged, StoreError: The memory cannot be loaded: the tree was killed.
            TimeoutError: ``timeout`` seconds have passed.
        """
        return self._loaded.result(timeout)

    def wait(self, timeout: float | None = None) -> ExitStatus:
        """Wait for the end of the root process: of a job, or of a tree restored without ``detach``.

        Raises:
            TimeoutError: It still runs.
        """
        if self.job is not None:
            return self.job.wait(timeout)
        status = self._exit.result(timeout)
        return ExitStatus(code=status) if status >= 0 else ExitStatus(signal=-status)
