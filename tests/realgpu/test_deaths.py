"""Whoever dies in a dump of a job on a real GPU: the job goes on, bit for bit, and can be dumped
again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from icecore.errors import IcecoreError
from icecore.host.kernel import procfs
from icecore.host.resident.client import Agent, Keeper, State
from icecore.host.resident.keeper import start_keeper

from .conftest import needs
from .first import TRAIN, reference
from .jobs import Lab, lines, same, wait_lines

pytestmark = pytest.mark.timeout(900)

_WORDS = {
    "guard": "icecore.dumper.freeze.guard_process",
    "helper": "icecore.host.gpu.helper",
    "worker": "icecore.host.gpu.worker",
    "CRIU": "/sbin/criu",
}
_MOMENTS = ["dump.gpu.lock", "dump.gpu.checkpoint", "dump.gpu.restore"]
_RESIDENT_MOMENTS = ["dump.resident.unmap", *_MOMENTS]


def _members(word: str) -> list[int]:
    """Processes below this one with such a command."""
    found = []
    for pid in procfs.tree(os.getpid()):
        with suppress(OSError):
            if word in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace(
                "\0", " "
            ):
                found.append(pid)
    return found


def _ender(who: str, lab: Lab) -> Callable[[], None]:
    def end() -> None:
        if who == "dumper":
            raise KeyboardInterrupt
        if who == "keeper":
            assert lab.keeper is not None
            victims = _members("icecore-keeper")
        else:
            victims = _members(_WORDS[who])
        assert victims, f"there is no {who}"
        for pid in victims:
            os.kill(pid, signal.SIGKILL)

    return end


def _held_again(keeper: Keeper, pid: int) -> None:
    """Another keeper has taken the place of one that was killed, and the process has handed all
    over to it.
    """
    start_keeper(keeper.directory)
    end = time.monotonic() + 30
    while Agent(keeper.directory, pid).report().counts.unheld:
        assert time.monotonic() < end, "it is not handed over"
        time.sleep(0.05)


@pytest.mark.parametrize("resident", [True, False])
def test_the_job_goes_on(resident: bool, lab: Lab) -> None:
    needs(1, "torch")
    wanted = reference(lab.folder, steps=4000)
    out = lab.folder / "losses"
    pid = lab.plain(
        TRAIN,
        "--out",
        str(out),
        "--pause",
        "0.02",
        "--steps",
        "4000",
        environment=lab.resident() if resident else {},
    )
    wait_lines(out, 20, lab.logs)
    who = ["dumper", "helper", "guard", "CRIU", *(["worker", "keeper"] if resident else [])]
    for victim in who:
        for moment in _RESIDENT_MOMENTS if resident else _MOMENTS:
            before = len(lab.repository.snapshots())
            try:
                lab.dump(pid, at={(moment, "end"): _ender(victim, lab)})
            except (KeyboardInterrupt, IcecoreError):
                assert len(lab.repository.snapshots()) == before
            if victim == "keeper":
                assert lab.keeper is not None
                _held_again(lab.keeper, pid)
            print(
                f"{victim} at the end of {moment}: {len(lab.repository.snapshots()) - before} snapshots",
                flush=True,
            )
            same(wait_lines(out, len(lines(out)) + 10, lab.logs), wanted)
            if lab.keeper is not None:
                assert Agent(lab.keeper.directory, pid).report().state == State.RUNNING
    snapshot = lab.dump(pid).snapshot
    lab.kill(pid)
    lab.restore(snapshot)
    same(wait_lines(out, len(lines(out)) + 30, lab.logs), wanted)
