/* What contexts have to do with memory that belongs to none; rule: as for the driver's own memory. */
#ifndef ICECORE_RESIDENT_CONTEXTS_H
#define ICECORE_RESIDENT_CONTEXTS_H

#include <stdbool.h>

#include "driver.h"

/* Whether `accessing` was given access to the memory of `owner` (cuCtxEnablePeerAccess). */
bool peer_enabled(CUdevice accessing, CUdevice owner);
void peers_of_child(void);

#endif
