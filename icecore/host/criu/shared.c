/* Preloaded into CRIU: the content of listed shared memory appears empty to it.
 *
 * CRIU (4.0 to 4.2: criu/shmem.c, do_dump_one_shmem) writes shared anonymous memory, memfds and
 * System V segments into its images while the tree stands still, in one thread. It asks for the next
 * page with SEEK_DATA. Where ICECORE_HIDDEN names a file, the file of that name with ".shared.log"
 * appended lists objects that the dumper has open and reads itself. For these, the answer is that
 * only a hole follows. Before that answer, the bytes that CRIU would have dumped are written into
 * the object's row; if they cannot be written, nothing is hidden.
 */
#define _GNU_SOURCE
#include "process_maps.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

/* A row of the list (icecore/host/criu/hidden.py, SHARED). A System V segment has the number of its
 * identifier as inode, which an object of another kind may have, too. */
struct object {
	uint64_t device, inode, system_v, size;
};

__attribute__((visibility("default"))) off64_t lseek64(int descriptor, off64_t offset, int whence);

static bool is_system_v(int descriptor)
{
	char name[64], path[16];
	snprintf(name, sizeof name, "/proc/self/fd/%d", descriptor);
	ssize_t size = readlink(name, path, sizeof path);
	return size > 5 && !memcmp(path, "/SYSV", 5);
}

/* How many bytes of an object CRIU has mapped, which are those that it would dump; 0: none. */
static uint64_t mapped(const struct stat *about)
{
	FILE *maps = fopen("/proc/self/maps", "re");
	char *line = NULL;
	size_t room = 0;
	uint64_t most = 0;

	while (maps && getline(&line, &room, maps) > 0) {
		unsigned long start, end, offset, inode;
		unsigned int high, low;
		if (sscanf(line, "%lx-%lx %*s %lx %x:%x %lu", &start, &end, &offset, &high, &low,
			&inode) == 6 &&
		    inode == about->st_ino && makedev(high, low) == about->st_dev &&
		    offset + (end - start) > most)
			most = offset + (end - start);
	}
	free(line);
	if (maps)
		fclose(maps);
	return most;
}

/* Write the size into the row of an object; false: it has none. */
static bool note(int list, const struct stat *about, bool system_v)
{
	struct object row;

	for (off_t at = 0; pread(list, &row, sizeof row, at) == (ssize_t)sizeof row;
	     at += sizeof row) {
		if (row.device != about->st_dev || row.inode != about->st_ino ||
		    row.system_v != system_v)
			continue;
		row.size = mapped(about);
		return row.size && pwrite(list, &row, sizeof row, at) == (ssize_t)sizeof row;
	}
	return false;
}

static bool hide(int descriptor)
{
	const char *hidden = hidden_file();
	char path[4096];
	struct stat about;

	if (!hidden || snprintf(path, sizeof path, "%s.shared.log", hidden) >= (int)sizeof path ||
	    fstat(descriptor, &about) || !S_ISREG(about.st_mode))
		return false;
	int list = open(path, O_RDWR | O_CLOEXEC);
	if (list < 0)
		return false;
	bool noted = note(list, &about, is_system_v(descriptor));
	close(list);
	return noted;
}

off64_t lseek64(int descriptor, off64_t offset, int whence)
{
	int before = errno;

	/* CRIU begins with the first page. */
	if (whence == SEEK_DATA && !offset && hide(descriptor)) {
		errno = ENXIO;
		return -1;
	}
	errno = before;
	return syscall(SYS_lseek, descriptor, offset, whence);
}

__attribute__((visibility("default"), alias("lseek64"))) off_t lseek(
    int descriptor, off_t offset, int whence);
