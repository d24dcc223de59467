"""Device memory that stays where it is, against the driver's way with the same job: windows,
restores, and what each phase reaches of its floor. Its rule: what does not fit this machine is left
out, and said.

So that large jobs fit the host's memory, only so much of the device memory is drawn at random, and
the rest are copies of it (`gpu_job`, ``--distinct``): stored once, but read, compared, fetched,
verified and placed as any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import floors
from benchmarks.common import Result, Rounds, progress, scratch
from benchmarks.gpu_phases import Phases
from benchmarks.gpu_tree import Calls, Job, gone, kill, workers_of
from benchmarks.reserve import Reserve
from benchmarks.worker import Worker
from icecore.host.kernel.limits import memory_available
from icecore.host.resident.keeper import environment, start_keeper

PART = "gpu resident"
PARTS = ("window", "all-changed", "from-resident", "restore", "driver-calls", "driver")
_DRIVERS = {"driver-calls", "driver"}
GIB = 1 << 30
#: Share of the device memory that changes before a dump.
CASES = {"nothing changed": 0.0, "5 % changed": 0.05, "all changed": 1.0}
_WINDOW_SECONDS = 1.2
_COPY_RATE = 45e9
_FROM_RESIDENT_SECONDS = 1.5
#: From so many bytes on the targets against the driver hold.
_LARGE = 60e9
#: Host memory for all that is neither device memory nor repository.
_SPARE = 8 * GIB


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        gib: Device memory of the job.
        parts: Of `PARTS`, done in their order.
        distinct: GiB that are not copies.
        memory, block: As in `gpu_job`.
        environment: Of the job, beside the preload's.
        place: Directory of a keeper that is there already; None: one of its own.
        reserve: Keep some of the host's memory warm.
    """

    gib: float
    parts: Sequence[str] = PARTS
    rounds: int = 1
    distinct: float = 4.0
    memory: str = "torch"
    block: int = 256
    environment: Mapping[str, str] = field(default_factory=dict)
    place: Path | None = None
    reserve: bool = True

    @property
    def size(self) -> int:
        """Bytes of device memory."""
        return int(self.gib * GIB)

    @property
    def stored(self) -> int:
        """Bytes that a first dump stores of it."""
        return min(self.size, int(self.distinct * GIB))

    @property
    def job(self) -> list[str]:
        """Arguments of the job."""
        return [
            "--distinct",
            str(self.distinct),
            "--memory",
            self.memory,
            "--block",
            str(self.block),
        ]


class Bench:
    """One run.

    Args:
        found: Figures, also of earlier runs.
    """

    def __init__(self, setting: Setting, folder: Path, found: Rounds) -> None:
        self.setting = setting
        self.folder = folder
        self.found = found
        self.phases = Phases()

    def run(self) -> None:
        """All parts that are asked for and fit."""
        if set(self.setting.parts) - _DRIVERS:
            self._resident()
        asked = _DRIVERS & set(self.setting.parts)
        if asked and (why := lacking(self.setting)):
            progress(f"gpu: the driver's way is left out: {why}")
        elif asked:
            self._driver(asked)

    def _resident(self) -> None:
        setting = self.setting
        place = setting.place or self.folder / "keeper"
        place.mkdir(exist_ok=True)
        keeper = start_keeper(place)
        more = {**setting.environment, **environment(str(place), setting.environment)}
        try:
            with ExitStack() as stack:
                job = stack.enter_context(
                    Job(
                        self.folder / "resident", setting.gib, 1, environment=more, more=setting.job
                    )
                )
                # What a dump stores, staging, shards that are being filled.
                reserve = (
                    stack.enter_context(Reserve(setting.stored + 3 * GIB))
                    if setting.reserve
                    else None
                )
                worker = self._worker(stack, "resident")
                job.wait_step(0)
                if {"window", "all-changed"} & set(setting.parts):
                    self._windows(worker, job, reserve)
                snapshot = self._stop(worker, job, reserve, keep="from-resident" in setting.parts)
                if "from-resident" in setting.parts:
                    self._bring_back(
                        worker, job, reserve, snapshot, "from-resident", from_resident=True
                    )
                if "restore" in setting.parts:
                    for _ in range(setting.rounds):
                        self._bring_back(worker, job, reserve, snapshot, "restore")
        finally:
            for held in keeper.processes():
                keeper.forget(held.token)

    def _windows(self, worker: Worker, job: Job, reserve: Reserve | None) -> None:
        self._dump(worker, job, reserve, "first")
        number, parts = 0, self.setting.parts
        for turn in range(self.setting.rounds):
            for case, share in CASES.items():
                if (share == 1.0 and turn) or (
                    "all-changed" if share == 1.0 else "window"
                ) not in parts:
                    continue  # all: once, because each takes as much room in the repository
                number += 1
                if share:
                    job.change(number, share)
                self._dump(worker, job, reserve, case)

    def _driver(self, asked: set[str]) -> None:
        setting = self.setting
        with ExitStack() as stack:
            job = stack.enter_context(
                Job(
                    self.folder / "driver",
                    setting.gib,
                    1,
                    environment=setting.environment,
                    more=setting.job,
                )
            )
            job.wait_step(0)
            if "driver-calls" in asked:
                calls, pids = Calls(), workers_of(job.pid)
                out, back = calls.stop(pids), calls.go(pids)
                self.found.add("driver's calls", out + back)
                self.found.add("driver's restore", back)
                progress(f"gpu: the driver's own calls: {out:.2f} s and {back:.2f} s")
            if "driver" not in asked:
                return
            worker = self._worker(stack, "driver")
            # Without a reserve: to warm so much memory takes longer than what is measured, and the
            # driver is the slower one.
            done = self._dump(worker, job, None, "driver's way")
            taken = sum(
                fields["seconds"]
                for name, fields in done["events"].items()
                if name.startswith("dump.gpu.")
            )
            self.found.add("driver's calls", taken)
            gone(kill(job.pid))
            self._bring_back(worker, job, None, done["snapshot"], "driver's way: restore")

    def _worker(self, stack: ExitStack, name: str) -> Worker:
        worker = stack.enter_context(Worker())
        worker.ask("open", path=str(self.folder / name / "repository"), create=True)
        return worker

    def _dump(
        self, worker: Worker, job: Job, reserve: Reserve | None, case: str, **more: Any
    ) -> dict[str, Any]:
        with ExitStack() as stack:
            if reserve is not None:
                stack.enter_context(reserve.lent())
            done = worker.ask(
                "dump", pid=job.pid, job="gpu", max_window=600.0, gpu_shared=True, **more
            )
        self.found.add(f"window {case}", done["window"])
        self.found.add(f"stored {case}", done["stored"])
        self.phases.add(case, done["events"])
        at = {name: round(seconds, 3) for name, seconds in done["at"].items()}
        progress(
            f"gpu: {case}: window {done['window']:.2f} s, standing after {done['freeze']:.3f} s, {done['stored'] / 1e6:.0f} MB stored, {at}"
        )
        return done

    def _stop(self, worker: Worker, job: Job, reserve: Reserve | None, *, keep: bool) -> str:
        snapshot: str = self._dump(worker, job, reserve, "stopped", stop=True, keep_resident=keep)[
            "snapshot"
        ]
        job.process.wait(60)
        return snapshot

    def _bring_back(
        self,
        worker: Worker,
        job: Job,
        reserve: Reserve | None,
        snapshot: str,
        case: str,
        **more: Any,
    ) -> None:
        with ExitStack() as stack:
            if reserve is not None:
                stack.enter_context(reserve.lent())
            done = worker.ask("restore", snapshot=snapshot, mode="full", **more)
            step = job.wait_step(done["called_ns"])
        self.found.add(case, (step - done["called_ns"]) / 1e9)
        self.phases.add(case, done["events"])
        at = {name: round(seconds / 1e9, 3) for name, seconds in done["at"].items()}
        progress(f"gpu: {case}: progress after {(step - done['called_ns']) / 1e9:.2f} s, {at}")
        worker.ask("resident")
        pids = kill(done["pid"])
        worker.ask("ended")
        gone(pids)


