"""Resident device memory through whole dumps and restores: a deterministic training goes on bit for
bit, and what each phase took.

    tools/test-gpu --resident [FOLDER] [--gib 16] [--part PART ...] [--gpus 2]

Parts: ``lineage`` (three snapshots, two restores), ``held`` (stopped, and brought back from memory
that stayed on the GPU), ``driver`` (the same training without the preload, for comparison); and,
only by themselves, ``ranks``: DDP on so many GPUs, whose ranks have each other's memory (NCCL's
P2P); ``stress``: many snapshots of a job that never rests (`tests.realgpu.hammer`); with
``--resting`` GiB of memory that mostly does, on a GPU so full that this is stored before the window
(`icecore.dumper.gpu.resident_precopy`).
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import icecore
from icecore.host.resident.client import Agent
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
        # The same memory as the others, for the random numbers' sake; on the CPU its reference
        # would not be bit for bit the same.
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
        print(
            f"  {len(found)} losses are right, {some} more in {time.monotonic() - began:.1f} s",
            flush=True,
        )


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


#: GiB that are left of the GPU beside what rests: for contexts, the worker, and what does not.
_ROOM = 7.0
_CROWD = """
import sys, time, torch
free, _ = torch.cuda.mem_get_info()
some = torch.empty(int(free - float(sys.argv[1]) * 2**30), dtype=torch.uint8, device="cuda")
print("there", flush=True)
time.sleep(3600)
"""


def stress(lab: Lab, dumps: int, resting: float) -> None:
    """So many snapshots of a job that never rests, one after the other; killed, and brought back
    from the last and from one in the middle.
    """
    out = lab.folder / "rounds"
    crowd = lab.plain("-c", _CROWD, str(resting + _ROOM)) if resting else 0
    end = time.monotonic() + 60
    while crowd and "there" not in lab.logs():
        assert time.monotonic() < end, lab.logs()
        time.sleep(0.1)
    pid = lab.plain(
        str(HERE / "hammer.py"),
        "--out",
        str(out),
        "--resting",
        str(resting),
        environment=lab.resident(),
    )

    def right(more: int) -> list[int]:
        """Each thread's rounds, so many lines from now on."""
        found = wait_lines(out, len(lines(out)) + more, lab.logs)
        wrong = [line for line in found if line.startswith("WRONG")]
        assert not wrong, wrong[0]
        return [int(word) for word in found[-1].split()]

    def goes_on() -> list[int]:
        """Every thread makes rounds."""
        before, end = right(1), time.monotonic() + 30
        while not all(now > then for now, then in zip(right(1), before, strict=True)):
            assert time.monotonic() < end, "a thread stands still"
        return right(1)

    goes_on()
    taken = []
    for number in range(dumps):
        taken.append(lab.dump(pid, pre_copy="on" if resting else "auto").snapshot)
        print(f"  {number + 1} of {dumps}: {sum(goes_on())} rounds, every buffer right", flush=True)
    lab.kill(pid)
    if crowd:
        lab.kill(crowd)
    for snapshot, mode in ((taken[-1], "lazy"), (taken[len(taken) // 2], "full")):
        restored = lab.restore(snapshot, mode=mode)
        goes_on()
        goes_on()
        lab.kill(restored.pid)


RANK_STEPS = 2500


def ranks(lab: Lab, gpus: int, gib: float) -> None:
    """DDP with peer access: three snapshots while it runs on, killed and brought back from two of
    them; then from memory that stayed on the GPUs.

    The order in which NCCL adds up must be the same in both runs: the same settings in both.
    """
    out, unbroken, words = (
        lab.folder / "losses",
        lab.folder / "unbroken",
        (TRAIN, "--world", str(gpus), "--width", "2048", "--ballast", str(gib)),
    )
    debug = {"NCCL_DEBUG": "INFO"}
    first = lab.run(
        "reference",
        *words,
        "--out",
        str(unbroken),
        "--steps",
        str(RANK_STEPS),
        network=True,
        environment=debug,
    )
    assert first.wait(500).exit_code == 0, first.log_path("stderr").read_text()[-3000:]
    wanted = lines(unbroken)
    print(f"reference: {len(wanted)} steps, by {transports(first)}", flush=True)
    job = lab.run(
        "ddp", *words, "--out", str(out), "--pause", "0.02", network=True, environment=debug
    )

    def log() -> str:
        return job.log_path("stderr").read_text()[-3000:]

    def goes_on(some: int = 30) -> None:
        began = time.monotonic()
        same(found := wait_lines(out, len(lines(out)) + some, log), wanted)
        print(
            f"  {len(found)} losses are right, {some} more in {time.monotonic() - began:.1f} s",
            flush=True,
        )

    wait_lines(out, 20, log)
    used = transports(job)
    print(f"the job: by {used}", flush=True)
    assert used and all(one.startswith("P2P") for one in used), (
        "this machine's GPUs reach each other in another way"
    )
    shared(job, gpus)
    taken = []
    for _ in range(3):
        taken.append(lab.dump("ddp").snapshot)
        goes_on()
    lab.kill(job.pid)
    restored = lab.restore(taken[2])
    goes_on()
    lab.kill(restored.pid)
    restored = lab.restore(taken[0], mode="lazy")
    goes_on()
    # A restored job is a job like any other.
    assert restored.job is not None
    shared(restored.job, gpus)
    last = lab.dump(restored.job.name, stop=True, keep_resident=True).snapshot
    lab.kill(restored.pid)
    restored = lab.restore(last, from_resident=True)
    goes_on()
    lab.kill(restored.pid)


def transports(job: icecore.Job) -> list[str]:
    """How NCCL says that its channels go ("P2P/CUMEM")."""
    logs = [job.log_path("stdout"), job.log_path("stderr")]
    text = "".join(log.read_text(errors="replace") for log in logs)
    return sorted(
        {found.partition("/read")[0] for found in re.findall(r"Channel .* via (\S+)", text)}
    )


def shared(job: icecore.Job, gpus: int) -> None:
    """Every rank has memory of another's, and nothing that no window could take away."""
    place = job.directory / "resident"
    if not place.exists():  # no private root
        place = Path("/run/icecore/resident") / job.instance
    having = 0
    for path in sorted(place.glob("agent-*")):
        counts = Agent(place, int(path.name.partition("-")[2])).report().counts
        print(f"  {path.name}: {counts}", flush=True)
        assert not counts.multicast and not counts.unparkable and not counts.unheld
        having += counts.imported > 0 and counts.exports > 0
    assert having == gpus


def alone(folder: Path, gpus: int, name: str, part: Callable[[Lab], None]) -> int:
    """A part by itself."""
    why = lack(gpus, "torch")
    if why:
        print(f"skipped: {why}")
        return 0
    lab = Lab(folder)
    try:
        print(f"== {name}", flush=True)
        part(lab)
    except BaseException:
        for path in sorted((folder / "state").glob("**/std*.log")):
            print(f"-- {path}\n{path.read_text(errors='replace')[-4000:]}", flush=True)
        raise
    finally:
        lab.close()
    print("passed")
    return 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("folder", nargs="?", default="")
    parser.add_argument("--gib", type=float, default=16.0)
    parser.add_argument(
        "--part",
        action="append",
        default=[],
        help="lineage, held, driver; or ranks, or stress, by itself",
    )
    parser.add_argument("--dumps", type=int, default=100, help="of stress")
    parser.add_argument("--resting", type=float, default=0.0, help="of stress, GiB")
    arguments = parser.parse_args()
    why = lack(1, "torch")
    if why:
        print(f"skipped: {why}")
        return 0
    folder = Path(arguments.folder or tempfile.mkdtemp(prefix="icecore-gpu-"))
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.part == ["ranks"]:
        return alone(
            folder, arguments.gpus, "ranks", lambda lab: ranks(lab, arguments.gpus, arguments.gib)
        )
    if arguments.part == ["stress"]:
        return alone(
            folder, 1, "stress", lambda lab: stress(lab, arguments.dumps, arguments.resting)
        )
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
