"""Hooks: a user's shell command that runs at a certain point of an operation.

ICECORE_… variables describe the operation to the hook. Its output goes to stderr.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from icecore.environment import without_secrets
from icecore.errors import HookFailed
from icecore.events import Sink, discard, phase
from icecore.host.jobs.shell import run_shell


def run_hook(
    command: str, variables: Mapping[str, str], *, seconds: float, emit: Sink = discard
) -> None:
    """Run a command with /bin/sh. Do nothing if it is empty.

    Args:
        variables: Added to the environment.
        seconds: Time limit.
        emit: Gets a ``hook`` phase.

    Raises:
        HookFailed: The command failed, or was killed at the time limit.
    """
    if not command:
        return
    with phase(emit, "hook", command=command):
        try:
            status = run_shell(
                command, {**without_secrets(os.environ), **variables}, seconds=seconds, output=2
            )
        except TimeoutError:
            raise HookFailed(
                f"the hook {command!r} was killed after {seconds:.0f} s",
                cure="run long work in the background",
            ) from None
        if status:
            raise HookFailed(
                f"the hook {command!r} ended with status {status}",
                cure="correct the command; the job runs",
            )
