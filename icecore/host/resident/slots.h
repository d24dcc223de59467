/* The slots of a loaded library, in which the loader put the addresses of the functions that the
 * library imports from others. */
#ifndef ICECORE_RESIDENT_SLOTS_H
#define ICECORE_RESIDENT_SLOTS_H

#include <link.h>
#include <stdbool.h>

struct replacement {
	const char *name;
	void *function;
};

/* Make a library call these functions instead (at most 32, in at most 16 slots; a name of NULL ends
 * them). Return as bits which of them have a slot. Only one thread may call this at a time. */
unsigned slots_replace(const struct link_map *library, const struct replacement *by);

/* Undo slots_replace; return whether all slots have their former addresses. */
bool slots_put_back(void);

#endif
