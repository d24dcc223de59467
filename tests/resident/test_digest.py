"""The digest's kernel, part by part on the CPU, against the id that the store gives a chunk."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from icecore.host.resident.digest import BYTES, KERNEL_SOURCE, reference
from icecore.sizes import CELL_BYTES as CELL
from icecore.store.format.chunk import chunk_id

MACROS = """
#define DEVICE static inline
#define UNROLL
#define ROLLED
#define ROTATE(x, n) ((x) >> (n) | (x) << (32 - (n)))
#define LOAD(to, from) __builtin_memcpy(to, from, 16)
"""
#: What the kernel does with its threads.
LOOP = """
void cells(const u32 *data, long some, const u32 *key, u32 *out)
{
	static u32 found[CHUNKS][8];

	for (long cell = 0; cell < some; cell++, data += 1 << 18, out += 8) {
		u32 m[16];
		for (int number = 0; number < CHUNKS; number++)
			chunk(found[number], data, key, number);
		for (int nodes = CHUNKS / 2; nodes; nodes /= 2)
			for (int node = 0; node < nodes; node++) {
				for (int i = 0; i < 16; i++)
					m[i] = found[2 * node + i / 8][i % 8];
				parent(found[node], m, key, 0);
			}
		for (int i = 0; i < 8; i++)
			m[i] = found[0][i];
		rest(m + 8, data, key);
		parent(out, m, key, ROOT);
	}
}
"""


def test_the_kernels_parts_make_the_chunks_id(tmp_path: Path) -> None:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc")
    source, library = tmp_path / "digest.c", tmp_path / "digest.so"
    source.write_text(MACROS + KERNEL_SOURCE + LOOP)
    subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source)],
        check=True,
        timeout=60,
    )
    data = np.frombuffer(np.random.default_rng(1).bytes(3 * CELL), np.uint8).copy()
    data[CELL : 2 * CELL] = 0
    key, out = bytes(range(32)), np.zeros((3, BYTES), np.uint8)
    ctypes.CDLL(str(library)).cells(
        ctypes.c_void_p(data.ctypes.data),
        ctypes.c_long(3),
        ctypes.c_char_p(key),
        ctypes.c_void_p(out.ctypes.data),
    )
    assert (out == reference(data, key)).all()
    cells = [data[at : at + CELL] for at in range(0, 3 * CELL, CELL)]
    assert [row.tobytes() for row in out] == [
        chunk_id(key, bytes([255]) * 32, cell) for cell in cells
    ]
