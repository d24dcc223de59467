"""What all benchmarks share: measured ratios with their targets, scratch room on tmpfs, the table.
Its rule: a verdict is about a ratio within one run on the same input; seconds are only notes.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
TMPFS = Path("/dev/shm")
CACHE = Path(tempfile.gettempdir()) / "icecore-benchmarks"
MIB = 1 << 20


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes:
        part: Which benchmark.
        what: What was measured, against what.
        values: The figure of each round: a ratio, unless ``unit`` says otherwise.
        target: What it should reach; None for a figure that is only to be looked at.
        better: Which way is better.
        unit: What the figure counts; a ratio where it is ×.
        note: Medians in seconds, bytes and the like.
    """

    part: str
    what: str
    values: tuple[float, ...]
    target: float | None = None
    better: Literal["lower", "higher"] = "lower"
    unit: str = "×"
    note: str = ""

    @property
    def median(self) -> float:
        """The middle of the rounds."""
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        """Whether the median reaches the target; None without one."""
        if self.target is None:
            return None
        return self.median <= self.target if self.better == "lower" else self.median >= self.target


@dataclass
class Rounds:
    """Figures by name, one for each round."""

    figures: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        """Note one round's figure."""
        self.figures.setdefault(name, []).append(value)

    def ratio(self, name: str, base: str) -> tuple[float, ...]:
        """``name`` by ``base``, round by round."""
        return tuple(a / b for a, b in zip(self.figures[name], self.figures[base], strict=True))

    def of(self, name: str) -> tuple[float, ...]:
        """The figures as they are."""
        return tuple(self.figures[name])

    def median(self, name: str) -> float:
        """The middle of the rounds."""
        return statistics.median(self.figures[name])


@contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A folder on tmpfs that is gone afterwards, whatever happens."""
    folder = Path(tempfile.mkdtemp(prefix=f"icecore-bench-{name}-", dir=TMPFS))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def running(program: str, *words: str, seconds: float = 60.0) -> Iterator[int]:
    """Run a Python program that prints a line once it is ready; its pid. It is killed afterwards, with
    its process group.
    """
    process = subprocess.Popen(
        [sys.executable, program, *words],
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        if not process.stdout.readline():
            raise RuntimeError(f"the job did not start: {process.wait(seconds)}")
        yield process.pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(seconds)
        process.stdout.close()


def tree_bytes(folder: Path) -> int:
    """Bytes of all files below ``folder``."""
    return sum(
        os.lstat(os.path.join(top, name)).st_size
        for top, _, names in os.walk(folder)
        for name in names
    )


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return {
        "cpu": f"{os.cpu_count()} × {model}",
        "memory": f"{memory:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    }


def show(results: Sequence[Result], console: Console) -> None:
    """Print the table."""
    about = machine()
    table = Table(
        title=f"icecore benchmarks on {about['cpu']}, {about['memory']}, Linux {about['kernel']}, load {about['load']}"
    )
    for heading in ("part", "measured", "median", "range", "n", "target", "", "note"):
        table.add_column(
            heading,
            justify="right" if heading in ("median", "range", "n", "target") else "left",
            overflow="fold",
        )
    for result in results:
        sign = "≤" if result.better == "lower" else "≥"
        verdict = {True: "[green]met[/green]", False: "[red]missed[/red]", None: ""}[result.met]
        table.add_row(
            result.part,
            result.what,
            figure(result.median, result.unit),
            f"{figure(min(result.values), '')}–{figure(max(result.values), '')}"
            if len(result.values) > 1
            else "",
            str(len(result.values)),
            f"{sign} {figure(result.target, result.unit)}" if result.target is not None else "",
            verdict,
            result.note,
        )
    console.print(table)


def figure(value: float, unit: str) -> str:
    """A number with three digits and its unit."""
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f}{' ' if unit not in ('', '×', '%') else ''}{unit}"


def write(results: Sequence[Result], folder: Path) -> Path:
    """Write the results as JSON into ``folder``, named after the day; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{time.strftime('%Y-%m-%d')}.json"
    found: list[dict[str, Any]] = [
        {**asdict(result), "median": result.median, "met": result.met} for result in results
    ]
    path.write_text(
        json.dumps(
            {"machine": machine(), "at": time.time(), "results": found},
            indent=1,
            ensure_ascii=False,
        )
        + "\n"
    )
    return path


def progress(message: str) -> None:
    """Say what is going on, beside the results."""
    print(message, file=sys.stderr, flush=True)
