"""Checks for room before files are written; rule: the bytes in the cells count, not the sizes in a
manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from icecore.host.kernel import limits
from icecore.restorer.files.filewriter import FileTarget
from icecore.sizes import PAGE


def shortage(folder: Path, targets: Sequence[FileTarget]) -> str:
    """Say by how much the targets' bytes exceed what is free in ``folder``; empty if they fit."""
    pages = sum(
        int(
            np.bitwise_count(
                target.cells.records["data"] if target.within is None else target.within
            ).sum(dtype=np.int64)
        )
        for target in targets
    )
    free = limits.free_space(str(folder))
    if pages * PAGE <= free:
        return ""
    return f"{pages * PAGE >> 20} MiB must be written to {folder}, which has {free >> 20} MiB free"
