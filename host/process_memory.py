"""Another process's memory, written through /proc/PID/mem (proc(5)); its rule: bytes go into the address space that was opened, whoever has its pid by then.

Memory that is not there yet is made by the write, of huge pages where a mapping has them. It must not be registered with a userfaultfd, which would wait for
somebody to place the page.
"""

from __future__ import annotations

import errno
import os

from icecore.host import libc


def open_memory(pid: int) -> int:
    """A descriptor for `write`, to be closed.

    Raises:
        OSError: There is no such process, or it may not be traced.
    """
    return os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)


def write(descriptor: int, destination: int, source: int, length: int) -> bool:
    """Write ``length`` bytes of this process at ``source`` to ``destination`` there.

    Returns:
        Whether it could be done; false: the process has ended.

    Raises:
        OSError: It has no such memory.
    """
    done = 0
    while done < length:
        count = libc.pwrite(descriptor, source + done, length - done, destination + done)
        if count == 0:
            return False
        if count < 0:
            error = libc.last_error(f"writing {length - done} bytes at {destination + done:#x} of another process")
            if error.errno != errno.EINTR:
                raise error
            continue
        done += count
    return True
