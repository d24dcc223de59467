"""Children that are forked after the pre-copy: what they share with their parent is not stored
again.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from icecore.dumper.memory.forked import with_forked
from icecore.dumper.memory.known import KnownCells
from icecore.dumper.memory.precopy import PreCopied
from icecore.dumper.options import DumpOptions
from icecore.host.kernel import procfs
from tests.host.target import eventually

from .puppet import Puppet
from .world import Event, Events, Stillness, Store, assert_same_memory

pytestmark = pytest.mark.criu

_MIB = 1 << 20


def fork(puppet: Puppet, then: str, *, orphaned: bool = False) -> int:
    """Have it fork a child that does something and stays; return the child's pid.

    Args:
        orphaned: Fork through a process in between, which ends.
    """
    puppet.do(f"""
pid = os.fork()
if pid == 0:
    if {orphaned} and os.fork():
        os._exit(0)
    {then}
    with open("child", "w") as file:
        file.write(str(os.getpid()))
    os.rename("child", "forked")
    while True:
        time.sleep(1)
if {orphaned}:
    os.waitpid(pid, 0)
""")
    there = Path(puppet.folder / "forked")
    assert eventually(there.exists)
    pid = int(there.read_text())
    there.unlink()
    return pid


#: Executes the same program again, which then lies elsewhere.
_EXECUTE = (
    "os.execv(sys.executable, [sys.executable, '-c', "
    '\'import os, time; open("child", "w").write(str(os.getpid())); os.rename("child", "forked"); time.sleep(1000)\'])'
)


def test_what_a_new_child_shares_is_not_stored_again(
    puppet: Puppet, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("icecore.events._PROGRESS_SECONDS", 0.0)
    puppet.do("data = private(64 * MIB); put(data, os.urandom(64 * MIB))")
    still = Stillness()
    children: list[int] = []

    def begin(_: Event) -> None:
        children.extend(
            fork(puppet, f"put(data + {number} * MIB, b'changed {number}')") for number in range(3)
        )

    events = Events(
        {
            ("dump.precopy", "end"): begin,
            ("dump.files", "begin"): lambda _: still.look(puppet.pid),
        }
    )
    recorded = store.read(
        store.dump(puppet.pid, DumpOptions(pre_copy="on"), events=events).snapshot
    )
    assert {puppet.pid, *children} == {p.pid for p in recorded.manifest.processes}
    assert assert_same_memory(recorded, still) * 4096 >= 4 * 64 * _MIB
    (queued,) = {total for _, total in events.progress("dump.store")}
    assert queued < 32 * _MIB, "of 192 that the children have"


def test_whose_cells_a_new_process_starts_from(puppet: Puppet) -> None:
    """Its parent's, or if that has ended, those of a process that runs the same program at the same
    addresses."""
    none = KnownCells.none()
    about = {
        number: PreCopied([], none, none, number, 0, 0, 0) for number in (puppet.pid, os.getpid())
    }
    child = fork(puppet, "pass")
    orphan = fork(puppet, "pass", orphaned=True)
    other = fork(puppet, _EXECUTE)
    here = {pid: pid for pid in (puppet.pid, os.getpid(), child, orphan, other)}
    found = with_forked(about, here, None)
    assert {pid: found[pid].changed for pid in (child, orphan)} == {
        child: puppet.pid,
        orphan: puppet.pid,
    }
    assert with_forked({}, here, None) == {}
    assert procfs.layout(child) == procfs.layout(puppet.pid)
    if Path("/proc/sys/kernel/randomize_va_space").read_text().strip() != "0":
        assert procfs.layout(other) != procfs.layout(puppet.pid) and other not in found
