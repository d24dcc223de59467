/* Loaded into a CRIU that restores: to let go of a thread that has been killed is no failure; rule: nothing else is different.
 *
 * CRIU (4.0 to 4.2: criu/cr-restore.c, finalize_restore_detach) lets the threads of the tree go one after the other, the root's first. What runs already may end what does
 * not run yet: a supervisor kills a worker, a process ends or executes another program and with that its own threads. PTRACE_DETACH says ESRCH then, and CRIU kills a
 * tree that has done nothing wrong. Where that has a pid namespace, CRIU then waits for the end of its init, which waits for processes that CRIU traces: for ever.
 *
 * CRIU has stopped each of these threads, and nothing but its end takes a thread out of that. */
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <unistd.h>

__attribute__((visibility("default"))) long ptrace(enum __ptrace_request request, ...)
{
	va_list arguments;
	va_start(arguments, request);
	long pid = va_arg(arguments, int);
	void *address = va_arg(arguments, void *);
	void *data = va_arg(arguments, void *);
	va_end(arguments);

	/* The kernel puts what it has read where the fourth argument points; the C library's function returns it. */
	long word;
	bool reads = request == PTRACE_PEEKTEXT || request == PTRACE_PEEKDATA || request == PTRACE_PEEKUSER;
	long result = syscall(SYS_ptrace, (long)request, pid, address, reads ? &word : data);
	if (reads && result >= 0) {
		errno = 0;
		return word;
	}
	if (result < 0 && errno == ESRCH && request == PTRACE_DETACH)
		return 0;
	return result;
}
