/* See in_place.h. */
#define _GNU_SOURCE
#include "in_place.h"

#include <setjmp.h>
#include <signal.h>
#include <string.h>

/* Where a read of a mapping goes on if a page cannot be had. The model of the variable lets a handler
 * read it without a call that may allocate. */
static __thread sigjmp_buf *volatile guarded __attribute__((tls_model("initial-exec")));
static struct sigaction before;

static void on_lost_page(int number, siginfo_t *info, void *context)
{
	sigjmp_buf *place = guarded;

	(void)context;
	if (place && info->si_code > 0) {
		guarded = NULL;
		siglongjmp(*place, 1);
	}
	/* Not one of these reads: whoever was asked before decides. The fault repeats itself. */
	sigaction(number, &before, NULL);
	if (info->si_code <= 0)
		raise(number);
}

/* Has SIGBUS come here first; 0, or -1. Not to be called by two threads at once. The mask of the
 * thread is left alone, so that a read need not save it. */
__attribute__((visibility("default"))) int64_t guard_reads(void)
{
	struct sigaction now, own = {.sa_sigaction = on_lost_page};

	own.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
	sigemptyset(&own.sa_mask);
	if (sigaction(SIGBUS, NULL, &now))
		return -1;
	if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_lost_page)
		return 0;
	before = now;
	return sigaction(SIGBUS, &own, NULL);
}

bool is_within(size_t size, const struct iovec *runs, size_t count)
{
	for (size_t run = 0; run < count; run++) {
		size_t at = (size_t)runs[run].iov_base;
		if (at > size || runs[run].iov_len > size - at)
			return false;
	}
	return true;
}

bool hash_in_place(const struct streaming *streaming, void *state, const uint8_t *map,
    const struct iovec *runs, size_t count, struct hash *found)
{
	sigjmp_buf place;

	if (sigsetjmp(place, 0))
		return false;
	guarded = &place;
	for (size_t run = 0; run < count; run++)
		streaming->update(state, map + (size_t)runs[run].iov_base, runs[run].iov_len);
	guarded = NULL;
	*found = streaming->digest(state);
	return true;
}

bool copy_in_place(uint8_t *target, const uint8_t *map, const struct iovec *runs, size_t count)
{
	sigjmp_buf place;

	if (sigsetjmp(place, 0))
		return false;
	guarded = &place;
	__asm__ volatile("" ::: "memory");
	for (size_t run = 0, done = 0; run < count; done += runs[run++].iov_len)
		memcpy(target + done, map + (size_t)runs[run].iov_base, runs[run].iov_len);
	__asm__ volatile("" ::: "memory");
	guarded = NULL;
	return true;
}
