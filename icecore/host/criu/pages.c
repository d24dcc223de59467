/* Preloaded into CRIU: private anonymous memory appears empty to it. Whatever is hidden is recorded
 * first; if it cannot be recorded, nothing is hidden.
 *
 * In a lazy dump CRIU (4.0 to 4.2: criu/mem.c, generate_iovs and drain_pages) walks the pages of
 * one process after the other and has each put its own into pipes, from which nobody reads: the
 * dumper reads memory in place. That adds about 45 ms of window for each GiB of 4 KiB pages, and a
 * descriptor for every 2 MiB. Where ICECORE_HIDDEN names a file, PAGEMAP_SCAN
 * (criu/pagemap-cache.c, pmc_fill) of a range within one private anonymous mapping of another
 * process finds nothing, and a struct hidden at the end of that file records the range.
 *
 * The kernel answers everything else: memory of files and shared memory (which CRIU writes), the
 * search for guard pages, and small ranges.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/ioctl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* More than CRIU's cache holds (PMC_SIZE): for less, CRIU asks for several mappings at once, which
 * may have become one since (it makes all readable). */
#define LEAST (((uint64_t)2 << 20) + 4096)
#define ROOM ((size_t)256 << 10)

/* linux/fs.h from 6.7 on; where this is built may be older. */
struct scan {
	uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages, category_inverted,
	    category_mask, category_anyof_mask, return_mask;
};
#define SCAN _IOWR('f', 16, struct scan)
#define PRESENT_OR_SWAPPED (1 << 3 | 1 << 4)

struct range {
	uint64_t start, end;
};

struct hidden {
	uint64_t pid, start, end;
};

/* The private anonymous mappings of the process that was asked about last, ascending. CRIU has one
 * thread. */
static struct {
	pid_t pid;
	struct range *ranges;
	size_t count;
} known;

__attribute__((visibility("default"))) int ioctl(int descriptor, unsigned long request, ...);

/* A whole file of /proc, which the caller frees; NULL if it cannot be read. */
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

/* Whether a line of /proc/PID/maps (proc_pid_maps(5)) is of private anonymous memory, and where
 * that is. */
static bool anonymous(const char *line, struct range *range)
{
	char private;
	unsigned int major, minor;
	unsigned long inode;
	int name;

	if (sscanf(line, "%lx-%lx %*c%*c%*c%c %*x %x:%x %lu %n", &range->start, &range->end,
		&private, &major, &minor, &inode, &name) != 6)
		return false;
	if (private != 'p' || major || minor || inode)
		return false;
	return !line[name] || !strcmp(line + name, "[heap]") || !strncmp(line + name, "[anon:", 6);
}

/* Fill `known` for this process. */
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
		if (!anonymous(line, &found) || found.end - found.start < LEAST)
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

static bool within_one(uint64_t start, uint64_t end)
{
	size_t low = 0, high = known.count;

	while (low < high) {
		size_t middle = (low + high) / 2;
		if (known.ranges[middle].end <= start)
			low = middle + 1;
		else
			high = middle;
	}
	return low < known.count && known.ranges[low].start <= start &&
	    end <= known.ranges[low].end;
}

/* Whose pagemap it is; 0: no process's, or our own. */
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

static bool note(pid_t pid, uint64_t start, uint64_t end)
{
	const char *path = getenv("ICECORE_HIDDEN");
	struct hidden entry = {(uint64_t)pid, start, end};
	int file = path ? open(path, O_WRONLY | O_APPEND | O_CLOEXEC) : -1;
	bool written = file >= 0 && write(file, &entry, sizeof entry) == (ssize_t)sizeof entry;

	if (file >= 0)
		close(file);
	return written;
}

static bool hide(int descriptor, struct scan *scan)
{
	if (scan->size < sizeof *scan || scan->category_anyof_mask != PRESENT_OR_SWAPPED ||
	    scan->end < scan->start || scan->end - scan->start < LEAST)
		return false;
	pid_t pid = whose(descriptor);
	return pid && look(pid) && within_one(scan->start, scan->end) &&
	    note(pid, scan->start, scan->end);
}

int ioctl(int descriptor, unsigned long request, ...)
{
	va_list arguments;
	va_start(arguments, request);
	void *argument = va_arg(arguments, void *);
	va_end(arguments);

	if (request == SCAN && getenv("ICECORE_HIDDEN") && hide(descriptor, argument)) {
		struct scan *scan = argument;
		scan->walk_end = scan->end;
		return 0;
	}
	return (int)syscall(SYS_ioctl, descriptor, request, argument);
}
