"""Test 1, the first to be run on a new machine: a deterministic training on one GPU goes on bit for
bit after every snapshot of its lineage.

Runs by itself, too: python -m tests.realgpu.first FOLDER
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.realgpu.jobs import HERE, Lab, lack, lines, same, wait_lines

TRAIN = str(HERE / "train.py")
STEPS = 1200
AFTER = 50


def reference(folder: Path, *more: str, steps: int = STEPS) -> list[str]:
    """The lines of an uninterrupted run."""
    out = folder / "reference"
    subprocess.run(
        [sys.executable, TRAIN, "--out", str(out), "--steps", str(steps), *more],
        check=True,
        timeout=500,
        cwd=folder,
    )
    found = lines(out)
    assert len(found) == steps
    return found


def lineage(lab: Lab, wanted: list[str], mode: str = "full") -> None:
    """Three snapshots while it runs on; killed; brought back from the third, the first and the
    second.
    """
    out = lab.folder / f"losses-{mode}"
    pid = lab.plain(TRAIN, "--out", str(out), "--pause", "0.02")
    wait_lines(out, 20, lab.logs)
    taken: list[tuple[str, int]] = []
    for _ in range(3):
        before = len(lines(out))
        result = lab.dump(pid)
        taken.append((result.snapshot, before))
        assert result.sizes.device > 50 << 20, (
            f"only {result.sizes.device} bytes of device memory were found"
        )
        wait_lines(out, len(lines(out)) + 20, lab.logs)
        same(lines(out), wanted)
    lab.kill(pid)
    for snapshot, before in (taken[2], taken[0], taken[1]):
        restored = lab.restore(snapshot, mode=mode)
        at = len(lines(out))
        began = time.monotonic()
        found = wait_lines(out, max(at, before) + AFTER, lab.logs)
        same(found, wanted)
        print(
            f"{snapshot}: {len(found) - at} losses after the restore are right, in {time.monotonic() - began:.1f} s",
            flush=True,
        )
        lab.kill(restored.pid)


def main() -> int:
    """Command line."""
    why = lack(1, "torch")
    if why:
        print(f"skipped: {why}")
        return 0
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="icecore-gpu-"))
    folder.mkdir(parents=True, exist_ok=True)
    lab = Lab(folder)
    try:
        wanted = reference(folder)
        print(f"reference: {len(wanted)} steps", flush=True)
        for mode in ("full", "lazy"):
            lineage(lab, wanted, mode)
    finally:
        lab.close()
    print("passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
