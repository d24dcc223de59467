"""Memory that CRIU does not see in a lazy dump (icecore/host/criu/pages.c). What is hidden is
recorded, and whoever reads the memory in place adds it again.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from icecore.errors import Damaged
from icecore.host.criu.libraries import CRIU_LIBRARY
from icecore.host.criu.program import Criu
from icecore.host.kernel.limits import kernel_version
from icecore.host.kernel.pagemap import scan_supported
from icecore.sizes import HUGE_PAGE, PAGE

#: Mappings smaller than this are not hidden (LEAST in icecore/host/criu/pages.c).
LEAST_BYTES = HUGE_PAGE + PAGE

#: A range of addresses.
RANGE = np.dtype([("start", "<u8"), ("end", "<u8")])
_ENTRY = np.dtype([("pid", "<u8"), ("range", RANGE)])

Ranges = npt.NDArray[np.void]


def hides(criu: Criu) -> bool:
    """Return whether memory is hidden from this CRIU: the library was built, CRIU uses PAGEMAP_SCAN
    (Linux 6.7), and it handles guard pages.
    """
    return CRIU_LIBRARY.exists() and scan_supported() and criu.keeps_guard_pages(kernel_version())


def read_hidden(path: Path) -> dict[int, Ranges]:
    """Return the records of the file.

    Returns:
        Pid (as CRIU sees it) → RANGE records, ascending, disjoint; neighbours are not joined.

    Raises:
        Damaged: The file is cut off.
    """
    data = path.read_bytes()
    if len(data) % _ENTRY.itemsize:
        raise Damaged("image", path.name, "it is cut off")
    entries = np.frombuffer(data, _ENTRY)
    return {
        pid: _ascending(entries["range"][entries["pid"] == pid])
        for pid in set(entries["pid"].tolist())
    }


def _ascending(ranges: Ranges) -> Ranges:
    """Sort the records and drop those that CRIU asked for twice."""
    ranges = ranges[np.argsort(ranges["start"], kind="stable")]
    before = np.maximum.accumulate(ranges["end"])[:-1]
    start = ranges["start"].copy()
    start[1:] = np.maximum(start[1:], before)
    out = np.empty(len(ranges), RANGE)
    out["start"], out["end"] = start, ranges["end"]
    return out[out["start"] < out["end"]]
