/* Preloaded into CRIU: private memory appears empty to it. What is hidden is recorded first. If it
 * cannot be recorded, it is not hidden.
 *
 * In a lazy dump CRIU (4.0 to 4.2: criu/mem.c, generate_iovs, drain_pages and xfer_pages) walks the
 * pages of one process after another. It has each process put its pages into pipes, and writes those
 * that cannot be restored lazily into its images. But the dumper reads all memory in place. So this
 * only makes the window longer: by about 45 ms for each GiB of 4 KiB pages, and by some 5 ms for each
 * process of an interpreter with libraries, whose relocations are private pages of files. It also
 * takes a descriptor for every 2 MiB.
 *
 * Where ICECORE_HIDDEN names a file, PAGEMAP_SCAN (criu/pagemap-cache.c, pmc_fill) of another process
 * finds nothing in hidden mappings (process_maps.c). For each part of the requested range that lies
 * in such a mapping, a struct hidden is appended to that file.
 *
 * The kernel answers for everything else: stacks, the kernel's own mappings (the vDSO, for example),
 * executable mappings of files (CRIU has system calls made in them, which changes pages), small
 * executable mappings without a file, files below /dev, anonymous huge pages, and shared memory
 * (see shared.c). It also answers the search for guard pages.
 */
#define _GNU_SOURCE
#include "../kernel/pagemap_scan.h"
#include "process_maps.h"

#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MOST ((size_t)4096) /* parts of one answer, and runs */

struct hidden {
	uint64_t pid, start, end;
};

__attribute__((visibility("default"))) int ioctl(int descriptor, unsigned long request, ...);

/* Append records to the file, which stays open; false if that fails. */
static bool note(const struct hidden *entries, size_t count)
{
	static int file = -1;
	static struct stat opened;
	struct stat now;
	ssize_t size = (ssize_t)(count * sizeof *entries);

	/* CRIU closes only its own descriptors. If it closes this one nevertheless, and reuses its
	 * number, the file is opened again. */
	if (file < 0 || fstat(file, &now) || now.st_dev != opened.st_dev ||
	    now.st_ino != opened.st_ino) {
		file = open(hidden_file(), O_WRONLY | O_APPEND | O_CLOEXEC);
		if (file >= 0 && fstat(file, &opened)) {
			close(file);
			file = -1;
		}
		if (file < 0)
			return false;
	}
	return write(file, entries, (size_t)size) == size;
}

/* Find the parts of hidden memory from `start` to `end`. Return their number; -1: no room, or the
 * mappings cannot be read. */
static ssize_t parts_of(pid_t pid, uint64_t start, uint64_t end, struct hidden *parts, size_t room)
{
	size_t all, count = 0;
	const struct mapping *mappings = mappings_of(pid, &all);

	if (!mappings)
		return -1;
	for (const struct mapping *one = mapping_after(mappings, all, start);
	     one < mappings + all && one->start < end; one++) {
		if (!one->hideable)
			continue;
		if (count == room)
			return -1;
		parts[count++] = (struct hidden){(uint64_t)pid,
		    one->start > start ? one->start : start, one->end < end ? one->end : end};
	}
	return (ssize_t)count;
}

/* Find what of `count` runs lies in no part. Returns the number of runs left; -1: no room. */
static ssize_t left_of(const struct run *runs, size_t count, const struct hidden *parts,
    size_t part_count, struct run *left, size_t room)
{
	size_t out = 0, at = 0;

	for (size_t i = 0; i < count; i++) {
		uint64_t start = runs[i].start;
		while (at < part_count && parts[at].end <= start)
			at++;
		for (size_t next = at; start < runs[i].end; next++) {
			bool last = next == part_count || parts[next].start >= runs[i].end;
			uint64_t end = last ? runs[i].end : parts[next].start;
			if (start < end) {
				if (out == room)
					return -1;
				left[out++] = (struct run){start, end, runs[i].categories};
			}
			start = last ? end : parts[next].end;
		}
	}
	return (ssize_t)out;
}

/* Ask the kernel, and remove hidden memory from its answer. */
static int scan(int descriptor, struct scan *scan)
{
	static struct hidden parts[MOST];
	static struct run left[MOST];
	static struct owner last;
	struct run *runs = (struct run *)(uintptr_t)scan->vec;
	ssize_t count = 0, kept;
	pid_t pid = 0;

	if (hidden_file() && scan->size >= sizeof *scan &&
	    scan->category_anyof_mask == PRESENT_OR_SWAPPED && scan->start < scan->end)
		pid = owner_of(descriptor, "pagemap", &last);
	if (pid)
		count = parts_of(pid, scan->start, scan->end, parts, MOST);
	if (count == 1 && parts->start == scan->start && parts->end == scan->end &&
	    note(parts, 1)) {
		scan->walk_end = scan->end;
		return 0;
	}
	int found = (int)syscall(SYS_ioctl, descriptor, SCAN, scan);
	if (found <= 0 || count <= 0)
		return found;
	uint64_t end = scan->walk_end > runs[found - 1].end ? scan->walk_end : runs[found - 1].end;
	count = parts_of(pid, scan->start, end < scan->end ? end : scan->end, parts, MOST);
	if (count <= 0)
		return found;
	kept = left_of(runs, (size_t)found, parts, (size_t)count, left,
	    scan->vec_len < MOST ? scan->vec_len : MOST);
	if (kept < 0 || !note(parts, (size_t)count))
		return found;
	memcpy(runs, left, (size_t)kept * sizeof *left);
	return (int)kept;
}

int ioctl(int descriptor, unsigned long request, ...)
{
	va_list arguments;
	va_start(arguments, request);
	void *argument = va_arg(arguments, void *);
	va_end(arguments);

	if (request == SCAN)
		return scan(descriptor, argument);
	return (int)syscall(SYS_ioctl, descriptor, request, argument);
}
