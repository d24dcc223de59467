"""A process that plays a CUDA process for `icecore.host.cuda.fake`: device memory outside of itself, a thread of the driver's that moves it in and out.

python fake_cuda.py '{"world": …, "gpu": "GPU-…", "mib": 4, "out": FILE, "busy": 0, "children": ["GPU-…"]}'

Each step reads and writes device memory and appends a line ``STEP DIGEST`` to its output: the same lines whatever happens to it in between.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

CONTROL, HEADER, DEVICE = 0x6FA4E0000000, struct.Struct("<8sQQIiIIIIQ16s"), 0x6FA500000000
RUNNING, LOCKED, CHECKPOINTED = 0, 1, 2
OK, INVALID, ILLEGAL, NOT_READY = 0, 1, 401, 600

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def anonymous(address: int, size: int) -> Any:
    """A private mapping at an address of its own, as a writable buffer."""
    if (
        libc.mmap(address, size, 3, 0x22 | 0x8000 | 0x100000, -1, 0) != address
    ):  # MAP_PRIVATE, MAP_ANONYMOUS, MAP_POPULATE (as the real one has it), MAP_FIXED_NOREPLACE
        raise OSError(ctypes.get_errno(), "mmap")
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def expected(steps: int, mib: int) -> list[str]:
    """The lines of the first steps."""
    memory = bytearray(fresh(mib))
    lines = []
    for step in range(1, steps + 1):
        at, digest = chain(step, len(memory), memory)
        memory[at : at + 16] = digest
        lines.append(f"{step} {digest.hex()}")
    return lines


def fresh(mib: int) -> bytes:
    return hashlib.shake_128(b"device").digest(1 << 20) * mib


def chain(step: int, size: int, memory: Any) -> tuple[int, bytes]:
    at = step * 40507 % (size - 64)
    return at, hashlib.blake2b(b"%d" % step + bytes(memory[at : at + 64]), digest_size=16).digest()


class Device:
    """Device memory: a file on the GPU that it is on. Its calls wait while the process is locked."""

    def __init__(self, world: Path, gpu: str, size: int) -> None:
        self.world, self.gpu, self.size = world, gpu, size
        self.lock = threading.Lock()
        self.state = RUNNING
        self.page = anonymous(CONTROL, 4096)
        self.nodes: list[int] = []
        self.file = -1
        self.place = Path()
        self.take(fresh(size >> 20))
        threading.Thread(target=self.serve, daemon=True).start()

    def take(self, content: Any) -> None:
        """Memory on the GPU, with that content; also opens what a CUDA process has open."""
        self.place = self.world / "gpu" / self.gpu / secrets.token_hex(8)
        self.file = os.open(self.place, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.pwrite(self.file, content, 0)
        gpus = [gpu["uuid"] for gpu in json.loads((self.world / "inventory.json").read_text())["gpus"]]
        names = [f"nvidia{gpus.index(self.gpu)}", "nvidiactl", "nvidia-uvm"]
        self.nodes = [os.open(self.world / "dev" / name, os.O_RDWR) for name in names]

    def leave(self, held: Any) -> None:
        """Move the content to ``held``; the GPU is let go."""
        os.preadv(self.file, [held], 0)
        for descriptor in (self.file, *self.nodes):
            os.close(descriptor)
        self.place.unlink()

    def step(self, number: int, busy: float) -> bytes:
        with self.lock:
            time.sleep(busy)
            at = number * 40507 % (self.size - 64)
            piece = os.pread(self.file, 64, at)
            digest = hashlib.blake2b(b"%d" % number + piece, digest_size=16).digest()
            os.pwrite(self.file, digest, at)
            return digest

    # -- the driver's thread

    def serve(self) -> None:
        answered = 0
        self.tell(0, OK)
        while True:
            request = struct.unpack_from("<Q", self.page, 8)[0]
            if request == answered:
                time.sleep(0.001)
                continue
            operation, milliseconds, pairs = (struct.unpack_from("<I", self.page, at)[0] for at in (24, 40, 44))
            answered = request
            self.tell(request, self.act(operation, milliseconds, pairs))

    def tell(self, answer: int, result: int) -> None:
        request, operation = struct.unpack_from("<Q", self.page, 8)[0], struct.unpack_from("<I", self.page, 24)[0]
        old = struct.unpack_from("<II", self.page, 40)
        thread = threading.get_native_id()
        uuid_bytes = uuid.UUID(self.gpu.removeprefix("GPU-")).bytes
        header = HEADER.pack(
            b"FAKECUDA",
            request,
            struct.unpack_from("<Q", self.page, 16)[0],
            operation,
            result,
            self.state,
            thread,
            *old,
            self.size,
            uuid_bytes,
        )
        self.page[: HEADER.size] = header
        struct.pack_into("<Q", self.page, 16, answer)

    def act(self, operation: int, milliseconds: int, pairs: int) -> int:
        match operation, self.state:
            case 1, 0:
                if not self.lock.acquire(timeout=milliseconds / 1000 if milliseconds else -1):
                    return NOT_READY
                self.state = LOCKED
            case 2, 1:
                self.leave(anonymous(DEVICE, self.size))
                self.state = CHECKPOINTED
            case 3, 2:
                at = HEADER.size
                for number in range(pairs):
                    old, new = (
                        f"GPU-{uuid.UUID(bytes=bytes(self.page[at + 32 * number + 16 * i : at + 32 * number + 16 * i + 16]))}"
                        for i in (0, 1)
                    )
                    if old == self.gpu:
                        self.gpu = new
                        break
                else:
                    if pairs:
                        return INVALID
                if not (self.world / "gpu" / self.gpu).is_dir():
                    return INVALID
                self.take((ctypes.c_char * self.size).from_address(DEVICE))
                libc.munmap(DEVICE, self.size)
                self.state = LOCKED
            case 4, 1:
                self.lock.release()
                self.state = RUNNING
            case _:
                return ILLEGAL
        return OK


def take(what: str, world: Path) -> Any:
    """Have what some CUDA programs have: NCCL with its sockets, managed memory, CUDA IPC."""
    match what:
        case "nccl":
            listener = socket.create_server(("127.0.0.1", 0))
            return listener, mapped(world / "libnccl.so.2", 0, 0)
        case "managed":
            return mapped(world / "dev" / "nvidia-uvm", 0x7E0000000000, 0x7E0000000000)
        case "driver's own":
            return mapped(world / "dev" / "nvidia-uvm", 0x20D200000, 0x20D200000)
        case "ipc":
            return mapped(Path(f"/dev/shm/cuda.shm.0.{os.getpid():x}.1"), 0, 0)
    raise ValueError(what)


def mapped(path: Path, address: int, offset: int) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    address = libc.mmap(address, 1 << 21, 3, 1 | (0x100000 if address else 0), file, offset)  # MAP_SHARED
    os.close(file)
    return address


def main(order: dict[str, Any]) -> None:
    gpus = [order["gpu"], *order.get("children", ())]
    out = order["out"]
    for number, gpu in enumerate(gpus[1:], 1):
        if os.fork() == 0:
            gpus, out = [gpu], f"{out}.{number}"
            break
    held = [take(what, Path(order["world"])) for what in order.get("also", ())]
    device = Device(Path(order["world"]), gpus[0], order["mib"] << 20)
    with open(out, "a", encoding="ascii") as lines:
        step = 0
        while True:
            step += 1
            print(step, device.step(step, order.get("busy", 0.0)).hex(), file=lines, flush=True)
            assert all(held)
            time.sleep(0.005)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
