"""Processes that were forked after the pre-copy, such as the workers of a new epoch. Most of their
memory is their parent's, at the same addresses, and pre-copy has stored that.

What is known of a cell counts only if the cell has the known fingerprint, so a wrong guess costs
time and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from icecore.dumper.memory.known import KnownCells
from icecore.dumper.memory.precopy import PreCopied
from icecore.errors import NotFound
from icecore.host.kernel import procfs


def with_forked(
    copied: Mapping[int, PreCopied], images: Mapping[int, int]
) -> Mapping[int, PreCopied]:
    """Add, for each process that pre-copy has not seen, what it learnt of one that the process was
    forked from or together with.

    Args:
        copied: What pre-copy learnt, by image id.
        images: Host pid → image id of all processes of the tree.
    """
    new = {pid: image for pid, image in images.items() if image not in copied}
    if not new or not copied:
        return copied
    by_image = {image: pid for pid, image in images.items()}
    known: dict[procfs.Layout, dict[int, int]] = {}
    for image in copied:
        if image in by_image and (layout := _layout(by_image[image])) is not None:
            known.setdefault(layout, {})[by_image[image]] = image
    found = dict(copied)
    for pid, image in new.items():
        layout = _layout(pid)
        alike = known.get(layout, {}) if layout is not None else {}
        if alike:
            source = alike.get(_parent(pid), next(iter(alike.values())))
            # What is seen to change from now on is its own.
            found[image] = replace(copied[source], seen=KnownCells.none())
    return found


def _layout(pid: int) -> procfs.Layout | None:
    """Return where the program of a process lies, which fork(2) leaves as it is and execve(2)
    changes; None: it has no memory any more.
    """
    with suppress(NotFound):
        found = procfs.layout(pid)
        return found if any(found) else None
    return None


def _parent(pid: int) -> int:
    with suppress(NotFound):
        return procfs.status(pid).parent
    return 0
