/* Preloaded into CRIU: keeps what other files here need to know about a process's mappings, and
 * reads it once for each process: from smaps, which CRIU opens first (mappings.c), or from maps.
 *
 * CRIU has one thread, and handles one process after another, which stands still. Later, CRIU adds
 * mappings of its own to the process, for which it does not ask, and makes some readable, which
 * changes no answer.
 */
#define _GNU_SOURCE
#include "process_maps.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Executable mappings without a file that are smaller than this are left to CRIU. After a restore
 * under another kernel, one may be the old vDSO, which CRIU recognises and writes whole. */
#define LEAST_CODE (((uint64_t)2 << 20) + 4096)
#define ROOM ((size_t)256 << 10)

static struct {
	pid_t pid;
	struct mapping *mappings;
	size_t count;
} known;

const char *hidden_file(void)
{
	static const char *path;
	static bool asked;

	if (!asked)
		path = getenv("ICECORE_HIDDEN");
	asked = true;
	return path;
}

/* Return the rest of a file as text, which the caller frees; NULL if it cannot be read. */
static char *contents(int file, size_t *size)
{
	size_t room = ROOM;
	char *text = malloc(room);
	ssize_t got = -1;

	*size = 0;
	while (text && (got = read(file, text + *size, room - *size - 1)) > 0) {
		*size += (size_t)got;
		if (room - *size < ROOM / 2) {
			char *larger = realloc(text, room *= 2);
			if (!larger) {
				got = -1;
				break;
			}
			text = larger;
		}
	}
	if (got || !text) {
		free(text);
		return NULL;
	}
	text[*size] = '\0';
	return text;
}

/* Parse a line of /proc/PID/maps or smaps (proc_pid_maps(5)); return false if it is not the first
 * line of a mapping. Private memory without a file is hideable, and that of a file if it is not
 * executable. */
static bool parse(const char *line, struct mapping *found)
{
	char executable, private;
	unsigned int major, minor;
	unsigned long inode;
	int name;
	bool code;

	if (sscanf(line, "%lx-%lx %*c%*c%c%c %*x %x:%x %lu %n", &found->start, &found->end,
		&executable, &private, &major, &minor, &inode, &name) != 7)
		return false;
	line += name;
	code = executable == 'x';
	found->of_no_file = !inode && !major && !minor && (!*line || *line == '[');
	found->opened = private == 'p' ? S_IRUSR : 0;
	if (private != 'p')
		found->hideable = false;
	else if (inode)
		found->hideable = !code && *line == '/' && strncmp(line, "/dev/", 5) &&
		    strncmp(line, "/anon_hugepage", 14);
	else
		found->hideable = found->of_no_file &&
		    (!code || found->end - found->start >= LEAST_CODE) &&
		    (!*line || !strcmp(line, "[heap]") || !strncmp(line, "[anon:", 6));
	return true;
}

/* Return whether a mapping's flags ("VmFlags: rd wr sh ...") contain a two-letter flag. */
static bool has_flag(const char *flags, const char *word)
{
	for (const char *at = strchr(flags, ' '); at; at = strchr(at + 1, ' '))
		if (at[1] == word[0] && at[2] == word[1])
			return true;
	return false;
}

/* Remember the mappings in the text of maps or smaps, and change the text; false: no memory. */
static bool remember(pid_t pid, char *text)
{
	struct mapping found;
	size_t room = 0;

	free(known.mappings);
	known.mappings = NULL;
	known.pid = 0;
	known.count = 0;
	for (char *line = text, *end; (end = strchr(line, '\n')); line = end + 1) {
		*end = '\0';
		if (*line == 'V' && known.count && !strncmp(line, "VmFlags:", 8)) {
			struct mapping *last = known.mappings + known.count - 1;
			/* The kernel sets VM_SHARED on a shared mapping only if its file was opened
			 * for writing. */
			if (!last->opened)
				last->opened = has_flag(line, "sh") ? S_IRUSR | S_IWUSR : S_IRUSR;
		}
		if ((*line >= 'A' && *line <= 'Z') || !parse(line, &found))
			continue;
		if (known.count == room) {
			struct mapping *more =
			    realloc(known.mappings, (room = 2 * room + 64) * sizeof *more);
			if (!more)
				return false;
			known.mappings = more;
		}
		known.mappings[known.count++] = found;
	}
	known.pid = pid;
	return true;
}

int take_mappings(pid_t pid, int smaps)
{
	size_t size = 0;
	int copy = memfd_create("smaps", MFD_CLOEXEC);
	char *text = copy < 0 ? NULL : contents(smaps, &size);
	bool done = text && write(copy, text, size) == (ssize_t)size && !lseek(copy, 0, SEEK_SET) &&
	    remember(pid, text);

	free(text);
	close(smaps);
	if (!done && copy >= 0)
		close(copy);
	if (!done)
		errno = ENOMEM;
	return done ? copy : -1;
}

const struct mapping *mappings_of(pid_t pid, size_t *count)
{
	char path[32];
	size_t size;

	if (known.pid != pid) {
		snprintf(path, sizeof path, "/proc/%d/maps", pid);
		int file = open(path, O_RDONLY | O_CLOEXEC);
		char *text = file < 0 ? NULL : contents(file, &size);
		if (file >= 0)
			close(file);
		bool done = text && remember(pid, text);
		free(text);
		if (!done)
			return NULL;
	}
	*count = known.count;
	return known.mappings;
}

const struct mapping *mapping_after(const struct mapping *mappings, size_t count, uint64_t at)
{
	size_t low = 0, high = count;

	while (low < high) {
		size_t middle = (low + high) / 2;
		if (mappings[middle].end <= at)
			low = middle + 1;
		else
			high = middle;
	}
	return mappings + low;
}

pid_t owner_of(int descriptor, const char *name, struct owner *last)
{
	char link[64], path[64], word[16];
	struct stat about;
	int pid, size;

	if (fstat(descriptor, &about))
		return 0;
	/* While an inode of /proc is open, no other has its number. */
	if (last->pid && last->descriptor == descriptor && last->device == about.st_dev &&
	    last->inode == about.st_ino)
		return last->pid;
	last->pid = 0;
	snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
	size = (int)readlink(link, path, sizeof path - 1);
	if (size <= 0)
		return 0;
	path[size] = '\0';
	if (sscanf(path, "/proc/%d/%15s", &pid, word) != 2 || strcmp(word, name) || pid == getpid())
		return 0;
	*last = (struct owner){descriptor, about.st_dev, about.st_ino, pid};
	return pid;
}
