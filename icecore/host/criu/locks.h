/* The POSIX locks of restored processes. */
#ifndef ICECORE_CRIU_LOCKS_H
#define ICECORE_CRIU_LOCKS_H

#include <stddef.h>
#include <sys/types.h>

/* Have processes set their POSIX locks again. -1: a process failed to; the log says why.
 *
 * threads: stopped threads that this process traces; entries of 0 are skipped. */
int set_locks(const pid_t *threads, size_t count);

#endif
