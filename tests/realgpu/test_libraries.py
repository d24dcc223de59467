"""Trainings by libraries' own loops on a real GPU: what they log is what an undisturbed run logs, bit
for bit.
"""

from __future__ import annotations

import pytest

from .conftest import needs
from .jobs import HERE, Lab, lines, same, wait_lines
from .libraries import LAUNCHERS, LIBRARIES

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_goes_on(library: str, lab: Lab) -> None:
    """Beside it runs the same, undisturbed. Two snapshots, killed, restored from both."""
    needs(1, *LIBRARIES[library][1])
    program, out = (*LAUNCHERS.get(library, ()), str(HERE / "libraries.py")), lab.folder / "lines"
    # By default, JAX reserves three quarters of the free GPU memory.
    less = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1"}
    undisturbed = lab.plain(
        *program, library, "--out", str(lab.folder / "undisturbed"), environment=less
    )
    pid = lab.plain(*program, library, "--out", str(out), environment=lab.resident())
    wait_lines(out, 20, lab.logs, 120)
    snapshots = []
    for _ in range(2):
        snapshots.append(lab.dump(pid).snapshot)
        wait_lines(out, len(lines(out)) + 60, lab.logs)
    lab.kill(pid)
    found = lines(out)
    for snapshot, mode in zip(reversed(snapshots), ("full", "lazy"), strict=True):
        restored = lab.restore(snapshot, mode=mode)
        wait_lines(out, len(lines(out)) + 60, lab.logs)
        lab.kill(restored.pid)
        same(lines(out), max(found, lines(out), key=len))
        found = max(found, lines(out), key=len)
    same(found, wait_lines(lab.folder / "undisturbed", len(found), lab.logs, 120))
    lab.kill(undisturbed)
