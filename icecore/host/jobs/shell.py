"""A shell command that the user configures. It has a session of its own, and everything that it
started ends with it unless it ends by itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress

_POLL_SECONDS = 0.02
# An exception of a signal's handler may come when the shell has been started and nobody knows it
# yet: then it does nothing, for nobody tells it to.
_WHEN_TOLD = 'read -r icecore_told && exec /bin/sh -c "$1" </dev/null'
#: From TERM to KILL.
_END_SECONDS = 3.0


def run_shell(command: str, environment: Mapping[str, str], *, seconds: float, output: int) -> int:
    """Run ``command`` with /bin/sh; return its exit status, or the negated number of the signal
    that ended it.

    What it leaves running in the background runs on, unless it is given up: then its process group
    is ended, by TERM and soon by KILL.

    Args:
        environment: All of it.
        seconds: Time that it may take.
        output: The descriptor that it writes to, on stdout and on stderr.

    Raises:
        TimeoutError: It did not end in time, and was given up. So it is with every other exception
            that is raised meanwhile.
    """
    words = ["/bin/sh", "-c", _WHEN_TOLD, "sh", command]
    told, tell = os.pipe()
    try:
        process = subprocess.Popen(
            words,
            env=dict(environment),
            stdin=told,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            os.write(tell, b"\n")
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            _end(process)
            raise TimeoutError(f"{command!r} did not end within {seconds:g} s") from None
        except BaseException:
            _end(process)
            raise
    finally:
        os.close(told)
        os.close(tell)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group, whose leader it is."""
    until = time.monotonic() + _END_SECONDS
    with suppress(ProcessLookupError):  # nobody is left
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < until:
            process.poll()  # a dead leader counts until it was waited for
            os.killpg(process.pid, 0)
            time.sleep(_POLL_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
