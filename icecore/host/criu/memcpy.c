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
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LEAST ((size_t)8 << 20) /* bytes; what is smaller is not worth the calls */
#define PIECE ((size_t)4 << 20)
#define SMALLEST_PAGE 4096
#define HAS_DATA (3ull << 62) /* present or swapped */

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

void *memcpy(void *target, const void *source, size_t size)
{
	int pagemap = size < LEAST ? -1 : open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	size_t page = (size_t)getpagesize();

	if (pagemap < 0)
		return memmove(target, source, size);
	for (size_t at = 0; at < size;)
		at += copy_some(
		    pagemap, (char *)target + at, (const char *)source + at, size - at, page);
	close(pagemap);
	return target;
}
