"""Pre-copy of a busy process: what is stored before the window, and when it stops."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from icecore.dumper.memory import precopy
from icecore.dumper.memory.background import NICE, beside, in_background
from icecore.dumper.memory.cells import EXTENT, CellPlan, plan_cells
from icecore.dumper.memory.known import KnownCells
from icecore.dumper.memory.scan import ScanResult
from icecore.dumper.options import DumpOptions
from icecore.sizes import CELL_BYTES, CELL_PAGES
from icecore.store.format.cell import CELL
from icecore.store.format.fingerprints import FINGERPRINT
from icecore.store.format.manifest import Region

from .conftest import Store
from .puppet import Puppet

_START = 1 << 40
_CELLS = 2048
MIB = 1 << 20


class Sink:
    def __init__(self, plan: CellPlan) -> None:
        self.plan, self.records = plan, np.zeros(len(plan), CELL)
        self.kept: list[int] = []

    def keep(self, row: int, _slot: Any) -> None:
        self.kept.append(row)


class Scripted:
    """A scanner of memory of 2 GiB that changes as a script says, at each scan. Its time is
    scripted, too: a scan takes 1 ms a cell, and nothing else takes any.

    Args:
        changes: Returns the cells that change before the scan of this number.
    """

    def __init__(self, changes: Callable[[int], npt.NDArray[np.int64]]) -> None:
        regions = [Region(_START, _CELLS * CELL_BYTES, _START)]
        self.plan = plan_cells(regions, np.array([(_START, _CELLS * CELL_PAGES)], EXTENT))
        self.version = np.zeros(_CELLS, np.uint64)
        self.stored = np.zeros(_CELLS, np.int64)
        self.scans = 0
        self.now = 0.0
        self.stop = self.pipeline = self
        self._changes = changes
        self._sinks: list[Sink] = []

    def fingerprints(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
        pairs = np.stack([rows.astype(np.uint64), self.version[rows]], axis=1)
        return np.ascontiguousarray(pairs).view(FINGERPRINT).reshape(-1)

    def scan(self, plan: CellPlan, known: KnownCells, keep: Callable[..., None]) -> ScanResult:
        self.version[self._changes(self.scans)] += np.uint64(1)
        self.scans += 1
        self.now += len(plan) * 1e-3
        rows = ((plan.key - np.uint64(_START)) // np.uint64(CELL_BYTES)).astype(np.int64)
        found = self.fingerprints(rows)
        row = np.where(known.differ(plan.key, found), -1, known.find(plan.key))
        for changed in np.flatnonzero(row < 0).tolist():
            keep(changed, None)
        return ScanResult(found, row)

    def sink(self, plan: CellPlan, _known: KnownCells) -> Sink:
        self._sinks.append(Sink(plan))
        return self._sinks[-1]

    def drop(self, _row: int, _slot: Any) -> None:
        """Keep nothing."""

    def drain(self) -> None:
        for sink in self._sinks:
            at = (sink.plan.key[sink.kept] - np.uint64(_START)) // np.uint64(CELL_BYTES)
            self.stored[at.astype(np.int64)] += 1
            sink.kept.clear()

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now

    def run(self) -> tuple[Any, KnownCells]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(precopy, "time", self)
            rounds = precopy._Rounds(
                self,  # type: ignore[arg-type]
                self.plan,
                self.fingerprints(np.arange(_CELLS)),
                KnownCells.none(),
                0.0,
            )
            return rounds, rounds.run(KnownCells.none())


def nothing(_scan: int) -> npt.NDArray[np.int64]:
    return np.empty(0, np.int64)


def test_what_does_not_change_is_stored_once() -> None:
    memory = Scripted(nothing)
    rounds, known = memory.run()
    assert (memory.stored == 1).all()
    assert len(known.key) == _CELLS
    assert rounds.stored == rounds.true == _CELLS * CELL_BYTES
    expected = known.find(memory.plan.key)
    assert (known.fingerprint[expected] == memory.fingerprints(np.arange(_CELLS))).all()


def test_what_changes_all_the_time_is_held_back() -> None:
    hot = np.arange(0, _CELLS, 2)
    memory = Scripted(lambda scan: hot)
    rounds, known = memory.run()
    assert (memory.stored[hot] == 0).all()
    assert (memory.stored[1::2] == 1).all()
    assert len(known.key) == _CELLS // 2
    assert rounds.stored == rounds.true == _CELLS // 2 * CELL_BYTES


def test_no_round_stores_what_a_sweep_will_reach() -> None:
    """Each scan meets an eighth of the memory changed, and in the end all of it."""
    memory = Scripted(lambda scan: np.arange(_CELLS // 8) + scan % 8 * (_CELLS // 8))
    rounds, _ = memory.run()
    assert memory.stored.max() <= 1
    assert memory.stored.sum() <= _CELLS // 8
    assert rounds.stored == memory.stored.sum() * CELL_BYTES
    assert rounds.true <= rounds.stored


def test_it_goes_on_once_a_burst_is_over() -> None:
    """The half that the burst changed is left for the window."""
    burst = np.arange(_CELLS // 2)
    memory = Scripted(lambda scan: burst if scan == 2 else nothing(scan))
    rounds, _ = memory.run()
    assert (memory.stored[_CELLS // 2 :] == 1).all()
    assert memory.stored.max() == 1
    assert memory.stored[burst].sum() <= _CELLS // precopy._FIRST_ROUND + 1
    assert rounds.true == _CELLS // 2 * CELL_BYTES


def test_a_cell_whose_round_was_in_vain_is_not_stored_again() -> None:
    memory = Scripted(lambda scan: np.arange(16) if scan in (2, 4) else nothing(scan))
    rounds, _ = memory.run()
    assert (memory.stored == 1).all()
    assert rounds.stored == _CELLS * CELL_BYTES
    assert rounds.true == (_CELLS - 16) * CELL_BYTES


def test_work_in_the_background_has_a_lower_priority_and_hands_on_errors() -> None:
    stop, before = threading.Event(), os.nice(0)

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert in_background(priority, stop) == min(19, before + NICE)
    inner: list[int] = []

    def start() -> None:
        thread = threading.Thread(target=lambda: inner.append(priority()))
        thread.start()
        thread.join(10)

    in_background(start, stop)
    assert inner == [min(19, before + NICE)]
    assert priority() == before

    def fail() -> None:
        raise KeyError("of the work")

    with pytest.raises(KeyError, match="of the work"):
        in_background(fail, stop)
    assert not stop.is_set()


def test_what_runs_beside() -> None:
    entered, given_up, seen = threading.Event(), threading.Event(), list[str]()

    def wait() -> None:
        entered.wait(10)
        seen.append("worked")

    failed = threading.Event()
    with beside(wait, given_up.set, failed.set):
        entered.set()
    assert seen == ["worked"] and not given_up.is_set()

    def fail() -> None:
        raise ValueError("beside")

    assert not failed.is_set()
    with pytest.raises(ValueError, match="beside"), beside(fail, given_up.set, failed.set):
        assert failed.wait(10)
    assert not given_up.is_set()
    # An error in the context that follows from the work's error is dropped.
    with pytest.raises(ValueError, match="beside"), beside(fail, given_up.set, failed.set):
        assert failed.wait(10)
        raise OSError("abandoned")
    # An interruption takes precedence.
    with pytest.raises(KeyboardInterrupt), beside(fail, given_up.set, failed.set):
        assert failed.wait(10)
        raise KeyboardInterrupt
    given_up.clear()

    def until_given_up() -> None:
        assert given_up.wait(10)
        raise ValueError("given up")

    failed.clear()
    with pytest.raises(OSError, match="here"), beside(until_given_up, given_up.set, failed.set):
        raise OSError("here")
    assert failed.is_set()


@pytest.mark.criu
def test_only_the_calm_part_of_a_busy_heap_is_stored_before_the_window(
    puppet: Puppet, store: Store
) -> None:
    puppet.do("area = private(192 * MIB); put(area, os.urandom(MIB) * 192); going = True")
    puppet.do("for cell in range(192): put(area + cell * MIB, cell.to_bytes(8, 'little'))")
    puppet.do(
        "import threading\n"
        "def write():\n"
        "    number = 0\n"
        "    while going:\n"
        "        number += 1\n"
        "        for cell in range(64): put(area + cell * MIB + 8, number.to_bytes(8, 'little'))\n"
        "        time.sleep(0.001)\n"
        "writer = threading.Thread(target=write); writer.start()"
    )
    result = store.dump(puppet.pid, DumpOptions(pre_copy="on"))
    puppet.do("going = False; writer.join()")
    assert 128 * MIB <= result.pre_copied < 160 * MIB
