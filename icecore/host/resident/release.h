/* The end of resident memory: at once, or once it can be waited for. Under table_lock, but for
 * release_all_deferred. */
#ifndef ICECORE_RESIDENT_RELEASE_H
#define ICECORE_RESIDENT_RELEASE_H

#include <stdbool.h>
#include <stdint.h>

#include "table.h"

/* lets go of table_lock for a while: takes one whose use has ended off the table, the device and
 * the keeper */
void release_now(struct allocation *at);
void release_defer(struct allocation *what);
/* what was deferred until then (release_clock); the context has been synchronised since */
void release_deferred(CUcontext context, uint64_t until);
uint64_t release_clock(void);
/* of the current context, now that memory is short: whether there was any */
bool release_all_deferred(CUcontext context);
void release_in_child(void);

#endif
