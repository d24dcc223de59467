/* Preloaded into CRIU: reads the copy of a process's smaps if there is one, and remembers the
 * mappings for the other files here (process_maps.c).
 *
 * CRIU (4.0 to 4.2: criu/proc_parse.c, parse_smaps) reads /proc/PID/smaps of one process after
 * another while the tree stands still. It needs only the lines of maps and the flags, but the
 * kernel also counts the pages of each mapping, one by one. In a tree of workers with 250 MB each,
 * that was about half of CRIU's time. So the dumper copies the file for processes that CRIU holds
 * but has not reached yet (icecore/host/criu/mappings.py).
 *
 * Nothing changes the mappings of a process between the copy and CRIU's use of it: all threads are
 * held, processes that share an address space are refused, and CRIU has system calls made in a process
 * only after it has read the file.
 *
 * Where ICECORE_HIDDEN names a file, the copy for PID has that name with ".PID.smaps.log" appended.
 * Each copy is used once. Without a copy, CRIU reads the file in /proc.
 */
#define _GNU_SOURCE
#include "process_maps.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

/* Return the process whose directory in /proc this is; 0: it is none. */
static int process_of(int directory)
{
	char name[64], path[64];
	int pid, length = 0;

	snprintf(name, sizeof name, "/proc/self/fd/%d", directory);
	ssize_t size = readlink(name, path, sizeof path - 1);
	if (size <= 0)
		return 0;
	path[size] = '\0';
	return sscanf(path, "/proc/%d%n", &pid, &length) == 1 && length == size ? pid : 0;
}

/* Open the copy; -1: there is none. */
static int open_copy(int pid)
{
	const char *hidden = hidden_file();
	char path[4096];

	if (!hidden ||
	    snprintf(path, sizeof path, "%s.%d.smaps.log", hidden, pid) >= (int)sizeof path)
		return -1;
	int file = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW, 0);
	if (file >= 0)
		syscall(SYS_unlinkat, AT_FDCWD, path, 0);
	return file;
}

__attribute__((visibility("default"))) int openat64(
    int directory, const char *path, int flags, ...)
{
	mode_t mode = 0;

	if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) {
		va_list more;
		va_start(more, flags);
		mode = va_arg(more, mode_t);
		va_end(more);
	}
	const struct mapping *one = named_mapping(directory, path);
	if (one && one->of_no_file) {
		errno = ENOENT;
		return -1;
	}
	int pid = strcmp(path, "smaps") ? 0 : process_of(directory);
	int file = pid ? open_copy(pid) : -1;
	if (file < 0)
		file = (int)syscall(SYS_openat, (long)directory, path, (long)flags, (long)mode);
	return file >= 0 && pid && pid != getpid() ? take_mappings(pid, file) : file;
}
