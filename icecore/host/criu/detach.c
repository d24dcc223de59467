/* Preloaded into a CRIU that restores: the death of a thread is no failure once other threads run.
 * A thread that dies before any thread runs still fails the restore.
 *
 * CRIU (4.0 to 4.2: criu/cr-restore.c, finalize_restore_detach) detaches the threads of the tree
 * one after the other, the root's first. Those that run may end those that do not run yet: a
 * supervisor kills a worker, a process exits or executes another program, which ends its other
 * threads. PTRACE_DETACH then returns ESRCH, and CRIU kills a healthy tree. If that tree has a pid
 * namespace, CRIU then waits for the end of its init, which waits for processes that CRIU traces: a
 * deadlock.
 *
 * CRIU has stopped each of these threads, and only its end takes a thread out of that stop. Before
 * the first is detached, all are checked: one that is missing then was killed from outside (by the
 * OOM killer, by hand), and the tree would run without it.
 */
#define _GNU_SOURCE
#include "traced.h"

#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "locks.h"

static bool all_there(void)
{
	for (size_t i = 0; i < traced.count; i++)
		if (traced.threads[i] && !is_there(traced.threads[i]))
			return false;
	return true;
}

/* Whether a process could not set its locks again. */
static bool locks_lost;

static int set_all_locks(void)
{
	locks_lost = locks_lost || set_locks(traced.threads, traced.count);
	return locks_lost ? -1 : 0;
}

/* CRIU (criu/action-scripts.c, run_shell_scripts) names the stage before it starts its script. It
 * goes on if that fails, and then fails when it detaches. */
__attribute__((visibility("default"))) int setenv(const char *name, const char *value, int overwrite)
{
	int (*next)(const char *, const char *, int) = dlsym(RTLD_NEXT, "setenv");

	if (traced.of == getpid() && !strcmp(name, "CRTOOLS_SCRIPT_ACTION") &&
	    !strcmp(value, "pre-resume") && set_all_locks())
		return -1;
	return next(name, value, overwrite);
}

long let_go(pid_t thread, void *address, void *data)
{
	bool ours = traced.of == getpid();

	if (ours && !traced.letting_go) {
		if (!all_there()) {
			errno = ESRCH;
			return -1;
		}
		if (set_all_locks())
			return -1;
	}
	long result = detach_now(thread, address, data);
	if (!ours || (result < 0 && errno != ESRCH))
		return result;
	forget(thread);
	if (result < 0 && !traced.letting_go)
		return result;
	traced.letting_go = true;
	return 0;
}
