#!/usr/bin/env python3
"""How fast a job is back, against plain CRIU on the same tmpfs: with all its memory, and until its
first step when it is restored lazily.

The job is memory-pattern; the repository and CRIU's images hold the same state. icecore is called
in a process that has restored once before, CRIU is its command. A step of the job verifies one page
at random and then tells the time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from benchmarks.common import MIB, Result, Rounds, progress, scratch, show
from benchmarks.jobs import criu_run, job, plain_dump
from benchmarks.reserve import Reserve
from benchmarks.worker import Worker
from icecore.host.criu.program import Criu, find_criu
from tests.programs import driving, plain_criu

PART = "restore"
_LAZY_MS = 150.0
_SECONDS = 120.0


def measure(mib: int, rounds: int) -> list[Result]:
    """All figures of this part; ``mib`` of private memory."""
    criu, found = find_criu(), Rounds()
    with (
        scratch(PART) as folder,
        job("memory-pattern", folder, ["--mib", str(mib)]) as running,
        Reserve((mib + 256) * MIB) as reserve,
        Worker() as worker,
    ):
        worker.ask("open", path=str(folder / "repository"), create=True)
        with reserve.lent():
            snapshot = worker.ask("dump", pid=running.pid, job="memory-pattern", pre_copy="off")[
                "snapshot"
            ]
        images = folder / "images"
        with reserve.lent():
            plain_dump(criu, running.pid, images, leave_running=False)
        running.process.wait(60)
        state = running.state_dir
        progress("restore: the first, not counted")
        _ours(worker, snapshot, "lazy", state, reserve, Rounds())
        for turn in range(rounds):
            progress(f"restore: round {turn + 1} of {rounds}")
            with plain_criu.adopting():
                _plain(criu, images, state, reserve, found)
            _ours(worker, snapshot, "full", state, reserve, found)
            with plain_criu.adopting():
                _plain_lazy(criu, images, state, reserve, found)
            _ours(worker, snapshot, "lazy", state, reserve, found)
    return _results(found)


def _ours(
    worker: Worker, snapshot: str, mode: str, state: Path, reserve: Reserve, found: Rounds
) -> None:
    with reserve.lent():
        done = worker.ask("restore", snapshot=snapshot, mode=mode)
        step = driving.wait_step(state, done["called_ns"], _SECONDS)
        resident = worker.ask("resident")["seconds"]
    found.add(f"{mode} call", done["seconds"])
    found.add(f"{mode} step", (step - done["called_ns"]) / 1e9)
    found.add(f"{mode} resident", resident)
    for name, at in done["at"].items():
        found.add(f"{mode} {name}", at / 1e9)
    os.kill(done["pid"], signal.SIGKILL)
    worker.ask("ended")
    _gone(done["pid"])


def _command(criu: Criu, images: Path, *more: str | Path) -> list[str | Path]:
    (images / "restored.pid").unlink(missing_ok=True)
    command: list[str | Path] = [
        criu.path,
        "restore",
        "-D",
        images,
        "-o",
        "restore.log",
        "-v1",
        "-d",
        "--restore-sibling",
    ]
    return [
        *command,
        "--pidfile",
        "restored.pid",
        "--network-lock",
        "skip",
        "--manage-cgroups=ignore",
        *more,
    ]


def _plain(criu: Criu, images: Path, state: Path, reserve: Reserve, found: Rounds) -> None:
    with reserve.lent():
        called = time.time_ns()
        found.add("plain", criu_run(_command(criu, images), images / "restore.log"))
        found.add("plain step", (driving.wait_step(state, called, _SECONDS) - called) / 1e9)
    _end(images)


def _plain_lazy(criu: Criu, images: Path, state: Path, reserve: Reserve, found: Rounds) -> None:
    """The daemon is up before the clock starts: in its favour, as ours is part of the call."""
    command = [str(criu.path), "lazy-pages", "-D", str(images), "-o", "lazy-pages.log", "-v1"]
    socket = images / "lazy-pages.socket"
    socket.unlink(missing_ok=True)
    daemon = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + _SECONDS
        while not socket.exists():
            if daemon.poll() is not None or time.monotonic() > until:
                raise RuntimeError(
                    f"criu lazy-pages: {(images / 'lazy-pages.log').read_text()[-1000:]}"
                )
            time.sleep(0.001)
        with reserve.lent():
            called = time.time_ns()
            criu_run(_command(criu, images, "--lazy-pages"), images / "restore.log")
            found.add(
                "plain lazy step", (driving.wait_step(state, called, _SECONDS) - called) / 1e9
            )
            daemon.wait(_SECONDS)  # it ends when all memory is there
            found.add("plain lazy resident", (time.time_ns() - called) / 1e9)
    finally:
        if daemon.poll() is None:
            daemon.kill()
            daemon.wait(60)
    _end(images)


def _end(images: Path) -> None:
    pid = int((images / "restored.pid").read_text())
    driving.kill_tree(pid)
    _gone(pid)


def _gone(pid: int) -> None:
    """A pid can only be restored again once nothing of it is left."""
    until = time.monotonic() + _SECONDS
    while os.path.exists(f"/proc/{pid}"):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > until:
            raise RuntimeError(f"process {pid} does not go away")
        time.sleep(0.002)


def _results(found: Rounds) -> list[Result]:
    def seconds(*names: str) -> str:
        return ", ".join(f"{name} {found.median(name):.3f} s" for name in names)

    lazy = tuple(1000 * value for value in found.of("lazy step"))
    return [
        Result(
            PART,
            "full: call / criu restore",
            found.ratio("full call", "plain"),
            0.6,
            note=seconds("full call", "plain"),
        ),
        Result(
            PART,
            "full: first step / that of criu restore",
            found.ratio("full step", "plain step"),
            0.6,
            note=seconds("full step", "plain step"),
        ),
        Result(
            PART,
            "lazy: first step / that of criu lazy-pages",
            found.ratio("lazy step", "plain lazy step"),
            1.5,
            note=seconds("lazy step", "plain lazy step"),
        ),
        Result(
            PART,
            "lazy: first step after the call in a warm process",
            lazy,
            _LAZY_MS,
            unit="ms",
            note=_steps(found),
        ),
        Result(
            PART,
            "lazy: resident / that of criu lazy-pages",
            found.ratio("lazy resident", "plain lazy resident"),
            note=seconds("lazy resident", "plain lazy resident"),
        ),
    ]


def _steps(found: Rounds) -> str:
    """What happened when in a lazy restore."""
    events = [
        name
        for name in found.figures
        if name.startswith("lazy restore.") and not name.endswith("warning")
    ]
    return ", ".join(
        f"{name.removeprefix('lazy restore.')} {1000 * found.median(name):.0f} ms"
        for name in events
    )


def main() -> None:
    """This part alone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mib", type=int, default=3815, help="private memory of the job (default: 4 GB)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    show(measure(options.mib, options.rounds), Console(width=200))


if __name__ == "__main__":
    main()
