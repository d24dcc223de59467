/* Preloaded into a CRIU that restores: the restorer fills shared memory as soon as CRIU has made it.
 *
 * CRIU (4.0 to 4.2: criu/shmem.c, do_restore_shmem_content) makes shared anonymous memory, a memfd or
 * a System V segment, gives it its size, maps it writable, and opens pagemap-shmem-N.img to read what
 * goes into it. Where the image directory has placed-shmem-N.img instead, the restorer fills object
 * N. Its guard listens at shared.socket in that directory. It learns N and the address, opens the
 * object (/proc/PID/map_files) and answers. Then CRIU reads the image, which has no pages, and continues.
 *
 * Without this library, or if nobody answers, CRIU finds no image and fails.
 */
#define _GNU_SOURCE
#include "placed.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

/* icecore/restorer/guard/guard_process.py has the same. */
struct request {
	uint64_t number, start;
};

/* The last writable shared mapping. CRIU has one thread. */
static const void *last;

void note_mapping(const void *start, int protection, int flags)
{
	if (start != MAP_FAILED && flags & MAP_SHARED && protection & PROT_WRITE)
		last = start;
}

__attribute__((visibility("default"))) void *shmat(int segment, const void *at, int flags)
{
	void *start = (void *)syscall(SYS_shmat, (long)segment, at, (long)flags);

	if (start != MAP_FAILED && !(flags & SHM_RDONLY))
		last = start;
	return start;
}

/* Connect to the restorer. The directory is named by its descriptor alone: after CRIU has changed
 * the root, no path leads there. */
static int connect_at(int directory)
{
	static const struct sockaddr_un name = {AF_UNIX, "shared.socket"};
	int end = -1, here = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);

	if (here < 0)
		return -1;
	if (!fchdir(directory)) {
		end = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
		if (end >= 0 && connect(end, (const struct sockaddr *)&name, sizeof name)) {
			close(end);
			end = -1;
		}
		if (fchdir(here) && end >= 0) {
			close(end);
			end = -1;
		}
	}
	close(here);
	return end;
}

/* Have the restorer open what is mapped at `last`; 0: it has done so. */
static int announce(int directory, uint64_t number)
{
	struct request request = {number, (uintptr_t)last};
	int end = connect_at(directory);
	char answer = 0;
	ssize_t got = -1;

	if (end < 0)
		return -1;
	if (send(end, &request, sizeof request, MSG_NOSIGNAL) == (ssize_t)sizeof request)
		while ((got = recv(end, &answer, 1, 0)) < 0 && errno == EINTR)
			;
	close(end);
	return got == 1 && answer == 'y' ? 0 : -1;
}

static int open_image(int directory, const char *path, int flags, mode_t mode)
{
	unsigned long number;
	char name[64];
	int length = -1;

	if (path && sscanf(path, "pagemap-shmem-%lu.img%n", &number, &length) == 1 && length > 0 &&
	    !path[length] && !(flags & O_CREAT)) {
		snprintf(name, sizeof name, "placed-shmem-%lu.img", number);
		int image = (int)syscall(SYS_openat, (long)directory, name, (long)flags, 0L);
		if (image < 0 && errno != ENOENT)
			return -1;
		if (image >= 0) {
			if (!last || announce(directory, number)) {
				close(image);
				errno = EIO;
				return -1;
			}
			last = NULL;
			return image;
		}
	}
	return (int)syscall(SYS_openat, (long)directory, path, (long)flags, (long)mode);
}

__attribute__((visibility("default"))) int openat64(int directory, const char *path, int flags, ...)
{
	mode_t mode = 0;

	if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) {
		va_list more;
		va_start(more, flags);
		mode = va_arg(more, mode_t);
		va_end(more);
	}
	return open_image(directory, path, flags, mode);
}

__attribute__((visibility("default"), alias("openat64"))) int openat(
    int directory, const char *path, int flags, ...);
