"""Chunk ids computed on the GPU: BLAKE3 of complete cells of 1 MiB. The kernel computes
`icecore.store.format.chunk.chunk_id` bit for bit.

The input is the cell's page bitmap (32 bytes, all set) and its bytes: 1024 chunks of BLAKE3's, of
which the first begins with the bitmap, and one of 32 bytes. A thread takes four chunks; then each
level of their tree is made by as many threads as it has nodes, in shared memory. So what a restore
has put on a GPU is verified where it arrived, and no core of the host reads it once more.

Source: "BLAKE3: one function, fast everywhere", sections 2.1 to 2.4.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from icecore.sizes import CELL_BYTES as CELL

THREADS = 256
#: Of a digest, and of the key.
BYTES = 32
#: What is hashed before a cell: its page bitmap, all set.
BITMAP = b"\xff" * 32

#: CUDA C++ for NVRTC. ``digest<<<cells, 256>>>(addresses, key, out)``: ``key`` is eight words,
#: ``out`` eight words for each cell.
KERNEL_SOURCE = r"""
typedef unsigned int u32;
#ifndef DEVICE
#define DEVICE static __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#define ROTATE(x, n) __funnelshift_r(x, x, n)
#define LOAD(to, from) (*(uint4 *)(to) = __ldcs((const uint4 *)(from)))
#endif

enum { START = 1, END = 2, PARENT = 4, ROOT = 8, KEYED = 16, CHUNKS = 1024 };

#define G(a, b, c, d, x, y) \
	a += b + x; d = ROTATE(d ^ a, 16); c += d; b = ROTATE(b ^ c, 12); \
	a += b + y; d = ROTATE(d ^ a, 8);  c += d; b = ROTATE(b ^ c, 7);

/* A round; then the words change places. */
DEVICE void mix(u32 v[16], u32 m[16])
{
	G(v[0], v[4], v[8], v[12], m[0], m[1])
	G(v[1], v[5], v[9], v[13], m[2], m[3])
	G(v[2], v[6], v[10], v[14], m[4], m[5])
	G(v[3], v[7], v[11], v[15], m[6], m[7])
	G(v[0], v[5], v[10], v[15], m[8], m[9])
	G(v[1], v[6], v[11], v[12], m[10], m[11])
	G(v[2], v[7], v[8], v[13], m[12], m[13])
	G(v[3], v[4], v[9], v[14], m[14], m[15])
	u32 w[16] = { m[2], m[6], m[3], m[10], m[7], m[0], m[4], m[13], m[1], m[11], m[12], m[5], m[9], m[14], m[15], m[8] };
	UNROLL for (int i = 0; i < 16; i++)
		m[i] = w[i];
}

/* The chaining value after a block, whose words are lost; the counter is below 2^32. */
DEVICE void compress(u32 cv[8], u32 m[16], u32 counter, u32 length, u32 flags)
{
	u32 v[16] = { cv[0], cv[1], cv[2], cv[3], cv[4], cv[5], cv[6], cv[7],
		0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, counter, 0, length, flags };

	/* Not unrolled: it is compiled while somebody waits, and fast enough. */
	ROLLED for (int round = 0; round < 7; round++)
		mix(v, m);
	UNROLL for (int i = 0; i < 8; i++)
		cv[i] = v[i] ^ v[i + 8];
}

/* 32 of the input's bytes: before the cell lies the bitmap. */
DEVICE void half(u32 *m, const u32 *cell, int word)
{
	if (word < 0) {
		UNROLL for (int i = 0; i < 8; i++)
			m[i] = 0xFFFFFFFFu;
		return;
	}
	UNROLL for (int i = 0; i < 8; i += 4)
		LOAD(m + i, cell + word + i);
}

/* One of the 1024 whole chunks of a cell. */
DEVICE void chunk(u32 cv[8], const u32 *cell, const u32 *key, int number)
{
	UNROLL for (int i = 0; i < 8; i++)
		cv[i] = key[i];
	for (int block = 0; block < 16; block++) {
		u32 m[16];
		int word = 256 * number + 16 * block - 8;
		half(m, cell, word);
		half(m + 8, cell, word + 8);
		compress(cv, m, number, 64, KEYED | (block == 0 ? START : 0) | (block == 15 ? END : 0));
	}
}

/* The last one, of 32 bytes. */
DEVICE void rest(u32 cv[8], const u32 *cell, const u32 *key)
{
	u32 m[16] = { 0 };

	half(m, cell, 256 * CHUNKS - 8);
	UNROLL for (int i = 0; i < 8; i++)
		cv[i] = key[i];
	compress(cv, m, CHUNKS, 32, KEYED | START | END);
}

/* A node of the tree; what its children are is in m, and lost. */
DEVICE void parent(u32 cv[8], u32 m[16], const u32 *key, u32 root)
{
	UNROLL for (int i = 0; i < 8; i++)
		cv[i] = key[i];
	compress(cv, m, 0, 64, KEYED | PARENT | root);
}

#ifdef __CUDACC__
extern "C" __global__ void __launch_bounds__(256) digest(const unsigned long long *addresses, const u32 *key, u32 *out)
{
	__shared__ u32 even[8 * CHUNKS], odd[8 * CHUNKS / 2];
	const u32 *cell = (const u32 *)addresses[blockIdx.x];
	u32 *from = even, *to = odd, own[8], m[16], words[8];

	for (int i = 0; i < 8; i++)
		words[i] = key[i];
	for (int number = threadIdx.x; number < CHUNKS; number += blockDim.x) {
		chunk(own, cell, words, number);
		for (int i = 0; i < 8; i++)
			even[i * CHUNKS + number] = own[i];
	}
	for (int nodes = CHUNKS / 2; nodes; nodes /= 2) {
		__syncthreads();
		for (int node = threadIdx.x; node < nodes; node += blockDim.x) {
			for (int i = 0; i < 8; i++) {
				m[i] = from[i * 2 * nodes + 2 * node];
				m[i + 8] = from[i * 2 * nodes + 2 * node + 1];
			}
			parent(own, m, words, 0);
			for (int i = 0; i < 8; i++)
				to[i * nodes + node] = own[i];
		}
		u32 *other = from;
		from = to;
		to = other;
	}
	if (threadIdx.x)
		return;
	/* The node of 1024 is this thread's own. */
	for (int i = 0; i < 8; i++)
		m[i] = own[i];
	rest(m + 8, cell, words);
	parent(own, m, words, ROOT);
	for (int i = 0; i < 8; i++)
		out[8 * blockIdx.x + i] = own[i];
}
#endif
"""

Digests = npt.NDArray[np.uint8]


def reference(data: memoryview | bytes | npt.NDArray[np.uint8], key: bytes) -> Digests:
    """Compute the digests of host memory as the kernel does.

    Args:
        data: A whole number of cells.
        key: 32 bytes.

    Returns:
        u8[cells, 32].
    """
    from blake3 import blake3

    cells = memoryview(data).cast("B")  # type: ignore[arg-type]
    found = [
        blake3(BITMAP, key=key).update(cells[at : at + CELL]).digest()
        for at in range(0, len(cells), CELL)
    ]
    return np.frombuffer(b"".join(found), np.uint8).reshape(-1, BYTES)
