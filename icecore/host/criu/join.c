/* Preloaded into a CRIU that restores: it joins cgroups and a session keyring before it starts, and
 * the tree inherits both. If it cannot, CRIU does not start.
 *
 * CRIU with --manage-cgroups=ignore leaves the tree in its own cgroup, and does not know keyrings.
 * ICECORE_CGROUPS holds files cgroup.procs, separated by colons; ICECORE_KEYRING is set where the
 * tree must not possess the keys of the session that restores it.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define JOIN_SESSION_KEYRING 1

static void fail(const char *what)
{
	perror(what);
	_exit(1);
}

__attribute__((constructor)) static void join(void)
{
	const char *named = getenv("ICECORE_CGROUPS");
	char *groups = named ? strdup(named) : NULL;

	for (char *path = groups; path && *path;) {
		char *end = strchr(path, ':');
		if (end)
			*end = 0;
		int file = open(path, O_WRONLY | O_CLOEXEC);
		if (file < 0 || write(file, "0", 1) != 1)
			fail(path);
		close(file);
		path = end ? end + 1 : NULL;
	}
	free(groups);
	if (getenv("ICECORE_KEYRING") && syscall(SYS_keyctl, JOIN_SESSION_KEYRING, NULL) < 0)
		fail("keyctl");
	unsetenv("ICECORE_CGROUPS"); /* programs that CRIU starts are in the groups already */
	unsetenv("ICECORE_KEYRING");
}
