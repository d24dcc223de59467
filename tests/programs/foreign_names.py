"""A job that has bytes that are not UTF-8, control characters and markup in every name that a process can have; it counts on stdout until a file appears.

Usage: foreign_names.py FOLDER FINISH NAME (NAME as hexadecimal digits: the bytes that go into each name)
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
import time

_PR_SET_NAME = 15


def _call_thread(name: bytes) -> None:
    """Name the calling thread, as /proc/PID/task/TID/comm shows it."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.create_string_buffer(name[:15]), 0, 0, 0)


def main() -> None:
    """Make and hold everything, then count."""
    folder, finish = os.fsencode(sys.argv[1]), sys.argv[2]
    name = bytes.fromhex(sys.argv[3])
    own = os.path.join(folder, b"cwd " + name)
    os.makedirs(own, exist_ok=True)
    os.chdir(own)
    held: list[object] = []
    for kind in (b"read", b"written", b"deleted", b"unlinked"):
        path = os.path.join(own, kind + b" " + name)
        with open(path, "wb") as file:
            file.write(kind)
        held.append(open(path, "rb" if kind == b"read" else "r+b", buffering=0))
    os.link(os.path.join(own, b"unlinked " + name), os.path.join(own, b"kept " + name))
    os.unlink(os.path.join(own, b"unlinked " + name))
    os.unlink(os.path.join(own, b"deleted " + name))
    for address in (b"socket " + name[:40], b"\0abstract\0" + name[:40]):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(address)
        listener.listen(1)
        held.append(listener)
    _call_thread(name)

    def stay() -> None:
        _call_thread(b"t" + name)
        threading.Event().wait()

    threading.Thread(target=stay, daemon=True).start()
    number = 0
    while not os.path.exists(finish):
        number += 1
        print(number, flush=True)
        time.sleep(0.02)
    words = [os.fsencode(word) for word in sys.argv[4:]]
    print("argv", *[word.hex() for word in words], "env", os.environb.get(b"NASTY", b"").hex(), "cwd", os.getcwdb().hex(), flush=True)
    print("written", os.fstat(held[1].fileno()).st_size, os.path.exists(os.path.join(own, b"written " + name)), flush=True)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
