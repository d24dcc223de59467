#!/usr/bin/env python3
"""Dump and restore of a real job through the command line, over a link of 1 Gb/s and 80 ms to the
bucket (SeaweedFS behind `benchmarks.shaper`); rule: the whole command counts, from its start to its
end, against the bytes that the link would have carried meanwhile.

Beside them the bare client, with the same link, so that it is seen what the link and the server
give. The job's memory cannot be compressed, and each round has other bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from benchmarks.bucket import at_once
from benchmarks.common import MIB, TMPFS, Result, Rounds, progress, scratch, show
from benchmarks.jobs import job
from benchmarks.reserve import Reserve
from benchmarks.shaper import shaped
from icecore.store.backend.s3 import S3Backend, S3Place
from tests.programs import driving
from tests.seaweedfs import Server, running

PART = "link"
BUCKET = "far-away"
#: 1 Gb/s, in bytes a second; and seconds there and back.
RATE, ROUND_TRIP = 125e6, 0.08
_BARE_BYTES, _BARE_IN_FLIGHT = 8 << 20, 16
_SECONDS = 300.0
#: What a dump takes for staging and shards, and a restore for ranges, at most: kept warm, or the
#: machine's host is measured (benchmarks.reserve).
_WARM_BYTES = 1280 << 20


@dataclass(frozen=True)
class Shell:
    """Runs icecore's commands on a repository in the bucket."""

    environment: dict[str, str]

    def run(self, *words: str) -> tuple[float, list[dict[str, Any]]]:
        """The seconds that a command took from its start to its end, and what it said."""
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-P", "-m", "icecore", "--json", *words],
            env=self.environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        seconds = time.perf_counter() - began
        if done.returncode:
            raise RuntimeError(
                f"icecore {words[0]} ended with status {done.returncode}: {done.stderr[-2000:]}"
            )
        return seconds, [json.loads(line) for line in done.stdout.splitlines()]


def measure(
    mib: int, rounds: int, *, data: str | None = None, verbose: bool = False
) -> list[Result]:
    """All figures; ``mib`` of private memory, the server's data in a folder below ``data``."""
    found = Rounds()
    for turn in range(rounds):
        progress(f"link: round {turn + 1} of {rounds}")
        with _linked(data) as (_, _, endpoint):
            asyncio.run(_bare(endpoint, mib, found))
        with _linked(data) as (folder, server, endpoint):
            _whole(folder, server, endpoint, mib, turn, found, verbose)
    return _results(found)


@contextmanager
def _linked(data: str | None) -> Iterator[tuple[Path, Server, str]]:
    """A folder on tmpfs, a server of its own (what is deleted stays in its volumes), and its URL at
    the end of the link.
    """
    with (
        scratch(PART) as folder,
        tempfile.TemporaryDirectory(prefix="icecore-bench-link-", dir=data or TMPFS) as place,
        running(Path(place)) as server,
    ):
        server.make_bucket(BUCKET)
        os.environ.update(server.environment())
        with shaped(server.endpoint, RATE, ROUND_TRIP) as endpoint:
            yield folder, server, endpoint


