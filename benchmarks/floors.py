#!/usr/bin/env python3
"""What a machine can do at best in each of the ways that memory takes here: the floors that phases
are measured against, in GB/s, of the same run.

Its rule: every copy is made by the means that icecore has (the driver's copies, process_vm_readv,
files on tmpfs), with nothing done to the bytes. Run as a program of its own, so that what it takes
on host and device is gone afterwards.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: icecore is the installed one

MIB = 1 << 20
_ROUNDS = 3
_SECONDS = 120.0
#: More threads of one interpreter are slower, and took over a minute on 64 cores.
_MOST_THREADS = 16
#: Name → what it is.
NAMES = {
    "pcie out": "pinned cuMemcpyDtoH of one GPU",
    "pcie in": "pinned cuMemcpyHtoD of one GPU",
    "pageable out": "cuMemcpyDtoH of one GPU into memory that is not pinned",
    "pageable in": "cuMemcpyHtoD of one GPU from memory that is not pinned",
    "device": "cuMemcpyDtoD within one GPU",
    "memory": "process_vm_readv of another process's 4 KiB pages, a thread a core, 16 at most",
    "memory, huge pages": "the same of huge pages",
    "tmpfs": "writing new files on tmpfs, by as many threads",
}


def measure(folder: Path, mib: int = 1024, *, devices: bool) -> dict[str, float]:
    """All floors, by a process of its own.

    Args:
        folder: On tmpfs.
        mib: Size of each piece that is copied.
        devices: Those of the first GPU, too.

    Raises:
        subprocess.CalledProcessError: It failed; it has said why.
    """
    command = [
        sys.executable,
        __file__,
        str(folder),
        "--mib",
        str(mib),
        *(["--devices"] if devices else []),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=_SECONDS, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def best(
    size: int, work: Callable[[], object], before: Callable[[], object] = lambda: None
) -> float:
    """GB/s of the fastest round, after one that does not count; ``before`` is called ahead of each."""
    work()
    seconds = []
    for _ in range(_ROUNDS):
        before()
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return size / min(seconds) / 1e9


def together(work: Callable[[int], object], threads: int) -> None:
    """``work(n)`` in so many threads at once."""
    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def reading(size: int, threads: int, *, huge: bool) -> float:
    """How fast another process's memory is read."""
    import numpy as np

    from icecore.host.kernel import libc
    from icecore.host.kernel.memory import HugeBuffer

    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    area = np.frombuffer(memory, np.uint8)
    child = os.fork()
    if child == 0:
        area[:: mmap.PAGESIZE // 2] = 1
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    try:
        os.waitpid(child, os.WUNTRACED)
        buffers = [HugeBuffer(MIB) for _ in range(threads)]
        address = area.__array_interface__["data"][0]
        runs = np.array([(address + at, MIB) for at in range(0, size, MIB)], np.uint64)

        def read(number: int) -> None:
            for row in range(number, len(runs), threads):
                got = libc.process_vm_readv(
                    child, buffers[number].iovec, 1, runs.ctypes.data + 16 * row, 1, 0
                )
                assert got == MIB, got

        return best(size, lambda: together(read, threads))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        del area
        memory.close()


def writing(folder: Path, size: int, threads: int) -> float:
    """How fast files are written."""
    piece = os.urandom(4 * MIB)
    each = max(1, size // threads // len(piece))
    place = Path(tempfile.mkdtemp(dir=folder))

    def write(number: int) -> None:
        with open(place / str(number), "wb", buffering=0) as file:
            for _ in range(each):
                file.write(piece)

    def clear() -> None:
        for path in place.iterdir():
            path.unlink()

    try:
        return best(each * len(piece) * threads, lambda: together(write, threads), clear)
    finally:
        shutil.rmtree(place)


def copying(size: int) -> dict[str, float]:
    """How fast the first GPU's memory is copied."""
    import numpy as np
    from cuda.bindings import driver

    def call(name: str, *arguments: Any) -> Any:
        result = getattr(driver, name)(*arguments)
        if int(result[0]):
            raise RuntimeError(f"{name}: {driver.CUresult(int(result[0])).name}")
        return result[1] if len(result) > 1 else None

    call("cuInit", 0)
    device = call("cuDeviceGet", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", device))
    here, there = call("cuMemAlloc", size), call("cuMemAlloc", size)
    pinned = call("cuMemAllocHost", size)
    pageable = np.ones(size, np.uint8)
    plain = pageable.ctypes.data

    def done(name: str, *arguments: Any) -> None:
        call(name, *arguments)
        call("cuCtxSynchronize")

    found = {
        "pcie out": best(size, lambda: done("cuMemcpyDtoH", pinned, here, size)),
        "pcie in": best(size, lambda: done("cuMemcpyHtoD", here, pinned, size)),
        "pageable out": best(size, lambda: done("cuMemcpyDtoH", plain, here, size)),
        "pageable in": best(size, lambda: done("cuMemcpyHtoD", here, plain, size)),
        "device": best(size, lambda: done("cuMemcpyDtoD", there, here, size)),
    }
    call("cuMemFreeHost", pinned)
    for address in (here, there):
        call("cuMemFree", address)
    call("cuDevicePrimaryCtxRelease", device)
    return found


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="on tmpfs")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--devices", action="store_true")
    options = parser.parse_args()
    size, threads = options.mib * MIB, min(_MOST_THREADS, os.cpu_count() or 1)
    found = {
        "memory": reading(size, threads, huge=False),
        "memory, huge pages": reading(size, threads, huge=True),
        "tmpfs": writing(options.folder, size, threads),
    }
    print(json.dumps({**found, **(copying(size) if options.devices else {})}))


if __name__ == "__main__":
    main()
