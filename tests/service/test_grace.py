"""The time from a signal to the kill, as Slurm and systemd tell it. `test_slurm` asks a real Slurm;
systemd does not run on the machines of the tests, so its answers are canned.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from icecore.service.supervision.grace import Grace, find_grace


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("1min 30s", 90),
        ("5min", 300),
        ("500ms", 0.5),
        ("1h 2min", 3720),
        ("infinity", None),
        ("", None),
    ],
)
def test_what_systemd_says(said: str, seconds: float | None, tmp_path: Path) -> None:
    program = tmp_path / "systemctl"
    program.write_text(f'#!/bin/sh\n[ "$4" = job@a.service ] && echo "{said}"\n')
    program.chmod(0o755)
    groups = tmp_path / "cgroup"
    groups.write_text("0::/system.slice/system-job.slice/job@a.service/supervisor\n")
    environment = {"INVOCATION_ID": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    found = find_grace(environment, groups)
    assert found == (None if seconds is None else Grace(seconds, "TimeoutStopSec of job@a.service"))


def test_nobody_says_anything(tmp_path: Path) -> None:
    empty = {"PATH": str(tmp_path)}
    assert find_grace(empty) is None
    assert find_grace({**empty, "SLURM_JOB_ID": "1", "SLURM_JOB_PARTITION": "low"}) is None
    groups = tmp_path / "cgroup"
    for group in ("user.slice/session-1.scope", "user.slice/user@1.service/app.slice/a.service"):
        groups.write_text(f"0::/{group}\n")
        assert find_grace({**empty, "INVOCATION_ID": "1"}, groups) is None
    assert find_grace({**empty, "INVOCATION_ID": "1"}, tmp_path / "none") is None
