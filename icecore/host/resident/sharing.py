"""Find which resident allocations of several processes are the same memory: those whose descriptors
the kernel says are one open file.

A descriptor says nothing else: all of the driver's are of one device file. Whoever exports memory
gives away duplicates of one descriptor, and whoever imports it keeps that (``handles.c``), so that
all that come from the keeper of one memory are duplicates of each other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cmp_to_key

import msgspec

from icecore.errors import IcecoreError
from icecore.host.kernel.kcmp import kcmp
from icecore.host.resident.protocol import Allocation

Taken = tuple[Allocation, int]


class SharingUnclear(IcecoreError):
    """It cannot be determined which memory is shared, or shared memory has no owner."""


class Import(msgspec.Struct, frozen=True):
    """An allocation that is the memory of another allocation.

    Attributes:
        allocation: As its process has it.
        owner: The process (as in what was asked) that has it first-hand, and its identity there.
    """

    allocation: Allocation
    owner: tuple[int, int]


class Shares(msgspec.Struct, frozen=True):
    """Who has which memory.

    Attributes:
        owned: By process: each memory once.
        imports: By process: what it has of others', or once more of its own.
    """

    owned: dict[int, list[Taken]]
    imports: dict[int, list[Import]]


def find_shares(taken: Mapping[int, Sequence[Taken]]) -> Shares:
    """Find which allocations of processes are the same memory.

    Memory is its creator's. Where that has let go of it, it is that importer's who has most of it
    mapped.

    Args:
        taken: By process: its allocations, with a descriptor of each in this process.

    Raises:
        SharingUnclear: The kernel does not tell, or memory has neither a creator nor a mapping.
    """
    owned: dict[int, list[Taken]] = {key: [] for key in taken}
    imports: dict[int, list[Import]] = {key: [] for key in taken}
    shared: list[tuple[int, Taken]] = []
    for key, pairs in taken.items():
        for pair in pairs:
            if pair[0].imported or pair[0].exported:
                shared.append((key, pair))
            else:
                owned[key].append(pair)
    for group in _groups(shared):
        owner, (first, descriptor) = min(
            group, key=lambda one: (one[1][0].imported, -one[1][0].size, one[0])
        )
        if not first.size:
            raise SharingUnclear(
                "a process has imported device memory whose creator is gone, and has not mapped it: its size is unknown",
                cure="take the snapshot once it has mapped or released that memory",
            )
        owned[owner].append((first, descriptor))
        for key, (other, _) in group:
            if other is not first:
                imports[key].append(Import(other, (owner, first.identity)))
    for pairs in owned.values():
        pairs.sort(key=lambda pair: pair[0].address)
    return Shares(owned, imports)


def repeated(taken: Sequence[Taken]) -> list[int]:
    """Return the positions of those that are the memory of an earlier one.

    Raises:
        SharingUnclear: The kernel does not tell.
    """
    marked = [
        (number, one) for number, one in enumerate(taken) if one[0].imported or one[0].exported
    ]
    return sorted(
        number for group in _groups(marked) for number in sorted(number for number, _ in group)[1:]
    )


def share_any(some: Sequence[Taken], others: Sequence[Taken]) -> bool:
    """Return whether any of these is the memory of any of the others."""
    marked = [(0, one) for one in some if one[0].imported or one[0].exported]
    marked += [(1, one) for one in others if one[0].imported or one[0].exported]
    return any(len({side for side, _ in group}) == 2 for group in _groups(marked))


def _groups(shared: Sequence[tuple[int, Taken]]) -> Iterator[list[tuple[int, Taken]]]:
    group: list[tuple[int, Taken]] = []

    def order(a: tuple[int, Taken], b: tuple[int, Taken]) -> int:
        return _compare(a[1][1], b[1][1])

    for one in sorted(shared, key=cmp_to_key(order)):
        if group and _compare(group[-1][1][1], one[1][1]):
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _compare(one: int, other: int) -> int:
    """Compare open files (kcmp(2)): 0 if they are the same."""
    pid = os.getpid()
    try:
        return kcmp(pid, pid, "file", one, other)
    except OSError as error:
        raise SharingUnclear(
            f"cannot determine which processes share device memory: {error.strerror}",
            cure="use a kernel with CONFIG_KCMP, which CRIU also requires",
        ) from error
