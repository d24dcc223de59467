"""A process that plays a CUDA process for `icecore.host.cuda.fake`: it computes, while
fake_device.c holds its memory and plays its driver.

python fake_cuda.py '{"library": fake_device.so, "world": …, "gpu": "GPU-…", "mib": 4, "out": FILE,
"busy": 0, "children": ["GPU-…"], "lent": false,
                     "workers": 0, "late": "GPU-…", "gpuless": false}'

Each step reads and writes device memory and appends a line ``STEP DIGEST`` to its output: the same
lines whatever happens to it in between. With ``lent``, a thread that makes no CUDA call uses memory
of the driver, which is not there for a moment of each checkpoint and restore. ``workers`` are
forked once there is device memory, as those of a DataLoader are, one more at each SIGUSR1; each
appends lines ``STEP DEVICE…`` to ``OUT.worker.N``: the numbers of the device files that it has
inherited. At SIGTERM it closes and unmaps these, ends well, and its last line is ``done``. ``late``
is the GPU that a child begins to use at SIGUSR2; with ``gpuless`` the process itself uses none.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import itertools
import json
import mmap
import os
import signal
import socket
import stat
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Where the driver maps device memory while the process is checkpointed.
DEVICE = 0x6FA500000000
#: Where a process has mapped its GPU's device file.
REGISTERS = 0x6FA4D0000000

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def foreseen(mib: int) -> Iterator[str]:
    """The lines of an undisturbed process."""
    memory = bytearray(fresh(mib))
    for step in itertools.count(1):
        at, digest = chain(step, len(memory), memory)
        memory[at : at + 16] = digest
        yield f"{step} {digest.hex()}"


def expected(steps: int, mib: int) -> list[str]:
    """The lines of the first steps."""
    return list(itertools.islice(foreseen(mib), steps))


def fresh(mib: int) -> bytes:
    return hashlib.shake_128(b"device").digest(1 << 20) * mib


def chain(step: int, size: int, memory: Any) -> tuple[int, bytes]:
    at = step * 40507 % (size - 64)
    return at, hashlib.blake2b(b"%d" % step + bytes(memory[at : at + 64]), digest_size=16).digest()


class Device:
    """Device memory on a GPU. Its calls wait while the process is locked."""

    def __init__(self, order: dict[str, Any], gpu: str) -> None:
        self.size = order["mib"] << 20
        self.library = ctypes.CDLL(order["library"])
        known = json.loads((Path(order["world"]) / "inventory.json").read_text())
        gpus = [one["uuid"] for one in known["gpus"]]
        failed = self.library.device_start(
            order["world"].encode(),
            b"".join(uuid.UUID(one.removeprefix("GPU-")).bytes for one in gpus),
            len(gpus),
            gpus.index(gpu),
            fresh(order["mib"]),
            ctypes.c_size_t(self.size),
            order.get("lent", False),
        )
        if failed:
            raise OSError(failed, os.strerror(failed), gpu)

    def step(self, number: int, busy: float) -> bytes:
        file = self.library.device_enter()
        try:
            time.sleep(busy)
            at = number * 40507 % (self.size - 64)
            piece = os.pread(file, 64, at)
            digest = hashlib.blake2b(b"%d" % number + piece, digest_size=16).digest()
            os.pwrite(file, digest, at)
            return digest
        finally:
            self.library.device_leave()


def take(what: str, world: Path) -> Any:
    """Have what some CUDA programs have: NCCL with its sockets (``nccl to PORT``: to somebody
    else's), managed memory, CUDA IPC, much memory of the host's.
    """
    name, _, peer = what.partition(" to ")
    match name:
        case "nccl" if peer:
            host, port = (
                ("::1" if peer.startswith("v6 ") else "127.0.0.1"),
                int(peer.removeprefix("v6 ")),
            )
            return socket.create_connection((host, port), 10), mapped(world / "libnccl.so.2", 0, 0)
        case "nccl":
            listener = socket.create_server(("127.0.0.1", 0))
            mine = socket.create_connection(listener.getsockname(), 10)
            return listener, mine, listener.accept(), mapped(world / "libnccl.so.2", 0, 0)
        case "managed":
            return mapped(world / "dev" / "nvidia-uvm", 0x7E0000000000, 0x7E0000000000)
        case "driver's own":
            return mapped(world / "dev" / "nvidia-uvm", 0x20D200000, 0x20D200000)
        case "large":
            return Large()
        case "a device file":
            return os.open(world / "dev" / "nvidiactl", os.O_RDWR)
        case "NVML":
            return mapped(world / "libnvidia-ml.so.1", 0, 0)
        case "ipc":
            return mapped(Path(f"/dev/shm/cuda.shm.0.{os.getpid():x}.1"), 0, 0)
    raise ValueError(what)


class Large:
    """Memory of the host's, as much as a driver's mapping; true as long as it is as it was."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 70 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory[:] = fresh(70)
        self.digest = hashlib.blake2b(self.memory[-(1 << 20) :]).digest()

    def __bool__(self) -> bool:
        return hashlib.blake2b(self.memory[-(1 << 20) :]).digest() == self.digest


def mapped(path: Path, address: int, offset: int) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    address = libc.mmap(
        address, 1 << 21, 3, 1 | (0x100000 if address else 0), file, offset
    )  # MAP_SHARED
    os.close(file)
    return address


def device_files() -> list[int]:
    """The descriptors of this process that are device files, but for its standard ones."""

    def is_one(number: int) -> bool:
        try:
            mode = os.fstat(number).st_mode
        except OSError:
            return False
        return stat.S_ISCHR(mode) or stat.S_ISBLK(mode)

    return [
        number for number in map(int, os.listdir("/proc/self/fd")) if number > 2 and is_one(number)
    ]


def work(out: str) -> None:
    """Be a worker: never returns."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    inherited = device_files()
    with open(out, "a", encoding="ascii") as lines:
        for step in itertools.count(1):
            found = (os.fstat(number).st_rdev for number in inherited)
            print(
                step, *(f"{os.major(one)}:{os.minor(one)}" for one in found), file=lines, flush=True
            )
            if asked:
                break
            time.sleep(0.005)
        for number in inherited:
            try:
                fcntl.ioctl(
                    number, 0xC020462A
                )  # a call of the driver's, which libcuda may make as it ends
            except OSError:
                os.close(number)
        assert libc.munmap(REGISTERS, mmap.PAGESIZE) == 0
        print("done", file=lines, flush=True)
    sys.exit(0)


def begin_late(order: dict[str, Any]) -> None:
    """Be a child that begins to use a GPU when it is told to, and then does nothing: never returns."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    signal.sigwait([signal.SIGUSR2])
    _device = Device(order, order["late"])
    while True:
        time.sleep(60)


def main(order: dict[str, Any]) -> None:
    gpus = [order["gpu"], *order.get("children", ())]
    out = order["out"]
    for number, gpu in enumerate(gpus[1:], 1):
        if os.fork() == 0:
            gpus, out = [gpu], f"{out}.{number}"
            break
    if order.get("late") and os.fork() == 0:
        begin_late(order)
    held = [take(what, Path(order["world"])) for what in order.get("also", ())]
    device = None if order.get("gpuless") else Device(order, gpus[0])
    numbers = itertools.count(1)

    def begin_worker(*_: object) -> None:
        number = next(numbers)
        if os.fork() == 0:
            work(f"{out}.worker.{number}")

    signal.signal(signal.SIGUSR1, begin_worker)
    for _ in range(order.get("workers", 0)):
        begin_worker()
    with open(out, "a", encoding="ascii") as lines:
        step = 0
        while True:
            step += 1
            print(
                step,
                device.step(step, order.get("busy", 0.0)).hex() if device else "",
                file=lines,
                flush=True,
            )
            assert all(held)
            time.sleep(0.005)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
