#!/usr/bin/env python3
"""Freeing the space of a repository in which nine tenths are dead, against ``restic forget
--prune`` on the same files; rule: whole commands, one round.

*Scattered*: of the files of the first snapshot every tenth is in the second, which stays; so each
shard, or pack, is live to a tenth and has to be rewritten. *Whole*: ten snapshots have nothing in
common, and the last stays. restic looks at what it removes with its own rules (it tolerates 5 % of
unused data, icecore shards of which less than half is dead): here both rewrite or delete
everything. The repositories lie on tmpfs. Beside them the floor: ``rm`` of as many bytes, in files
as large as shards, which is the kernel freeing their pages.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
import numpy as np
from rich.console import Console

from benchmarks.common import MIB, Result, Rounds, progress, scratch, show, tree_bytes
from benchmarks.jobs import peers
from benchmarks.peers import PREFIX
from icecore.store.backend.local import LocalBackend
from icecore.store.format.cell import CELL
from icecore.store.format.manifest import Region
from icecore.store.format.names import new_snapshot_id
from icecore.store.log.repository import StoredRepository
from icecore.store.runtime.loop import LoopThread
from icecore.store.snapshot.reader import SnapshotReader
from icecore.store.snapshot.writer import SnapshotWriter
from tests.restorer.places import empty_manifest

PART = "prune"
PASSPHRASE = b"only for a benchmark"
_FULL = b"\xff" * 32
_THREADS = 2
_SECONDS = 600.0
_SHARD_MIB = 64
#: The files of each snapshot, by their numbers; the last snapshot stays.
_LAYOUTS = {
    "scattered": lambda count: [range(count), range(5, count, 10)],
    "whole": lambda count: [
        range(first, min(first + count // 10, count))
        for first in range(0, count - count % 10, count // 10)
    ],
}


def _files(folder: Path, count: int) -> None:
    """Files of 1 MiB that nothing compresses."""
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:05d}").write_bytes(np.random.default_rng(number).bytes(MIB))


class Ours:
    """An icecore repository: the command ``forget --gc``."""

    def __init__(self, folder: Path, *, encrypted: bool) -> None:
        self.folder = folder
        self._passphrase = (lambda: PASSPHRASE) if encrypted else None

    def fill(self, source: Path, snapshots: Sequence[range]) -> str:
        """Store the files, a cell each; the snapshot that stays."""
        with LoopThread() as loop:
            self._ids = []
            repository = loop.run(
                StoredRepository.create(
                    LocalBackend(self.folder, create=True), passphrase=self._passphrase
                )
            )
            for files in snapshots:
                session = loop.run(repository.begin(None, "benchmark", beat_seconds=None))
                with (
                    SnapshotWriter(repository, session, loop.loop) as writer,
                    ThreadPoolExecutor(_THREADS) as pool,
                ):

                    def store(number: int, writer: SnapshotWriter = writer) -> np.void:
                        return writer.store_cell(
                            0,
                            number,
                            _FULL,
                            bytes(32),
                            memoryview((source / f"{number:05d}").read_bytes()),
                            None,
                        )

                    records = np.array(list(pool.map(store, files)), CELL)
                    length = (max(files) + 1) * MIB
                    space = writer.put_map(
                        "process", "1", 0, [Region(0, length, 0)], [records], None
                    )
                    manifest = msgspec.structs.replace(
                        empty_manifest(), snapshot=new_snapshot_id(), spaces=[space]
                    )
                    self._ids.append(writer.commit(manifest))
            loop.run(repository.close())
        return self._ids[-1]

    def prune(self) -> None:
        """Forget all snapshots but the last, and free what they had."""
        command = [
            str(Path(sys.executable).parent / "icecore"),
            "-r",
            str(self.folder),
            "-q",
            "forget",
            "--gc",
            *self._ids[:-1],
        ]
        opens = {"ICECORE_PASSPHRASE": PASSPHRASE.decode()} if self._passphrase else {}
        _run(command, {**os.environ, **opens, "ICECORE_STATE": str(self.folder.with_name("state"))})

    def verify(self, source: Path, files: range) -> None:
        """What stays has to be there, byte for byte."""
        with LoopThread() as loop:
            repository = loop.run(
                StoredRepository.open(LocalBackend(self.folder), passphrase=self._passphrase)
            )
            reader = SnapshotReader.open(repository, self._ids[-1], loop.loop)
            (records,) = reader.records(reader.manifest.spaces[0])
            room = memoryview(bytearray(MIB))
            assert [int(record["cell"]) for record in records] == list(files)
            for number, record in zip(files, records, strict=True):
                assert (
                    bytes(reader.read_cell(record, room)) == (source / f"{number:05d}").read_bytes()
                )
            loop.run(repository.close())


class Restic:
    """A restic repository, its cache included: packs as large as icecore's shards."""

    def __init__(self, folder: Path, binary: Path) -> None:
        self.folder = folder
        self._binary = binary
        places = {"HOME": folder.with_name("home"), "RESTIC_CACHE_DIR": folder.with_name("cache")}
        self._home = {
            "PATH": os.environ["PATH"],
            "RESTIC_PASSWORD": "x",
            **{name: str(place) for name, place in places.items()},
        }

    def _call(self, *words: str, folder: Path | None = None) -> str:
        return _run(
            [
                str(self._binary),
                *words,
                "-q",
                "-r",
                str(self.folder),
                "--pack-size",
                "64",
                "--compression",
                "fastest",
            ],
            self._home,
            folder,
        )

    def fill(self, source: Path, snapshots: Sequence[range]) -> None:
        """Store the files."""
        self._call("init")
        for files in snapshots:
            names = source.with_name("names")
            names.write_text("".join(f"{number:05d}\n" for number in files))
            self._call("backup", "--no-scan", "--files-from-verbatim", str(names), folder=source)
        listed = json.loads(self._call("snapshots", "--json"))
        self._ids = [one["id"] for one in sorted(listed, key=lambda one: str(one["time"]))]

    def prune(self) -> None:
        """The same in one command."""
        self._call("forget", "--prune", *self._ids[:-1])

    def verify(self, source: Path, files: range) -> None:
        """What stays has to be there."""
        listed = [
            line for line in self._call("ls", self._ids[-1]).splitlines() if line.startswith("/")
        ]
        assert len(listed) == len(files), f"{len(listed)} of {len(files)} files"


