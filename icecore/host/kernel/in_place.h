/* Cells of a file that is mapped into this process: hashed where they are, without a copy.
 *
 * The file may be shortened meanwhile, and its pages may be lost to an I/O error. Then the read fails,
 * where any other read of a mapping would end the process by SIGBUS. */
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

/* XXH3's streaming functions: the bitmap that is hashed before a cell does not lie before it. */
struct streaming {
	void *(*create)(void);
	int (*reset)(void *state, uint64_t seed);
	int (*update)(void *state, const void *data, size_t size);
	struct hash (*digest)(const void *state);
	int (*destroy)(void *state);
};

/* Return whether all pages of a cell are in memory. `map` is where offset 0 of the file is mapped, with
 * `size` bytes; runs are addressed by offsets. To read a page that is not there would allocate it in
 * the file. */
bool is_there(const uint8_t *map, size_t size, const struct iovec *runs, size_t count);

/* These fail if a page cannot be had. */
bool hash_in_place(const struct streaming *streaming, void *state, const uint8_t *map,
    const struct iovec *runs, size_t count, struct hash *found);
bool copy_in_place(
    uint8_t *target, const uint8_t *map, const struct iovec *runs, size_t count);

#endif
