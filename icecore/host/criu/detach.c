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
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "locks.h"

/* The threads that this process has seized and not detached. A child of CRIU's starts with none: it
 * traces nobody. */
static struct {
	pid_t of;
	pid_t *threads;
	size_t count, room;
	size_t next; /* the thread after the one that was detached last: they are detached in the
			order in which they were seized */
	bool letting_go; /* since the last one came, one has gone */
} seized;

static void remember(pid_t thread)
{
	seized.letting_go = false;
	if (seized.of != getpid()) {
		seized.of = getpid();
		seized.count = seized.next = 0;
	}
	if (seized.count == seized.room) {
		size_t room = seized.room ? 2 * seized.room : 1024;
		pid_t *threads = realloc(seized.threads, room * sizeof *threads);
		if (!threads)
			return; /* then nobody asks whether it is there */
		seized.threads = threads;
		seized.room = room;
	}
	seized.threads[seized.count++] = thread;
}

static void forget(pid_t thread)
{
	for (size_t i = 0; i < seized.count; i++) {
		size_t at = (seized.next + i) % seized.count;
		if (seized.threads[at] == thread) {
			seized.threads[at] = 0;
			seized.next = at + 1;
			return;
		}
	}
}

static bool all_there(void)
{
	unsigned long message;

	for (size_t i = 0; i < seized.count; i++)
		if (seized.threads[i] &&
		    syscall(SYS_ptrace, (long)PTRACE_GETEVENTMSG, (long)seized.threads[i], NULL,
			&message) < 0)
			return false;
	return true;
}

static long detach(pid_t thread, void *address, void *data)
{
	bool ours = seized.of == getpid();

	if (ours && !seized.letting_go) {
		if (!all_there()) {
			errno = ESRCH;
			return -1;
		}
		if (set_locks(seized.threads, seized.count))
			return -1;
	}
	long result = syscall(SYS_ptrace, (long)PTRACE_DETACH, (long)thread, address, data);
	if (!ours || (result < 0 && errno != ESRCH))
		return result;
	forget(thread);
	if (result < 0 && !seized.letting_go)
		return result;
	seized.letting_go = true;
	return 0;
}

__attribute__((visibility("default"))) long ptrace(enum __ptrace_request request, ...)
{
	va_list arguments;
	va_start(arguments, request);
	pid_t thread = va_arg(arguments, pid_t);
	void *address = va_arg(arguments, void *);
	void *data = va_arg(arguments, void *);
	va_end(arguments);

	if (request == PTRACE_DETACH)
		return detach(thread, address, data);
	/* The kernel stores what it has read where the fourth argument points; the C library's
	 * function returns it. */
	long word;
	bool reads =
	    request == PTRACE_PEEKTEXT || request == PTRACE_PEEKDATA || request == PTRACE_PEEKUSER;
	long result =
	    syscall(SYS_ptrace, (long)request, (long)thread, address, reads ? &word : data);
	if (reads && result >= 0) {
		errno = 0;
		return word;
	}
	if (request == PTRACE_SEIZE && result >= 0)
		remember(thread);
	return result;
}
