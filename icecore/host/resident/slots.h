/* What a loaded library calls: the slots in which the loader put the addresses of functions that it
 * has from other libraries. */
#ifndef ICECORE_RESIDENT_SLOTS_H
#define ICECORE_RESIDENT_SLOTS_H

#include <link.h>
#include <stdbool.h>

struct replacement {
	const char *name;
	void *function;
};

/* Make a library call these functions instead (ended by a name of NULL, 32 at most); return which
 * of them it has a slot for, as bits. Nothing else may do so at the same time. */
unsigned slots_replace(const struct link_map *library, const struct replacement *by);

/* Undo it; return whether all is as it was. */
bool slots_put_back(void);

#endif
