/* Reads cells of another process's memory, or of a file, and fingerprints them, one after the other.
 * If the scan stops at a changed cell, the slot contains that cell. Cells of a mapped file are
 * copied to the slot only if they are not known.
 *
 * icecore/dumper/memory/scan.py could do the same, but in Python each cell costs two calls, after
 * each of which the thread waits for the interpreter's lock. The hash is XXH3
 * (XXH3_128bits_withSeed of xxhash.h), whose address the caller passes.
 */
#define _GNU_SOURCE
#include "in_place.h"

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
	const uint8_t *map; /* of the file; NULL: not mapped, or cannot be hashed in place */
	uint64_t mapped; /* size of the mapping in bytes */
	struct streaming streaming;
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

static bool is_of_file(const struct cells *cells, int64_t i)
{
	return cells->pid < 0 || (cells->by_file && cells->by_file[i]);
}

/* Return whether a cell can be read where it is mapped. */
static bool is_mapped(const struct cells *cells, int64_t i)
{
	uint32_t first = cells->first_run[i];

	return cells->map && is_of_file(cells, i) &&
	    is_there(cells->map, cells->mapped, cells->runs + first,
		cells->first_run[i + 1] - first);
}

/* Read a whole cell in as few calls as possible. */
static bool read_cell(const struct cells *cells, int64_t i, uint8_t *slot, bool mapped)
{
	const struct iovec *runs = cells->runs + cells->first_run[i];
	size_t count = cells->first_run[i + 1] - cells->first_run[i];
	struct iovec here = {slot, cells->length[i]};

	if (!is_of_file(cells, i))
		return process_vm_readv((pid_t)cells->pid, &here, 1, runs, count, 0) ==
		    (ssize_t)cells->length[i];
	if (mapped)
		return copy_in_place(slot, cells->map, runs, count);
	for (size_t run = 0; run < count; slot += runs[run++].iov_len)
		if (pread64((int)cells->file, slot, runs[run].iov_len,
			(off64_t)(uintptr_t)runs[run].iov_base) != (ssize_t)runs[run].iov_len)
			return false;
	return true;
}

/* Return whether a mapped cell is the known one. If so, its fingerprint is written. Return false if
 * a page is not available. */
static bool is_known_in_place(const struct cells *cells, int64_t i, void *state)
{
	uint32_t first = cells->first_run[i];
	const uint8_t *known = cells->known + FINGERPRINT * (size_t)cells->candidate[i];
	uint8_t *fingerprint = cells->fingerprint + FINGERPRINT * (size_t)i;
	struct hash hash;

	cells->streaming.reset(state, cells->seed);
	cells->streaming.update(state, cells->bitmap + BITMAP * (size_t)i, BITMAP);
	if (!hash_in_place(&cells->streaming, state, cells->map, cells->runs + first,
		cells->first_run[i + 1] - first, &hash))
		return false;
	put(fingerprint, hash);
	return !memcmp(fingerprint, known, FINGERPRINT);
}

/* Find where a file has data in `ranges` (`count` pairs of start and end). Write pairs to `found`,
 * and return their number, or -1 if the search fails. Set `*done` to the number of finished ranges.
 * If `found` is full, move the start of the next range to where the search has to continue. The
 * file may change meanwhile. */
__attribute__((visibility("default"))) int64_t find_data(
    int64_t file, uint64_t *ranges, int64_t count, uint64_t *found, int64_t room, int64_t *done)
{
	int64_t out = 0;
	uint64_t known = 0; /* end of the data found last: SEEK_HOLE may search past a range */

	for (*done = 0; *done < count; ++*done) {
		uint64_t *at = &ranges[2 * *done], end = at[1];
		while (*at < end) {
			if (out == room)
				return out;
			if (*at < known) {
				found[2 * out] = *at;
				found[2 * out++ + 1] = *at = known < end ? known : end;
				continue;
			}
			off64_t low = lseek64((int)file, (off64_t)*at, SEEK_DATA);
			if (low < 0 && errno != ENXIO)
				return -1;
			if (low < 0 || (uint64_t)low >= end)
				break;
			off64_t high = lseek64((int)file, low, SEEK_HOLE);
			if (high < 0 && errno != ENXIO)
				return -1;
			if (high < 0)
				break; /* the file now ends before that */
			if (high <= low) { /* now a hole */
				*at = (uint64_t)low + PAGE;
				continue;
			}
			known = (uint64_t)high;
			found[2 * out] = (uint64_t)low;
			found[2 * out++ + 1] = *at = known < end ? known : end;
		}
	}
	return out;
}

static int64_t scan(const struct cells *cells, int64_t start, int64_t stop, uint8_t *slot,
    int64_t *why, void *state)
{
	for (int64_t i = start; i < stop; i++) {
		size_t length = cells->length[i];
		uint8_t *fingerprint = cells->fingerprint + FINGERPRINT * (size_t)i;
		int64_t candidate = cells->candidate[i];
		bool mapped;

		if (cells->row[i] >= 0)
			continue;
		if (length > CELL) {
			*why = NOT_READ;
			return i;
		}
		mapped = is_mapped(cells, i);
		if (mapped && state && candidate >= 0 && is_known_in_place(cells, i, state)) {
			cells->row[i] = candidate;
			continue;
		}
		memcpy(slot - BITMAP, cells->bitmap + BITMAP * (size_t)i, BITMAP);
		if (!read_cell(cells, i, slot, mapped)) {
			*why = NOT_READ;
			return i;
		}
		put(fingerprint, cells->hash(slot - BITMAP, BITMAP + length, cells->seed));
		if (candidate < 0 ||
		    memcmp(fingerprint, cells->known + FINGERPRINT * (size_t)candidate, FINGERPRINT)) {
			*why = CHANGED;
			return i;
		}
		cells->row[i] = candidate;
	}
	*why = ALL_KNOWN;
	return stop;
}

/* Scan cells from `start` to `stop`, up to one that is not known or cannot be read in one call.
 * Return its number, or `stop`, and set `*why`. `slot` has room for a cell, and before it for its
 * bitmap. */
__attribute__((visibility("default"))) int64_t scan_cells(
    const struct cells *cells, int64_t start, int64_t stop, uint8_t *slot, int64_t *why)
{
	void *state = cells->map ? cells->streaming.create() : NULL;
	int64_t at = scan(cells, start, stop, slot, why, state);

	if (state)
		cells->streaming.destroy(state);
	return at;
}
