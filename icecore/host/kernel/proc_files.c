/* Read files of /proc without the interpreter. In Python, each system call would have to wait for the
 * interpreter's lock again.
 */
#define _GNU_SOURCE
#include "pagemap_scan.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

/* A range, and the categories of which its pages may have none. The kernel looks at each page's own
 * record to tell a file's, which takes five times as long: so only where there may be some. */
struct wanted {
	uint64_t start, end, excluded;
};

/* Find the runs of pages in `ranges` that are present or swapped out. Writes them to `found`, and returns their number, or a negative errno. `*done` is set
 * to the number of ranges that are finished. If `found` is full, the start of the next range is
 * moved to where the search has to go on. */
__attribute__((visibility("default"))) int64_t find_runs(int64_t pagemap, struct wanted *ranges,
    int64_t count, struct run *found, int64_t room, int64_t *done)
{
	int64_t out = 0;

	for (*done = 0; *done < count; ++*done) {
		struct wanted *range = &ranges[*done];
		while (range->start < range->end) {
			struct scan scan = {
			    .size = sizeof scan,
			    .start = range->start,
			    .end = range->end,
			    .vec = (uint64_t)(uintptr_t)(found + out),
			    .vec_len = (uint64_t)(room - out),
			    .category_inverted = range->excluded,
			    .category_mask = range->excluded,
			    .category_anyof_mask = PRESENT_OR_SWAPPED,
			};
			if (out == room)
				return out;
			int got = ioctl((int)pagemap, SCAN, &scan);
			if (got < 0 && errno == EINTR)
				continue;
			if (got < 0)
				return -errno;
			if (!got)
				break;
			out += got;
			/* Linux 6.18 leaves an old walk_end if the walk reached the end of the range.
			 * Continuing there would return runs twice. */
			uint64_t last = found[out - 1].end;
			range->start = scan.walk_end > last ? scan.walk_end : last;
		}
	}
	return out;
}

/* Copy the rest of a file. Returns 0, or an errno. A read of a file of /proc returns only a small
 * piece, so several reads fill the buffer before it is written. */
__attribute__((visibility("default"))) int64_t copy_file(int64_t source, int64_t target)
{
	enum { ROOM = 1 << 17, LEAST = 1 << 14 };
	char *room = malloc(ROOM);
	ssize_t got = 1;
	int64_t failed = room ? 0 : ENOMEM;

	while (!failed && got) {
		size_t held = 0, written = 0;
		while (ROOM - held >= LEAST &&
		    (got = read((int)source, room + held, ROOM - held)) > 0)
			held += (size_t)got;
		if (got < 0)
			failed = errno;
		while (!failed && written < held) {
			ssize_t put = write((int)target, room + written, held - written);
			if (put < 0)
				failed = errno;
			else
				written += (size_t)put;
		}
	}
	free(room);
	return failed;
}
