"""A user's shell command at a certain moment; rule: it sees what it is about in ICECORE_…
variables, and what it prints goes to stderr.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from icecore.config import without_secrets
from icecore.errors import HookFailed
from icecore.events import Sink, discard, phase
from icecore.host.jobs.shell import run_shell


def run_hook(
    command: str, variables: Mapping[str, str], *, seconds: float, emit: Sink = discard
) -> None:
    """Run ``command`` with /bin/sh; nothing if it is empty.

    Args:
        variables: Added to the environment.
        seconds: Time that it may take.
        emit: Gets a ``hook`` phase.

    Raises:
        HookFailed: It ended with another status than 0, or not in time (then it was killed).
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
                cure="let it do its work in the background",
            ) from None
        if status:
            raise HookFailed(
                f"the hook {command!r} ended with status {status}",
                cure="correct the command; the job itself runs",
            )
