/* Our forms of the driver's calls (allocate.c, spare.c, handles.c, contexts.c, capture.c, ipc.c,
 * events.c, interpose.c). Each answers as the driver's own would. */
#ifndef ICECORE_RESIDENT_HOOKS_H
#define ICECORE_RESIDENT_HOOKS_H

#include "driver.h"

#define OURS(name, arguments) CUresult resident_##name arguments;
#define NOT_OURS(name, arguments)
DRIVER_CALLS(NOT_OURS, OURS, OURS)
#undef OURS
#undef NOT_OURS

#endif
