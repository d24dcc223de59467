"""Leaves a job that is to be restored elsewhere: the requeue command, and the exit status."""

from __future__ import annotations

import os
import signal
import time

from icecore.environment import without_secrets
from icecore.host.jobs.shell import run_shell
from icecore.service.record import Measured
from icecore.service.supervision.instances import Tell
from icecore.service.supervision.plan import Plan

_REQUEUE_SECONDS = 60.0


def leave(plan: Plan, snapshot: str, known: Measured, tell: Tell) -> int:
    """Run the requeue command and return the preempted status.

    Args:
        snapshot: The one to restore; empty: the job starts anew.
        known: What was measured of the job.
    """
    if not plan.requeue:
        return plan.preempted_exit
    taken = {one.snapshot: one.at for one in known.taken}
    at = time.gmtime(taken[snapshot]) if snapshot in taken else None
    variables = {
        "ICECORE_JOB": plan.name,
        "ICECORE_SNAPSHOT": snapshot,
        "ICECORE_SNAPSHOT_TIME": time.strftime("%FT%TZ", at) if at else "",
    }
    environment = {**without_secrets(os.environ), **variables}
    try:
        status = run_shell(plan.requeue, environment, seconds=_REQUEUE_SECONDS, output=2)
    except OSError as error:  # also TimeoutError
        tell("run.requeue_failed", error=str(error))
    else:
        if status:
            tell("run.requeue_failed", error=f"it ended with status {status}")
    return plan.preempted_exit


def leave_before(plan: Plan, number: int, known: Measured, tell: Tell) -> int:
    """Return the exit status after a signal that came before there was a job. Unless the signal
    comes from a person or is meant for the job, whoever ended this process starts it again.
    """
    if plan.on_term == "pass" or number == signal.SIGINT:
        return 128 + number
    # The newest that this node took: the repository may be unreachable.
    return leave(plan, known.taken[-1].snapshot if known.taken else "", known, tell)
