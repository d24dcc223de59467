/* Release of resident memory. What cannot be waited for in a stream capture is deferred, and
 * released with the next memory that is freed outside of a capture. */
#define _GNU_SOURCE
#include <stddef.h>

#include "capture.h"
#include "holding.h"
#include "release.h"

/* under table_lock; orders what is deferred by when its wait can have begun */
static uint64_t free_clock;

void release_now(struct allocation *at)
{
	const struct driver *d = driver();
	struct allocation what = *at;

	table_remove(at);
	pthread_mutex_unlock(&table_lock);
	d->cuMemUnmap(what.address, what.size);
	d->cuMemRelease(what.handle);
	d->cuMemAddressFree(what.address, what.size);
	pthread_mutex_lock(&table_lock);
	holding_free(&what);
}

static struct allocation *find_deferred(CUcontext context, uint64_t until)
{
	struct allocation *at = NULL;

	while ((at = table_next(at, KIND_RESIDENT)))
		if (at->context == context && at->resident.freed && at->resident.freed <= until)
			break;
	return at;
}

void release_deferred(CUcontext context, uint64_t until)
{
	struct allocation *at;

	while (table_counts.deferred && (at = find_deferred(context, until))) {
		table_counts.deferred--;
		table_counts.deferred_bytes -= at->size;
		release_now(at);
	}
}

void release_defer(struct allocation *what)
{
	what->resident.freed = ++free_clock;
	table_counts.deferred++;
	table_counts.deferred_bytes += what->size;
}

bool release_all_deferred(CUcontext context)
{
	pthread_mutex_lock(&table_lock);
	uint64_t began = free_clock;
	bool any = table_counts.deferred > 0 && !capture_active();
	pthread_mutex_unlock(&table_lock);
	if (!any || capture_wait_for_context())
		return false;
	pthread_mutex_lock(&table_lock);
	release_deferred(context, began);
	pthread_mutex_unlock(&table_lock);
	return true;
}

uint64_t release_clock(void)
{
	return free_clock;
}

void release_in_child(void)
{
	free_clock = 0;
}
