/* Requests that icecore/host/criu/conntrack.c did not send, for the other files of the library. */
#ifndef ICECORE_CONNTRACK_H
#define ICECORE_CONNTRACK_H

#include <stdbool.h>

bool is_unasked(int descriptor);

#endif
