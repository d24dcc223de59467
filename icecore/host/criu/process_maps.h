/* The mappings of the process that CRIU handles. */
#ifndef ICECORE_PROCESS_MAPS_H
#define ICECORE_PROCESS_MAPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct mapping {
	uint64_t start, end;
	bool hideable; /* its pages are hidden from CRIU (pages.c) */
	bool of_no_file;
	mode_t opened; /* correct mode of its link in map_files (0400 or 0600); 0: unknown */
};

/* The last answer of owner_of: a process, and the descriptor of its directory or file in /proc. */
struct owner {
	int descriptor;
	dev_t device;
	ino_t inode;
	pid_t pid;
};

/* Return the file that records what is hidden from CRIU (ICECORE_HIDDEN); NULL: nothing is. */
const char *hidden_file(void);

/* Read and close a process's smaps, and remember its mappings. Return a descriptor of a file with
 * the same content, at offset 0; -1 with errno on failure. */
int take_mappings(pid_t pid, int smaps);

/* Return the mappings of a process, ascending; NULL if they cannot be read. They are valid until a
 * call for another process. */
const struct mapping *mappings_of(pid_t pid, size_t *count);

/* Return the first mapping that ends after an address, or the end of the array. */
const struct mapping *mapping_after(const struct mapping *mappings, size_t count, uint64_t at);

/* Return the mapping that a name in /proc/PID/map_files denotes; NULL: none, or not known. */
const struct mapping *named_mapping(int directory, const char *name);

/* Return the PID if a descriptor is open on /proc/PID/NAME; 0: it is not, or PID is CRIU itself. */
pid_t owner_of(int descriptor, const char *name, struct owner *last);

#endif
