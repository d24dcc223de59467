/* Whether icecore/host/criu/conntrack.c did not send the last request through this socket, whose answer
 * is empty then; asked once. */
#ifndef ICECORE_CONNTRACK_H
#define ICECORE_CONNTRACK_H

#include <stdbool.h>

bool take_unasked(int descriptor);

#endif
