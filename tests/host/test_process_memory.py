"""Writing into another process's memory: into that address space, and no other."""

from __future__ import annotations

import hashlib
import mmap
import os
import subprocess
import sys

import pytest

from icecore.host import process_memory
from icecore.host.memory import address_of

_SIZE = 3 << 20
#: Says where it has memory, and then what is there.
_TARGET = f"""
import ctypes, hashlib, mmap, sys
memory = mmap.mmap(-1, {_SIZE})
print(ctypes.addressof(ctypes.c_char.from_buffer(memory)), flush=True)
sys.stdin.readline()
print(hashlib.sha256(memory).hexdigest(), flush=True)
sys.stdin.readline()
"""


def test_what_is_written_is_there_until_the_process_has_ended() -> None:
    target = subprocess.Popen([sys.executable, "-S", "-c", _TARGET], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert target.stdin is not None and target.stdout is not None
    data = bytearray(os.urandom(_SIZE))
    source = address_of(memoryview(data))
    try:
        address = int(target.stdout.readline())
        memory = process_memory.open_memory(target.pid)
        half = _SIZE // 2 + 5
        assert process_memory.write(memory, address, source, half)
        assert process_memory.write(memory, address + half, source + half, _SIZE - half)
        print(file=target.stdin, flush=True)
        assert target.stdout.readline().strip() == hashlib.sha256(data).hexdigest()
        with pytest.raises(OSError, match="writing 4096 bytes at 0x10000 of another process"):
            process_memory.write(memory, 0x10000, source, mmap.PAGESIZE)
        with pytest.raises(OSError, match="writing"):
            process_memory.write(memory, address, 0x10000, mmap.PAGESIZE)  # nothing of ours is there
        target.kill()
        target.wait(10)
        assert not process_memory.write(memory, address, source, mmap.PAGESIZE)
        os.close(memory)
        with pytest.raises(OSError, match="No such file"):
            process_memory.open_memory(target.pid)
    finally:
        target.kill()
        target.communicate()
