"""Whether a caller is confined by a security module, and what its jobs do not inherit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from icecore.errors import UsageError
from icecore.host.jobs.identity import Identity


@pytest.mark.parametrize(
    ("label", "own", "refused"),
    [
        (b"docker-default (enforce)\n", b"unconfined\n", True),
        (b"system_u:system_r:httpd_t:s0\0", b"system_u:system_r:unconfined_service_t:s0\0", True),
        (b"user_u:user_r:unconfined_t:s0\0", b"system_u:system_r:icecore_t:s0\0", False),
        (b"unconfined\n", b"icecore (enforce)\n", False),
        (b"editor (unconfined)\n", b"unconfined\n", False),
        (b"icecore (enforce)\n", b"icecore (enforce)\n", False),
        # Complain mode enforces "deny" rules: aa-complain(8).
        (b"editor (complain)\n", b"unconfined\n", True),
        (b"user_u:user_r:user_t:s0\0", b"system_u:system_r:icecore_t:s0\0", True),
        (b"staff_u:staff_r:staff_t:s0\0", b"system_u:system_r:icecore_t:s0\0", True),
    ],
)
def test_a_confined_caller_is_refused(
    label: bytes, own: bytes, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels are those of kernels with a security module, which a machine need not have."""
    pid = os.getpid()
    labels = {f"/proc/{pid}/attr/current": label, "/proc/self/attr/current": own}
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: labels.get(str(path)) or read(path))
    if refused:
        with pytest.raises(UsageError, match="confined by a security module") as found:
            Identity.of_process(pid)
        cure = (
            "semanage login -a -s unconfined_u" if b":" in label else "without an AppArmor profile"
        )
        assert cure in found.value.cure
    else:
        assert Identity.of_process(pid).user == os.geteuid()


#: Takes a nice value and a policy, and prints the pid of a child.
SCHEDULED = """
import os, sys, time
nice, policy, priority = map(int, sys.argv[1:])
os.setpriority(os.PRIO_PROCESS, 0, nice)
os.sched_setscheduler(0, policy, os.sched_param(priority))
child = os.fork()
if child:
    print(child, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root takes these without rtkit")
@pytest.mark.parametrize("flag", [0, os.SCHED_RESET_ON_FORK], ids=["inherited", "reset"])
@pytest.mark.parametrize(
    ("nice", "policy", "priority"),
    [
        (-11, os.SCHED_OTHER, 0),
        (4, os.SCHED_OTHER, 0),
        (-3, os.SCHED_BATCH, 0),
        (0, os.SCHED_IDLE, 0),
        (5, os.SCHED_RR, 2),
        (-5, os.SCHED_FIFO, 1),
    ],
)
def test_a_job_is_scheduled_like_a_child_of_its_caller(
    nice: int, policy: int, priority: int, flag: int
) -> None:
    words = [sys.executable, "-c", SCHEDULED, str(nice), str(policy | flag), str(priority)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            child = int(process.stdout.readline())
            found = Identity.of_process(process.pid)
            assert (found.nice, found.policy, found.priority) == (
                os.getpriority(os.PRIO_PROCESS, child),
                os.sched_getscheduler(child) & ~os.SCHED_RESET_ON_FORK,
                os.sched_getparam(child).sched_priority,
            )
            assert not flag or (found.nice >= 0 and not found.priority)
        finally:
            process.communicate(timeout=10)
