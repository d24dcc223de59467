/* Physical memory of a GPU. When the device has none left, released memory is given back first, and
 * then the allocation waits for what other processes hold for a moment. */
#define _GNU_SOURCE
#include <stdbool.h>
#include <time.h>

#include "clock.h"
#include "holding.h"
#include "physical.h"
#include "release.h"
#include "spare.h"

#define CHILD_NANOSECONDS 200000000ll /* within which one that was forked has begun to run */

static int64_t last_fork = -CHILD_NANOSECONDS, looked_until;

void physical_forked(void)
{
	__atomic_store_n(&last_fork, clock_now(), __ATOMIC_RELAXED);
}

void physical_looked_at(int64_t nanoseconds)
{
	__atomic_store_n(
	    &looked_until, nanoseconds ? clock_now() + nanoseconds : 0, __ATOMIC_RELAXED);
}

/* Memory freed meanwhile is not free yet: a forked child has the descriptors that are kept since a
 * window until it has begun to run, and a client that examines memory has it mapped. */
static bool others_may_hold_memory(void)
{
	int64_t time = clock_now(), forked = time - __atomic_load_n(&last_fork, __ATOMIC_RELAXED);

	return time < __atomic_load_n(&looked_until, __ATOMIC_RELAXED) ||
	    /* a restore may have set the clock back */
	    (__atomic_load_n(&table_counts.windows, __ATOMIC_RELAXED) && forked >= 0 &&
		forked < CHILD_NANOSECONDS);
}

CUresult physical_create(CUhandle *out, size_t size, const struct allocation_properties *properties)
{
	const struct driver *d = driver();
	/* asked first: what they let go of after that is found */
	bool held = others_may_hold_memory();
	uint64_t before = spare_given_back();
	CUresult result = d->cuMemCreate(out, size, properties, 0);
	CUcontext context;

	if (result == CUDA_ERROR_OUT_OF_MEMORY && spare_make_room(before))
		result = d->cuMemCreate(out, size, properties, 0);
	if (result == CUDA_ERROR_OUT_OF_MEMORY && !d->cuCtxGetCurrent(&context) && context &&
	    release_all_deferred(context))
		result = d->cuMemCreate(out, size, properties, 0);
	if (result == CUDA_ERROR_OUT_OF_MEMORY && holding_yielded())
		result = d->cuMemCreate(out, size, properties, 0);
	while (result == CUDA_ERROR_OUT_OF_MEMORY && (held || others_may_hold_memory())) {
		nanosleep(&(struct timespec){0, 1000000}, NULL);
		held = others_may_hold_memory();
		result = d->cuMemCreate(out, size, properties, 0);
	}
	return result;
}

void physical_in_child(void)
{
	looked_until = 0;
}
