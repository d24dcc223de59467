#!/usr/bin/env python3
"""icecore's import and export against restic, borg and desync, on the same three successive CRIU
image directories.

Everything lies on tmpfs and is read warm. Each program starts as a process of its own for each
step, icecore too; each has the settings that were quickest for it here without storing more (see
the functions). Each round begins with an empty repository and takes the programs in turn.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from benchmarks.common import MIB, Result, Rounds, progress, scratch, show, tree_bytes
from benchmarks.jobs import job, page_bytes, peers, plain_dump
from benchmarks.reserve import Reserve
from icecore.host.criu.program import find_criu
from tests.programs import driving
from tests.programs.catalogue import BENCHMARK_ARGUMENTS

PART = "peers"
PREFIX = Path("/usr/local/lib/icecore/peers")
JOBS = ("inference", "training")
_BETWEEN_SECONDS = 0.4
_SECONDS = 600.0
_TIMES = ("1st", "2nd", "3rd")


class Program(ABC):
    """One program with an empty repository in ``folder``."""

    name = ""

    def __init__(self, folder: Path, binary: Path) -> None:
        self.folder = folder
        self.binary = binary
        self.repository = folder / self.name
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Make the repository; not timed."""

    @abstractmethod
    def store(self, directory: Path, number: int) -> None:
        """Store a directory as the next snapshot."""

    @abstractmethod
    def restore(self, number: int, target: Path) -> None:
        """Write a stored directory into ``target``, which exists and is empty."""

    def call(self, *arguments: str | Path, cwd: Path | None = None, **environment: str) -> None:
        """Run the program.

        Raises:
            RuntimeError: It failed.
        """
        home = {
            "HOME": str(self.folder),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "PATH": os.environ["PATH"],
        }
        done = subprocess.run(
            [self.binary, *arguments],
            cwd=cwd or self.folder,
            env=home | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        if done.returncode:
            raise RuntimeError(
                f"{self.name} {arguments[0]}: status {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"
            )


class Restic(Program):
    """restic: its fastest compression, both cores, no cache beside a local repository, no scan
    ahead.
    """

    name = "restic"

    def prepare(self) -> None:
        self._call("init")

    def store(self, directory: Path, number: int) -> None:
        fast = (
            "--compression",
            "fastest",
            "--no-scan",
            "--read-concurrency",
            "4",
            "--pack-size",
            "64",
        )
        self._call("backup", *fast, ".", cwd=directory)

    def restore(self, number: int, target: Path) -> None:
        self._call("restore", "latest", "--target", target)

    def _call(self, *arguments: str | Path, cwd: Path | None = None) -> None:
        options = ("--no-cache", "--quiet", "-r", self.repository)
        self.call(*arguments, *options, cwd=cwd, RESTIC_PASSWORD="x")


class Borg(Program):
    """borg: zstd 1, no encryption, no files cache (a new directory each time)."""

    name = "borg"

    def prepare(self) -> None:
        self._call("init", "-e", "none", self.repository)

    def store(self, directory: Path, number: int) -> None:
        fast = (
            "--compression",
            "zstd,1",
            "--files-cache",
            "disabled",
            "--noxattrs",
            "--noacls",
            "--noflags",
        )
        self._call("create", *fast, f"{self.repository}::{number}", ".", cwd=directory)

    def restore(self, number: int, target: Path) -> None:
        self._call("extract", f"{self.repository}::{number}", cwd=target)

    def _call(self, *arguments: str | Path, cwd: Path | None = None) -> None:
        free = {
            "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes",
            "BORG_RELOCATED_REPO_ACCESS_IS_OK": "yes",
        }
        self.call(*arguments, cwd=cwd, BORG_BASE_DIR=str(self.folder / "borg-home"), **free)


class Desync(Program):
    """desync: chunks of 256 KiB to 4 MiB; its index files of directories only take the default
    digest.
    """

    name = "desync"

    def prepare(self) -> None:
        self.repository.mkdir()
        (self.repository / "store").mkdir()

    def store(self, directory: Path, number: int) -> None:
        index = self.repository / f"{number}.caidx"
        self._call(
            "tar", "-i", "-s", self.repository / "store", "-m", "256:1024:4096", index, directory
        )

    def restore(self, number: int, target: Path) -> None:
        self._call(
            "untar",
            "-i",
            "-s",
            self.repository / "store",
            self.repository / f"{number}.caidx",
            target,
        )

    def _call(self, verb: str, *arguments: str | Path) -> None:
        self.call(verb, *arguments)


class Icecore(Program):
    """icecore, with its defaults."""

    name = "icecore"

    def prepare(self) -> None:
        self._call("init")

    def store(self, directory: Path, number: int) -> None:
        self._call("import", directory, "--job", "job")

    def restore(self, number: int, target: Path) -> None:
        self._call("export", f"job@{number + 1}", target)

    def _call(self, *arguments: str | Path) -> None:
        self.call("-r", self.repository, *arguments, ICECORE_STATE=str(self.folder / "state"))


PROGRAMS: tuple[type[Program], ...] = (Restic, Borg, Desync, Icecore)


def can_export() -> bool:
    """Whether this icecore can write image directories."""
    return find_spec("icecore.restorer.files.exporter") is not None


def measure(
    name: str, arguments: Sequence[str], rounds: int, only: Sequence[str] = ()
) -> list[Result]:
    """All figures for one job.

    Args:
        name: The test program.
        arguments: Its arguments.
        only: Names of programs, where not all are wanted.
    """
    # As installed beside the Python that runs this.
    binaries, found = (
        peers(PREFIX) | {Icecore.name: Path(sys.executable).with_name("icecore")},
        Rounds(),
    )
    wanted = [p for p in PROGRAMS if p.name in binaries and (not only or p.name in only)]
    with scratch(PART) as folder:
        directories = dump_three(name, arguments, folder)
        sizes = [tree_bytes(directory) for directory in directories]
        warm(directories)
        with Reserve(2 * max(sizes) + 256 * MIB) as reserve:
            for turn in range(rounds):
                progress(f"peers: {name}, round {turn + 1} of {rounds}")
                for kind in wanted:
                    _one(
                        kind,
                        binaries[kind.name],
                        folder / "work",
                        directories,
                        sizes,
                        reserve,
                        found,
                    )
    return _results(name, sizes, [p.name for p in wanted], found)


def dump_three(name: str, arguments: Sequence[str], folder: Path) -> list[Path]:
    """Three image directories of a job, one after the other."""
    criu = find_criu()
    directories = [folder / f"images{number}" for number in range(3)]
    with job(name, folder, arguments) as running:
        for directory in directories:
            progress(f"peers: dumping {name}")
            time.sleep(_BETWEEN_SECONDS)
            plain_dump(criu, running.pid, directory)
            driving.wait_progress(running.state_dir)
    progress(f"peers: {[page_bytes(directory) // MIB for directory in directories]} MiB of pages")
    return directories


def warm(directories: list[Path]) -> None:
    """Read everything once."""
    for directory in directories:
        for path in directory.iterdir():
            with open(path, "rb", buffering=0) as file:
                while file.read(16 * MIB):
                    pass


def _one(
    kind: type[Program],
    binary: Path,
    work: Path,
    directories: list[Path],
    sizes: list[int],
    reserve: Reserve,
    found: Rounds,
) -> None:
    """One program, from an empty repository to a restored directory."""
    work.mkdir()
    try:
        program = kind(work, binary)
        before = tree_bytes(program.repository)
        for number, (directory, size) in enumerate(zip(directories, sizes, strict=True)):
            with reserve.lent():
                seconds, cpu = _timed(partial(program.store, directory, number))
            after = tree_bytes(program.repository)
            found.add(f"{kind.name} {_TIMES[number]}", size / seconds / 1e9)
            found.add(f"{kind.name} cpu {_TIMES[number]}", cpu)
            found.add(f"{kind.name} added {_TIMES[number]}", after - before)
            before = after
        if kind is Icecore and not can_export():
            return
        target = work / "restored"
        target.mkdir()
        with reserve.lent():
            seconds, cpu = _timed(partial(program.restore, 2, target))
        if page_bytes_below(target) != page_bytes(directories[2]):
            raise RuntimeError(f"{kind.name} restored {tree_bytes(target)} of {sizes[2]} bytes")
        found.add(f"{kind.name} restore", sizes[2] / seconds / 1e9)
        found.add(f"{kind.name} cpu restore", cpu)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of ``work``, and CPU seconds of the processes that it started: those hardly depend on
    what else runs.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def page_bytes_below(folder: Path) -> int:
    """Bytes of memory in an image directory somewhere below ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("pages-*.img"))


def _results(name: str, sizes: list[int], programs: list[str], found: Rounds) -> list[Result]:
    others = [program for program in programs if program != Icecore.name]
    results = []
    if Icecore.name not in programs:
        return [
            Result(
                PART,
                f"{name}: {f}",
                found.of(f),
                None,
                "higher",
                "GB/s" if "added" not in f else "B",
            )
            for f in found.figures
        ]
    steps = [*_TIMES, *(["restore"] if can_export() else [])]
    for step in steps:
        rates = ", ".join(f"{p} {found.median(f'{p} {step}'):.2f}" for p in programs)
        rates += "; CPU s: " + ", ".join(
            f"{p} {found.median(f'{p} cpu {step}'):.1f}" for p in programs
        )
        if others:
            best = max(others, key=lambda p: found.median(f"{p} {step}"))
            what = f"{name}, {sizes[0] / 1e9:.1f} GB: {step}, speed / that of {best}, the fastest"
            target = 3.0 if step == "restore" else 4.0
            ratios = found.ratio(f"icecore {step}", f"{best} {step}")
            results.append(Result(PART, what, ratios, target, "higher", note=f"GB/s: {rates}"))
        else:
            results.append(
                Result(PART, f"{name}: {step}", found.of(f"icecore {step}"), None, "higher", "GB/s")
            )
    for step in _TIMES:
        added = ", ".join(f"{p} {found.median(f'{p} added {step}') / 1e6:.1f}" for p in programs)
        if others:
            least = min(others, key=lambda p: found.median(f"{p} added {step}"))
            goal = 0.5 if name == "inference" and step != "1st" else None
            ratios = found.ratio(f"icecore added {step}", f"{least} added {step}")
            results.append(
                Result(
                    PART,
                    f"{name}: bytes added by the {step} / {least}'s, the fewest",
                    ratios,
                    goal,
                    note=f"MB: {added}",
                )
            )
        else:
            results.append(
                Result(
                    PART,
                    f"{name}: added {step}",
                    tuple(v / 1e6 for v in found.of(f"icecore added {step}")),
                    unit="MB",
                )
            )
    return results


def main() -> None:
    """This part alone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--job", choices=JOBS, action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, help="another size of the job's memory")
    parser.add_argument(
        "--only", action="append", default=[], help="name of a program; default: all"
    )
    options = parser.parse_args()
    results: list[Result] = []
    for name in options.job or JOBS:
        results += measure(name, sized(name, options.mib), options.rounds, options.only)
    show(results, Console(width=200))


def sized(name: str, mib: int | None) -> list[str]:
    """The job's arguments, for another size than the usual one where ``mib`` says so."""
    arguments = list(BENCHMARK_ARGUMENTS[name])
    if mib is not None:
        arguments[arguments.index("--mib") + 1] = str(mib)
    return arguments


if __name__ == "__main__":
    main()
