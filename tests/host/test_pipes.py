"""Pipes of another process: what lies in them stays while they are held, and pipes of one's own are
left alone.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys

from icecore.host.kernel.pipes import HeldPipes, make_room

_CHILD = """
import os, sys
read, write = os.pipe()
os.write(write, b"pages")
print(write, flush=True)
sys.stdin.readline()
os.close(read), os.close(write)
print("closed", flush=True)
sys.stdin.readline()
"""


def test_what_a_process_had_in_pipes_stays_until_it_is_released() -> None:
    make_room()
    gc.collect()  # what earlier tests left to be closed
    before = len(os.listdir("/proc/self/fd"))
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        inside = os.stat(f"/proc/{child.pid}/fd/{int(child.stdout.readline())}").st_ino
        held = HeldPipes(child.pid)
        child.stdin.write(b"\n")
        assert child.stdout.readline() == b"closed\n"
        mine = [
            int(name)
            for name in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{name}")
        ]
        (one,) = [number for number in mine if os.fstat(number).st_ino == inside]
        assert len(held) == 1 and os.read(one, 100) == b"pages"
        held.release()
        child.stdin.write(b"\n")
        child.wait(20)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not len(HeldPipes(child.pid))
