"""Set how the OOM killer ranks a process. Processes that hold a job are protected, and the job
keeps its own rank.

The rank is inherited by children (proc(5), oom_score_adj). Lowering it requires CAP_SYS_RESOURCE,
down to a minimum that is inherited too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

#: The OOM killer never chooses such a process.
PROTECTED = -1000
CURE = "give icecore CAP_SYS_RESOURCE (root has it; in a container: --cap-add SYS_RESOURCE or --privileged)"


def score(pid: int | str = "self") -> int:
    """Return the ``oom_score_adj`` of a process.

    Raises:
        OSError: There is no such process.
    """
    with open(f"/proc/{pid}/oom_score_adj", encoding="ascii") as file:
        return int(file.read())


def protect() -> int:
    """Keep the OOM killer from choosing this process, as far as the kernel permits it.

    Returns:
        The ``oom_score_adj`` that was reached: `PROTECTED`, or where that is refused, 0 at best.
    """
    for wanted in (PROTECTED, 0):
        if score() <= wanted or _set(wanted):
            break
    return score()


@contextmanager
def ordinary() -> Iterator[None]:
    """Have what is started within the block begin with a score of 0, if the kernel permits it. It
    inherits the score, and the minimum to which it may lower it.
    """
    before = score()
    _set(0)
    try:
        yield
    finally:
        if not _set(PROTECTED):
            _set(before)


def _set(wanted: int) -> bool:
    """Set the score of this process; False: the kernel refuses."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(str(wanted))
    except PermissionError:
        return False
    return True
