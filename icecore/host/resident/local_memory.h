/* The local memory of contexts. By the agent alone, with every other thread parked. */
#ifndef ICECORE_RESIDENT_LOCAL_MEMORY_H
#define ICECORE_RESIDENT_LOCAL_MEMORY_H

#include "driver.h"

void local_memory_shrink(CUcontext context); /* which has been synchronised */
void local_memory_grow(void); /* of all that were shrunk */

#endif
