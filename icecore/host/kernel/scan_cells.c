/* Reads cells of another process's memory and fingerprints them, one after the other. The slot
 * always contains the cell that was hashed last.
 *
 * icecore/dumper/memory/scan.py could do the same, but in Python each cell costs two calls, after
 * each of which the thread waits for the interpreter's lock. The hash is XXH3
 * (XXH3_128bits_withSeed of xxhash.h), whose address the caller passes.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>

#define CELL ((size_t)1 << 20) /* bytes; so much room has a slot */
#define BITMAP ((size_t)32)
#define FINGERPRINT ((size_t)16)

/* XXH128_hash_t */
struct hash {
	uint64_t low, high;
};

/* A whole plan (icecore/dumper/memory/cells.py, CellPlan) and what is known of it; the results are
 * written here. */
struct cells {
	const struct iovec *runs;
	const uint32_t *first_run; /* n + 1 */
	const uint64_t *length; /* n */
	const uint8_t *bitmap; /* n times BITMAP */
	const int64_t *candidate; /* n; the row of `known` that may be true still, or less than 0 */
	const uint8_t *known; /* rows of FINGERPRINT */
	uint8_t *fingerprint; /* n times FINGERPRINT */
	int64_t *row; /* n; the candidate where it is */
	struct hash (*hash)(const void *data, size_t size, uint64_t seed);
	uint64_t seed;
	int64_t pid;
};

/* Whether the caller means the same by it. */
__attribute__((visibility("default"))) const uint64_t scan_cells_size = sizeof(struct cells);

enum why { ALL_KNOWN, CHANGED, NOT_READ };

/* As xxhash's canonical form: the high half first, the most significant byte first. */
static void put(uint8_t *target, struct hash hash)
{
	uint64_t words[2] = {__builtin_bswap64(hash.high), __builtin_bswap64(hash.low)};

	memcpy(target, words, FINGERPRINT);
}

/* Cells from `start` to `stop`, up to one that is not known or cannot be read in one call: its
 * number, and why; else `stop`. `slot` has room for a cell, and before it for its bitmap. */
__attribute__((visibility("default"))) int64_t scan_cells(
    const struct cells *cells, int64_t start, int64_t stop, uint8_t *slot, int64_t *why)
{
	for (int64_t i = start; i < stop; i++) {
		size_t length = cells->length[i];
		const struct iovec *runs = cells->runs + cells->first_run[i];
		struct iovec here = {slot, length};
		uint8_t *fingerprint = cells->fingerprint + FINGERPRINT * (size_t)i;

		if (length > CELL) {
			*why = NOT_READ;
			return i;
		}
		memcpy(slot - BITMAP, cells->bitmap + BITMAP * (size_t)i, BITMAP);
		if (process_vm_readv((pid_t)cells->pid, &here, 1, runs,
			cells->first_run[i + 1] - cells->first_run[i], 0) != (ssize_t)length) {
			*why = NOT_READ;
			return i;
		}
		put(fingerprint, cells->hash(slot - BITMAP, BITMAP + length, cells->seed));
		if (cells->candidate[i] < 0 ||
		    memcmp(fingerprint, cells->known + FINGERPRINT * (size_t)cells->candidate[i],
			FINGERPRINT)) {
			*why = CHANGED;
			return i;
		}
		cells->row[i] = cells->candidate[i];
	}
	*why = ALL_KNOWN;
	return stop;
}
