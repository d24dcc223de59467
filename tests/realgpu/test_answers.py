"""What an application hears of its GPU, and what others hear of the application, is the same with
the preload and without.
"""

from __future__ import annotations

import subprocess
import time

import pytest

from icecore.host.cuda.inventory import read_inventory

from .conftest import needs
from .jobs import HERE, Lab, lines, wait_lines

pytestmark = pytest.mark.timeout(600)

_PROGRAM = str(HERE / "answers.py")
_COUNTED = "GiB until out of memory"
GIB = 1 << 30
#: What contexts and the preload's recycled memory may differ by.
_SLACK = 128 << 20


def test_an_application_hears_the_same(lab: Lab) -> None:
    """Out of memory, codes of allocations and releases, captures, copies: one after the other,
    because each takes all memory there is.
    """
    needs(1, "torch")
    found = []
    for name, own in (("without", {}), ("with", lab.resident())):
        out = lab.folder / name
        pid = lab.plain(_PROGRAM, str(out), environment=own)
        wait_lines(out, 7, lab.logs)
        lab.kill(pid)
        found.append(dict(line.split(": ", 1) for line in lines(out)))
    without, with_ = found
    counts = [[int(word) for word in one.pop(_COUNTED).split()] for one in found]
    assert with_ == without
    assert all(abs(one - other) <= 1 for one, other in zip(*counts, strict=True)), counts


def _shown(pid: int) -> int | None:
    """MiB that nvidia-smi shows for a process; None: it shows none for it (a pid namespace)."""
    done = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    rows = [line.split(",") for line in done.stdout.splitlines() if line.strip()]
    found = [int(used) for number, used in rows if int(number) == pid]
    return sum(found) if found else None


def _settles_at(wanted: int) -> None:
    """What is in use of the first GPU comes to this: what has ended is let go of in its own time."""
    end = time.monotonic() + 20
    while abs((used := read_inventory().gpus[0].used) - wanted) > _SLACK:
        assert time.monotonic() < end, f"{used >> 20} MiB are in use, not {wanted >> 20}"
        time.sleep(0.1)


def test_tools_see_what_it_has(lab: Lab) -> None:
    """nvidia-smi by process and by GPU, and cudaMemGetInfo, while memory is held, through a
    snapshot, and after its process has ended.
    """
    needs(1, "torch")
    idle = read_inventory().gpus[0].used
    used, shown, heard = [], [], []
    for name, own in (("without", {}), ("with", lab.resident())):
        out = lab.folder / name
        pid = lab.plain(_PROGRAM, str(out), "--hold", "4", environment=own)
        [words] = wait_lines(out, 1, lab.logs)
        took, total = map(int, words.split())
        heard.append((took, total))
        used.append(read_inventory().gpus[0].used)
        shown.append(_shown(pid))
        if own:
            lab.dump(pid)
            _settles_at(used[-1])
            # Of a process the driver counts what it made, not what it imported, as all that is
            # resident is after a window.
            assert (now := _shown(pid)) is None or now <= shown[-1] + (_SLACK >> 20)
        lab.kill(pid)
        _settles_at(idle)
    for took, total in heard:
        assert 4 * GIB <= took <= 4 * GIB + _SLACK and total == heard[0][1]
    assert all(one - idle >= 4 * GIB for one in used) and abs(used[0] - used[1]) <= _SLACK
    assert [one is None for one in shown] in ([True, True], [False, False])
    if None not in shown:
        assert all(one >= 4096 for one in shown) and abs(shown[0] - shown[1]) <= _SLACK >> 20
