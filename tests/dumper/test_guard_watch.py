"""A guard ends a CRIU that neither finishes nor reacts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time

import pytest

from icecore.dumper.freeze import guard_process


class Deaf:
    """Stands for a CRIU that waits for ever for a process that was killed."""

    def __init__(self) -> None:
        self.criu = subprocess.Popen(["sleep", "600"])
        self.told = 0

    def hang_up(self) -> None:
        self.told += 1


@pytest.mark.parametrize("limit", [0.1, None])
def test_a_criu_that_hangs_is_told_to_end_and_killed_later(
    monkeypatch: pytest.MonkeyPatch, limit: float | None
) -> None:
    """After the window's limit, or if there is none, after the dumper's end."""
    monkeypatch.setattr(guard_process, "LAST_SECONDS", 0.3)
    deaf = Deaf()
    ours, dumper = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ended = os.pidfd_open(deaf.criu.pid)
    began = time.monotonic()
    try:
        if limit is None:
            dumper.close()
        guard_process._Watch(deaf, limit, ours).wait(ended)  # type: ignore[arg-type]
    finally:
        os.close(ended)
        ours.close()
        dumper.close()
        deaf.criu.kill()
    assert time.monotonic() - began >= 0.3 + (limit or 0.0)
    assert deaf.criu.wait(10) == -signal.SIGKILL and deaf.told == 1
