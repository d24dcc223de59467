"""A user's shell command at a certain moment; rule: it sees what it is about in ICECORE_… variables, and what it prints goes to stderr."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from icecore.errors import IcecoreError
from icecore.events import Sink, discard, phase
from icecore.passphrase import without_secrets


class HookFailed(IcecoreError):
    """A hook ended with an error or took too long; what it was to follow is done all the same."""


def run_hook(command: str, variables: Mapping[str, str], *, seconds: float, emit: Sink = discard) -> None:
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
            done = subprocess.run(
                ["/bin/sh", "-c", command],
                env={**without_secrets(os.environ), **variables},
                stdin=subprocess.DEVNULL,
                stdout=2,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise HookFailed(f"the hook {command!r} was killed after {seconds:.0f} s", cure="let it do its work in the background") from None
        if done.returncode:
            raise HookFailed(f"the hook {command!r} ended with status {done.returncode}", cure="correct the command; the job itself runs")
