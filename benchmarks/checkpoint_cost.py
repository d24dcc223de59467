#!/usr/bin/env python3
"""Measure what a checkpoint costs a training job: PyTorch's ways to save, and icecore's snapshots
of an unmodified job.

One job at a time trains on the GPU and logs its steps; each way saves the same state to tmpfs. The
table gives, for each checkpoint: the training time that was lost (the time from its start until it
is durable, minus the steps made meanwhile at their undisturbed pace), the longest step, how much
slower the other steps are meanwhile, the time until it is durable, and its bytes. With --every,
icecore takes snapshots at that interval, and the table gives the share of the training time that
they cost.

Needs PyTorch and, for icecore, root and CRIU. With --device cpu a small job shows that it works.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from benchmarks.common import Result, progress, scratch, show, tree_bytes, write

PART = "checkpoint cost"
ICECORE = "icecore"
WAYS = ("torch.save", "dcp", "dcp-best", ICECORE)
_JOB = str(Path(__file__).with_name("checkpoint_cost_job.py"))
_START_SECONDS = 180.0
_SAVE_SECONDS = 300.0
#: So many undisturbed steps give the pace.
_FEWEST = 5
#: A step of more than this many medians is one that the checkpoint stopped, not one that it slowed
#: down.
_STOPPED = 3.0


@dataclass(frozen=True)
class Cost:
    """What one checkpoint cost.

    Attributes:
        lost: Seconds of training.
        longest: Seconds of the longest step.
        slower: Mean duration of the steps that were not stopped, divided by the median of
            undisturbed ones; 0: there were none.
        durable: Seconds until it was durable.
        stored: Bytes.
    """

    lost: float
    longest: float
    slower: float
    durable: float
    stored: int


@dataclass(frozen=True)
class Step:
    """One training step; times in nanoseconds of CLOCK_MONOTONIC."""

    begin: int
    end: int

    @property
    def seconds(self) -> float:
        """Its duration."""
        return (self.end - self.begin) / 1e9


class Training:
    """A running training job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def steps(self) -> list[Step]:
        """Return all steps until now."""
        path = self.folder / "steps"
        lines = path.read_text().splitlines() if path.exists() else []
        return [Step(*map(int, line.split())) for line in lines if line.count(" ") == 1]

    def settle(self, seconds: float) -> float:
        """Wait for ``seconds``, and at least `_FEWEST` undisturbed steps; return their median in
        seconds.

        Raises:
            RuntimeError: The job makes too few steps.
        """
        self._await(1, 0)
        since = time.monotonic_ns()
        time.sleep(seconds)
        return statistics.median(step.seconds for step in self._await(_FEWEST, since))

    def _await(self, count: int, since: int) -> list[Step]:
        end = time.monotonic() + _START_SECONDS
        while len(made := [step for step in self.steps() if step.begin >= since]) < count:
            if time.monotonic() > end:
                raise RuntimeError(f"the job in {self.folder} makes too few steps")
            time.sleep(0.1)
        return made

    def cost(self, began: int, durable: int, pace: float, stored: int) -> Cost:
        """Return what a checkpoint between two times cost."""
        time.sleep(3 * pace)  # the step in progress when it becomes durable
        within = [step for step in self.steps() if step.end > began and step.begin < durable]
        # A save that the job makes itself is part of the step at whose end it stands; a window may
        # fall between two steps.
        ends = [step.end for step in within]
        spans = (
            [
                (end - begin) / 1e9
                for begin, end in zip([within[0].begin, *ends[:-1]], ends, strict=True)
            ]
            if within
            else []
        )
        lost = sum(spans) - pace * len(spans)
        slowed = [span / pace for span in spans if span < _STOPPED * pace]
        longest = max(spans, default=0.0)
        return Cost(
            max(0.0, lost),
            longest,
            statistics.mean(slowed) if slowed else 0.0,
            (durable - began) / 1e9,
            stored,
        )


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@contextmanager
def training(folder: Path, way: str, gib: float, device: str) -> Iterator[Training]:
    """A job that saves in ``way``, killed at the end."""
    command = [sys.executable, _JOB, str(folder), way, "--gib", str(gib), "--device", device]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(),
            start_new_session=True,
        )
    try:
        yield Training(folder)
    except RuntimeError as error:
        raise RuntimeError(
            f"{error}: {(folder / 'log').read_text(errors='replace')[-3000:]}"
        ) from error
    finally:
        os.killpg(process.pid, 9)  # its processes that save, too
        process.wait(60)


