/* See in_place.h. */
#define _GNU_SOURCE
#include "in_place.h"

#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE ((size_t)4096)
#define MOST ((size_t)256) /* pages of a cell */

/* Where a guarded read resumes if a page is not available. With the initial-exec model, a handler
 * reads the variable without a call that may allocate. */
static __thread sigjmp_buf *volatile guarded __attribute__((tls_model("initial-exec")));
static struct sigaction before;

static void on_lost_page(int number, siginfo_t *info, void *context)
{
	sigjmp_buf *place = guarded;
	/* A signal that was sent, or tells of bad memory elsewhere, does not occur again. */
	bool once = info->si_code <= 0 || info->si_code == BUS_MCEERR_AO;
	struct sigaction none = {.sa_handler = SIG_DFL};

	if (place && !once) {
		guarded = NULL;
		siglongjmp(*place, 1);
	}
	/* Not a guarded read: act as if this handler were not there. */
	if (before.sa_flags & SA_SIGINFO)
		before.sa_sigaction(number, info, context);
	else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
		before.sa_handler(number);
	else if (before.sa_handler == SIG_DFL || !once) {
		sigaction(number, &none, NULL);
		if (once)
			raise(number);
	}
}

/* Install the handler for SIGBUS. Return 0, or -1 if that fails. Two threads must not call this at
 * once. The handler leaves the thread's signal mask unchanged, so a read need not save it. */
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

bool is_there(const uint8_t *map, size_t size, const struct iovec *runs, size_t count)
{
	unsigned char pages[MOST];
	size_t start, end;

	if (!count)
		return false;
	start = (size_t)runs[0].iov_base / PAGE * PAGE;
	end = (size_t)runs[count - 1].iov_base + runs[count - 1].iov_len;
	if (end > size || end <= start || end - start > MOST * PAGE ||
	    mincore((void *)(map + start), end - start, pages))
		return false;
	for (size_t run = 0; run < count; run++) {
		size_t low = (size_t)runs[run].iov_base, high = low + runs[run].iov_len;
		if (low < start || high > end || high < low)
			return false;
		for (size_t at = low / PAGE; at * PAGE < high; at++)
			if (!(pages[at - start / PAGE] & 1))
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
