"""The fingerprint's kernel against its reference, and the plan of what is copied."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icecore.host.resident.copyplan import LARGEST, To, divide, plan_copies, runs
from icecore.host.resident.fingerprint import KERNEL_SOURCE, changed, reference
from icecore.sizes import CELL_BYTES as CELL

SEED = 0xFEDCBA9876543210
#: The kernel's own steps, thread by thread, on the CPU.
LOOP = """
void cells(const u64 *data, long some, u64 seed, u64 *out)
{
	for (long cell = 0; cell < some; cell++)
		for (unsigned thread = 0; thread < 256; thread++) {
			const u64 *at = data + cell * 131072 + 2 * thread;
			u64 a, b;
			begin(seed, thread, &a, &b);
			for (int i = 0; i < 256; i++)
				step(&a, &b, at[512 * i], at[512 * i + 1]);
			end(&a, &b);
			out[2 * cell] += a;
			out[2 * cell + 1] += b;
		}
}
"""


def noise(cells: int, seed: int = 1) -> np.ndarray:
    return np.frombuffer(np.random.default_rng(seed).bytes(cells * CELL), np.uint8).copy()


def test_the_kernels_steps_are_the_references(tmp_path: Path) -> None:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc")
    source, library = tmp_path / "steps.c", tmp_path / "steps.so"
    source.write_text("#define DEVICE static inline\n" + KERNEL_SOURCE + LOOP)
    subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source)],
        check=True,
        timeout=60,
    )
    data, out = noise(5), np.zeros((5, 2), np.uint64)
    data[CELL : 2 * CELL] = 0
    ctypes.CDLL(str(library)).cells(
        ctypes.c_void_p(data.ctypes.data),
        ctypes.c_long(5),
        ctypes.c_ulonglong(SEED),
        ctypes.c_void_p(out.ctypes.data),
    )
    assert (out == reference(data, SEED)).all()


def test_the_kernel_compiles(tmp_path: Path) -> None:
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("no nvcc")
    (tmp_path / "kernel.cu").write_text(KERNEL_SOURCE)
    done = subprocess.run(
        [
            compiler,
            "-ptx",
            "-arch=sm_90",
            "-o",
            str(tmp_path / "kernel.ptx"),
            str(tmp_path / "kernel.cu"),
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert ".entry fingerprint(" in (tmp_path / "kernel.ptx").read_text()


@pytest.mark.parametrize(
    "how",
    ["one bit", "two words swapped", "two vectors of a thread swapped", "cells swapped", "seed"],
)
def test_what_changes_a_fingerprint(how: str) -> None:
    data = noise(2)
    before = reference(data, SEED)
    words = data.view(np.uint64)
    if how == "one bit":
        data[CELL - 1] ^= 0x80
        assert list(changed(before, reference(data, SEED))) == [True, False]
    elif how == "two words swapped":
        words[[10, 11]] = words[[11, 10]]
        assert list(changed(before, reference(data, SEED))) == [True, False]
    elif how == "two vectors of a thread swapped":
        words[[0, 1, 512, 513]] = words[[512, 513, 0, 1]]
        assert list(changed(before, reference(data, SEED))) == [True, False]
    elif how == "cells swapped":
        assert (reference(np.concatenate([data[CELL:], data[:CELL]]), SEED) == before[::-1]).all()
    else:
        assert changed(before, reference(data, SEED + 1)).all()


def test_single_bits_in_zeros_all_differ() -> None:
    data = np.zeros(512 * CELL, np.uint8)
    for cell in range(512):
        data[cell * CELL + 16 * ((cell * 977) % 65536) + cell % 16] = 1 << (cell % 8)
    assert len(np.unique(reference(data, SEED), axis=0)) == 512


def test_what_nothing_is_known_of_has_changed() -> None:
    now = reference(noise(3), SEED)
    assert changed(None, now).all()
    assert list(changed(now[:1], now)) == [False, True, True]
    assert list(changed(now, now[:2])) == [False, False]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=300), min_size=1, max_size=4),
    st.integers(0, 400),
    st.integers(0, 400),
    st.integers(1, 4),
)
def test_every_changed_cell_is_placed_once_or_said_to_be_left(
    masks: list[list[bool]], device: int, host: int, streams: int
) -> None:
    wanted = {
        (number, cell) for number, mask in enumerate(masks) for cell, one in enumerate(mask) if one
    }
    plan = plan_copies(
        {number: np.array(mask) for number, mask in enumerate(masks)},
        device_room=device * CELL + 17,
        host_room=host * CELL + 5,
        streams=streams,
    )
    placed: list[tuple[int, int]] = []
    places: dict[To, list[tuple[int, int]]] = {to: [] for to in To}
    for copy in plan.copies:
        assert copy.size <= LARGEST
        assert copy.stream < streams
        placed += [
            (copy.allocation, (copy.offset + at) // CELL) for at in range(0, copy.size, CELL)
        ]
        places[copy.to].append((copy.place, copy.place + copy.size))
    left = [
        (number, (offset + at) // CELL)
        for number, offset, size in plan.left
        for at in range(0, size, CELL)
    ]
    assert sorted(placed + left) == sorted(wanted)
    for to, room in ((To.DEVICE, device), (To.HOST, host)):
        taken = sorted(places[to])
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
        assert not taken or taken[-1][1] <= room * CELL
    assert len(left) == max(0, len(wanted) - device - host)
    if device and wanted:
        assert places[To.DEVICE]


def test_runs() -> None:
    assert runs(np.array([True, True, False, True])) == [(0, 2), (3, 1)]
    assert runs(np.zeros(3, np.bool_)) == []


@pytest.mark.parametrize(
    ("short", "parts"),
    [
        ({"a": 0}, {"a": 100}),
        ({"a": 70, "b": 0}, {"a": 85, "b": 15}),
        ({"a": 300, "b": 100, "c": 0}, {"a": 75, "b": 25, "c": 0}),
    ],
)
def test_host_memory_goes_to_who_is_short_of_it(
    short: dict[str, int], parts: dict[str, int]
) -> None:
    assert divide(100, short) == parts
