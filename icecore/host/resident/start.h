/* How modules that make resident memory start the agent, which lies above them. */
#ifndef ICECORE_RESIDENT_START_H
#define ICECORE_RESIDENT_START_H

#include <stdbool.h>

/* Requires an agent before there is resident memory; whether one listens: else there must be none.
 * agent.c sets it, statically: an application's constructor may allocate before one of ours would
 * run. */
extern bool (*const start_agent)(void);

#endif
