/* CUDA's legacy IPC of resident memory. Not under table_lock. */
#ifndef ICECORE_RESIDENT_IPC_H
#define ICECORE_RESIDENT_IPC_H

#include <stdint.h>

#include "driver.h"

/* The handle of memory or of an event, as applications pass it around. Handles of the same memory
 * are equal: PyTorch and others use them as keys of what they have opened. */
struct ipc_reference {
	uint8_t magic[16];
	uint8_t token[16]; /* of the process that made it */
	uint64_t identity;
	uint8_t reserved[24];
};

void ipc_forget_context(CUcontext context); /* which is gone */
void ipc_in_child(void);

#endif
