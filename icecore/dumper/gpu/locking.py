"""Lock GPU processes: the driver completes the work that a process has submitted, and accepts no more
until the process is unlocked.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from icecore.errors import DumpFailed
from icecore.events import Sink, phase
from icecore.host.cuda.api import DeviceError, LockTimeout
from icecore.host.gpu.client import Helper

#: Shares of the time that is allowed for a lock, one for each attempt. Ranks that wait for each
#: other (one is locked, the other's collective is under way) never come to rest. With several
#: processes, the first attempts are therefore short, and each begins at another point of their
#: steps.
LOCK_ONE = (1.0, 1.0, 1.0)
LOCK_SEVERAL = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
_PAUSE_SECONDS = 0.2


def lock_all(
    helper: Helper,
    pids: Sequence[int],
    seconds: float,
    emit: Sink,
    leave_out: Callable[[], Collection[int]] = frozenset,
) -> None:
    """Lock all processes or none. A rank that waits for a locked one never comes to rest, so after
    a timeout all are unlocked, and the next attempt follows.

    Args:
        seconds: How long the last attempt may take.
        leave_out: Called if processes could not be locked; returns those that may be left out.

    Raises:
        DumpFailed: A process could not be locked, or unlocked again.
    """
    with phase(emit, "dump.gpu.lock", processes=len(pids)) as running:
        shares = LOCK_SEVERAL if len(pids) > 1 else LOCK_ONE
        for attempt, share in enumerate(shares, 1):
            running.fields["attempts"] = attempt
            failed = helper.lock(pids, seconds * share)
            if failed:
                over = leave_out()
                pids = [pid for pid in pids if pid not in over]
                failed = {pid: error for pid, error in failed.items() if pid not in over}
            if not failed:
                return
            timeouts = {
                pid: error for pid, error in failed.items() if isinstance(error, LockTimeout)
            }
            if len(timeouts) < len(failed) or attempt == len(shares):
                raise_failed(failed, "locked")
            raise_failed(helper.unlock(pid for pid in pids if pid not in failed), "unlocked")
            time.sleep(random.uniform(0.1, 1.0) * _PAUSE_SECONDS)


def lock_briefly(helper: Helper, pids: Collection[int], seconds: float) -> None:
    """Lock all processes or none, in one attempt.

    Raises:
        DeviceError: A process could not be locked; a timeout only if nothing else failed.
    """
    failed = helper.lock(pids, seconds)
    if failed:
        helper.unlock([pid for pid in pids if pid not in failed])
        raise min(failed.values(), key=lambda error: isinstance(error, LockTimeout))


def unlock(helper: Helper, pids: Collection[int]) -> None:
    """Unlock processes.

    Raises:
        DeviceError: One could not be unlocked.
    """
    for error in helper.unlock(pids).values():
        raise error


def raise_failed(failed: Mapping[int, DeviceError], what: str) -> None:
    """Raise one error for all that failed, if anything did.

    Args:
        failed: By pid.
        what: What the processes could not be, in a word: locked, …

    Raises:
        DumpFailed: Something failed.
    """
    if failed:
        cures = dict.fromkeys(error.cure for error in failed.values() if error.cure)
        words = "; ".join(error.message for error in failed.values())
        raise DumpFailed(f"GPU processes could not be {what}: {words}", cure="; ".join(cures))
