"""Fingerprints computed on the GPU: 128 bits for each cell of 1 MiB. Kernel and reference compute
the same function, word for word.

256 threads take a cell, each every 256th 16-byte vector of it, so that neighbours read neighbouring
addresses. A step is a bijection of its state for any word, and of the word for any state: where
only one thread's words of one half changed, the fingerprint has changed for certain. The seed is
the lineage's secret; this is no cryptographic hash, and chunks are named by BLAKE3 all the same.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from icecore.sizes import CELL_BYTES as CELL

THREADS = 256
_MASK = (1 << 64) - 1

#: CUDA C++ for NVRTC. ``fingerprint<<<cells, 256>>>(addresses, seed, out)``: ``out`` is two words
#: for each cell, zeroed before.
KERNEL_SOURCE = r"""
typedef unsigned long long u64;
#ifndef DEVICE
#define DEVICE static __device__ __forceinline__
#endif

DEVICE u64 finish(u64 x)
{
	x ^= x >> 33;
	x *= 0xFF51AFD7ED558CCDull;
	x ^= x >> 33;
	x *= 0xC4CEB9FE1A85EC53ull;
	return x ^ (x >> 33);
}

DEVICE void begin(u64 seed, unsigned thread, u64 *a, u64 *b)
{
	*a = finish(seed + 0x9E3779B97F4A7C15ull * (2 * thread + 1));
	*b = finish(*a + 0x9E3779B97F4A7C15ull);
}

DEVICE void step(u64 *a, u64 *b, u64 low, u64 high)
{
	u64 x = (*a ^ low) * 0x9FB21C651E98DF25ull, y = (*b ^ high) * 0xD6E8FEB86659FD93ull;
	*a = x ^ (x >> 32);
	*b = y ^ (y >> 29);
}

DEVICE void end(u64 *a, u64 *b)
{
	u64 first = finish(*a), second = finish(*b + (first << 23 | first >> 41));
	*a = first;
	*b = second;
}

#ifdef __CUDACC__
extern "C" __global__ void __launch_bounds__(256) fingerprint(const u64 *addresses, u64 seed, u64 *out)
{
	const ulonglong2 *cell = (const ulonglong2 *)addresses[blockIdx.x] + threadIdx.x;
	u64 a, b;

	begin(seed, threadIdx.x, &a, &b);
	for (int i = 0; i < 256; i += 8) {
		ulonglong2 some[8];
#pragma unroll
		for (int k = 0; k < 8; k++)
			some[k] = __ldcs(cell + 256 * (i + k));
#pragma unroll
		for (int k = 0; k < 8; k++)
			step(&a, &b, some[k].x, some[k].y);
	}
	end(&a, &b);
#pragma unroll
	for (int lane = 16; lane; lane /= 2) {
		a += __shfl_down_sync(0xFFFFFFFFu, a, lane);
		b += __shfl_down_sync(0xFFFFFFFFu, b, lane);
	}
	if (threadIdx.x % 32 == 0) {
		atomicAdd(out + 2 * blockIdx.x, a);
		atomicAdd(out + 2 * blockIdx.x + 1, b);
	}
}
#endif
"""

Words = npt.NDArray[np.uint64]


def reference(data: memoryview | bytes | npt.NDArray[np.uint8], seed: int) -> Words:
    """Compute the fingerprints of host memory as the kernel does.

    Args:
        data: A whole number of cells.
        seed: 64 bits.

    Returns:
        u64[cells, 2].
    """
    words = np.frombuffer(data, np.uint64).reshape(-1, CELL // 16 // THREADS, THREADS, 2)
    with np.errstate(over="ignore"):
        thread = np.arange(THREADS, dtype=np.uint64)
        golden = np.uint64(0x9E3779B97F4A7C15)
        a = np.broadcast_to(
            _finish(np.uint64(seed & _MASK) + golden * (np.uint64(2) * thread + np.uint64(1))),
            (len(words), THREADS),
        )
        b = _finish(a + golden)
        for i in range(words.shape[1]):
            x = (a ^ words[:, i, :, 0]) * np.uint64(0x9FB21C651E98DF25)
            y = (b ^ words[:, i, :, 1]) * np.uint64(0xD6E8FEB86659FD93)
            a, b = x ^ (x >> np.uint64(32)), y ^ (y >> np.uint64(29))
        first = _finish(a)
        second = _finish(b + (first << np.uint64(23) | first >> np.uint64(41)))
        return np.stack(
            [first.sum(axis=1, dtype=np.uint64), second.sum(axis=1, dtype=np.uint64)], axis=1
        )


@cache
def zero_words(seed: int) -> Words:
    """Return the fingerprint of a cell of zeros, u64[2]; not to be written to."""
    found: Words = reference(bytes(CELL), seed)[0]
    found.flags.writeable = False
    return found


def _finish(x: Words) -> Words:
    x = (x ^ x >> np.uint64(33)) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ x >> np.uint64(33)) * np.uint64(0xC4CEB9FE1A85EC53)
    found: Words = x ^ x >> np.uint64(33)
    return found


def changed(before: Words | None, now: Words) -> npt.NDArray[np.bool_]:
    """Return which cells have changed; all of them if nothing is known.

    Args:
        before, now: u64[cells, 2]; ``before`` may be shorter or longer, where the allocation is
            another.
    """
    found = np.ones(len(now), np.bool_)
    if before is not None:
        both = min(len(before), len(now))
        found[:both] = (before[:both] != now[:both]).any(axis=1)
    return found
