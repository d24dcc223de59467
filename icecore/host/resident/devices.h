/* What is known of each GPU, and which may reach another's memory. */
#ifndef ICECORE_RESIDENT_DEVICES_H
#define ICECORE_RESIDENT_DEVICES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "table.h"

#define DEVICES 64

struct device {
	bool known, usable, rdma;
	size_t granularity;
	uint8_t uuid[16];
};

/* Not under table_lock. */
struct device devices_find(CUdevice number);
bool devices_usable(CUdevice number);
/* gives or takes access to the owner's memory, also what there is now */
void devices_change_peer(CUdevice accessing, CUdevice owner, bool to);

/* Under table_lock. */
const uint8_t *devices_uuid(CUdevice number);
void devices_refresh(void); /* after a restore, which may have been onto other GPUs */
/* the devices are bits */
CUresult devices_change_access(const struct allocation *what, uint64_t opened, uint64_t closed);
/* its own device's and that of the peers */
CUresult devices_set_access(const struct allocation *what);

struct allocation_properties devices_properties(CUdevice device, bool rdma);
/* that were given access to its memory (cuCtxEnablePeerAccess), as bits; they change under
 * table_lock */
uint64_t devices_peers(CUdevice owner);
void devices_in_child(void);

#endif
