/* Reads cells of another process's memory, or of a file, and fingerprints them, one after the other.
 * The slot always contains the cell that was hashed last.
 *
 * icecore/dumper/memory/scan.py could do the same, but in Python each cell costs two calls, after
 * each of which the thread waits for the interpreter's lock. The hash is XXH3
 * (XXH3_128bits_withSeed of xxhash.h), whose address the caller passes.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define CELL ((size_t)1 << 20) /* bytes; so much room has a slot */
#define PAGE ((uint64_t)4096)
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
	int64_t *row; /* n; the candidate where it is; 0 or more before: the cell is not read */
	struct hash (*hash)(const void *data, size_t size, uint64_t seed);
	uint64_t seed;
	int64_t pid; /* of the process; -1: a file is read */
	int64_t file; /* the file's descriptor; addresses are offsets in it */
	const uint8_t *by_file; /* n; not 0: the file is read; NULL: it is if there is no process */
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

/* The whole cell in as few calls as possible. */
static bool read_cell(const struct cells *cells, int64_t i, uint8_t *slot)
{
	const struct iovec *runs = cells->runs + cells->first_run[i];
	size_t count = cells->first_run[i + 1] - cells->first_run[i];
	struct iovec here = {slot, cells->length[i]};

	if (cells->pid >= 0 && !(cells->by_file && cells->by_file[i]))
		return process_vm_readv((pid_t)cells->pid, &here, 1, runs, count, 0) ==
		    (ssize_t)cells->length[i];
	for (size_t run = 0; run < count; slot += runs[run++].iov_len)
		if (pread64((int)cells->file, slot, runs[run].iov_len,
			(off64_t)(uintptr_t)runs[run].iov_base) != (ssize_t)runs[run].iov_len)
			return false;
	return true;
}

/* Where the data of a file begins and ends, from `at` on: up to `room` pairs are written to `found`.
 * Returns how many, or -1 if the file cannot tell. The file may change meanwhile. */
__attribute__((visibility("default"))) int64_t find_data(
    int64_t file, uint64_t at, uint64_t end, uint64_t *found, int64_t room)
{
	int64_t count = 0;

	while (count < room && at < end) {
		off64_t low = lseek64((int)file, (off64_t)at, SEEK_DATA);
		if (low < 0)
			return errno == ENXIO ? count : -1;
		if ((uint64_t)low >= end)
			break;
		off64_t high = lseek64((int)file, low, SEEK_HOLE);
		if (high < 0)
			return errno == ENXIO ? count : -1; /* it ends before that now */
		if (high <= low) { /* a hole now */
			at = (uint64_t)low + PAGE;
			continue;
		}
		found[2 * count] = (uint64_t)low;
		found[2 * count++ + 1] = at = (uint64_t)high < end ? (uint64_t)high : end;
	}
	return count;
}

/* Cells from `start` to `stop`, up to one that is not known or cannot be read in one call: its
 * number, and why; else `stop`. `slot` has room for a cell, and before it for its bitmap. */
__attribute__((visibility("default"))) int64_t scan_cells(
    const struct cells *cells, int64_t start, int64_t stop, uint8_t *slot, int64_t *why)
{
	for (int64_t i = start; i < stop; i++) {
		size_t length = cells->length[i];
		uint8_t *fingerprint = cells->fingerprint + FINGERPRINT * (size_t)i;

		if (cells->row[i] >= 0)
			continue;
		if (length > CELL) {
			*why = NOT_READ;
			return i;
		}
		memcpy(slot - BITMAP, cells->bitmap + BITMAP * (size_t)i, BITMAP);
		if (!read_cell(cells, i, slot)) {
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
