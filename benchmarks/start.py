#!/usr/bin/env python3
"""The CPU time that commands and helper processes take to start, as ratios to an interpreter that
does nothing.

python benchmarks/start.py [--rounds N]

CPU time depends less on the load of the machine than wall time, and a ratio of runs that alternate
depends on it least. An editable install and ``.pth`` files make every start slower. With
PYTHONDONTWRITEBYTECODE each start compiles icecore, so the benchmark removes that variable.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_PYTHON = [sys.executable, "-P"]
_NOTHING = [*_PYTHON, "-c", "pass"]
_BARE = [sys.executable, "-I", "-S", "-c", "pass"]
_MODULES = (
    "icecore.api",
    "icecore.service.supervision.watchdog",
    "icecore.dumper.freeze.guard_process",
    "icecore.restorer.guard.guard_process",
    "icecore.host.gpu.helper",
    "icecore.host.gpu.worker",
)


def cpu_seconds(command: Sequence[str], environment: Mapping[str, str]) -> float:
    """Run a command, which may fail; return its CPU time in seconds, user and system."""
    pid = os.posix_spawn(
        command[0],
        command,
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)
        ],
    )
    used = os.wait4(pid, 0)[2]
    return used.ru_utime + used.ru_stime


def measured(
    commands: Mapping[str, Sequence[str]], environment: Mapping[str, str], rounds: int
) -> dict[str, float]:
    """Return the median CPU time of each command in seconds; a round runs each of them once."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds + 1):
        for name, command in commands.items():
            times[name].append(cpu_seconds(command, environment))
    return {name: statistics.median(found[1:]) for name, found in times.items()}  # 0 fills caches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if name != "PYTHONDONTWRITEBYTECODE" and not name.startswith("ICECORE_")
            },
            "ICECORE_STATE": str(Path(folder) / "state"),
            "ICECORE_PASSPHRASE": "seven random words would be better here",
        }
        cli = [*_PYTHON, "-m", "icecore"]
        plain, encrypted = (str(Path(folder) / name) for name in ("plain", "encrypted"))
        for words in (["init", plain], ["init", "--encrypt", encrypted]):
            subprocess.run([*cli, *words], env=environment, check=True, capture_output=True)
        commands: dict[str, Sequence[str]] = {
            "python -P -c pass": _NOTHING,
            "python -I -S -c pass": _BARE,
            "icecore ps": [*cli, "ps"],
            "icecore ls": [*cli, "-r", plain, "ls"],
            "icecore ls, encrypted": [*cli, "-r", encrypted, "ls"],
            "icecore show, no snapshot": [*cli, "-r", plain, "show", "latest"],
            "icecore wait, no job": [*cli, "wait", "none"],
            "icecore dump, no job": [*cli, "-r", plain, "dump", "none"],
            "icecore restore, no snapshot": [*cli, "-r", plain, "restore", "latest"],
            **{f"import {name}": [*_PYTHON, "-c", f"import {name}"] for name in _MODULES},
        }
        found = measured(commands, environment, rounds)
    floor = found["python -P -c pass"]
    for name, seconds in found.items():
        print(f"{name:48} {seconds * 1000:7.0f} ms  {seconds / floor:5.1f} ×")


if __name__ == "__main__":
    main()
