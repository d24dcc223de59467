"""A process to look at: runs a snippet of Python, says when it is ready, takes commands on its
standard input; always ended by its test.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PRELUDE = r"""
import ctypes, mmap, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mremap.restype = ctypes.c_void_p
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
def anonymous(length, protection=3, flags=0x22):
    address = libc.mmap(None, length, protection, flags, -1, 0)
    assert address not in (None, 2**64 - 1)
    return address
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())
def hear():
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    return line.split()
"""


class Target:
    """A running snippet."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.pid = process.pid
        self._heard = b""

    def hear(self, seconds: float = 20) -> list[str]:
        """The words of the next line that it says."""
        assert self.process.stdout is not None
        end = time.monotonic() + seconds
        while b"\n" not in self._heard:
            ready, _, _ = select.select(
                [self.process.stdout], [], [], max(0, end - time.monotonic())
            )
            assert ready, "the target said nothing in time"
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            assert data, f"the target ended: {self.process.poll()}"
            self._heard += data
        line, self._heard = self._heard.split(b"\n", 1)
        return line.decode().split()

    def tell(self, *words: object) -> None:
        """Send it a line."""
        assert self.process.stdin is not None
        self.process.stdin.write((" ".join(map(str, words)) + "\n").encode())


@contextmanager
def target(
    code: str, *arguments: object, pass_fds: tuple[int, ...] = (), site: bool = False
) -> Iterator[Target]:
    """Run a snippet in its own session, killed when the block ends; with ``site`` it may import
    icecore.
    """
    process = subprocess.Popen(
        [
            sys.executable,
            *([] if site else ["-S"]),
            "-c",
            PRELUDE + textwrap.dedent(code),
            *map(str, arguments),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        pass_fds=pass_fds,
    )
    try:
        yield Target(process)
    finally:
        process.kill()
        process.communicate(timeout=20)


def eventually(what: Callable[[], bool], seconds: float = 10) -> bool:
    """Whether a condition comes true in time."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def dead_pid() -> int:
    """The pid of a process that has just ended and been waited for."""
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    return pid
