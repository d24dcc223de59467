"""Set how the OOM killer ranks a process. Processes that hold a job are protected, and the job
keeps its own rank.

The rank is inherited by children (proc(5), oom_score_adj). Lowering it requires CAP_SYS_RESOURCE,
down to a minimum that is inherited too.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

#: The OOM killer never chooses such a process.
PROTECTED = -1000
CURE = "give icecore CAP_SYS_RESOURCE (root has it; in a container: --cap-add SYS_RESOURCE or --privileged)"


def score(pid: int | str = "self") -> int:
    """Return the ``oom_score_adj`` of a process.

    Raises:
        OSError: There is no such process.
    """
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def protect() -> int:
    """Keep the OOM killer from choosing this process, as far as the kernel permits it.

    Returns:
        The ``oom_score_adj`` that was reached: `PROTECTED`, or where that is refused, 0 at best.
    """
    for wanted in (PROTECTED, 0):
        if score() <= wanted:
            break
        with suppress(PermissionError):
            Path("/proc/self/oom_score_adj").write_text(str(wanted))
            break
    return score()