def lacking(setting: Setting) -> str:
    """Why this machine cannot take the driver's way; empty: it can."""
    need, free = setting.size + 2 * setting.stored + _SPARE, memory_available()
    if need <= free:
        return ""
    return (
        f"the driver's checkpoint takes {setting.size / 1e9:.0f} GB of the host's memory, with the repository and the rest "
        f"{need / 1e9:.0f} GB, of which {free / 1e9:.0f} GB are free"
    )


def measure(setting: Setting, figures: Path | None = None) -> list[Result]:
    """All that is asked for.

    Args:
        figures: JSON file with the figures of earlier runs of the same size, to which these are
            added.
    """
    known: dict[str, dict[str, list[float]]] = (
        json.loads(figures.read_text()) if figures and figures.exists() else {}
    )
    found = Rounds(known.setdefault(f"{setting.gib:g}", {}))
    with scratch("gpu") as folder:
        progress("gpu: floors")
        limits = floors.measure(folder, devices=setting.memory == "torch")
        bench = Bench(setting, folder, found)
        try:
            bench.run()
        finally:
            if figures:
                figures.write_text(json.dumps(known, indent=1) + "\n")
    where = f"{setting.gib:g} GiB, {min(setting.gib, setting.distinct):g} of them distinct"
    return [*results(found, setting, where), *bench.phases.results(PART, where, limits, 1)]


def results(found: Rounds, setting: Setting, where: str) -> list[Result]:
    """The figures against their targets; those that were not measured are left out."""
    out: list[Result] = []
    large = setting.size >= _LARGE

    def add(what: str, name: str, target: float | None, note: str = "") -> None:
        if name in found.figures:
            out.append(
                Result(PART, f"{where}: {what}", found.of(name), target, unit="s", note=note)
            )

    for case, share in CASES.items():
        limit = _WINDOW_SECONDS + (setting.size / _COPY_RATE if share == 1.0 else 0.0)
        stored = (
            f"stored {found.median(f'stored {case}') / 1e6:.0f} MB"
            if f"stored {case}" in found.figures
            else ""
        )
        add(f"window, {case}", f"window {case}", limit, stored)
    add("restore until progress, repository on tmpfs", "restore", None)
    add(
        "restore from what stayed on the GPU, until progress",
        "from-resident",
        _FROM_RESIDENT_SECONDS,
    )
    add(
        "the driver's way: its own calls in a window",
        "driver's calls",
        None,
        "with nothing of icecore's or CRIU's",
    )
    add("the driver's way: restore until progress", "driver's way: restore", None)
    for what, over, under, target in (
        (
            "the driver's calls / window, nothing changed",
            "driver's calls",
            "window nothing changed",
            20.0,
        ),
        ("the driver's way / restore", "driver's way: restore", "restore", 4.0),
        ("the driver's own restore and unlock / restore", "driver's restore", "restore", None),
    ):
        if over in found.figures and under in found.figures:
            ratio = found.median(over) / found.median(under)
            out.append(
                Result(PART, f"{where}: {what}", (ratio,), target if large else None, "higher")
            )
    return out
