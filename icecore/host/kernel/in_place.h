/* Hashes cells of a file that is mapped into this process where they are, without a copy.
 *
 * Meanwhile, the file may be truncated, and its pages may be lost to an I/O error. Then these reads
 * fail. Any other read of a mapping would end the process by SIGBUS. */
#ifndef ICECORE_IN_PLACE_H
#define ICECORE_IN_PLACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* XXH128_hash_t */
struct hash {
	uint64_t low, high;
};

/* XXH3's streaming functions: the bitmap, which is hashed before the cell, is stored elsewhere. */
struct streaming {
	void *(*create)(void);
	int (*reset)(void *state, uint64_t seed);
	int (*update)(void *state, const void *data, size_t size);
	struct hash (*digest)(const void *state);
	int (*destroy)(void *state);
};

/* Return whether all pages of a cell are in memory. Reading a missing page would allocate it in the
 * file. `map` is where offset 0 of the file is mapped, `size` is the length of the mapping, and
 * runs are addressed by file offset. */
bool is_there(const uint8_t *map, size_t size, const struct iovec *runs, size_t count);

/* These return false if a page is not available. */
bool hash_in_place(const struct streaming *streaming, void *state, const uint8_t *map,
    const struct iovec *runs, size_t count, struct hash *found);
bool copy_in_place(
    uint8_t *target, const uint8_t *map, const struct iovec *runs, size_t count);

#endif
