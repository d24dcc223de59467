/* Preloaded into CRIU: large blocks of memory are reserved, not promised. They cost what is used of
 * them.
 *
 * CRIU (4.0 to 4.2: criu/page-pipe.c, create_page_pipe) allocates 16 bytes for each page of the
 * private mappings of a process, reserved ones included: 32 GiB for a process that reserves 8 TiB,
 * as servers and language runtimes do. It uses few of them, and none for what is hidden from it
 * (pages.c). But Linux refuses to promise more memory than the machine has (vm.overcommit_memory 0),
 * except to a mapping with MAP_NORESERVE.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>

#define LEAST ((size_t)64 << 20) /* bytes; malloc(3) maps blocks of that size, too */
#define MOST 64			 /* blocks at one time; any more come from malloc(3) */

void *__libc_malloc(size_t size);
void *__libc_realloc(void *block, size_t size);
void __libc_free(void *block);

/* CRIU has one thread. */
static struct {
	void *start;
	size_t size;
} blocks[MOST];
static size_t used;

__attribute__((visibility("default"))) void *malloc(size_t size);
__attribute__((visibility("default"))) void *realloc(void *block, size_t size);
__attribute__((visibility("default"))) void free(void *block);

static size_t find(const void *start)
{
	size_t at = 0;

	while (at < used && blocks[at].start != start)
		at++;
	return at;
}

void *malloc(size_t size)
{
	if (size < LEAST || used == MOST)
		return __libc_malloc(size);
	void *start = mmap(NULL, size, PROT_READ | PROT_WRITE,
	    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (start == MAP_FAILED) {
		errno = ENOMEM;
		return NULL;
	}
	blocks[used].start = start;
	blocks[used++].size = size;
	return start;
}

void free(void *block)
{
	size_t at = block ? find(block) : used;
	int before = errno;

	if (at == used) {
		__libc_free(block);
		return;
	}
	munmap(block, blocks[at].size);
	blocks[at] = blocks[--used];
	errno = before;
}

void *realloc(void *block, size_t size)
{
	size_t at = block ? find(block) : used;

	if (at == used)
		return __libc_realloc(block, size);
	void *moved = mremap(block, blocks[at].size, size ? size : 1, MREMAP_MAYMOVE);
	if (moved == MAP_FAILED) {
		errno = ENOMEM;
		return NULL;
	}
	blocks[at].start = moved;
	blocks[at].size = size ? size : 1;
	return moved;
}
