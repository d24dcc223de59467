"""Ends a job whose supervisor was killed, unless another supervisor of this node takes it over.

The supervisor holds the lease of the job's name. Once it is gone, another node may take the lease
after `icecore.store.log.lease.SILENCE_SECONDS` and bring the job back there; the job must not run
here by then. Run as ``python -m icecore.service.watchdog STATE NAME INSTANCE``; standard input is a
pipe whose other end the supervisor holds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from icecore.errors import IcecoreError
from icecore.host.jobs.job import Job
from icecore.service.record import is_supervised

#: Less than the silence after which another node may run the job.
PATIENCE_SECONDS = 60.0
_LOOK_SECONDS = 0.5


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
                *(str(state), job.name, job.instance),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def disarm(self) -> None:
        """Let the job live without a supervisor, or end the watchdog of one that has ended."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(b"disarm\n")
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> None:
    """Wait for the supervisor's end, then for another supervisor, then end the job."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # sent to all processes of a node or of a batch job
    state, name, instance = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    if os.read(0, 64):
        return
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
        if is_supervised(state, name):
            return
    with suppress(IcecoreError):
        Job.load(state / "jobs" / instance).kill(signal.SIGKILL)


if __name__ == "__main__":
    main()
