/* The POSIX locks of restored processes. */
#ifndef ICECORE_CRIU_LOCKS_H
#define ICECORE_CRIU_LOCKS_H

#include <stddef.h>
#include <sys/types.h>

/* Have processes set their locks again. -1: one could not; the log says why.
 *
 * threads: that this process traces, and that stand; 0: none in this place. */
int set_locks(const pid_t *threads, size_t count);

#endif
