#!/usr/bin/env python3
"""Measure what a checkpoint costs a training job: PyTorch's ways to save, Orbax, and icecore's
snapshots of an unmodified job.

One job at a time trains on the GPU and logs its steps. Each way saves the job's state to tmpfs, or
with --bucket to a bucket. icecore then has its repository in the bucket; with the other ways, a
thread of the job uploads each checkpoint. Each way has its own SeaweedFS server on this machine,
with its data on tmpfs. The way "icecore-jax" takes snapshots of the JAX job that the way "orbax"
saves.

The table gives, for each checkpoint: the training time that was lost (the time from its start until
it is durable, minus the steps made meanwhile at their undisturbed pace), the longest step, how much
slower the other steps are meanwhile, the time until it is durable, and its bytes. With --every,
icecore takes snapshots at that interval, and the table gives the share of the training time that
they cost.

Requires PyTorch, or JAX and Orbax, for the ways that use them, and root and CRIU for icecore. With
--device cpu, a small job shows that the benchmark works.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from benchmarks.common import Result, progress, scratch, show, write

PART = "checkpoint cost"
ICECORE = "icecore"
WAYS = ("torch.save", "dcp", "dcp-best", ICECORE, "orbax", f"{ICECORE}-jax")
#: The ways that use the PyTorch job.
_TORCH_WAYS = WAYS[:4]
_BUCKET = "checkpoints"
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


@dataclass(frozen=True)
class Setting:
    """What all jobs have in common.

    Attributes:
        gib: Device state of each job, in GiB.
        device: "cuda" or "cpu".
        bucket: Whether checkpoints go to a bucket.
        calm: Undisturbed seconds between two checkpoints.
    """

    gib: float
    device: str
    bucket: bool
    calm: float

    def job(self, folder: str, way: str) -> list[str]:
        """Return the command of the job of one way. With icecore's ways, it saves nothing itself."""
        own = "none" if way.startswith(ICECORE) else way
        framework = "torch" if way in _TORCH_WAYS else "jax"
        sizes = ["--gib", str(self.gib), "--device", self.device]
        return [sys.executable, _JOB, folder, own, "--framework", framework, *sizes]


@contextmanager
def target(folder: Path, setting: Setting) -> Iterator[tuple[str, dict[str, str]]]:
    """Provide a place for one way's checkpoints: a bucket's URL and the environment variables for
    access to it; "" and none without a bucket.
    """
    if not setting.bucket:
        yield "", {}
        return
    from tests.seaweedfs import running

    with running(folder / "server") as server:
        server.make_bucket(_BUCKET)
        plain = {"AWS_ENDPOINT_URL": server.endpoint, "AWS_ALLOW_HTTP": "true"}
        yield f"s3://{_BUCKET}", {**server.environment(), **plain}


