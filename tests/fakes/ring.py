"""Ranks in a ring, each with a GPU: a step writes into the next one's device memory, as NCCL does
over NVLink; rule: the same lines whatever happens to it.

    python ring.py '{"out": FILE, "ranks": 2, "mib": 4}'

Each rank appends ``STEP DIGEST`` to its output (others than the first to ``FILE.1``, …). The memory
that a rank made is written by the one before it, which imported it; a word in it says how far that
is, and is waited for by looking at it again and again, as kernels do. Beside that each has memory
of its own (cudaMalloc) and something small that the driver moves. With ``"ipc": true`` the memory
is cudaMalloc's and shared by CUDA's legacy IPC, and every few steps it is closed and opened again.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

MIB = 1 << 20
WORD = 16


def first(rank: int) -> bytes:
    """What a rank begins with."""
    return hashlib.blake2b(b"rank %d" % rank, digest_size=16).digest()


def following(before: bytes, received: bytes, own: bytes) -> bytes:
    """What a rank has after a step: of what it had, what it was sent, and what lies in its own
    memory.
    """
    return hashlib.blake2b(before + received + own, digest_size=16).digest()


def places(step: int, size: int) -> tuple[int, int]:
    """Where a step writes in a shared buffer, and in a rank's own."""
    return 4096 + step * 40503 // 16 * 16 % (size - 8192), step * 7919 // 16 * 16 % MIB


def foreseen(ranks: int, mib: int) -> Iterator[list[str]]:
    """Each rank's line of every step."""
    states, own = [first(rank) for rank in range(ranks)], [bytearray(2 * MIB) for _ in range(ranks)]
    for step in count(1):
        _, at = places(step, mib * MIB)
        states = [
            following(states[rank], states[rank - 1], bytes(own[rank][at : at + WORD]))
            for rank in range(ranks)
        ]
        for rank in range(ranks):
            own[rank][at : at + WORD] = states[rank]
        yield [f"{step} {state.hex()}" for state in states]


def steps(
    rank: int, mine: Any, next_one: Any, own: Any, open_again: Callable[[], Any] | None = None
) -> Iterator[str]:
    """Lines, each after its step."""
    state, step = first(rank), 0
    word, acknowledged = (ctypes.c_uint64.from_buffer(mine, at) for at in (0, 64))
    while True:
        if open_again is not None and step % 5 == 4:
            next_one = open_again()
        word_there, acknowledged_there = (
            ctypes.c_uint64.from_buffer(next_one, at) for at in (0, 64)
        )
        step += 1
        there, at = places(step, len(mine))
        while acknowledged_there.value != step - 1:  # what was sent before has been read
            time.sleep(0.0002)
        next_one[there : there + WORD] = state
        word_there.value = step
        while word.value != step:
            time.sleep(0.0002)
        received = bytes(mine[there : there + WORD])
        acknowledged.value = step
        state = following(state, received, bytes(own[at : at + WORD]))
        own[at : at + WORD] = state
        yield f"{step} {state.hex()}"


def view(address: int, size: int) -> Any:
    """Device memory as bytes."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def looks_like_nccl(folder: str, rank: int) -> list[Any]:
    """What tells from outside that a process has a communicator."""
    with open(f"{folder}/libnccl.so.{rank}", "wb") as made:
        made.truncate(4096)
    with open(f"{folder}/libnccl.so.{rank}", "rb") as library:
        mapping = mmap.mmap(library.fileno(), 4096, prot=mmap.PROT_READ)
    passing = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    passing.bind(f"\0/tmp/nccl-socket-{rank}-{os.getpid():x}")
    return [mapping, passing, socket.create_server(("127.0.0.1", 0))]


def main(order: dict[str, Any]) -> None:
    """Entry."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from target import (
        alloc,
        create,
        export,
        imported,
        ipc_close,
        ipc_handle,
        ipc_open,
        mapped,
        start,
        vm,
    )

    ranks, size, rank = order["ranks"], order["mib"] * MIB, 0
    pairs: Sequence[tuple[socket.socket, socket.socket]] = [
        socket.socketpair() for _ in range(ranks)
    ]
    for number in range(1, ranks):
        if os.fork() == 0:
            rank = number
            break
    start(rank)
    ipc = bool(order.get("ipc"))
    code, handle = alloc(size) if ipc else create(size, rank)
    assert code == 0, code
    mine = view(handle if ipc else mapped(handle, size, rank), size)
    mine[:] = hashlib.shake_128(b"buffer %d" % rank).digest(size)
    mine[:4096] = bytes(4096)
    before, after = pairs[rank][0], pairs[(rank + 1) % ranks][1]
    open_again: Callable[[], Any] | None = None
    if ipc:
        code, reference = ipc_handle(handle)
        assert code == 0, code
        before.sendall(reference.encode())
        theirs = after.recv(128, socket.MSG_WAITALL).decode()
        code, there = ipc_open(theirs)
        assert code == 0, code
        next_one = view(there, size)

        def open_again() -> Any:
            nonlocal there
            assert ipc_close(there) == 0
            code, there = ipc_open(theirs)
            assert code == 0, code
            return view(there, size)
    else:
        code, descriptor = export(handle)
        assert code == 0, code
        socket.send_fds(before, [b"x"], [descriptor])
        os.close(descriptor)
        _, [descriptor], _, _ = socket.recv_fds(after, 1, 1)
        code, other = imported(descriptor)
        assert code == 0, code
        next_one = view(mapped(other, size, rank), size)
    if order.get("let_go"):  # the mapping keeps it
        assert vm("cuMemRelease", other) == vm("cuMemRelease", handle) == 0
    for pair in pairs:
        for end in pair:
            end.close()
    code, address = alloc(2 * MIB)
    assert code == 0 and alloc(MIB // 2)[0] == 0
    own = view(address, 2 * MIB)
    own[:] = bytes(2 * MIB)
    if order.get("nccl"):
        signs = looks_like_nccl(os.path.dirname(order["out"]), rank)  # noqa: F841 - open as long as it runs
    with open(order["out"] + (f".{rank}" if rank else ""), "a", encoding="ascii") as lines:
        for line in steps(rank, mine, next_one, own, open_again):
            print(line, file=lines, flush=True)
            time.sleep(0.003)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
