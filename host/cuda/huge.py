"""Huge pages for the mapping into which the driver moves device memory; its rule: an optimisation, which never fails a checkpoint nor outlives it.

The driver makes one large private anonymous mapping in the process and then touches it page by page. Where transparent huge pages are for those who ask
(``madvise``, as on most machines) it does not ask. Only the process itself can, so it is made to as soon as the mapping is seen.
"""

from __future__ import annotations

import errno
import mmap
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from icecore.errors import NotFound
from icecore.host import injection, procfs

#: From how many bytes on a mapping counts as the driver's.
SMALLEST = 64 << 20
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_BUDDYINFO = Path("/proc/buddyinfo")
_MADVISE, _MADV_HUGEPAGE = 28, 14
#: The driver makes the mapping soon; the later it is seen, the less there is to gain, and maps are read with the process's own lock.
_PAUSE_SECONDS, _PAUSE_SHARE = 0.002, 0.05
#: How the driver's threads are called, which work meanwhile, and what the preload's are.
_LEFT_ALONE = ("cuda", "icecore-")
_WANTED = procfs.PROT_READ | procfs.PROT_WRITE


def setting() -> str:
    """What the machine does about transparent huge pages: ``always``, ``madvise`` (where they are asked for) or ``never``."""
    try:
        return _ENABLED.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return "never"


def free_bytes() -> int:
    """Free memory in pieces of at least a huge page: for more, the kernel would have to compact, which takes longer than it gains (proc(5), buddyinfo)."""
    order = (huge_page_bytes() // mmap.PAGESIZE).bit_length() - 1
    found = 0
    for line in _BUDDYINFO.read_text().splitlines():
        counts = [int(word) for word in line.partition("zone")[2].split()[1:]]
        found += sum(count << at for at, count in enumerate(counts) if at >= order) * mmap.PAGESIZE
    return found


def huge_page_bytes() -> int:
    """Size of a transparent huge page."""
    return int(_SIZE.read_text())


def advise(pid: int, start: int, length: int, drivers_thread: int = 0) -> None:
    """Have a process ask for huge pages for ``length`` bytes of its memory at ``start``, in whichever thread is not the driver's.

    Raises:
        NotMade: It cannot be made to, or the kernel refuses.
        NotFound: The process is gone.
    """

    def avoid(thread: procfs.Status) -> bool:
        return thread.pid == drivers_thread or thread.name.startswith(_LEFT_ALONE)

    answer = injection.execute(pid, _MADVISE, (start, length, _MADV_HUGEPAGE), avoid)
    if answer < 0:
        raise injection.NotMade(f"madvise: {errno.errorcode.get(-answer, answer)}")


class HugePages:
    """Watches a process while the driver checkpoints it (a context manager: left, the process is no longer touched).

    Args:
        drivers_thread: The thread in which the driver works there; 0: it is not known but by its name.

    Attributes:
        bytes: Of mappings for which huge pages were asked for.
        why: Why not for all; empty: nothing went wrong.
    """

    def __init__(self, pid: int, drivers_thread: int = 0) -> None:
        self.bytes = 0
        self.why = ""
        self._pid = pid
        self._drivers_thread = drivers_thread
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._lines: frozenset[bytes] = frozenset()

    def __enter__(self) -> Self:
        if (machine := setting()) != "madvise":
            self.why = f"transparent huge pages are there {machine}"
            return self
        try:
            self._lines = procfs.maps_lines(self._pid)
        except (OSError, NotFound) as error:
            self.why = str(error)
            return self
        self._thread = threading.Thread(target=self._watch, name="huge-pages")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        pause, waited = _PAUSE_SECONDS, 0.0
        try:
            while not self._over.wait(pause):
                waited += pause
                pause = max(_PAUSE_SECONDS, waited * _PAUSE_SHARE)
                self._look()
        except (OSError, NotFound, injection.NotMade) as error:
            self.why = str(error)

    def _look(self) -> None:
        lines = procfs.maps_lines(self._pid)
        before, now = (procfs.parse_maps(some) for some in (self._lines - lines, lines - self._lines))
        found = [(start, end - start) for start, end in procfs.appeared(before, now, _WANTED) if end - start >= SMALLEST]
        if found:
            self._lines = lines
        for start, length in found:
            if self._over.is_set():
                return
            if free_bytes() < length:
                raise injection.NotMade(f"less than {length >> 20} MiB of free memory are in pieces of a huge page")
            advise(self._pid, start, length, self._drivers_thread)
            self.bytes += length