@contextmanager
def training(folder: Path, way: str, setting: Setting) -> Iterator[Training]:
    """A job that saves in ``way``, killed at the end."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with ExitStack() as stack:
        place, variables = stack.enter_context(target(folder, setting))
        command = [*setting.job(str(folder), way), "--bucket", place]
        yield stack.enter_context(_running(folder, command, own | variables))


@contextmanager
def _running(
    folder: Path, command: Sequence[str], environment: Mapping[str, str]
) -> Iterator[Training]:
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=dict(environment),
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


def saves(way: str, setting: Setting, count: int) -> list[Cost]:
    """Return the costs of ``count`` saves by the job itself."""
    costs = []
    with scratch("cost") as folder, training(folder, way, setting) as job:
        pace = job.settle(setting.calm)
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
            if "error" in saved:
                raise RuntimeError(f"{way}: save {number}: {saved['error']}")
            costs.append(job.cost(saved["began"], saved["durable"], pace, saved["bytes"]))
            progress(f"{PART}: {way}: {costs[-1]}, pace {pace:.4f} s")
            pace = job.settle(setting.calm)
    return costs


class Icecore:
    """The command line, with a repository and a state directory of its own."""

    def __init__(self, folder: Path, repository: str, variables: Mapping[str, str]) -> None:
        self.environment = {
            **os.environ,
            **variables,
            "ICECORE_REPOSITORY": repository or str(folder / "repository"),
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
    way: str, setting: Setting, count: int, every: float, during: float
) -> tuple[list[Cost], float | None]:
    """Return the costs of ``count`` snapshots, and the share of training time that one each
    ``every`` seconds costs.
    """
    # A GPU job has a private root, with a /dev/shm of its own: it logs its steps elsewhere.
    with (
        scratch("cost") as folder,
        tempfile.TemporaryDirectory(prefix="icecore-bench-cost-") as visible,
        target(folder, setting) as (repository, variables),
    ):
        icecore = Icecore(folder, repository and f"{repository}/repository", variables)
        icecore("init")
        job = Training(Path(visible))
        gpu = ["--gpu"] if setting.device == "cuda" else []
        command = setting.job(visible, way)
        icecore("run", "-d", "-q", *gpu, "--name", "train", "--", *command)
        try:
            pace = job.settle(setting.calm)
            costs = []
            for _ in range(count):
                costs.append(_snapshot(way, icecore, job, pace))
                pace = job.settle(setting.calm)
            if not every:
                return costs, None
            return costs, _periodic(way, icecore, job, pace, every, during)
        finally:
            with suppress(RuntimeError):  # it may have ended
                icecore("kill", "train", "-s", "KILL")


def _snapshot(way: str, icecore: Icecore, job: Training, pace: float) -> Cost:
    began = time.monotonic_ns()
    said = icecore("--json", "dump", "train")
    durable = time.monotonic_ns()
    events = [json.loads(line) for line in said.splitlines()]
    (done,) = [event for event in events if event.get("event") == "dump.done"]
    cost = job.cost(began, durable, pace, done["stored"])
    progress(f"{PART}: {way}: {cost}, pace {pace:.4f} s, window {done['window_seconds']:.3f} s")
    return cost


def _periodic(
    way: str, icecore: Icecore, job: Training, pace: float, every: float, during: float
) -> float:
    """Take snapshots for so many seconds, and keep the newest two; return the share of training
    time that was lost.
    """
    began = time.monotonic_ns()
    end = time.monotonic() + during
    while (due := time.monotonic()) < end:
        _snapshot(way, icecore, job, pace)
        icecore("forget", "--keep-last", "2", "--gc")
        time.sleep(max(0.0, min(due + every, end) - time.monotonic()))
    ended = time.monotonic_ns()
    made = [step for step in job.steps() if step.begin >= began and step.end <= ended]
    return 1.0 - len(made) * pace / ((ended - began) / 1e9)


def results(
    found: dict[str, list[Cost]], shares: Mapping[str, float], where: str, every: float
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
            ours = way.startswith(ICECORE)
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
    for way, share in shares.items():
        out.append(
            Result(
                PART,
                f"{where}, {way}, a snapshot each {every:g} s: training time lost",
                (100 * share,),
                None,
                unit="%",
            )
        )
    for way, costs in found.items():
        own = ICECORE if way in _TORCH_WAYS else f"{ICECORE}-jax"
        ours = found.get(own, [])[1:]
        if ours and way != own and costs[1:]:
            ratio = statistics.median(cost.lost for cost in costs[1:]) / max(
                1e-9, statistics.median(cost.lost for cost in ours)
            )
            out.append(
                Result(
                    PART,
                    f"{where}: lost training time, {way} / {own}",
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
        "--ways",
        default=",".join(_TORCH_WAYS),
        help=f"comma-separated list of {', '.join(WAYS)} (default: %(default)s)",
    )
    parser.add_argument("--bucket", action="store_true", help="store the checkpoints in a bucket")
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
    setting = Setting(options.gib, options.device, options.bucket, options.calm)
    found: dict[str, list[Cost]] = {}
    shares: dict[str, float] = {}
    for way in ways:
        try:
            if way.startswith(ICECORE):
                found[way], share = snapshots(
                    way, setting, options.count, options.every, options.during
                )
                if share is not None:
                    shares[way] = share
            else:
                found[way] = saves(way, setting, options.count)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            progress(f"{PART}: {way} failed: {error}")
    where = f"{options.gib:g} GiB" + (", bucket" if options.bucket else "")
    table = results(found, shares, where, options.every)
    show(table, Console(width=160))
    if options.save:
        write(table, options.save)
    if len(found) < len(ways):
        sys.exit(1)


if __name__ == "__main__":
    main()
