/* The local memory of contexts, given back for a window. A context gets back the limit that it had.
 * If that fails, the driver makes room by itself when a kernel needs it.
 *
 * A context keeps local memory (stacks and spilled registers) for every thread that the GPU can
 * hold, whether a kernel uses it or not: 1 KiB for each is 232 MiB on an H100. It contains nothing
 * while no kernel runs, but the driver's checkpoint copies it out and in like the rest.
 */
#define _GNU_SOURCE
#include <stdbool.h>
#include <stddef.h>

#include "local_memory.h"

#define CONTEXTS 64
#define LIMIT_STACK_SIZE 0
#define SMALLEST ((size_t)0) /* bytes per thread; the driver keeps what kernels need */

static struct shrunk {
	CUcontext context;
	size_t before;
} shrunk[CONTEXTS];
static size_t shrunk_count;

static bool known(CUcontext context)
{
	for (size_t i = 0; i < shrunk_count; i++)
		if (shrunk[i].context == context)
			return true;
	return false;
}

void local_memory_shrink(CUcontext context)
{
	const struct driver *d = driver();
	size_t before;

	if (!d->cuCtxGetLimit || !d->cuCtxSetLimit || shrunk_count == CONTEXTS || known(context))
		return;
	if (d->cuCtxSetCurrent(context) || d->cuCtxGetLimit(&before, LIMIT_STACK_SIZE) ||
	    before <= SMALLEST)
		return;
	if (d->cuCtxSetLimit(LIMIT_STACK_SIZE, SMALLEST) == CUDA_SUCCESS)
		shrunk[shrunk_count++] = (struct shrunk){context, before};
}

void local_memory_grow(void)
{
	const struct driver *d = driver();

	while (shrunk_count) {
		struct shrunk *last = &shrunk[--shrunk_count];
		if (d->cuCtxSetCurrent(last->context) == CUDA_SUCCESS) /* else it has ended */
			d->cuCtxSetLimit(LIMIT_STACK_SIZE, last->before);
	}
}
