"""A file that this process has mapped for reading."""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress

from icecore.host.kernel import libc
from icecore.sizes import PAGE


class MappedFile:
    """The whole pages of a file, mapped shared and read-only; offset 0 is at ``address``. If the
    file is truncated, a read past its new end raises SIGBUS. So only guarded reads (in_place.c) may
    use the mapping.

    Args:
        descriptor: Open for reading; it may be closed afterwards.
        size: Bytes of the file. A partial page at the end is not mapped.

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
        """Unmap the file, which takes about 0.1 s for each GiB that was read. Several threads may
        call this at once.
        """
        with self._closing:
            if self.size:
                libc.munmap(self.address, self.size)
                self.size = 0
