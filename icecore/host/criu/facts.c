/* Preloaded into CRIU: keeps the results of its kernel probes where CRIU itself cannot.
 *
 * CRIU (4.0 to 4.2: criu/kerndat.c) probes the kernel when it starts, which takes 40 to 120 ms, and
 * keeps the result in /run/criu.kdat until the next boot. Where /run is not a tmpfs, as in many
 * containers, it probes again at each start. There, this library redirects the file to a directory
 * that root owns and only root can write to ($ICECORE_KERNEL_FACTS). The file's name contains the
 * boot id and CRIU's capabilities, and identifies CRIU's program. No result is kept if CRIU lacks
 * permission to use userfaultfd: a later CRIU that has permission would restore without its events.
 *
 * Without that variable, or if the directory is missing or fails these checks, CRIU works as usual.
 */
#define _GNU_SOURCE
#include "names.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/magic.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#define KNOWN "/run/criu.kdat"
#define UNFINISHED KNOWN ".tmp"
#define BOOT 36

static int folder = -1, unfinished = -1;
static char finished_name[160], unfinished_name[192];

/* Prepare the names; return whether CRIU's file is moved. */
static int moved(void)
{
	static int state; /* 0: unknown, 1: moved, -1: left where it is */
	const char *path = getenv("ICECORE_KERNEL_FACTS");
	struct statfs run;
	struct stat about, program;
	struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
	struct __user_cap_data_struct own[_LINUX_CAPABILITY_U32S_3];
	char boot[BOOT + 1] = "";

	if (state)
		return state > 0;
	state = -1;
	if (!path || syscall(SYS_statfs, "/run", &run) || run.f_type == TMPFS_MAGIC)
		return 0;
	int faults = (int)syscall(SYS_userfaultfd, (long)O_CLOEXEC);
	if (faults < 0)
		return 0;
	close(faults);
	if (syscall(SYS_capget, &header, own))
		return 0;
	int random = (int)syscall(
	    SYS_openat, AT_FDCWD, "/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC, 0);
	if (random < 0)
		return 0;
	ssize_t got = read(random, boot, BOOT);
	close(random);
	if (got != BOOT || stat("/proc/self/exe", &program))
		return 0;
	folder = (int)syscall(
	    SYS_openat, AT_FDCWD, path, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0);
	if (folder < 0)
		return 0;
	if (fstat(folder, &about) || about.st_uid || about.st_mode & (S_IWGRP | S_IWOTH)) {
		close(folder);
		return 0;
	}
	snprintf(finished_name, sizeof finished_name, "%s-%lx-%lx-%llx-%lx-%x%08x", boot,
	    (unsigned long)program.st_dev, (unsigned long)program.st_ino,
	    (unsigned long long)program.st_mtim.tv_sec, (unsigned long)program.st_mtim.tv_nsec,
	    own[1].effective, own[0].effective);
	snprintf(unfinished_name, sizeof unfinished_name, "%s.%d", finished_name, getpid());
	state = 1;
	return 1;
}

static const char *name_of(const char *path)
{
	if (!path || strncmp(path, KNOWN, sizeof KNOWN - 1))
		return NULL;
	if (!path[sizeof KNOWN - 1])
		return moved() ? finished_name : NULL;
	return !strcmp(path, UNFINISHED) && moved() ? unfinished_name : NULL;
}

__attribute__((visibility("default"))) int open64(const char *path, int flags, ...)
{
	const char *name = name_of(path);
	mode_t mode = 0;

	if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) {
		va_list more;
		va_start(more, flags);
		mode = va_arg(more, mode_t);
		va_end(more);
	}
	if (!name)
		return make_file(path, flags, mode);
	int file = (int)syscall(
	    SYS_openat, (long)folder, name, (long)(flags | O_NOFOLLOW | O_CLOEXEC), (long)mode);
	if (name == unfinished_name)
		unfinished = file;
	return file;
}

/* CRIU keeps the file only on a tmpfs, because it must not outlast the boot. */
__attribute__((visibility("default"))) int fstatfs64(int file, struct statfs64 *about)
{
	int failed = (int)syscall(SYS_fstatfs, (long)file, about);

	if (!failed && file >= 0 && file == unfinished) {
		about->f_type = TMPFS_MAGIC;
		unfinished = -1;
	}
	return failed;
}

__attribute__((visibility("default"))) int rename(const char *old, const char *new)
{
	const char *from = name_of(old), *to = name_of(new);

	if (from && to)
		return (int)syscall(SYS_renameat2, (long)folder, from, (long)folder, to, 0L);
	return change_name(old, new);
}

__attribute__((visibility("default"))) int unlink(const char *path)
{
	const char *name = name_of(path);

	return name ? (int)syscall(SYS_unlinkat, (long)folder, name, 0L)
	            : remove_name(AT_FDCWD, path, 0);
}
