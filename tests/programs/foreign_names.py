"""A job with any bytes in every name that a process can have; it counts on stdout until a file
appears, and then says what it has.

Usage: foreign_names.py FOLDER FINISH NAMES [ARGUMENT ...]: NAMES are hexadecimal digits, with
commas between names.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import sys
import threading
import time

_PR_SET_NAME = 15


def call_thread(name: bytes) -> None:
    """Name the calling thread, as /proc/PID/task/TID/comm shows it."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.create_string_buffer(name[:15]), 0, 0, 0)


def main() -> None:
    """Make and hold everything, then count."""
    folder, finish = os.fsencode(sys.argv[1]), sys.argv[2]
    names = [bytes.fromhex(word) for word in sys.argv[3].split(",")]
    own = os.path.join(folder, b"cwd " + names[0])
    os.makedirs(own, exist_ok=True)
    os.chdir(own)
    written: dict[bytes, int] = {}
    held: list[object] = []
    for name in names:
        for kind, flags in (
            (b"read", os.O_RDONLY),
            (b"written", os.O_RDWR),
            (b"deleted", os.O_RDWR),
            (b"unlinked", os.O_RDWR),
        ):
            path = os.path.join(own, kind + b" " + name)
            with open(path, "wb") as file:
                file.write(kind)
            held.append(descriptor := os.open(path, flags))
            if kind == b"read":
                held.append(mmap.mmap(descriptor, 4, prot=mmap.PROT_READ))
            if kind == b"written":
                written[name] = descriptor
        os.unlink(os.path.join(own, b"deleted " + name))
        os.link(os.path.join(own, b"unlinked " + name), os.path.join(own, b"kept " + name))
        os.unlink(os.path.join(own, b"unlinked " + name))
        # CRIU takes a socket with such a name for one whose file is gone, and refuses it.
        short = name.replace(b" (deleted)", b"")[:60]
        for address in (b"s" + short, b"\0abstract\0" + short):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(address)
            listener.listen(1)
            held.append(listener)

        def stay(name: bytes = name) -> None:
            call_thread(name)
            threading.Event().wait()

        threading.Thread(target=stay, daemon=True).start()
    call_thread(names[0])
    number = 0
    while not os.path.exists(finish):
        number += 1
        print(number, flush=True)
        time.sleep(0.02)
    for descriptor in written.values():
        os.lseek(descriptor, 0, os.SEEK_END)
        os.write(descriptor, b" to the end")
    words = [os.fsencode(word).hex() for word in sys.argv[4:]]
    print(
        "arguments",
        *words,
        "variable",
        os.environb.get(b"FOREIGN", b"").hex(),
        "cwd",
        os.getcwdb().hex(),
        flush=True,
    )


if __name__ == "__main__":
    main()
