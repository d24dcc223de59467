"""A job that has its first resident memory late, once a file is there: by cuMemCreate, or in two
threads at once. Each line says whether it holds what was written.

    late.py {"out": PATH, "late": PATH, "how": "create" | "two"}
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from target import alloc, create, mapped, start

MIB = 1 << 20


def another() -> None:
    """Just starts the agent."""
    start(0)
    alloc(2 * MIB)


def main() -> None:
    """Entry."""
    order = json.loads(sys.argv[1])
    start(0)
    assert alloc(MIB // 2)[0] == 0  # the driver's
    memory, wanted, step = None, b"", 0
    with open(order["out"], "a", encoding="ascii") as out:
        while True:
            step += 1
            if memory is None:
                print(step, "nothing", file=out, flush=True)
            else:
                print(
                    step, "right" if bytes(memory[:32]) == wanted else "wrong", file=out, flush=True
                )
                memory[:32] = wanted = hashlib.blake2b(b"%d" % step, digest_size=32).digest()
            time.sleep(0.005)
            if memory is None and os.path.exists(order["late"]):
                if order["how"] == "create":
                    address = mapped(create(4 * MIB, 0)[1], 4 * MIB, 0)
                else:
                    threading.Thread(target=another, daemon=True).start()
                    time.sleep(0.3)
                    address = alloc(4 * MIB)[1]
                memory = memoryview((ctypes.c_char * (4 * MIB)).from_address(address)).cast("B")
                wanted = bytes(memory[:32])


if __name__ == "__main__":
    main()
