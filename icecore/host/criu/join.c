/* Preloaded into a CRIU that restores: it joins cgroups and a session keyring before it starts, and
 * the tree inherits both. If it cannot, CRIU does not start.
 *
 * CRIU with --manage-cgroups=ignore leaves the tree in its own cgroup, and does not know keyrings.
 * ICECORE_CGROUPS holds files cgroup.procs, separated by newlines, which a cgroup's name cannot
 * contain; users name groups. ICECORE_GROUP is such a file of a cgroup of the instance's own, without
 * which it runs if the kernel refuses: dumps of trees that never rest are then tried more often.
 * ICECORE_KEYRING is set where the tree must not possess the keys of the session that restores it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#define JOIN_SESSION_KEYRING 1

static void fail(const char *what)
{
	perror(what);
	_exit(1);
}

/* Open a file cgroup.procs for writing; nothing else is ever written to. */
static int open_group(const char *path)
{
	static const char last[] = "/cgroup.procs";
	size_t length = strlen(path), end = sizeof last - 1;
	struct statfs about;

	if (*path != '/' || length < end || strcmp(path + length - end, last)) {
		errno = EINVAL;
		return -1;
	}
	int file = open(path, O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	if (file < 0)
		return -1;
	if (fstatfs(file, &about) < 0 ||
	    (about.f_type != CGROUP_SUPER_MAGIC && about.f_type != CGROUP2_SUPER_MAGIC)) {
		close(file);
		errno = EINVAL;
		return -1;
	}
	return file;
}

__attribute__((constructor)) static void join(void)
{
	const char *named = getenv("ICECORE_CGROUPS");
	char *groups = named ? strdup(named) : NULL;

	for (char *path = groups; path && *path;) {
		char *end = strchr(path, '\n');
		if (end)
			*end = 0;
		int file = open_group(path);
		if (file < 0 || write(file, "0", 1) != 1)
			fail(path);
		close(file);
		path = end ? end + 1 : NULL;
	}
	free(groups);
	const char *own = getenv("ICECORE_GROUP");
	int file = own ? open_group(own) : -1;
	if (file >= 0) {
		if (write(file, "0", 1) != 1)
			perror(own);
		close(file);
	}
	if (getenv("ICECORE_KEYRING") && syscall(SYS_keyctl, JOIN_SESSION_KEYRING, NULL) < 0)
		fail("keyctl");
	unsetenv("ICECORE_CGROUPS"); /* programs that CRIU starts are in the groups already */
	unsetenv("ICECORE_GROUP");
	unsetenv("ICECORE_KEYRING");
}
