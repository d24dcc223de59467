"""Memory that CRIU does not see in a lazy dump (icecore/host/criu/pages.c and shared.c). What is
hidden is recorded, and whoever reads the memory in place adds it again.
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

#: A range of addresses.
RANGE = np.dtype([("start", "<u8"), ("end", "<u8")])
#: A shared memory object that CRIU is to be kept from seeing (struct object in
#: icecore/host/criu/shared.c). ``size`` is 0 until CRIU has asked for its content; then it is the
#: bytes that CRIU would have written.
SHARED = np.dtype([("device", "<u8"), ("inode", "<u8"), ("system_v", "<u8"), ("size", "<u8")])
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


def list_shared(path: Path, rows: npt.NDArray[np.void]) -> None:
    """Write the list of shared memory (SHARED records) that belongs to a file of hidden ranges."""
    _shared_list(path).write_bytes(rows.tobytes())


def read_shared(path: Path) -> dict[int, int]:
    """Return which shared memory CRIU was kept from seeing.

    Args:
        path: The file of hidden ranges to which the list belongs.

    Returns:
        Inode → the bytes that CRIU would have written.
    """
    listed = _shared_list(path)
    if not listed.exists():
        return {}
    rows = np.frombuffer(listed.read_bytes(), SHARED)
    rows = rows[rows["size"] > 0]
    return dict(zip(rows["inode"].tolist(), rows["size"].tolist(), strict=True))


def _shared_list(path: Path) -> Path:
    return path.with_name(f"{path.name}.shared.log")


def _ascending(ranges: Ranges) -> Ranges:
    """Sort the records and drop those that CRIU asked for twice."""
    ranges = ranges[np.argsort(ranges["start"], kind="stable")]
    before = np.maximum.accumulate(ranges["end"])[:-1]
    start = ranges["start"].copy()
    start[1:] = np.maximum(start[1:], before)
    out = np.empty(len(ranges), RANGE)
    out["start"], out["end"] = start, ranges["end"]
    return out[out["start"] < out["end"]]
