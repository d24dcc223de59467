/* Preloaded into CRIU: tells it without the kernel which mappings have no file.
 *
 * CRIU (4.0 to 4.2: criu/proc_parse.c, vma_get_mapfile) looks up the link of each mapping in
 * /proc/PID/map_files. It opens the link (mappings.c) unless the mapping before had no file either,
 * and takes ENOENT for "no file". For each call, the kernel looks up the process and its mapping
 * again. A process with many libraries has hundreds of mappings without a file, and the tree stands
 * still meanwhile. For mappings of files, the kernel answers as before.
 */
#define _GNU_SOURCE
#include "process_maps.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

bool names_no_file(int directory, const char *name)
{
	static struct owner last;
	char *after;
	size_t count;
	uint64_t start, end;

	if (!hidden_file() || directory < 0 || !name)
		return false;
	start = strtoull(name, &after, 16);
	if (after == name || *after != '-')
		return false;
	name = after + 1;
	end = strtoull(name, &after, 16);
	if (after == name || *after)
		return false;
	pid_t pid = owner_of(directory, "map_files", &last);
	const struct mapping *all = pid ? mappings_of(pid, &count) : NULL;
	if (!all)
		return false;
	const struct mapping *one = mapping_after(all, count, start);
	return one < all + count && one->start == start && one->end == end && one->of_no_file;
}

__attribute__((visibility("default"))) int fstatat64(
    int directory, const char *path, struct stat64 *about, int flags)
{
	if (names_no_file(directory, path)) {
		errno = ENOENT;
		return -1;
	}
	return (int)syscall(SYS_newfstatat, (long)directory, path, about, (long)flags);
}
