/* Preloaded into CRIU: a cgroup that CRIU freezes (--freeze-cgroup) is quiet once the write that
 * freezes it returns.
 *
 * CRIU (4.0 to 4.2: criu/seize.c, freeze_processes) polls the state of the cgroup every 100 ms,
 * which would be a large part of a window; tasks freeze within a millisecond. It also takes what is
 * frozen for what can be seized, which is wrong in two cases:
 *
 * - a parent that waits in vfork(2) counts as frozen, but cannot be stopped before its child has
 *   executed a program, and the child is seized: CRIU would wait for ever;
 * - a process that is about to become a zombie no longer counts, and CRIU fails on it.
 *
 * Both pass quickly. So the cgroup is thawed for a moment and frozen again, for at most
 * MOST_SECONDS; then CRIU goes on with what there is. The cgroup is frozen only between this write
 * and CRIU's next one, which thaws it once every task is seized.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/kcmp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MOST_SECONDS 1
#define POLL_NS 200000
#define FIRST_PATIENCE_NS 50000000 /* for a cgroup that does not freeze; doubles */
#define PAUSE_NS 1000000           /* between thawing and freezing; grows */
#define STATE 32                   /* bytes that CRIU writes: freezer_write_state */

struct freezer {
	int file;
	bool second; /* version 2 */
	char folder[PATH_MAX];
};

__attribute__((visibility("default"))) ssize_t write(int file, const void *data, size_t size);

static ssize_t put(int file, const char *text)
{
	return syscall(SYS_pwrite64, (long)file, text, strlen(text), 0L);
}

static void set(const struct freezer *freezer, bool frozen)
{
	put(freezer->file, freezer->second ? (frozen ? "1" : "0") : (frozen ? "FROZEN" : "THAWED"));
}

static long long now(void)
{
	struct timespec at;

	clock_gettime(CLOCK_MONOTONIC, &at);
	return at.tv_sec * 1000000000ll + at.tv_nsec;
}

static void pause_for(long ns)
{
	struct timespec wait = {ns / 1000000000, ns % 1000000000};

	nanosleep(&wait, NULL);
}

static bool contains(const char *folder, const char *name, const char *wanted)
{
	char path[PATH_MAX], text[512];

	if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path)
		return false;
	int file = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t size = file < 0 ? -1 : read(file, text, sizeof text - 1);

	if (file >= 0)
		close(file);
	if (size < 0)
		return false;
	text[size] = 0;
	return strstr(text, wanted) != NULL;
}

static bool is_frozen(const struct freezer *freezer)
{
	return freezer->second ? contains(freezer->folder, "cgroup.events", "frozen 1")
			       : contains(freezer->folder, "freezer.state", "FROZEN");
}

/* State and parent of a process; false: it is gone. */
static bool status_of(long pid, char *state, long *parent)
{
	char path[64], text[512];

	snprintf(path, sizeof path, "/proc/%ld/stat", pid);
	int file = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t size = file < 0 ? -1 : read(file, text, sizeof text - 1);

	if (file >= 0)
		close(file);
	if (size <= 0)
		return false;
	text[size] = 0;
	char *end = strrchr(text, ')'); /* the name may contain anything */
	return end && sscanf(end + 1, " %c %ld", state, parent) == 2;
}

/* Whether a thread has a child that is exiting: not a zombie yet, and no member of any cgroup. */
static bool has_exiting_child(long thread)
{
	char path[96];
	long child, parent;
	bool found = false;

	snprintf(path, sizeof path, "/proc/%ld/task/%ld/children", thread, thread);
	FILE *file = fopen(path, "re");
	if (!file)
		return false;
	while (!found && fscanf(file, "%ld", &child) == 1) {
		char state = 'Z', name[64], line[256];
		unsigned long flags = 0;

		if (!status_of(child, &state, &parent) || state == 'Z')
			continue;
		snprintf(name, sizeof name, "/proc/%ld/stat", child);
		FILE *about = fopen(name, "re");
		if (about && fgets(line, sizeof line, about)) {
			char *end = strrchr(line, ')');
			if (end)
				sscanf(end + 1, " %*c %*d %*d %*d %*d %*d %lu", &flags);
		}
		if (about)
			fclose(about);
		found = state == 'X' || flags & 4; /* PF_EXITING */
	}
	fclose(file);
	return found;
}

static bool shares_memory_with_parent(long pid)
{
	char state;
	long parent;

	return status_of(pid, &state, &parent) && parent > 1 &&
	    syscall(SYS_kcmp, pid, parent, (long)KCMP_VM, 0L, 0L) == 0;
}

/* Whether any member of a list of the cgroup matches. */
static bool any(const char *folder, const char *list, bool (*matches)(long))
{
	char path[PATH_MAX];
	long pid;
	bool found = false;

	if (snprintf(path, sizeof path, "%s/%s", folder, list) >= (int)sizeof path)
		return false;
	FILE *file = fopen(path, "re");
	if (!file)
		return false;
	while (!found && fscanf(file, "%ld", &pid) == 1)
		found = matches(pid);
	fclose(file);
	return found;
}

/* Whether something in the frozen cgroup, or in one below it, is in the middle of a step. */
static bool is_busy(const struct freezer *freezer, const char *folder)
{
	if (any(folder, "cgroup.procs", shares_memory_with_parent) ||
	    any(folder, freezer->second ? "cgroup.threads" : "tasks", has_exiting_child))
		return true;
	DIR *entries = opendir(folder);
	if (!entries)
		return false;
	bool found = false;
	for (struct dirent *entry; !found && (entry = readdir(entries));) {
		char below[PATH_MAX];

		if (entry->d_type == DT_DIR && strcmp(entry->d_name, ".") &&
		    strcmp(entry->d_name, "..") &&
		    snprintf(below, sizeof below, "%s/%s", folder, entry->d_name) <
			(int)sizeof below)
			found = is_busy(freezer, below);
	}
	closedir(entries);
	return found;
}

static void freeze(const struct freezer *freezer)
{
	long long end = now() + MOST_SECONDS * 1000000000ll;
	long patience = FIRST_PATIENCE_NS;

	for (long pause = PAUSE_NS;; pause += PAUSE_NS) {
		set(freezer, true);
		long long until = now() + patience;
		while (!is_frozen(freezer) && now() < until)
			pause_for(POLL_NS);
		bool frozen = is_frozen(freezer);
		if (now() >= end || (frozen && !is_busy(freezer, freezer->folder)))
			return;
		if (!frozen)
			patience *= 2;
		set(freezer, false);
		pause_for(pause);
	}
}

/* The cgroup whose control file this descriptor is. */
static bool is_control(int file, struct freezer *freezer)
{
	char name[64];

	snprintf(name, sizeof name, "/proc/self/fd/%d", file);
	ssize_t size = readlink(name, freezer->folder, sizeof freezer->folder - 1);
	if (size <= 0)
		return false;
	freezer->folder[size] = 0;
	char *last = strrchr(freezer->folder, '/');
	if (!last)
		return false;
	freezer->second = !strcmp(last, "/cgroup.freeze");
	if (!freezer->second && strcmp(last, "/freezer.state"))
		return false;
	*last = 0;
	freezer->file = file;
	return true;
}

ssize_t write(int file, const void *data, size_t size)
{
	struct freezer freezer;

	if (size != STATE || (strcmp(data, "FROZEN") && strcmp(data, "1")) ||
	    !is_control(file, &freezer))
		return syscall(SYS_write, (long)file, data, size);
	freeze(&freezer);
	return (ssize_t)size;
}
