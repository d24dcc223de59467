/* CUDA's legacy IPC of resident memory. Not under table_lock. */
#ifndef ICECORE_RESIDENT_IPC_H
#define ICECORE_RESIDENT_IPC_H

#include "driver.h"

void ipc_forget_context(CUcontext context); /* which is gone */
void ipc_in_child(void);

#endif
