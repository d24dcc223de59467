"""Children that are forked after the pre-copy: what they share with their parent is not stored
again.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from icecore.dumper.memory.cells import CellPlan, plan_cells
from icecore.dumper.memory.forked import fork_sources, with_forked
from icecore.dumper.memory.frames import SharedFrames
from icecore.dumper.memory.known import KnownCells
from icecore.dumper.memory.precopy import PreCopied
from icecore.dumper.memory.present import present_extents
from icecore.dumper.options import DumpOptions
from icecore.host.kernel import procfs
from icecore.store.format.manifest import Region
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
    [early] = [one for one in events.named("dump.early") if one.fields["state"] == "end"]
    assert int(str(early.fields["shared"])) >= 3 * 60 * _MIB, "shared memory was read again"
    assert {puppet.pid, *children} == {p.pid for p in recorded.manifest.processes}
    assert assert_same_memory(recorded, still) * 4096 >= 4 * 64 * _MIB
    (queued,) = {total for _, total in events.progress("dump.store")}
    assert queued < 32 * _MIB, "of 192 that the children have"


def test_a_dump_makes_no_copies_of_what_processes_share(puppet: Puppet, store: Store) -> None:
    """The kernel copies a shared page before it pins it: a tree with many workers would run out of
    memory.
    """
    puppet.do("data = private(64 * MIB); put(data, os.urandom(64 * MIB))")
    pids = [puppet.pid, *(fork(puppet, "pass") for _ in range(2))]

    def own() -> list[int]:
        found = []
        for pid in pids:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            sizes = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
            found.append((sizes["Private_Clean:"] + sizes["Private_Dirty:"]) // 1024)
        return found

    before = own()
    assert max(before) < 20
    for pre_copy in ("on", "off"):
        store.dump(puppet.pid, DumpOptions(pre_copy=pre_copy))
        assert max(own()) < 20, (before, own())


def test_what_lies_in_the_same_frames(puppet: Puppet) -> None:
    puppet.do("data = private(16 * MIB); put(data, os.urandom(16 * MIB))")
    data = puppet.number("data")
    alike = fork(puppet, "pass")
    other = fork(puppet, "put(data + 3 * MIB + 5, b'changed')")
    region = Region(data, 16 * _MIB, data, 3, 0x22, "anonymous", "", True)

    def plan(pid: int) -> CellPlan:
        return plan_cells([region], present_extents(pid, [(data, data + 16 * _MIB)], 1))

    plans = {pid: plan(pid) for pid in (puppet.pid, alike, other)}
    assert all(len(one) == 16 for one in plans.values())
    shared = SharedFrames(plans, {alike: puppet.pid, other: puppet.pid}, 2, threading.Event())
    puppet.do("put(data + 7 * MIB, b'moved')")

    def cells(pid: int) -> list[int]:
        found = shared.of(pid)
        assert found is not None
        source, here, there = found
        assert source == puppet.pid and (plans[pid].key[here] == plans[source].key[there]).all()
        return plans[pid].cell[here].tolist()  # type: ignore[no-any-return]

    assert cells(alike) == [n for n in range(16) if n != 7]
    assert cells(other) == [n for n in range(16) if n not in (3, 7)]
    assert shared.of(puppet.pid) is None


def test_which_processes_may_be_forks(puppet: Puppet) -> None:
    child = fork(puppet, "pass")
    orphan = fork(puppet, "pass", orphaned=True)
    other = fork(puppet, _EXECUTE)
    assert fork_sources([puppet.pid, child, orphan, other, os.getpid()]) == {
        child: puppet.pid,
        orphan: puppet.pid,
    }
    assert fork_sources([child, orphan]) == {orphan: child}


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
