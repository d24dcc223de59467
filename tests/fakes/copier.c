/* A library that copies as libcuda does in a checkpoint. Tests of copies.c have its calls
 * replaced. */
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT void *copier_map(size_t size)
{
	return mmap(NULL, size, PROT_READ | PROT_WRITE,
	    MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
}

EXPORT int copier_unmap(void *at, size_t size)
{
	return munmap(at, size);
}

EXPORT void *copier_copy(void *to, const void *from, size_t size)
{
	return memcpy(to, from, size);
}

EXPORT void *copier_move(void *from, size_t size, size_t new_size, void *to)
{
	return mremap(from, size, new_size, MREMAP_MAYMOVE | MREMAP_FIXED, to);
}
