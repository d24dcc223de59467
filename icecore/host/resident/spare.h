/* Memory that was released, kept for the next who asks. Not under table_lock, but for spare_keep.
 */
#ifndef ICECORE_RESIDENT_SPARE_H
#define ICECORE_RESIDENT_SPARE_H

#include <stdbool.h>
#include <stdint.h>

#include "table.h"

/* whether one that was released, and waited for, stays for the next who asks */
bool spare_keep(struct allocation *what);
/* by context, device and size; whether `address` is there now */
bool spare_take(struct allocation *wanted);
/* NULL: of all contexts; `gone`: it has been destroyed */
void spare_give_back(CUcontext context, bool gone);
void spare_give_back_old(void); /* by the agent */
/* how many were so far: asked before memory turns out to be short */
uint64_t spare_given_back(void);
/* memory is short: gives all back; whether there is more of it than before */
bool spare_make_room(uint64_t before);
/* with which the driver is asked: of memory that was released, one that is nobody's */
CUdeviceptr spare_hidden(CUdeviceptr address);
void spare_at_exit(void); /* what libcuda tears down is not given back any more */
void spare_in_child(void);

#endif
