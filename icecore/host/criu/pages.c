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
 * finds nothing in hidden mappings (hideable). For each part of the requested range that lies in such
 * a mapping, a struct hidden is appended to that file.
 *
 * The kernel answers for everything else: stacks, the kernel's own mappings (the vDSO, for example),
 * executable mappings of files (CRIU has system calls made in them, which changes pages), small
 * executable mappings of no file, files below /dev, anonymous huge pages, and shared memory (see
 * shared.c). It also answers the search for guard pages.
 */
#define _GNU_SOURCE
#include "../kernel/pagemap_scan.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Executable mappings of no file that are smaller than this are left to CRIU. After a restore under
 * another kernel, one may be the old vDSO, which CRIU recognises and writes whole. */
#define LEAST_CODE (((uint64_t)2 << 20) + 4096)
#define ROOM ((size_t)256 << 10)
#define MOST ((size_t)4096) /* parts of one answer, and runs */

struct hidden {
	uint64_t pid, start, end;
};

/* The hidden mappings of the process that CRIU asked about last, ascending. CRIU has one thread. */
static struct {
	pid_t pid;
	struct range *ranges;
	size_t count;
} known;

__attribute__((visibility("default"))) int ioctl(int descriptor, unsigned long request, ...);

/* Return the content of a file of /proc, which the caller frees; NULL if it cannot be read. */
static char *contents(const char *path)
{
	int file = open(path, O_RDONLY | O_CLOEXEC);
	size_t room = ROOM, size = 0;
	char *text = malloc(room);
	ssize_t got = -1;

	while (file >= 0 && text && (got = read(file, text + size, room - size - 1)) > 0) {
		size += (size_t)got;
		if (room - size < ROOM / 2) {
			char *larger = realloc(text, room *= 2);
			if (!larger) {
				got = -1;
				break;
			}
			text = larger;
		}
	}
	if (file >= 0)
		close(file);
	if (got || !text) {
		free(text);
		return NULL;
	}
	text[size] = '\0';
	return text;
}

/* Return whether a line of /proc/PID/maps (proc_pid_maps(5)) describes a mapping that is hidden, and
 * store its range: private memory of no file, or of a file if it is not executable. */
static bool hideable(const char *line, struct range *range)
{
	char executable, private;
	unsigned int major, minor;
	unsigned long inode;
	int name;

	if (sscanf(line, "%lx-%lx %*c%*c%c%c %*x %x:%x %lu %n", &range->start, &range->end,
		&executable, &private, &major, &minor, &inode, &name) != 7 ||
	    private != 'p')
		return false;
	line += name;
	if (inode)
		return executable != 'x' && *line == '/' && strncmp(line, "/dev/", 5) &&
		    strncmp(line, "/anon_hugepage", 14);
	if (executable == 'x' && range->end - range->start < LEAST_CODE)
		return false;
	return !major && !minor &&
	    (!*line || !strcmp(line, "[heap]") || !strncmp(line, "[anon:", 6));
}

/* Fill `known` for a process; false if that fails. */
static bool look(pid_t pid)
{
	char path[32];
	struct range found;
	size_t room = 0;

	if (known.pid == pid)
		return true;
	known.pid = 0;
	known.count = 0;
	snprintf(path, sizeof path, "/proc/%d/maps", pid);
	char *text = contents(path);
	if (!text)
		return false;
	for (char *line = text, *end; (end = strchr(line, '\n')); line = end + 1) {
		*end = '\0';
		if (!hideable(line, &found))
			continue;
		if (known.count == room) {
			struct range *more =
			    realloc(known.ranges, (room = 2 * room + 64) * sizeof *more);
			if (!more) {
				free(text);
				return false;
			}
			known.ranges = more;
		}
		known.ranges[known.count++] = found;
	}
	free(text);
	known.pid = pid;
	return true;
}

/* Return the process whose pagemap this is; 0: it is no pagemap, or our own. */
static pid_t whose(int descriptor)
{
	char name[64], path[64], word[16];
	int pid, size;

	snprintf(name, sizeof name, "/proc/self/fd/%d", descriptor);
	size = (int)readlink(name, path, sizeof path - 1);
	if (size <= 0)
		return 0;
	path[size] = '\0';
	if (sscanf(path, "/proc/%d/%15s", &pid, word) != 2 || strcmp(word, "pagemap") ||
	    pid == getpid())
		return 0;
	return pid;
}

/* Append records to the file; false if that fails. */
static bool note(const struct hidden *entries, size_t count)
{
	const char *path = getenv("ICECORE_HIDDEN");
	int file = path ? open(path, O_WRONLY | O_APPEND | O_CLOEXEC) : -1;
	ssize_t size = (ssize_t)(count * sizeof *entries);
	bool written = file >= 0 && write(file, entries, (size_t)size) == size;

	if (file >= 0)
		close(file);
	return written;
}

/* Find the parts of hidden memory from `start` to `end`. Returns their number; -1: no room. */
static ssize_t parts_of(pid_t pid, uint64_t start, uint64_t end, struct hidden *parts, size_t room)
{
	size_t low = 0, high = known.count, count = 0;

	while (low < high) {
		size_t middle = (low + high) / 2;
		if (known.ranges[middle].end <= start)
			low = middle + 1;
		else
			high = middle;
	}
	for (; low < known.count && known.ranges[low].start < end; low++) {
		const struct range *range = &known.ranges[low];
		if (count == room)
			return -1;
		parts[count++] = (struct hidden){(uint64_t)pid,
		    range->start > start ? range->start : start,
		    range->end < end ? range->end : end};
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
	struct run *runs = (struct run *)(uintptr_t)scan->vec;
	ssize_t count = 0, kept;
	pid_t pid = 0;

	if (getenv("ICECORE_HIDDEN") && scan->size >= sizeof *scan &&
	    scan->category_anyof_mask == PRESENT_OR_SWAPPED && scan->start < scan->end)
		pid = whose(descriptor);
	if (pid && look(pid))
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
	kept = left_of(runs, (size_t)found, parts, (size_t)count, left,
	    scan->vec_len < MOST ? scan->vec_len : MOST);
	if (count <= 0 || kept < 0 || !note(parts, (size_t)count))
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
