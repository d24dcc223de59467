"""Processes that were forked after the pre-copy, such as the workers of a new epoch. Most of their
memory equals their parent's, at the same addresses, and pre-copy has already stored it.

What is known of a cell is used only if the cell's fingerprint matches, so a wrong guess costs time
and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace

from icecore.dumper.memory.known import KnownCells
from icecore.dumper.memory.parent import Parent
from icecore.dumper.memory.precopy import PreCopied
from icecore.errors import NotFound
from icecore.host.kernel import procfs

#: The start of the stack, in a `procfs.Layout`.
_STACK = 2


def with_forked(
    copied: Mapping[int, PreCopied], images: Mapping[int, int], parent: Parent | None
) -> Mapping[int, PreCopied]:
    """For each process that was not pre-copied, and is not in the parent snapshot, add what pre-copy
    learnt of its parent, or else of another process that runs the same program at the same
    addresses.

    Args:
        copied: What pre-copy learnt, by image id.
        images: Host pid → image id of all processes of the tree.
        parent: The parent snapshot.
    """
    new = {
        pid: image
        for pid, image in images.items()
        if image not in copied and (parent is None or parent.space("process", str(image)) is None)
    }
    if not new or not copied:
        return copied
    known: dict[procfs.Layout, dict[int, int]] = {}
    for pid, image in images.items():
        if image in copied and (layout := _layout(pid)) is not None:
            known.setdefault(layout, {})[pid] = image
    found = dict(copied)
    for pid, image in new.items():
        layout = _layout(pid)
        alike = known.get(layout, {}) if layout is not None else {}
        if alike:
            source = alike.get(_nearest(pid, alike), next(iter(alike.values())))
            # Pre-copy saw none of its own memory, so none of its cells counts as restless.
            found[image] = replace(copied[source], seen=KnownCells.none())
    return found


def fork_sources(pids: Sequence[int]) -> dict[int, int]:
    """Map each process that may be a fork of an earlier one to that process: its nearest such
    ancestor, else the first with the same program at the same addresses.
    """
    earlier: dict[procfs.Layout, list[int]] = {}
    found = {}
    for pid in pids:
        if (layout := _layout(pid)) is None:
            continue
        alike = earlier.setdefault(layout, [])
        if alike:
            found[pid] = _nearest(pid, alike) or alike[0]
        alike.append(pid)
    return found


def _layout(pid: int) -> procfs.Layout | None:
    """Return where the program of a process lies: fork(2) keeps that, and execve(2) changes it,
    unless addresses are not randomised. None: the process has no memory any more, or may not be
    inspected.
    """
    with suppress(NotFound):
        found = procfs.layout(pid)
        return found if found[_STACK] else None
    return None


def _nearest(pid: int, wanted: Collection[int]) -> int:
    """Return the nearest ancestor that is among these; 0: none is."""
    with suppress(NotFound):
        while (pid := procfs.status(pid).parent) and pid not in wanted:
            pass
        return pid
    return 0
