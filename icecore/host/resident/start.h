/* How modules start the agent, which lies above them. */
#ifndef ICECORE_RESIDENT_START_H
#define ICECORE_RESIDENT_START_H

#include <stdbool.h>

/* Require an agent before there is resident memory; return whether one listens. If not, there must
 * be no resident memory. agent.c sets the pointer statically: an application's constructor may
 * allocate before one of ours would run. */
extern bool (*const start_agent)(void);

/* The same when a context begins. Nothing depends on it yet, so this waits for a short time only. */
extern void (*const start_agent_soon)(void);

#endif
