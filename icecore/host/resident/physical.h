/* Physical memory of a device. */
#ifndef ICECORE_RESIDENT_PHYSICAL_H
#define ICECORE_RESIDENT_PHYSICAL_H

#include <stddef.h>
#include <stdint.h>

#include "driver.h"

/* waits for what others still hold */
CUresult physical_create(
    CUhandle *out, size_t size, const struct allocation_properties *properties);
void physical_forked(void); /* in the parent */
/* a client has memory of this process mapped for so long; 0: no more */
void physical_looked_at(int64_t nanoseconds);
void physical_in_child(void);

#endif