def saves(way: str, gib: float, device: str, count: int, calm: float) -> list[Cost]:
    """Return the costs of ``count`` saves by the job itself."""
    costs = []
    with scratch("cost") as folder, training(folder, way, gib, device) as job:
        pace = job.settle(calm)
        for number in range(count):
            (folder / "order.new").write_text(str(number))
            (folder / "order.new").rename(folder / "order")
            done = folder / f"saved-{number}"
            end = time.monotonic() + _SAVE_SECONDS
            while not done.exists():
                if time.monotonic() > end:
                    raise RuntimeError(
                        f"{way}: save {number} is not durable after {_SAVE_SECONDS:.0f} s"
                    )
                time.sleep(0.01)
            saved = json.loads(done.read_text())
            path = folder / f"checkpoint-{number}"
            stored = tree_bytes(path) if path.is_dir() else path.stat().st_size
            costs.append(job.cost(saved["began"], saved["durable"], pace, stored))
            progress(f"{PART}: {way}: {costs[-1]}, pace {pace:.4f} s")
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            pace = job.settle(calm)
    return costs


class Icecore:
    """The command line, with a repository and a state directory of its own."""

    def __init__(self, folder: Path) -> None:
        self.environment = {
            **os.environ,
            "ICECORE_REPOSITORY": str(folder / "repository"),
            "ICECORE_STATE": str(folder / "state"),
        }

    def __call__(self, *words: str, seconds: float = _SAVE_SECONDS) -> str:
        """Run a command; return what it prints."""
        command = [sys.executable, "-P", "-m", "icecore", *words]
        done = subprocess.run(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        if done.returncode:
            raise RuntimeError(f"icecore {' '.join(words)}: {done.stderr[-3000:]}")
        return done.stdout


def snapshots(
    gib: float, device: str, count: int, calm: float, every: float, during: float
) -> tuple[list[Cost], float | None]:
    """Return the costs of ``count`` snapshots, and the share of training time that one each
    ``every`` seconds costs.
    """
    # A GPU job has a private root, with a /dev/shm of its own: it logs its steps elsewhere.
    with (
        scratch("cost") as folder,
        tempfile.TemporaryDirectory(prefix="icecore-bench-cost-") as visible,
    ):
        icecore = Icecore(folder)
        icecore("init")
        job = Training(Path(visible))
        words = ["--gpu"] if device == "cuda" else []
        icecore(
            "run",
            "-d",
            "-q",
            *words,
            "--name",
            "train",
            "--",
            sys.executable,
            _JOB,
            visible,
            "none",
            "--gib",
            str(gib),
            "--device",
            device,
        )
        try:
            pace = job.settle(calm)
            costs = []
            for _ in range(count):
                costs.append(_snapshot(icecore, job, pace, folder))
                pace = job.settle(calm)
            if not every:
                return costs, None
            return costs, _periodic(icecore, job, pace, folder, every, during)
        finally:
            icecore("kill", "train", "-s", "KILL")


def _snapshot(icecore: Icecore, job: Training, pace: float, folder: Path) -> Cost:
    before = tree_bytes(folder / "repository")
    began = time.monotonic_ns()
    said = icecore("dump", "-q", "train")
    durable = time.monotonic_ns()
    cost = job.cost(began, durable, pace, tree_bytes(folder / "repository") - before)
    progress(f"{PART}: {ICECORE}: {cost}, pace {pace:.4f} s; {said.strip()}")
    return cost


def _periodic(
    icecore: Icecore, job: Training, pace: float, folder: Path, every: float, during: float
) -> float:
    """Take snapshots for so many seconds, and keep the newest two; return the share of training
    time that was lost.
    """
    began = time.monotonic_ns()
    end = time.monotonic() + during
    while (due := time.monotonic()) < end:
        _snapshot(icecore, job, pace, folder)
        icecore("forget", "--keep-last", "2", "--gc")
        time.sleep(max(0.0, min(due + every, end) - time.monotonic()))
    ended = time.monotonic_ns()
    made = [step for step in job.steps() if step.begin >= began and step.end <= ended]
    return 1.0 - len(made) * pace / ((ended - began) / 1e9)


def results(
    found: dict[str, list[Cost]], share: float | None, where: str, every: float
) -> list[Result]:
    """Return the table: medians over the checkpoints of each way; the first of each is separate,
    because it warms what the others reuse.
    """
    out = []
    for way, costs in found.items():
        for label, chosen in (("first", costs[:1]), ("then", costs[1:])):
            if not chosen:
                continue
            note = f"{statistics.median(cost.stored for cost in chosen) / 1e9:.1f} GB"
            ours = way == ICECORE
            for what, values, target, unit in (
                ("lost training time", [cost.lost for cost in chosen], 0.7 if ours else None, "s"),
                ("longest step", [cost.longest for cost in chosen], None, "s"),
                (
                    "steps meanwhile / undisturbed",
                    [cost.slower for cost in chosen if cost.slower],
                    1.03 if ours else None,
                    "×",
                ),
                ("until durable", [cost.durable for cost in chosen], None, "s"),
            ):
                if values:
                    out.append(
                        Result(
                            PART,
                            f"{where}, {way}, {label}: {what}",
                            tuple(values),
                            target,
                            unit=unit,
                            note=note,
                        )
                    )
    if share is not None:
        out.append(
            Result(
                PART,
                f"{where}, {ICECORE}, a snapshot each {every:g} s: training time lost",
                (100 * share,),
                None,
                unit="%",
            )
        )
    ours = found.get(ICECORE, [])[1:]
    for way, costs in found.items():
        if ours and way != ICECORE and costs[1:]:
            ratio = statistics.median(cost.lost for cost in costs[1:]) / max(
                1e-9, statistics.median(cost.lost for cost in ours)
            )
            out.append(
                Result(
                    PART,
                    f"{where}: lost training time, {way} / {ICECORE}",
                    (ratio,),
                    None,
                    "higher",
                )
            )
    return out


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gib", type=float, default=20.0, help="device state of the job (default: %(default)g)"
    )
    parser.add_argument(
        "--ways", default=",".join(WAYS), help="some of them, by commas (default: %(default)s)"
    )
    parser.add_argument(
        "--count", type=int, default=3, help="checkpoints of each way (default: %(default)s)"
    )
    parser.add_argument(
        "--calm",
        type=float,
        default=4.0,
        help="undisturbed seconds between two checkpoints (default: %(default)g)",
    )
    parser.add_argument(
        "--every", type=float, default=0.0, help="also take snapshots at this interval, in seconds"
    )
    parser.add_argument(
        "--during", type=float, default=600.0, help="for so many seconds (default: %(default)g)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--save", type=Path, help="write JSON into this folder")
    options = parser.parse_args(words)
    ways = options.ways.split(",")
    if unknown := set(ways) - set(WAYS):
        parser.error(f"no such way: {', '.join(sorted(unknown))}")
    found: dict[str, list[Cost]] = {}
    share = None
    for way in ways:
        try:
            if way == ICECORE:
                found[way], share = snapshots(
                    options.gib,
                    options.device,
                    options.count,
                    options.calm,
                    options.every,
                    options.during,
                )
            else:
                found[way] = saves(way, options.gib, options.device, options.count, options.calm)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            progress(f"{PART}: {way} failed: {error}")
    table = results(found, share, f"{options.gib:g} GiB", options.every)
    show(table, Console(width=160))
    if options.save:
        write(table, options.save)
    if len(found) < len(ways):
        sys.exit(1)


if __name__ == "__main__":
    main()
