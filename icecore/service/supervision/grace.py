"""Ask Slurm or systemd how much time passes between its signal to a job and the kill."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec

_ANSWER_SECONDS = 5.0
#: Units of systemd.time(7), in seconds.
_UNITS = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": 604800.0,
    "month": 2629800.0,
    "y": 31557600.0,
}


class Grace(msgspec.Struct, frozen=True):
    """The time from a signal to the kill, in seconds, and the setting that it is."""

    seconds: float
    setting: str


def find_grace(
    environment: Mapping[str, str], groups: Path = Path("/proc/self/cgroup")
) -> Grace | None:
    """Return the time from a signal to the kill of this process; None: unknown.

    Args:
        environment: This process's environment, which shows whether Slurm or systemd started it.
        groups: The file that names this process's cgroup, and so its systemd unit.
    """
    if environment.get("SLURM_JOB_ID"):
        return _of_slurm(environment)
    if environment.get("INVOCATION_ID"):
        return _of_systemd(environment, groups)
    return None


def _of_slurm(environment: Mapping[str, str]) -> Grace | None:
    """Return the partition's GraceTime if its jobs may be preempted, else KillWait, which applies
    at the time limit; None: neither is known.
    """
    partition = environment.get("SLURM_JOB_PARTITION", "")
    if partition:
        shown = _said(environment, "scontrol", "--oneliner", "show", "partition", partition)
        grace = _number(r"\bGraceTime=(\d+)", shown)
        if grace and not re.search(r"\bPreemptMode=OFF\b", shown):
            return Grace(grace, f"GraceTime of partition {partition}")
    wait = _number(r"(?m)^KillWait\s*=\s*(\d+)", _said(environment, "scontrol", "show", "config"))
    return Grace(wait, "KillWait of Slurm") if wait else None


def _of_systemd(environment: Mapping[str, str], groups: Path) -> Grace | None:
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return None
    # Of a unit that it does not know, such as a user's, systemctl shows the default.
    own = [line for line in lines if "/user@" not in line]
    found = [unit for line in own for unit in re.findall(r"/([^/]+\.service)(?=/|$)", line)]
    if not found:
        return None
    words = ("systemctl", "show", "--property=TimeoutStopUSec", "--value", found[-1])
    said = _said(environment, *words)
    parts = re.findall(r"(\d+(?:\.\d+)?)(us|ms|s|min|h|d|w|month|y)\b", said)
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    return Grace(seconds, f"TimeoutStopSec of {found[-1]}") if seconds else None


def _number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    return float(found[1]) if found else 0.0


def _said(environment: Mapping[str, str], *words: str) -> str:
    """Return what a command prints; empty: it failed."""
    try:
        done = subprocess.run(
            words,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ANSWER_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
