/* What icecore/host/criu/reserve.c tells placed.c. */
#ifndef ICECORE_PLACED_H
#define ICECORE_PLACED_H

/* CRIU has mapped something at `start`. */
void note_mapping(const void *start, int protection, int flags);

#endif
