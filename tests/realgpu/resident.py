"""Resident device memory through whole dumps and restores: a deterministic training goes on bit for bit, and what each phase took.

    python -m tests.realgpu.resident FOLDER [--gib 16] [--part PART ...]

Parts: ``lineage`` (three snapshots, two restores), ``held`` (stopped, and brought back from memory that stayed on the GPU), ``driver`` (the same
training without the preload, for comparison). Preload and keeper must have been built (``tools/test-gpu --build``).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.realgpu.first import reference
from tests.realgpu.jobs import HERE, Lab, lack, lines, same, wait_lines

TRAIN = str(HERE / "train.py")
STEPS = 2000


class Resident:
    """A training under the preload, and its snapshots.

    Args:
        gib: Device memory beside the training's own.
    """

    def __init__(self, folder: Path, gib: float) -> None:
        self.lab = Lab(folder)
        self.words = (TRAIN, "--ballast", str(gib), "--width", "2048")
        # The same memory as the others, for the random numbers' sake; on the CPU its reference would not be bit for bit the same.
        self.wanted = reference(folder, *self.words[1:], steps=STEPS)
        print(f"reference: {len(self.wanted)} steps", flush=True)

    def close(self) -> None:
        """End all."""
        self.lab.close()

    def start(self, name: str, *, resident: bool = True) -> tuple[int, Path]:
        """A training that has begun."""
        out = self.lab.folder / f"losses-{name}"
        own = self.lab.resident() if resident else {}
        pid = self.lab.plain(*self.words, "--out", str(out), "--pause", "0.02", environment=own)
        wait_lines(out, 20, self.lab.logs)
        return pid, out

    def goes_on(self, out: Path, some: int = 30) -> None:
        """It makes so many steps more, and all losses are the wanted ones."""
        began = time.monotonic()
        found = wait_lines(out, len(lines(out)) + some, self.lab.logs)
        same(found, self.wanted)
        print(f"  {len(found)} losses are right, {some} more in {time.monotonic() - began:.1f} s", flush=True)


def lineage(lab: Resident) -> None:
    """Three snapshots while it runs on; killed; brought back."""
    pid, out = lab.start("lineage")
    taken = []
    for _ in range(3):
        taken.append(lab.lab.dump(pid).snapshot)
        lab.goes_on(out)
    lab.lab.kill(pid)
    for snapshot, mode in ((taken[2], "full"), (taken[0], "lazy")):
        restored = lab.lab.restore(snapshot, mode=mode)
        lab.goes_on(out)
        lab.lab.kill(restored.pid)


def held(lab: Resident) -> None:
    """Stopped with its memory left on the GPU, and brought back from there."""
    pid, out = lab.start("held")
    first = lab.lab.dump(pid).snapshot
    lab.goes_on(out)
    last = lab.lab.dump(pid, stop=True, keep_resident=True).snapshot
    lab.lab.kill(pid)
    assert lab.lab.keeper is not None
    print("held:", lab.lab.keeper.processes(), flush=True)
    restored = lab.lab.restore(last, from_resident=True)
    lab.goes_on(out)
    lab.lab.dump(restored.pid, stop=True, keep_resident=True)
    lab.lab.kill(restored.pid)
    restored = lab.lab.restore(first, from_resident=True)
    lab.goes_on(out)
    lab.lab.kill(restored.pid)


def driver(lab: Resident) -> None:
    """Without the preload."""
    pid, out = lab.start("driver", resident=False)
    snapshot = lab.lab.dump(pid).snapshot
    lab.lab.dump(pid)
    lab.goes_on(out)
    lab.lab.kill(pid)
    restored = lab.lab.restore(snapshot)
    lab.goes_on(out)
    lab.lab.kill(restored.pid)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default="")
    parser.add_argument("--gib", type=float, default=16.0)
    parser.add_argument("--part", action="append", default=[])
    arguments = parser.parse_args()
    why = lack(1, "torch")
    if why:
        print(f"skipped: {why}")
        return 0
    folder = Path(arguments.folder or tempfile.mkdtemp(prefix="icecore-gpu-"))
    folder.mkdir(parents=True, exist_ok=True)
    lab = Resident(folder, arguments.gib)
    try:
        for name in arguments.part or ("lineage", "held", "driver"):
            print(f"== {name}", flush=True)
            {"lineage": lineage, "held": held, "driver": driver}[name](lab)
    except BaseException:
        print(lab.lab.logs(), flush=True)
        raise
    finally:
        lab.close()
    print("passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
