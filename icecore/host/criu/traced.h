/* The threads that CRIU traces: what it seizes and lets go passes here. */
#ifndef ICECORE_CRIU_TRACED_H
#define ICECORE_CRIU_TRACED_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

/* The threads that this process has seized and not detached, in the order in which they were seized;
 * 0: one that was detached. A child of CRIU's starts with none: it traces nobody. */
extern struct traced {
	pid_t of;
	pid_t *threads;
	size_t count, room;
	size_t next; /* the thread after the one that was detached last: they are mostly detached in
			this order */
	bool letting_go; /* since the last one came, one has gone */
} traced;

/* Whether a thread is still there; what is stopped by a tracer can only be killed. */
bool is_there(pid_t thread);

/* Take a thread from the list; whether it was there. */
bool forget(pid_t thread);

/* PTRACE_DETACH itself. */
long detach_now(pid_t thread, void *address, void *data);

/* What happens on PTRACE_DETACH: each library has its own. */
long let_go(pid_t thread, void *address, void *data);

#endif
