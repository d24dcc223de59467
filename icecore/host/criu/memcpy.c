/* Preloaded into CRIU: a memcpy that skips pages of the source that were never touched. Wherever
 * the source has data, the target has it afterwards.
 *
 * In a lazy dump CRIU (4.1, 4.2: criu/mem.c, __parasite_dump_pages_seized) copies its whole table
 * of ranges into memory that it shares with the process: 16 bytes for each page of every private
 * mapping, reserved ones included, while the process is stopped. Few entries are in use; they come
 * first, and no others are ever read. A process with CUDA reserves more addresses than there is
 * memory: 64 GiB cost half a second of the window, and the address space of four GPUs 1.4 s for
 * each rank.
 *
 * A page of the source that is neither present nor swapped (/proc/self/pagemap) is zero and is not
 * read, because reading would make it present. In the target, zeros are written only to pages that
 * are present (mincore).
 *
 * Even that is long for the table of a process that has reserved terabytes. So what neither holds is
 * skipped in one step, up to the next page of the source that is present or swapped (PAGEMAP_SCAN,
 * Linux 6.7) and the next data of the target, whose file tells where that is (SEEK_DATA).
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/ioctl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LEAST ((size_t)8 << 20) /* bytes; what is smaller is not worth the calls */
#define PIECE ((size_t)4 << 20)
#define SMALLEST_PAGE 4096
#define HAS_DATA (3ull << 62) /* present or swapped */

/* linux/fs.h from 6.7 on; where this is built may be older. */
struct region {
	uint64_t start, end, categories;
};
struct scan {
	uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages, category_inverted,
	    category_mask, category_anyof_mask, return_mask;
};
#define SCAN _IOWR('f', 16, struct scan)
#define PRESENT_OR_SWAPPED (1 << 3 | 1 << 4)

/* The file of which the target is a mapping; `file` is -1 if it is of none, or may not be opened. */
struct backing {
	int file;
	uintptr_t start;
	off_t offset; /* in the file, of `start` */
};

__attribute__((visibility("default"))) void *memcpy(void *target, const void *source, size_t size);

/* Zeros, but pages that are not there stay so. */
static void clear(uintptr_t start, size_t size, size_t page)
{
	static __thread unsigned char there[PIECE / SMALLEST_PAGE + 1];
	uintptr_t first = start / page * page;
	size_t count = (start + size - 1) / page - start / page + 1;

	if (mincore((void *)first, count * page, there)) {
		memset((void *)start, 0, size);
		return;
	}
	for (size_t i = 0; i < count; i++) {
		uintptr_t from = first + i * page, to = from + page;

		from = from < start ? start : from;
		to = to > start + size ? start + size : to;
		if (there[i] & 1)
			memset((void *)from, 0, to - from);
	}
}

/* Copy from within a page of the source; return how much was copied. */
static size_t copy_some(int pagemap, char *target, const char *source, size_t size, size_t page)
{
	static __thread uint64_t entries[PIECE / SMALLEST_PAGE];
	size_t first = (uintptr_t)source / page,
	       most = (first + PIECE / page) * page - (uintptr_t)source;

	size = size < most ? size : most;
	size_t count = ((uintptr_t)source + size - 1) / page - first + 1;
	if (pread(pagemap, entries, count * sizeof *entries, (off_t)(first * sizeof *entries)) !=
	    (ssize_t)(count * sizeof *entries)) {
		memmove(target, source, size);
		return size;
	}
	for (size_t i = 0, next; i < count; i = next) {
		bool data = entries[i] & HAS_DATA;
		for (next = i + 1; next < count && !(entries[next] & HAS_DATA) == !data;)
			next++;
		size_t from = i ? (first + i) * page - (uintptr_t)source : 0,
		       to = next < count ? (first + next) * page - (uintptr_t)source : size;
		if (data)
			memmove(target + from, source + from, to - from);
		else
			clear((uintptr_t)target + from, to - from, page);
	}
	return size;
}

static struct backing backing_of(uintptr_t target, size_t size)
{
	struct backing found = {.file = -1};
	char line[512], path[96];
	unsigned long start, end, offset;
	FILE *maps = fopen("/proc/self/maps", "re");

	while (maps && fgets(line, sizeof line, maps)) {
		if (sscanf(line, "%lx-%lx %*s %lx", &start, &end, &offset) != 3 || target < start ||
		    target + size > end)
			continue;
		snprintf(path, sizeof path, "/proc/self/map_files/%lx-%lx", start, end);
		found.file = open(path, O_RDONLY | O_CLOEXEC);
		found.start = start;
		found.offset = (off_t)offset;
		break;
	}
	if (maps)
		fclose(maps);
	return found;
}

/* How much of the source, from here on, holds nothing. */
static size_t empty_source(int pagemap, const char *source, size_t size, size_t page)
{
	struct region first = {0};
	uintptr_t start = (uintptr_t)source / page * page,
		  end = ((uintptr_t)source + size + page - 1) / page * page;
	struct scan scan = {
	    .size = sizeof scan,
	    .start = start,
	    .end = end,
	    .vec = (uintptr_t)&first,
	    .vec_len = 1,
	    .max_pages = 1,
	    .category_anyof_mask = PRESENT_OR_SWAPPED,
	    .return_mask = PRESENT_OR_SWAPPED,
	};
	long count = syscall(SYS_ioctl, (long)pagemap, SCAN, &scan);

	if (count < 0)
		return 0;
	if (!count)
		return size;
	return first.start <= (uintptr_t)source ? 0 : first.start - (uintptr_t)source;
}

static size_t empty_target(const struct backing *backing, const char *target, size_t size)
{
	if (backing->file < 0)
		return 0;
	off_t at = backing->offset + (off_t)((uintptr_t)target - backing->start);
	off_t data = lseek(backing->file, at, SEEK_DATA);

	if (data < 0) /* ENXIO: there is none */
		return lseek(backing->file, 0, SEEK_END) < at + (off_t)size ? 0 : size;
	return (size_t)(data - at) < size ? (size_t)(data - at) : size;
}

void *memcpy(void *target, const void *source, size_t size)
{
	int pagemap = size < LEAST ? -1 : open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	size_t page = (size_t)getpagesize();

	if (pagemap < 0)
		return memmove(target, source, size);
	struct backing backing = backing_of((uintptr_t)target, size);
	for (size_t at = 0; at < size;) {
		char *to = (char *)target + at;
		const char *from = (const char *)source + at;
		size_t none = empty_source(pagemap, from, size - at, page);

		none = none ? empty_target(&backing, to, none) : 0;
		at += none ? none : copy_some(pagemap, to, from, size - at, page);
	}
	close(pagemap);
	if (backing.file >= 0)
		close(backing.file);
	return target;
}