async def _bare(endpoint: str, mib: int, found: Rounds) -> None:
    """As many bytes with the client alone, in objects of 8 MiB."""
    backend = S3Backend(S3Place(BUCKET, "bare", endpoint=endpoint))
    names = [f"o/{secrets.token_hex(8)}" for _ in range(max(1, mib * MIB // _BARE_BYTES))]
    data = memoryview(os.urandom(_BARE_BYTES))
    rooms = [memoryview(bytearray(_BARE_BYTES)) for _ in range(_BARE_IN_FLIGHT)]
    puts = [lambda who, name=name: backend.create(name, [data]) for name in names]
    gets = [lambda who, name=name: backend.get_into(name, 0, rooms[who]) for name in names]
    for what, work in (("put", puts), ("get", gets)):
        began = time.perf_counter()
        await asyncio.wait_for(at_once(work, _BARE_IN_FLIGHT), _SECONDS)
        found.add(what, len(names) * _BARE_BYTES / (time.perf_counter() - began) / RATE)
    await backend.close()


def _whole(
    folder: Path, server: Server, endpoint: str, mib: int, turn: int, found: Rounds, verbose: bool
) -> None:
    """A job is dumped, killed, and restored."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ICECORE_") or name == "ICECORE_CRIU_PREFIX"
    }
    environment |= {
        **server.environment(),
        "AWS_ENDPOINT_URL_S3": endpoint,
        "ICECORE_STATE": str(folder / "state"),
        "ICECORE_REPOSITORY": f"s3://{BUCKET}/repository",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    shell = Shell(environment)
    shell.run("init")
    with (
        job("memory-pattern", folder, ["--mib", str(mib), "--seed", str(turn + 1)]) as running_,
        Reserve(min(_WARM_BYTES, mib * MIB // 2)) as reserve,
    ):
        with reserve.lent():
            seconds, said = shell.run("dump", str(running_.pid), "--job", "pattern")
        driving.kill_tree(running_.pid)
        running_.process.wait(60)
        stored = _one(said, "dump.done")["stored"]
        found.add("dump", stored / seconds / RATE)
        found.add("dump seconds", seconds)
        _explain("dump", said, seconds, verbose)
        called = time.time_ns()
        with reserve.lent():
            seconds, said = shell.run("restore", "latest")
        fetched = _one(said, "restore.memory", state="end")["stored"]
        found.add("restore", fetched / seconds / RATE)
        found.add("restore seconds", seconds)
        _explain("restore", said, seconds, verbose)
        driving.wait_step(running_.state_dir, called, 60)
    shutil.rmtree(folder / "state", ignore_errors=True)


def _one(said: list[dict[str, Any]], name: str, **fields: str) -> dict[str, Any]:
    (event,) = [one for one in said if one["event"] == name and fields.items() <= one.items()]
    return event


def _explain(what: str, said: list[dict[str, Any]], seconds: float, verbose: bool) -> None:
    """When what happened."""
    if not verbose:
        return
    first = said[0]["at"]
    for event in said:
        if event.get("state") != "progress" and event["event"] != "store.requests":
            fields = {
                name: value
                for name, value in event.items()
                if name not in ("event", "at", "by_codec")
            }
            progress(f"  {what} {event['at'] - first:7.3f} {event['event']} {fields}")
    for event in said:
        if event["event"] == "store.requests":
            progress(f"  {what} {event}")
    progress(
        f"  {what}: {said[-1]['at'] - first:.3f} s from the first to the last event, {seconds:.3f} s in all"
    )


def _results(found: Rounds) -> list[Result]:
    def result(what: str, name: str, target: float | None) -> Result:
        note = f"{found.median(name) * RATE / 1e6:.0f} of {RATE / 1e6:.0f} MB/s"
        if f"{name} seconds" in found.figures:
            note += f", {found.median(f'{name} seconds'):.1f} s"
        return Result(PART, what, found.of(name), target, "higher", note=note)

    return [
        result("bare PUTs of 8 MiB, 16 at once / 1 Gb/s at 80 ms", "put", None),
        result("icecore dump, the whole command / the link", "dump", 0.9),
        result("bare GETs of 8 MiB, 16 at once / the link", "get", None),
        result("icecore restore, the whole command / the link", "restore", 0.9),
    ]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=3815, help="memory of the job (default: 4 GB)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="where the server's data lies (default: on tmpfs, as much as the job's memory)",
    )
    parser.add_argument("--verbose", action="store_true", help="when what happened")
    options = parser.parse_args()
    show(
        measure(options.mib, options.rounds, data=options.data, verbose=options.verbose),
        Console(width=None if sys.stdout.isatty() else 200),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
