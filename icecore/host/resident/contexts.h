/* What contexts have to do with memory that belongs to none; rule: as for the driver's own memory. */
#ifndef ICECORE_RESIDENT_CONTEXTS_H
#define ICECORE_RESIDENT_CONTEXTS_H

#include "driver.h"

/* The devices that were given access to the memory of `owner` (cuCtxEnablePeerAccess), as bits. They change under table_lock. */
uint64_t peers_of(CUdevice owner);
void peers_of_child(void);

#endif
