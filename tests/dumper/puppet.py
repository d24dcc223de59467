"""A Python process that executes what it reads from files, so that no descriptor of it leads
outside its tree.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_SCRIPT = """
import ctypes, mmap, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
MIB = 1 << 20

def private(size, at=0, protection=3, more=0):
    flags = 0x22 | (0x100000 if at else 0) | more  # MAP_FIXED_NOREPLACE
    address = libc.mmap(at, size, protection, flags, -1, 0)
    assert address and address != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    return address

def put(address, data):
    ctypes.memmove(address, data, len(data))

step = 0
while True:
    if os.path.exists(f"do{step}"):
        with open(f"do{step}") as file:
            code = file.read()
        try:
            exec(code)
            answer = "done"
        except BaseException as error:
            answer = repr(error)
        with open(f".said{step}", "w") as file:
            file.write(answer)
        os.rename(f".said{step}", f"said{step}")
        step += 1
    time.sleep(0.002)
"""


class Puppet:
    """The process.

    Args:
        folder: Its working directory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._step = 0
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", _SCRIPT],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def do(self, code: str, seconds: float = 20.0) -> None:
        """Have it execute ``code``; names stay from one call to the next."""
        told, said = self.folder / f".do{self._step}", self.folder / f"said{self._step}"
        told.write_text(code)
        told.rename(self.folder / f"do{self._step}")
        self._step += 1
        end = time.monotonic() + seconds
        while not said.exists():
            assert time.monotonic() < end and self.process.poll() is None, f"no answer to {code!r}"
            time.sleep(0.002)
        assert said.read_text() == "done", said.read_text()

    def number(self, expression: str) -> int:
        """Return the value of an expression."""
        self.do(f"with open('number', 'w') as file: file.write(str({expression}))")
        return int((self.folder / "number").read_text())

    def end(self) -> None:
        """Kill the process and its whole session."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(20)
