/* The driver's copies between the GPU and the memory of the process during a window, made by several
 * threads, and without writing zeros where there are some. */
#ifndef ICECORE_RESIDENT_COPIES_H
#define ICECORE_RESIDENT_COPIES_H

#include <stdbool.h>
#include <stddef.h>

/* What the threads are called: what holds all threads while the driver works lets these run
 * (icecore.host.cuda.threads has the same name). */
#define COPIES_NAME "icecore-copy"

/* Begin, with so many threads beside the driver's; every other thread but the agent's is parked.
 *
 * huge: so many bytes of the mapping that the driver makes may be huge pages.
 * Return whether the driver's copies are made here. */
bool copies_begin(unsigned threads, size_t huge);

/* End the threads, and leave the copies to the driver. Does nothing where none began. */
void copies_end(void);

void copies_in_child(void);

#endif
