"""The worker's memory through the real cuda.bindings, down to a libcuda whose memory is the host's
and whose kernels run on the CPU. Only NVRTC is left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from icecore.host.resident import digest, fingerprint
from tests.fakes.machine import HERE, MIB, uuid_of

from . import test_digest, test_fingerprint
from .conftest import NewMachine

_SCRIPT = """
import os, sys
import numpy as np
from icecore.host.resident import digest, fingerprint, kernels
kernels.compiled = lambda source, architecture: b"compiled\\0"
from icecore.host.resident.cuda_memory import Cuda, CudaMemory
from icecore.host.resident.memory import MemoryFailed, Piece
CELL = 1 << 20
memory = CudaMemory(Cuda(), sys.argv[1])
room = memory.room()
address, descriptor = memory.allocate(4 * CELL)
assert room - memory.room() == 4 * CELL
again = memory.map(descriptor, 4 * CELL)
noise = np.frombuffer(os.urandom(4 * CELL), np.uint8).copy()
memory.pin(noise.ctypes.data, noise.nbytes)
halves = [Piece(address + at, noise.ctypes.data + at, 2 * CELL, at // CELL) for at in (0, 2 * CELL)]
for lane, half in enumerate(halves):
    memory.start([half], lane)
for lane in (0, 1):
    memory.wait(lane)
back = np.zeros(4 * CELL, np.uint8)
memory.copy([Piece(back.ctypes.data, again, 4 * CELL)])
assert (back == noise).all()
cells = np.array([address + 3 * CELL, again], np.uint64)
wanted = np.concatenate([noise[3 * CELL :], noise[:CELL]])
memory.prepare_digests()
key = bytes(range(32))
for _ in range(2):
    assert (memory.fingerprints(cells, 77) == fingerprint.reference(wanted, 77)).all()
    assert (memory.digests(cells, key) == digest.reference(wanted, key)).all()
many = np.full(1100, again, np.uint64)  # more than there is room for at first
assert (memory.digests(many, key) == digest.reference(noise[:CELL], key)).all()
spare = memory.take(2 * CELL)
memory.give(spare)
before = memory.room()
with open("/dev/null", "r+b") as other:
    try:
        memory.map(other.fileno(), 2 * CELL)
    except MemoryFailed as error:
        print(error)
assert memory.room() == before
memory.unmap(address)
memory.unmap(again)
os.close(descriptor)
print((memory.room() - before) >> 20)
"""


def test_all_of_it(tmp_path: Path, new_machine: NewMachine) -> None:
    pytest.importorskip(
        "cuda.bindings", reason="cuda.bindings is not installed (pip install 'icecore[gpu]')"
    )
    (tmp_path / "fingerprint.c").write_text(
        "#define DEVICE static inline\n" + fingerprint.KERNEL_SOURCE + test_fingerprint.LOOP
    )
    (tmp_path / "digest.c").write_text(test_digest.MACROS + digest.KERNEL_SOURCE + test_digest.LOOP)
    flags = ["-std=gnu11", "-O2", "-fPIC", "-c", "-w"]
    for source, name in (("fingerprint.c", "fingerprint_cells"), ("digest.c", "digest_cells")):
        subprocess.run(
            ["gcc", *flags, f"-Dcells={name}", "-o", tmp_path / f"{source}.o", tmp_path / source],
            check=True,
            timeout=60,
        )
    words = [
        "gcc",
        "-std=gnu11",
        "-O2",
        "-fPIC",
        "-shared",
        "-o",
        tmp_path / "libcuda.so.1",
        HERE / "fake_libcuda.c",
        HERE / "worker_calls.c",
    ]
    objects = [tmp_path / "fingerprint.c.o", tmp_path / "digest.c.o"]
    link = [
        "-Wl,-soname,libcuda.so.1",
        f"-Wl,--version-script={HERE / 'fake_libcuda.map'}",
        "-lpthread",
        "-ldl",
    ]
    subprocess.run([*words, *objects, *link], check=True, timeout=60)
    machine = new_machine(gpus=1, memory=64 * MIB)
    environment = {**machine.environment(resident=False), "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", _SCRIPT, uuid_of(0)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=os.sep,
    )
    assert done.returncode == 0, done.stderr
    failed, given_back = done.stdout.splitlines()
    assert failed == "cuMemImportFromShareableHandle: CUDA_ERROR_INVALID_VALUE (1)"
    assert given_back == "4"
