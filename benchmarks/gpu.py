#!/usr/bin/env python3
"""Jobs with device memory: the window and the way back against what the driver alone takes, and
against plain CRIU images with the driver's calls around them (the way of CRIUgpu), on the same job
in the same run.

Needs NVIDIA GPUs, PyTorch and cuda.bindings. One job for each GPU that is asked for, in one tree;
each has the same device memory.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from benchmarks import floors, gpu_resident
from benchmarks.common import Result, Rounds, progress, scratch, show, write
from benchmarks.gpu_phases import Phases
from benchmarks.gpu_tree import SECONDS, Calls, Job, gone, huge_pages, kill, workers_of
from benchmarks.jobs import criu_run
from benchmarks.reserve import Reserve
from benchmarks.worker import Worker
from icecore.host.criu.program import Criu, find_criu
from icecore.host.kernel import procfs
from tests.programs import plain_criu

PART = "gpu"
GIB = 1 << 30
#: Share of the device memory that changes before a dump.
CASES = {"nothing changed": 0.0, "2 % changed": 0.02, "all changed": 1.0}
_HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CRIU = ("--network-lock", "skip", "--manage-cgroups=ignore", "--file-locks", "--link-remap")


def measure(gib: float, gpus: int, rounds: int) -> list[Result]:
    """All figures; ``gib`` of device memory on each of ``gpus``."""
    criu, calls, found, phases = find_criu(), Calls(), Rounds(), Phases()
    progress("gpu: floors")
    with scratch(PART) as folder:
        limits = floors.measure(folder, devices=True)
    # The largest step takes the driver's copy in the host's memory, as much staging, and as much in
    # the repository.
    size = int(gib * gpus * GIB)
    with (
        plain_criu.adopting(),
        scratch(PART) as folder,
        Job(folder, gib, gpus) as job,
        Reserve(2 * size + 4 * GIB) as reserve,
        Worker() as worker,
    ):
        job.wait_step(0)
        worker.ask("open", path=str(folder / "repository"), create=True)
        progress("gpu: the first dump")
        _dump(worker, job, reserve, found, phases, "first")
        number = 0
        for turn in range(rounds):
            progress(f"gpu: round {turn + 1} of {rounds}")
            pids = workers_of(job.pid)
            with reserve.lent():
                found.add("driver out", calls.stop(pids))
            found.add("huge pages", huge_pages(pids))
            found.add("driver back", calls.go(pids))
            _criugpu_dump(criu, calls, job, reserve, folder, found)
            if turn < rounds - 1:
                shutil.rmtree(folder / "images")
            for case, share in CASES.items():
                if share == 1.0 and turn:
                    continue  # once: each takes as much room in the repository
                number += 1
                job.change(number, share)
                _dump(worker, job, reserve, found, phases, case)
        progress("gpu: restores")
        pids = procfs.tree(job.pid)
        with reserve.lent():
            snapshot = worker.ask("dump", pid=job.pid, job="gpu", stop=True, gpu_shared=True)[
                "snapshot"
            ]
        job.process.wait(60)
        gone(pids)  # a restore would wait until nobody has them any more
        for _ in range(rounds):
            for mode in ("full", "lazy"):
                _restore(worker, job, reserve, snapshot, mode, found, phases)
        _criugpu_restore(criu, calls, job, reserve, folder, found)
    return [
        *_results(found, gib, gpus),
        *phases.results(PART, f"{gpus} × {gib:g} GiB", limits, gpus),
    ]


def _dump(
    worker: Worker, job: Job, reserve: Reserve, found: Rounds, seen: Phases, name: str
) -> None:
    with reserve.lent():
        done = worker.ask("dump", pid=job.pid, job="gpu", max_window=600.0, gpu_shared=True)
    phases: dict[str, float] = {
        k.removeprefix("dump.gpu."): v for k, v in done["phases"].items() if "gpu" in k
    }
    found.add(f"window {name}", done["window"])
    found.add(f"driver of {name}", sum(phases.values()))
    found.add(f"freeze of {name}", done["freeze"])
    found.add(f"stored {name}", done["stored"])
    found.add(f"seconds {name}", done["seconds"])
    seen.add(name, done["events"])
    progress(
        f"gpu: {name}: window {done['window']:.2f} s, {phases}, { ({k: v for k, v in done.items() if k != 'events'}) }"
    )


def _criugpu_dump(
    criu: Criu, calls: Calls, job: Job, reserve: Reserve, folder: Path, found: Rounds
) -> None:
    images = folder / "images"
    shutil.rmtree(images, ignore_errors=True)
    images.mkdir()
    pids = workers_of(job.pid)
    with reserve.lent():
        began = time.perf_counter()
        calls.stop(pids)
        try:
            command: list[str | Path] = [
                criu.path,
                "dump",
                "-t",
                str(job.pid),
                "-D",
                images,
                "-o",
                "dump.log",
                "-v1",
            ]
            criu_run([*command, "--leave-running", *_CRIU], images / "dump.log")
        finally:
            calls.go(pids)
        found.add("criugpu window", time.perf_counter() - began)


def _restore(
    worker: Worker,
    job: Job,
    reserve: Reserve,
    snapshot: str,
    mode: str,
    found: Rounds,
    phases: Phases,
) -> None:
    with reserve.lent():
        done = worker.ask("restore", snapshot=snapshot, mode=mode)
        step = job.wait_step(done["called_ns"])
    found.add(f"{mode} step", (step - done["called_ns"]) / 1e9)
    phases.add(f"restore {mode}", done["events"])
    at = {name: round(seconds / 1e9, 3) for name, seconds in done["at"].items()}
    progress(f"gpu: restore {mode}: progress after {(step - done['called_ns']) / 1e9:.2f} s, {at}")
    worker.ask("resident")
    pids = kill(done["pid"])
    worker.ask("ended")
    gone(pids)


def _criugpu_restore(
    criu: Criu, calls: Calls, job: Job, reserve: Reserve, folder: Path, found: Rounds
) -> None:
    images = folder / "images"
    with reserve.lent():
        called = time.time_ns()
        pid = plain_criu.restore(criu.path, images, _CRIU, SECONDS)
        built = time.time_ns()
        found.add("driver restore", calls.go(workers_of(pid)))
        found.add("criugpu step", (job.wait_step(called) - called) / 1e9)
    progress(f"gpu: CRIUgpu: built after {(built - called) / 1e9:.2f} s")
    gone(kill(pid))


def _results(found: Rounds, gib: float, gpus: int) -> list[Result]:
    size = gib * GIB
    where = f"{gpus} × {gib:g} GiB"
    floor = tuple(
        a + b for a, b in zip(found.of("driver out"), found.of("driver back"), strict=True)
    )
    pages = f"transparent_hugepage: {_HUGE.read_text().split('[')[-1].split(']')[0].strip()}"
    results = [
        Result(
            PART,
            f"{where}: driver alone, out",
            tuple(size / s / 1e9 for s in found.of("driver out")),
            None,
            "higher",
            "GB/s a GPU",
        ),
        Result(
            PART,
            f"{where}: driver alone, back",
            tuple(size / s / 1e9 for s in found.of("driver back")),
            None,
            "higher",
            "GB/s a GPU",
        ),
        Result(
            PART,
            f"{where}: memory in huge pages, checkpointed",
            found.of("huge pages"),
            None,
            "higher",
            note=pages,
        ),
        Result(
            PART,
            f"{where}: CRIUgpu's way: (window - driver) / driver",
            tuple((w - f) / f for w, f in zip(found.of("criugpu window"), floor, strict=True)),
        ),
    ]
    for case in CASES:
        own = zip(found.of(f"window {case}"), found.of(f"driver of {case}"), strict=True)
        note = f"window {found.median(f'window {case}'):.2f} s, stored {found.median(f'stored {case}') / 1e6:.0f} MB"
        results.append(
            Result(
                PART,
                f"{where}: (window - driver) / driver: {case}",
                tuple((w - d) / d for w, d in own),
                0.15,
                note=note,
            )
        )
    alone = zip(floor, found.of("window nothing changed"), strict=False)
    what = "(window - driver alone) / driver alone: nothing changed"
    results.append(
        Result(
            PART,
            f"{where}: {what}",
            tuple((w - f) / f for f, w in alone),
            0.15,
            note="the driver's calls with nobody's help",
        )
    )
    nothing = zip(floor, found.of("driver of nothing changed"), strict=False)
    results.append(
        Result(
            PART,
            f"{where}: driver alone / driver in a window",
            tuple(f / d for f, d in nothing),
            None,
            "higher",
        )
    )
    windows = zip(found.of("criugpu window"), found.of("window nothing changed"), strict=False)
    results.append(
        Result(
            PART,
            f"{where}: CRIUgpu's window / window, nothing changed",
            tuple(t / w for t, w in windows),
            None,
            "higher",
        )
    )
    share = tuple(stored / (size * gpus) for stored in found.of("stored 2 % changed"))
    results.append(Result(PART, f"{where}: bytes added / device memory, 2 % changed", share, 0.025))
    back, theirs = found.median("driver back"), found.median("criugpu step")
    for mode in ("full", "lazy"):
        steps = found.of(f"{mode} step")
        note = f"{found.median(f'{mode} step'):.2f} s; driver {back:.2f} s, CRIUgpu's way {theirs:.2f} s"
        results.append(
            Result(
                PART,
                f"{where}: restore {mode} until progress / driver's restore",
                tuple(s / back for s in steps),
                1.25,
                note=note,
            )
        )
        results.append(
            Result(
                PART,
                f"{where}: CRIUgpu's way / restore {mode}",
                tuple(theirs / s for s in steps),
                2.0,
                "higher",
            )
        )
    return results


def scaling(gib: float, counts: Sequence[int], rounds: int, one_gpu: bool) -> list[Result]:
    """Windows and restores with the same device memory on each of more and more GPUs, or processes
    on one, against the first number.
    """
    found = {count: Rounds() for count in counts}
    for count, own in found.items():
        size, phases = int(gib * count * GIB), Phases()
        with (
            plain_criu.adopting(),
            scratch(PART) as folder,
            Job(folder, gib, count, present=int(one_gpu)) as job,
            Reserve(2 * size + 4 * GIB) as reserve,
            Worker() as worker,
        ):
            job.wait_step(0)
            worker.ask("open", path=str(folder / "repository"), create=True)
            for turn in range(rounds + 1):
                _dump(worker, job, reserve, own if turn else Rounds(), phases, "nothing changed")
            pids = procfs.tree(job.pid)
            with reserve.lent():
                snapshot = worker.ask("dump", pid=job.pid, job="gpu", stop=True, gpu_shared=True)[
                    "snapshot"
                ]
            job.process.wait(60)
            gone(pids)
            for _ in range(rounds):
                for mode in ("full", "lazy"):
                    _restore(worker, job, reserve, snapshot, mode, own, phases)
    first, results = found[counts[0]], []
    for count, own in found.items():
        where = f"{gib:g} GiB each, {count} by {counts[0]} {'processes on one GPU' if one_gpu else 'GPUs'}"
        for name, what in (
            ("window nothing changed", "window"),
            ("full step", "restore, full"),
            ("lazy step", "restore, lazy"),
        ):
            base = first.median(name)
            note = f"{own.median(name):.2f} s"
            results.append(
                Result(
                    PART,
                    f"{where}: {what}",
                    tuple(s / base for s in own.of(name)),
                    1.3 if count > counts[0] else None,
                    note=note,
                )
            )
        calls = tuple(
            s / first.median("driver of nothing changed")
            for s in own.of("driver of nothing changed")
        )
        results.append(
            Result(
                PART,
                f"{where}: the driver's own calls in the window",
                calls,
                note=f"{own.median('driver of nothing changed'):.2f} s",
            )
        )
        pairs = zip(
            own.of("window nothing changed"), own.of("driver of nothing changed"), strict=True
        )
        results.append(
            Result(
                PART,
                f"{where}: (window - driver) / driver",
                tuple((w - d) / d for w, d in pairs),
                0.15,
            )
        )
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=16.0)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path, help="write JSON into this folder")
    parser.add_argument(
        "--scaling",
        metavar="N,N",
        help="with so many GPUs in turn, the window and the restores only (--gib for each)",
    )
    parser.add_argument(
        "--one-gpu",
        action="store_true",
        help="with --scaling: so many processes on one GPU, which is what several mean for the host",
    )
    resident = parser.add_argument_group(
        "memory that stays where it is", "the job runs under the preload, on one GPU"
    )
    resident.add_argument("--resident", action="store_true", help="measure this instead")
    resident.add_argument(
        "--parts",
        default=",".join(gpu_resident.PARTS),
        help="of it, by commas (default: %(default)s)",
    )
    resident.add_argument(
        "--distinct",
        type=float,
        default=4.0,
        help="GiB of memory that is not a copy of other memory",
    )
    resident.add_argument(
        "--figures",
        type=Path,
        help="file that keeps the figures, so that parts can be measured one by one",
    )
    options = parser.parse_args()
    if options.resident:
        parts = options.parts.split(",")
        if unknown := set(parts) - set(gpu_resident.PARTS):
            parser.error(f"--parts: there is no {', '.join(sorted(unknown))}")
        setting = gpu_resident.Setting(options.gib, parts, options.rounds, options.distinct)
        results = gpu_resident.measure(setting, options.figures)
    elif options.scaling:
        results = scaling(
            options.gib,
            [int(word) for word in options.scaling.split(",")],
            options.rounds,
            options.one_gpu,
        )
    else:
        results = measure(options.gib, options.gpus, options.rounds)
    show(results, Console(width=180))
    if options.save:
        write(results, options.save)


if __name__ == "__main__":
    main()
