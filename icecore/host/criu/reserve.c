/* Preloaded into a CRIU that restores: private memory that the kernel does not promise is reserved.
 *
 * CRIU (4.0 to 4.2: criu/mem.c, premap_private_vma) maps all private memory writable at first. The
 * kernel refuses that for address space that a job has reserved without access (PROT_NONE), which
 * may be larger than the memory of the machine (vm.overcommit_memory 0). Mapped with MAP_NORESERVE
 * it costs what is used of it, as it did in the job.
 */
#define _GNU_SOURCE
#include "placed.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define WANTED (MAP_PRIVATE | MAP_ANONYMOUS)

__attribute__((visibility("default"))) void *mmap(
    void *at, size_t size, int protection, int flags, int file, off_t offset);
__attribute__((visibility("default"))) void *mmap64(
    void *at, size_t size, int protection, int flags, int file, off_t offset);

static void *map(void *at, size_t size, int protection, int flags, int file, off_t offset)
{
	return (void *)syscall(SYS_mmap, at, size, (long)protection, (long)flags, (long)file, offset);
}

void *mmap(void *at, size_t size, int protection, int flags, int file, off_t offset)
{
	void *start = map(at, size, protection, flags, file, offset);

	if (start == MAP_FAILED && errno == ENOMEM && (flags & WANTED) == WANTED &&
	    protection & PROT_WRITE && !(flags & MAP_NORESERVE))
		start = map(at, size, protection, flags | MAP_NORESERVE, file, offset);
	note_mapping(start, protection, flags);
	return start;
}

void *mmap64(void *at, size_t size, int protection, int flags, int file, off_t offset)
{
	return mmap(at, size, protection, flags, file, offset);
}
