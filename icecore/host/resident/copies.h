/* The driver's copies between the GPU and the memory of the process during a window. Several
 * threads make them, and do not write zeros to memory that already reads as zeros. */
#ifndef ICECORE_RESIDENT_COPIES_H
#define ICECORE_RESIDENT_COPIES_H

#include <stdbool.h>
#include <stddef.h>

#define COPIES_NAME "icecore-copy" /* the name of the threads */

/* Replace the driver's copies; return whether this succeeded. Every thread except the driver's and
 * the agent's must be parked.
 *
 * threads: the most threads that copy, in addition to the driver's.
 * huge: how many bytes of the driver's new mapping may be huge pages. */
bool copies_begin(unsigned threads, size_t huge);

/* Return the copies to the driver and wait until the threads have ended. If the driver still
 * copies, give up after a second; the next call tries again. If the copies were not replaced, do
 * nothing. */
void copies_end(void);

void copies_in_child(void);

#endif
