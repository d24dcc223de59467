"""Progress and verdict of a test program: one JSON file, replaced atomically, that never loses the
first violation.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

STATE = "state.json"
FINISH = "finish"
KEPT_ERRORS = 8


class Report:
    """What one program tells the outside through its state directory.

    Args:
        state_dir: Directory of ``state.json`` (written here) and ``finish`` (created by whoever
            wants the verdict).
        program: Name of the program, for the reader of the file.
        every_s: Least time in seconds between two writes of the file; violations and the verdict
            are written at once.

    ``violation`` may be called from any thread: a list's append is atomic, and the file is written
    by the main thread.
    """

    def __init__(self, state_dir: str | Path, program: str, *, every_s: float = 0.02) -> None:
        self.state_dir = Path(state_dir)
        self.program = program
        self.every_s = every_s
        self.regions: list[dict[str, Any]] = []
        self._errors: list[str] = []
        self._error_count = 0
        self._writes = 0
        self._written_at = -1.0

    @property
    def failed(self) -> bool:
        return self._error_count > 0

    def region(self, name: str, address: int, size: int, pid: int | None = None) -> None:
        """Names memory that the program verifies, so that a test can damage it from outside and see
        it noticed.

        Args:
            address: Where it begins in the address space of process ``pid`` (as the program counts
                pids; default: itself).
            size: In bytes.
        """
        self.regions.append(
            {"name": name, "address": address, "bytes": size, "pid": pid or os.getpid()}
        )

    def violation(self, what: str) -> None:
        """Records a broken expectation; the first ones are kept word for word, later ones are
        counted.
        """
        self._error_count += 1
        if len(self._errors) < KEPT_ERRORS:
            self._errors.append(what)
            print(what, file=sys.stderr, flush=True)
            self._written_at = -1.0

    def write(self, counter: int, *, finished: bool = False, **facts: Any) -> None:
        """Replaces the state file, unless the last replacement is younger than ``every_s``."""
        now = time.monotonic()
        if not finished and 0 <= now - self._written_at < self.every_s:
            return
        self._written_at = now
        self._writes += 1
        state = {
            "program": self.program,
            "pid": os.getpid(),
            "counter": counter,
            "writes": self._writes,
            "errors": self._errors,
            "error_count": self._error_count,
            "finished": finished,
            "passed": (not self.failed) if finished else None,
            "regions": self.regions,
            "facts": facts,
        }
        try:
            self._replace(json.dumps(state))
        except FileNotFoundError:
            # A snapshot may lie between the file's end and its rename. The first instance that is
            # restored renames the file; a later one has to write it again.
            self._replace(json.dumps(state))

    def _replace(self, text: str) -> None:
        temporary = self.state_dir / f".{STATE}.new"
        temporary.write_text(text)
        temporary.replace(self.state_dir / STATE)

    def finish_asked(self) -> bool:
        return os.path.exists(self.state_dir / FINISH)

    def end(self, counter: int, **facts: Any) -> int:
        """Writes the verdict and returns the exit status that goes with it: 0 passed, 1 violated."""
        self.write(counter, finished=True, **facts)
        return 1 if self.failed else 0


def run(report: Report, main: Callable[[Report], int]) -> int:
    """Runs a program's main function; an exception that escapes it is a violation like any other."""
    try:
        return main(report)
    except Exception:  # noqa: BLE001 - whatever it was, the verdict must say it
        report.violation("crashed: " + traceback.format_exc())
        return report.end(-1)
