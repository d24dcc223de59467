/* Parking of all threads of the process, and the calls in which none is parked. */
#ifndef ICECORE_RESIDENT_THREADS_H
#define ICECORE_RESIDENT_THREADS_H

#include <stdint.h>

#include "protocol.h"

void threads_enter(void); /* from here on this thread parks itself only as it leaves */
void threads_leave(void);

/* By the agent alone. */
/* Return 0, EAGAIN if some threads block the signal, or another errno, after which nobody is
 * parked. With patience nobody is parked in the driver; answer->flags: how many run on for that. */
int threads_park_begin(int64_t until, int64_t patience_for_busy, struct resident_message *answer);
/* Wait for threads that were inside. EAGAIN: find another moment. After any other result than 0,
 * nobody is parked. */
int threads_park_settle(int64_t until);
void threads_park_end(void);
int threads_start(void); /* once */
void threads_in_child(void);

#endif
