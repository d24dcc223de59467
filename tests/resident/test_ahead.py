"""The look at resident memory while its processes run: what it finds, and that they get all that
they free.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from icecore.dumper.gpu import resident_ahead
from icecore.dumper.gpu.resident_ahead import FoundChanges
from icecore.dumper.memory.known import KnownCells
from icecore.dumper.memory.spaces import ParentSpace
from icecore.errors import IcecoreError
from icecore.host.gpu.working import Worker
from icecore.host.resident.client import Keeper
from icecore.host.resident.fingerprint import reference
from icecore.sizes import CELL_BYTES
from icecore.store.format.cell import CELL
from icecore.store.format.fingerprints import FINGERPRINT
from icecore.store.format.manifest import Region, Space
from tests.fakes.machine import MIB, Machine, Target, until, uuid_of

SEED = 77
GPU = uuid_of(0)


@pytest.fixture
def worker(joined: Machine) -> Iterator[Worker]:
    with Worker("test") as made:
        made.begin([uuid_of(0), uuid_of(1)])
        yield made


@pytest.fixture
def process(joined: Machine) -> Target:
    made = joined.target()
    made("start()")
    return made


def parent_of(target: Target) -> SimpleNamespace:
    """A snapshot that has a process's memory as it is now."""
    regions, keys, words = [], [], []
    for one, descriptor in target.machine.keeper.take(target.agent.report().token):
        regions.append(
            Region(one.address, one.size, one.address, 3, 0, kind="device", name=one.device)
        )
        keys.append(np.arange(one.address, one.address + one.size, CELL_BYTES, dtype=np.uint64))
        words.append(reference(os.pread(descriptor, one.size, 0), SEED))
        os.close(descriptor)
    key = np.concatenate(keys)
    known = KnownCells(
        key, np.concatenate(words).view(FINGERPRINT).reshape(-1), np.zeros(len(key), CELL)
    )
    space = ParentSpace(Space("device", str(target.pid), 0, regions), [], known)
    return SimpleNamespace(space=lambda kind, key: space)


def look(worker: Worker, target: Target, parent: SimpleNamespace) -> FoundChanges:
    tokens = {target.pid: target.agent.report().token}
    return resident_ahead.find_changes(
        worker, target.machine.directory, {target.pid: target.agent}, tokens, parent, SEED
    )  # type: ignore[arg-type]


def test_what_is_found(
    worker: Worker, process: Target, joined: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells that changed, and of memory that the parent does not have those that are not zeros, in
    portions; what comes or goes as it looks is left out.
    """
    addresses = [process("alloc(4 * MIB)")[1] for _ in range(6)]
    for at in addresses:
        process(f"fill({at}, 4 * MIB, 1)")
    parent = parent_of(process)
    assert look(worker, process, parent) == FoundChanges(24 * MIB, {GPU: 0})
    for at, cell in ((addresses[0], 3), (addresses[4], 0), (addresses[5], 1)):
        process(f"fill({at} + {cell} * MIB, 4096, 2)")
    new = process("alloc(6 * MIB)[1]")  # the parent does not have it
    process(f"fill({new} + 2 * MIB, 2 * MIB, 3)")
    monkeypatch.setattr(resident_ahead, "_FIRST_PORTION", 4 * MIB)
    monkeypatch.setattr(resident_ahead, "_GROWTH", 1)
    assert look(worker, process, parent) == FoundChanges(30 * MIB, {GPU: 5 * MIB})
    portions: list[int] = []
    fetch = Keeper.fetch

    def meanwhile(keeper: Keeper, token: bytes, identities: Sequence[int]) -> dict[int, int]:
        portions.append(len(identities))
        if len(portions) == 1:
            assert process(f"[free({addresses[0]}), free({addresses[5]}), alloc(8 * MIB)[0]]") == [
                0,
                0,
                0,
            ]
        return fetch(keeper, token, identities)

    monkeypatch.setattr(Keeper, "fetch", meanwhile)
    assert look(worker, process, parent) == FoundChanges(22 * MIB, {GPU: 3 * MIB})
    assert portions == [1] * 7
    assert joined.used() == (4 * 4 + 6 + 8) * MIB


def test_a_look_has_its_time(
    worker: Worker, process: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    process("alloc(4 * MIB)")
    parent = parent_of(process)
    monkeypatch.setattr(resident_ahead, "_SECONDS", 0.0)
    assert look(worker, process, parent) == FoundChanges(0, {GPU: 0})


@pytest.mark.parametrize("call", ["alloc(60 * MIB)[0]", "create(60 * MIB)[0]"])
def test_what_is_freed_can_be_had_again(
    worker: Worker, process: Target, joined: Machine, call: str
) -> None:
    """At once, as without a look: an allocation waits as long as the worker has the memory. What
    cannot be had fails as ever.
    """
    address = process("alloc(60 * MIB)")[1]
    parent = parent_of(process)
    (joined.cuda / "worker-faults" / "fingerprints").write_text("slow")
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look, worker, process, parent)
        until(lambda: not (joined.cuda / "worker-faults" / "fingerprints").exists())
        assert process(f"[free({address}), {call}]") == [0, 0]
        assert looking.result().looked == 60 * MIB
    assert process("alloc(60 * MIB)[0]") == 2
    assert joined.used() == 60 * MIB


FAULTS: dict[str, Callable[[Machine], object]] = {
    "the worker fails": lambda machine: (
        machine.cuda / "worker-faults" / "fingerprints"
    ).write_text("fails"),
    "no keeper": lambda machine: machine.kill_keeper(),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_look_that_fails_holds_nothing(
    worker: Worker, process: Target, joined: Machine, name: str
) -> None:
    address = process("alloc(4 * MIB)")[1]
    parent = parent_of(process)
    FAULTS[name](joined)
    with pytest.raises(IcecoreError):
        look(worker, process, parent)
    assert not [
        fd
        for fd in Path("/proc/self/fd").iterdir()
        if fd.is_symlink() and str(joined.cuda) in os.readlink(fd)
    ]
    assert process(f"free({address})") == 0
    assert joined.used() == 0
