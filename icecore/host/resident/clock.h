/* The clock of leases and time-outs. */
#ifndef ICECORE_RESIDENT_CLOCK_H
#define ICECORE_RESIDENT_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline int64_t clock_now(void) /* nanoseconds, monotonic */
{
	struct timespec at;

	clock_gettime(CLOCK_MONOTONIC, &at);
	return at.tv_sec * 1000000000ll + at.tv_nsec;
}

#endif
