/* The driver's copies between the GPU and the memory of the process during a window, made by
 * several threads, and without writing zeros where there are some. */
#ifndef ICECORE_RESIDENT_COPIES_H
#define ICECORE_RESIDENT_COPIES_H

#include <stdbool.h>
#include <stddef.h>

#define COPIES_NAME "icecore-copy" /* what the threads are called */

/* Begin, with so many threads at most beside the driver's; every other thread but the agent's is
 * parked.
 *
 * huge: so many bytes of the mapping that the driver makes may be huge pages.
 * Return whether the driver's copies are made here. */
bool copies_begin(unsigned threads, size_t huge);

/* Leave the copies to the driver again, once the threads have ended. Does nothing where none began.
 */
void copies_end(void);

void copies_in_child(void);

#endif
