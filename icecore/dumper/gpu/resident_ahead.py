"""Find how much of resident memory has changed while the job runs, so that the window finds host
memory for it. The job gets back all memory that it frees.

Memory that the worker has mapped is not free when its owner frees it. The worker therefore maps
memory in portions, for about `_PORTION_SECONDS` each, and announces this to the processes: an
allocation that finds no memory waits meanwhile (the preload's `AGENT_LOOK`). The result is a lower
bound, because the job goes on writing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

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
from icecore.sizes import CELL_BYTES

#: For how long a portion is mapped, judged by the rate of the one before; how long the search goes
#: on; how long it may hold up allocations.
_PORTION_SECONDS, _SECONDS, _MOST_SECONDS = 0.1, 2.0, 10.0
#: Time limit of one of the worker's calls. Mapping (in one call, up to its maximum number of
#: descriptors), fingerprinting and unmapping together end before the announcement does.
CALL_SECONDS = 2.5
#: The first portion in bytes, and by which factor one may exceed the last.
_FIRST_PORTION, _GROWTH = 1 << 30, 8


class FoundChanges(msgspec.Struct, frozen=True):
    """How much has changed.

    Attributes:
        looked: Bytes that were fingerprinted.
        changed: By GPU, bytes that differ from the parent or that it does not have.
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
    """Fingerprint device memory while the processes run, and compare it with the parent, or with
    zeros if there is none.

    Args:
        worker: Ready on all GPUs.
        place: The keeper's directory.
        agents, tokens: Agents and tokens of the processes, by pid.
        seed: The lineage's seed for fingerprints.

    Raises:
        IcecoreError: It failed. The processes go on, and nothing is mapped unless the worker hangs.
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
    """Announce to the processes that some of their memory is mapped, until the context is left."""
    with ExitStack() as stack:
        for agent in agents:
            stack.callback(_end_announcement, agent)
        announce(agents)
        yield


def announce(agents: Collection[Agent]) -> None:
    """Announce for `_MOST_SECONDS` from now, or until `announced` is left."""
    for agent in agents:
        agent.look(_MOST_SECONDS)


def _end_announcement(agent: Agent) -> None:
    with suppress(IcecoreError):  # it also ends by itself
        agent.look(0.0)


def owned(keeper: Keeper, tokens: Mapping[int, bytes]) -> dict[int, list[Taken]]:
    """Return the allocations of each process; shared ones belong to one of their processes. The
    descriptors, which identify shared memory, are closed.
    """
    with ExitStack() as stack:
        taken: dict[int, list[Taken]] = {}
        for pid, token in tokens.items():
            taken[pid] = keeper.take(token)
            for _, descriptor in taken[pid]:
                stack.callback(os.close, descriptor)
        return find_shares(taken).owned


class GpuAccess(NamedTuple):
    """What gives access to the memory of one GPU."""

    worker: Worker
    keeper: Keeper
    tokens: Mapping[int, bytes]
    seed: int
    device: str


def _find_changes_of(
    access: GpuAccess, pieces: Sequence[tuple[ProcessCells, AllocationCells]], until: float
) -> tuple[int, int]:
    """Return for one GPU the bytes fingerprinted and the bytes changed. New memory that was not
    reached counts as changed; memory that the parent has counts as unchanged.
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
    """Fingerprint memory of one GPU in portions, each of which is mapped for a moment.

    Yields:
        The allocations that still exist and were reached before ``until``.
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
    """Map and fingerprint allocations until the context is left; yield those that still exist."""
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
    """Unmap allocations. If the worker fails to, end it, which unmaps them too."""
    try:
        worker.release(device, handles, seconds=CALL_SECONDS)
    except WorkerFailed:
        worker.kill()
        raise
