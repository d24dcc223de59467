/* Preloaded into CRIU: ptrace(2) maintains the list of traced threads, and PTRACE_DETACH calls the
 * library's let_go(). */
#include "traced.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <unistd.h>

struct traced traced;

static void remember(pid_t thread)
{
	traced.letting_go = false;
	if (traced.of != getpid()) {
		traced.of = getpid();
		traced.count = traced.next = 0;
	}
	if (traced.count == traced.room) {
		size_t room = traced.room ? 2 * traced.room : 1024;
		pid_t *threads = realloc(traced.threads, room * sizeof *threads);
		if (!threads)
			return; /* the thread is not tracked */
		traced.threads = threads;
		traced.room = room;
	}
	traced.threads[traced.count++] = thread;
}

bool forget(pid_t thread)
{
	for (size_t i = 0; i < traced.count; i++) {
		size_t at = (traced.next + i) % traced.count;
		if (traced.threads[at] == thread) {
			traced.threads[at] = 0;
			traced.next = at + 1;
			return true;
		}
	}
	return false;
}

bool is_there(pid_t thread)
{
	unsigned long message;

	return syscall(SYS_ptrace, (long)PTRACE_GETEVENTMSG, (long)thread, NULL, &message) >= 0;
}

long detach_now(pid_t thread, void *address, void *data)
{
	return syscall(SYS_ptrace, (long)PTRACE_DETACH, (long)thread, address, data);
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
		return let_go(thread, address, data);
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
