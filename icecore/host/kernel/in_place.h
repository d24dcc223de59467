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

/* Where a file's offset 0 is mapped. The runs of a cell are addressed by offsets. */
bool is_within(size_t size, const struct iovec *runs, size_t count);
bool hash_in_place(const struct streaming *streaming, void *state, const uint8_t *map,
    const struct iovec *runs, size_t count, struct hash *found);
bool copy_in_place(
    uint8_t *target, const uint8_t *map, const struct iovec *runs, size_t count);

#endif
