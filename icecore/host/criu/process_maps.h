/* The mappings of the process that CRIU is at. */
#ifndef ICECORE_PROCESS_MAPS_H
#define ICECORE_PROCESS_MAPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct mapping {
	uint64_t start, end;
	bool hideable; /* kept from CRIU (pages.c) */
	bool of_no_file;
};

/* Whose directory or file of /proc a descriptor is: what was found last. */
struct owner {
	int descriptor;
	dev_t device;
	ino_t inode;
	pid_t pid;
};

/* Return the file in which everything is recorded that CRIU does not see (ICECORE_HIDDEN); NULL:
 * CRIU sees everything. */
const char *hidden_file(void);

/* Return the mappings of a process, ascending; NULL if they cannot be read. They are kept until
 * another process is asked for. */
const struct mapping *mappings_of(pid_t pid, size_t *count);

/* Return the first mapping that ends behind an address, or the end of the array. */
const struct mapping *mapping_behind(const struct mapping *mappings, size_t count, uint64_t at);

/* Return whether this is the name of a mapping of no file in a directory /proc/PID/map_files. */
bool names_no_file(int directory, const char *name);

/* Return the process to which a descriptor of /proc/PID/NAME belongs; 0: it is none, or our own. */
pid_t owner_of(int descriptor, const char *name, struct owner *last);

#endif
