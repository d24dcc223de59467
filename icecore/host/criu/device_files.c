/* Device files of NVIDIA's driver that a process without CUDA state has open or mapped, in CRIU's
 * images. After a restore none of them reaches a GPU.
 *
 * A child that was forked from a CUDA process inherits its descriptors and mappings of
 * /dev/nvidia*, and cannot use them, because CUDA does not work in it: it may only close and unmap
 * them. So a descriptor is restored as one of /dev/null, and a mapping as one of /dev/zero, with
 * the same number and at the same address. CRIU asks its plugins about every device that it does
 * not know, and does not say for which process. icecore decides which processes may have such files
 * (icecore.dumper.preflight.orphans). The record in the images says which of CRIU's files are
 * these; another plugin may have dumped the others.
 */

#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "device_files.h"
#include "say.h"

#define RECORD "icecore-device-files.img"

extern int criu_get_image_dir(void) __attribute__((weak));

enum { MOST_MAJORS = 64, MOST_RECORD = 1 << 24 };
static struct {
	mode_t kind;
	unsigned major;
} majors[MOST_MAJORS];
static int major_count;
static char *record; /* of a restore: lines "file ID" and "mapping PATH" */
static bool passes_retry;

/* ICECORE_DEVICE_FILES: words such as "c195", the kind (c or b) and the major number. */
int device_files_begin_dump(void)
{
	const char *at = getenv("ICECORE_DEVICE_FILES");
	int length;
	char kind;

	for (major_count = 0; at && *at; major_count++) {
		unsigned number;
		if (major_count == MOST_MAJORS ||
		    sscanf(at, " %c%u%n", &kind, &number, &length) != 2 ||
		    (kind != 'c' && kind != 'b')) {
			SAY("ICECORE_DEVICE_FILES cannot be read\n");
			return -1;
		}
		majors[major_count].kind = kind == 'c' ? S_IFCHR : S_IFBLK;
		majors[major_count].major = number;
		for (at += length; isspace((unsigned char)*at); at++)
			;
	}
	return 0;
}

static bool is_drivers(const struct stat *about)
{
	for (int i = 0; i < major_count; i++)
		if ((about->st_mode & S_IFMT) == majors[i].kind &&
		    major(about->st_rdev) == majors[i].major)
			return true;
	return false;
}

static int note(const char *line)
{
	size_t length = strlen(line);
	int file =
	    openat(criu_get_image_dir(), RECORD, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	bool done = file >= 0 && write(file, line, length) == (ssize_t)length;

	if (file >= 0)
		close(file);
	if (!done)
		SAY("%s cannot be written: %s\n", RECORD, strerror(errno));
	return done ? 0 : -1;
}

int device_file_dump(int descriptor, int id)
{
	struct stat about;
	char line[64];

	if (fstat(descriptor, &about) || !is_drivers(&about))
		return -ENOTSUP;
	snprintf(line, sizeof line, "file %d\n", id);
	return note(line);
}

int device_mapping_dump(int descriptor, const struct stat *about)
{
	char link[64], path[PATH_MAX], line[PATH_MAX + 16];

	if (!is_drivers(about))
		return -ENOTSUP;
	snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
	ssize_t length = readlink(link, path, sizeof path - 1);
	if (length < 0 || memchr(path, '\n', length))
		return -1;
	path[length] = 0;
	snprintf(line, sizeof line, "mapping %s\n", path);
	return note(line);
}

int device_files_begin_restore(void)
{
	struct stat about;

	passes_retry = getenv("ICECORE_CRIU_RETRIES") != NULL;
	int file = openat(criu_get_image_dir(), RECORD, O_RDONLY | O_CLOEXEC);
	if (file < 0)
		return errno == ENOENT ? 0 : -1;
	bool done = !fstat(file, &about) && about.st_size < MOST_RECORD &&
	    (record = calloc(1, about.st_size + 1)) &&
	    read(file, record, about.st_size) == about.st_size;
	close(file);
	if (!done)
		SAY("%s cannot be read\n", RECORD);
	return done ? 0 : -1;
}

static bool recorded(const char *line)
{
	size_t length = strlen(line);

	for (const char *at = record; at && (at = strstr(at, line)); at += length)
		if (at == record || at[-1] == '\n')
			return true;
	return false;
}

/* CRIU after 4.2 passes a place in which to request another call, older versions nothing. */
int device_file_restore(int id, bool *retry)
{
	char line[64];

	snprintf(line, sizeof line, "file %d\n", id);
	if (!recorded(line))
		return -ENOTSUP;
	if (passes_retry)
		*retry = false;
	int made = open("/dev/null", O_RDWR | O_CLOEXEC);
	if (made < 0)
		SAY("/dev/null cannot be opened: %s\n", strerror(errno));
	return made;
}

/* The descriptor is CRIU's to close: it keeps one for each mapping. */
int device_mapping_restore(
    const char *path, uint64_t address, uint64_t offset, uint64_t *new_offset, int *descriptor)
{
	char line[PATH_MAX + 16];

	(void)address, (void)offset;
	snprintf(line, sizeof line, "mapping %s\n", path);
	if (!recorded(line)) {
		snprintf(line, sizeof line, "mapping %s (deleted)\n", path);
		if (!recorded(line))
			return -ENOTSUP;
	}
	*descriptor = open("/dev/zero", O_RDWR | O_CLOEXEC);
	if (*descriptor < 0) {
		SAY("/dev/zero cannot be opened: %s\n", strerror(errno));
		return -1;
	}
	*new_offset = 0;
	return 1;
}
