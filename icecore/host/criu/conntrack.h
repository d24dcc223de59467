#ifndef ICECORE_CONNTRACK_H
#define ICECORE_CONNTRACK_H

#include <stdbool.h>

/* Return whether icecore/host/criu/conntrack.c withheld the last request on this socket, so that its
 * answer must be empty. True only once for each request. */
bool take_unasked(int descriptor);

#endif
