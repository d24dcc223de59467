/* The threads that CRIU traces. Every seize and detach passes through here. */
#ifndef ICECORE_CRIU_TRACED_H
#define ICECORE_CRIU_TRACED_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

/* The threads that this process has seized, in that order; 0 replaces one that was detached. A
 * child of CRIU starts with an empty list, because it traces nothing. */
extern struct traced {
	pid_t of;
	pid_t *threads;
	size_t count, room;
	size_t next; /* index after the thread that was detached last: most are detached in order */
	bool letting_go; /* one was detached since the last was seized */
} traced;

/* Return whether a traced thread still exists. Only SIGKILL ends one that a tracer has stopped. */
bool is_there(pid_t thread);

/* Remove a thread from the list; return whether it was listed. */
bool forget(pid_t thread);

/* Detach at once. */
long detach_now(pid_t thread, void *address, void *data);

/* Handle CRIU's PTRACE_DETACH. Each library defines its own. */
long let_go(pid_t thread, void *address, void *data);

#endif
