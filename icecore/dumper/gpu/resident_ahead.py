"""How much of resident memory has changed, found while the job runs, so that there is host memory
for it in the window; rule: the job gets all that it frees.

Mapped memory is not free when its owner frees it. So it is mapped in portions, for some
`_PORTION_SECONDS` each, and announced to the processes: an allocation that finds no memory waits
meanwhile (the preload's `AGENT_LOOK`). What is found is a lower bound, because the job goes on
writing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from icecore.dumper.gpu.resident_cells import (
    AllocationCells,
    ProcessCells,
    by_device,
    fingerprint,
    plan_process,
)
from icecore.dumper.memory.parent import Parent
from icecore.errors import IcecoreError
from icecore.host.gpu.worker import MOST_DESCRIPTORS
from icecore.host.gpu.working import Worker, WorkerFailed
from icecore.host.resident.client import Agent, Keeper
from icecore.host.resident.sharing import Taken, find_shares
from icecore.store.format.cell import CELL_BYTES

#: How long a portion is mapped at most, where GPUs are as fast as they were for the last one; how
#: long the look goes on; how long it may hold up allocations.
_PORTION_SECONDS, _SECONDS, _MOST_SECONDS = 0.1, 2.0, 10.0
#: What one of the worker's calls may take: mapping (one call, of as many as one has),
#: fingerprinting and unmapping together end before what was announced does.
CALL_SECONDS = 2.5
#: The first portion, and by how much one may be larger than the last. Bytes.
_FIRST_PORTION, _GROWTH = 1 << 30, 8


@dataclass(frozen=True)
class FoundChanges:
    """What a look found.

    Attributes:
        looked: Bytes that were fingerprinted.
        changed: By GPU, bytes that are not as the parent has them, or that it does not have.
    """

    looked: int
    changed: Mapping[str, int]


def find_changes(
    worker: Worker,
    place: Path,
    agents: Mapping[int, Agent],
    tokens: Mapping[int, bytes],
    parent: Parent | None,
    seed: int,
) -> FoundChanges:
    """Fingerprint device memory while the processes run: what differs from the parent, or, where
    there is none, from zeros.

    Args:
        worker: Ready on all GPUs.
        place: The keeper's directory.
        agents, tokens: The processes', by pid.
        seed: The lineage's, for fingerprints.

    Raises:
        IcecoreError: It cannot be done; the processes go on, and nothing is mapped unless the
            worker hangs.
    """
    keeper = Keeper(place)
    until = time.monotonic() + _SECONDS
    with announced(agents.values()):
        pairs = owned(keeper, tokens)
        processes = [
            plan_process(pid, str(agents[pid].pid), pairs[pid], worker, parent, seed)
            for pid in sorted(pairs)
        ]
        devices = by_device(processes)
        if not devices:
            return FoundChanges(0, {})
        with ThreadPoolExecutor(len(devices), "look") as pool:
            futures = {
                device: pool.submit(
                    _find_changes_of, GpuAccess(worker, keeper, tokens, seed, device), pieces, until
                )
                for device, pieces in devices.items()
            }
    found = {device: future.result() for device, future in futures.items()}
    return FoundChanges(
        sum(looked for looked, _ in found.values()),
        {device: changed for device, (_, changed) in found.items()},
    )


@contextmanager
def announced(agents: Collection[Agent]) -> Iterator[None]:
    """Processes know that somebody has some of their memory mapped."""
    with ExitStack() as stack:
        for agent in agents:
            stack.callback(_end_announcement, agent)
        announce(agents)
        yield


def announce(agents: Collection[Agent]) -> None:
    """From now on for `_MOST_SECONDS`, at the most until `announced` is left."""
    for agent in agents:
        agent.look(_MOST_SECONDS)


def _end_announcement(agent: Agent) -> None:
    with suppress(IcecoreError):  # it ends by itself, too
        agent.look(0.0)


def owned(keeper: Keeper, tokens: Mapping[int, bytes]) -> dict[int, list[Taken]]:
    """What each process has, of what several have one's; the descriptors, which told that, are
    closed.
    """
    with ExitStack() as stack:
        taken: dict[int, list[Taken]] = {}
        for pid, token in tokens.items():
            taken[pid] = keeper.take(token)
            for _, descriptor in taken[pid]:
                stack.callback(os.close, descriptor)
        return find_shares(taken).owned


class GpuAccess(NamedTuple):
    """What it takes to look at memory of one GPU."""

    worker: Worker
    keeper: Keeper
    tokens: Mapping[int, bytes]
    seed: int
    device: str


def _find_changes_of(
    access: GpuAccess, pieces: Sequence[tuple[ProcessCells, AllocationCells]], until: float
) -> tuple[int, int]:
    """Return one GPU's part: bytes looked at, and changed. New memory that was not reached counts
    as changed, the parent's as unchanged.
    """
    new = {id(piece): piece.cells for process, piece in pieces if not process.known(piece)}
    looked = changed = 0
    for process, piece in fingerprint_in_portions(access, pieces, until):
        process.compare(piece.rows)
        looked += piece.cells
        changed += int(process.changed(piece).sum())
        new.pop(id(piece), None)
    return looked * CELL_BYTES, (changed + sum(new.values())) * CELL_BYTES


def fingerprint_in_portions(
    access: GpuAccess, pieces: Sequence[tuple[ProcessCells, AllocationCells]], until: float
) -> Iterator[tuple[ProcessCells, AllocationCells]]:
    """Fingerprint memory of one GPU, each piece in a portion that is mapped for a moment; those
    that were there and were reached in time.
    """
    left, portion = list(pieces), _FIRST_PORTION
    while left and time.monotonic() < until:
        some: list[tuple[ProcessCells, AllocationCells]] = []
        size = 0
        while left and (
            not some
            or (size + left[-1][1].allocation.size <= portion and len(some) < MOST_DESCRIPTORS)
        ):
            some.append(left.pop())
            size += some[-1][1].allocation.size
        began = time.monotonic()
        with mapped(access, some) as there:
            pass
        rate = size / max(time.monotonic() - began, 1e-6)
        portion = min(int(rate * _PORTION_SECONDS), _GROWTH * max(size, portion))
        yield from there


@contextmanager
def mapped(
    access: GpuAccess, pieces: Sequence[tuple[ProcessCells, AllocationCells]]
) -> Iterator[list[tuple[ProcessCells, AllocationCells]]]:
    """Those of them that are still there, fingerprinted, and mapped meanwhile."""
    worker, keeper, tokens, seed, device = access
    with ExitStack() as stack:
        held: dict[int, dict[int, int]] = {}
        for pid in {process.pid for process, _ in pieces}:
            wanted = [piece.allocation.identity for process, piece in pieces if process.pid == pid]
            held[pid] = keeper.fetch(tokens[pid], wanted)
            for descriptor in held[pid].values():
                stack.callback(os.close, descriptor)
        there = []
        for process, piece in pieces:
            piece.descriptor = held[process.pid].get(piece.allocation.identity, -1)
            if piece.descriptor >= 0:
                there.append((process, piece))
        if there:
            stack.callback(_let_go, worker, device, [piece.handle for _, piece in there])
            fingerprint(worker, device, there, seed, CALL_SECONDS)
        yield there


def _let_go(worker: Worker, device: str, handles: Sequence[int]) -> None:
    """Unmap these; a worker that does not is ended, which does it."""
    try:
        worker.release(device, handles, seconds=CALL_SECONDS)
    except WorkerFailed:
        worker.kill()
        raise
