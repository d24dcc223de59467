/* A window: the device memory of a parked process is taken away and brought back. By the agent
 * alone. */
#ifndef ICECORE_RESIDENT_WINDOW_H
#define ICECORE_RESIDENT_WINDOW_H

#include <stdint.h>

#include "protocol.h"

int window_unmap(
    int64_t until, const struct resident_message *wanted, struct resident_message *answer);
int window_map(void); /* with the descriptors that were given, or the keeper's */
int window_give(uint64_t identity, int descriptor);
void window_drop_given(void);

#endif