def _run(command: Sequence[str], environment: dict[str, str], folder: Path | None = None) -> str:
    done = subprocess.run(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command[:4])}: status {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"
        )
    return done.stdout


def _rm(folder: Path, mib: int) -> float:
    """Seconds that ``rm`` takes for as many MiB in files as large as shards."""
    folder.mkdir()
    for first in range(0, mib, _SHARD_MIB):
        with open(folder / str(first), "wb") as file:
            for _ in range(min(_SHARD_MIB, mib - first)):
                file.write(bytes(MIB))
    started = time.perf_counter()
    subprocess.run(["rm", "-r", str(folder)], check=True, timeout=_SECONDS)
    return time.perf_counter() - started


def measure(mib: int, rounds: int) -> list[Result]:
    """Ratios, round by round."""
    restic = peers(PREFIX).get("restic")
    if restic is None:
        progress("prune: restic is not there (tools/install-peers)")
        return []
    got, kept = Rounds(), dict[str, list[float]]()
    for layout, plan in _LAYOUTS.items():
        snapshots = plan(mib)
        for turn in range(rounds):
            progress(f"prune: {layout}, round {turn + 1} of {rounds}")
            with (
                scratch(PART) as folder,
                tempfile.TemporaryDirectory(prefix="icecore-bench-files-") as elsewhere,
            ):
                got.add(
                    f"{layout} rm",
                    _rm(folder / "rm", mib if layout == "scattered" else mib - len(snapshots[-1])),
                )
                source = Path(elsewhere) / "files"
                _files(source, mib)
                places: dict[str, Ours | Restic] = {
                    "icecore": Ours(folder / "ours" / "repository", encrypted=False),
                    "encrypted": Ours(folder / "encrypted" / "repository", encrypted=True),
                    "restic": Restic(folder / "restic" / "repository", restic),
                }
                for name, place in places.items():
                    place.folder.parent.mkdir()
                    place.fill(source, snapshots)
                    before, used, started = (
                        tree_bytes(place.folder),
                        resource.getrusage(resource.RUSAGE_CHILDREN),
                        time.perf_counter(),
                    )
                    place.prune()
                    got.add(f"{layout} {name}", time.perf_counter() - started)
                    after = resource.getrusage(resource.RUSAGE_CHILDREN)
                    got.add(
                        f"{layout} {name} cpu",
                        after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime,
                    )
                    left = tree_bytes(place.folder)
                    place.verify(source, snapshots[-1])
                    live = len(snapshots[-1]) * MIB
                    assert before > 9 * live and left < 1.1 * live + 4 * MIB, (
                        f"{name}: {left} of {before} bytes are left, {live} live"
                    )
                    kept.setdefault(f"{layout} {name}", []).append(left / live)
                    subprocess.run(
                        ["rm", "-rf", str(place.folder.parent)], check=True, timeout=_SECONDS
                    )

    def result(layout: str, name: str, words: str) -> Result:
        def took(key: str) -> str:
            return f"{got.median(key):.2f} s ({got.median(f'{key} cpu'):.2f} s of CPU), {max(kept[key]):.2f} × the live bytes left"

        ours, theirs = f"{layout} {name}", f"{layout} restic"
        what = f"{words}, {mib} MiB, nine tenths dead, {layout}: speed of forget --gc / that of restic forget --prune"
        note = f"{name} {took(ours)}; restic {took(theirs)}; rm of as many bytes {got.median(f'{layout} rm'):.2f} s"
        return Result(PART, what, got.ratio(theirs, ours), 3.0, "higher", note=note)

    return [
        result(layout, name, words)
        for layout in _LAYOUTS
        for name, words in (("icecore", "as it is"), ("encrypted", "encrypted"))
    ]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    show(measure(options.mib, options.rounds), Console(width=None if sys.stdout.isatty() else 200))
    return 0


if __name__ == "__main__":
    sys.exit(main())
