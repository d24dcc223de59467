#!/usr/bin/env python3
"""What it gains to bring device memory back through a file, against placing it by userfaultfd: the
same restores in turn, with the fake driver of the tests.

The fake driver does what the real one does with that memory: it copies all of it, in one thread,
and unmaps it. How fast the real one copies, and what it loses to whoever uses the memory at the
same time, only a GPU shows (benchmarks/gpu.py).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from benchmarks.common import MIB, Result, Rounds, progress, scratch, show
from benchmarks.reserve import Reserve
from icecore.dumper.options import DumpOptions
from icecore.host.gpu.backend import VARIABLE
from icecore.restorer import restore as restorer
from icecore.restorer.options import RestoreOptions
from icecore.store.runtime.loop import LoopThread
from tests.dumper.world import Events, Store
from tests.fakes.world import Target, World
from tests.programs import plain_criu

PART = "device file"
_SECONDS = 120.0


def measure(mib: int, rounds: int) -> list[Result]:
    """All figures of this part.

    Args:
        mib: Device memory of the one process, in MiB.
        rounds: How often everything is done.
    """
    found, cases = Rounds(), [(mode, placers) for placers in (0, 2) for mode in ("full", "lazy")]
    with (
        scratch("device-file") as folder,
        LoopThread() as loop,
        plain_criu.adopting(),
        Reserve(3 * mib * MIB) as reserve,
    ):
        world = World(folder / "world")
        os.environ[VARIABLE] = f"fake:{world.root}"
        store = Store.make(loop, folder / "repository", folder)
        target = Target(world, folder / "target", mib=mib)
        try:
            snapshot = store.dump(target.start(), DumpOptions(stop=True)).snapshot
            target.reap()
            for turn in range(rounds):
                progress(f"{PART}: round {turn + 1} of {rounds}")
                for mode, placers in cases:
                    options = RestoreOptions(mode=mode, placers=placers)
                    with reserve.lent():
                        _restore(store, snapshot, options, found, f"{mode} {placers} file")
                    target.kill()
                    world.clear()
                    with reserve.lent(), patch.object(restorer, "temporary", return_value={}):
                        _restore(store, snapshot, options, found, f"{mode} {placers} userfaultfd")
                    target.kill()
                    world.clear()
        finally:
            target.kill()
    return [result for mode, placers in cases for result in _results(found, mode, placers)]


def _restore(
    store: Store, snapshot: str, options: RestoreOptions, found: Rounds, name: str
) -> None:
    events = Events()
    restored = restorer.restore(store.repository, store.loop, snapshot, options, emit=events)
    restored.wait_resident(_SECONDS)
    found.add(name, restored.seconds_to_running)
    found.add(
        f"{name} driver", float(str(events.named("restore.gpu.restore")[-1].fields["seconds"]))
    )


def _results(found: Rounds, mode: str, placers: int) -> list[Result]:
    name, who = f"{mode} {placers}", f"{mode}, {f'{placers} placers' if placers else 'threads'}"
    note = ", ".join(
        f"{found.median(f'{name} {way}'):.2f} s {way}" for way in ("file", "userfaultfd")
    )
    return [
        Result(
            PART,
            f"restore until the tree runs, {who}: file / userfaultfd",
            found.ratio(f"{name} file", f"{name} userfaultfd"),
            note=note,
        ),
        Result(
            PART,
            f"the driver's part of it, {who}",
            found.ratio(f"{name} file driver", f"{name} userfaultfd driver"),
        ),
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--mib", type=int, default=1900, help="device memory, MiB")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    show(measure(arguments.mib, arguments.rounds), Console(width=160))


if __name__ == "__main__":
    main()
