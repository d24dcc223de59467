"""A file that this process has mapped for reading."""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress

from icecore.host.kernel import libc
from icecore.sizes import PAGE


class MappedFile:
    """The whole pages of a file, mapped shared and for reading only: offset 0 is at ``address``. If
    the file is shortened, a read behind its new end is a SIGBUS, so nothing but a guarded read
    (in_place.c) may use it.

    Args:
        descriptor: Open for reading; it may be closed afterwards.
        size: Bytes of the file; a page at the end that is not whole is left out.

    Raises:
        OSError: The file cannot be mapped, or there is not enough address space.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._closing = threading.Lock()
        #: Bytes that are mapped.
        self.size = size // PAGE * PAGE
        #: Address of the first byte.
        self.address = libc.mmap(self.size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor)
        for advice in (mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP):
            with suppress(OSError):
                libc.madvise(self.address, self.size, advice)

    def close(self) -> None:
        """Unmap it, which takes about a tenth of a second for each GiB that was read. Several threads
        may call this.
        """
        with self._closing:
            if self.size:
                libc.munmap(self.address, self.size)
                self.size = 0
