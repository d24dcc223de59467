/* The driver's checkpoint copies what the GPU has for a process (its code, stacks, queues) into one
 * large new mapping of it, and its restore copies that back: through a small buffer, with
 * memcpy(3), in one thread, in pieces of 2 MiB. That is half of each. Much of it is zeros.
 *
 * So for a window, libcuda calls what is here for memcpy: several threads share out each piece. A
 * part that is all zeros is not written where the memory has never been touched, which reads as
 * zeros: such memory is neither made, nor scanned, nor dumped. The driver asks for a mapping with
 * all its pages (MAP_POPULATE), which one thread would make, of 4 KiB each. Here several threads
 * make those that were needed in the last window, huge where that is allowed; in the first window,
 * all.
 *
 * The driver's thread starts the threads when it has something to copy, and they end after a few
 * milliseconds without work: there are none when CRIU, which holds all others meanwhile, goes on
 * (icecore.host.cuda.threads waits for that), and none in a snapshot. The C library knows nothing
 * of them: it would call malloc for a thread, and a parked thread may hold its lock. They share the
 * thread-local memory of the driver's thread, so they make system calls without errno.
 *
 * A filter of system calls (seccomp(2)) sees only such as the driver and the agent make, too.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "clock.h"
#include "copies.h"
#include "driver.h"
#include "slots.h"

#if defined __x86_64__

#define PART ((size_t)128 << 10)
#define LEAST (4 * PART) /* what is smaller is copied by who wants it */
#define MOST_PARTS 0xffffu
#define MOST_THREADS 16
#define STACK ((size_t)64 << 10)
#define SPINS 3000 /* some hundred microseconds: the driver's next piece comes sooner */
#define TICK_NANOSECONDS 1000000l
#define IDLE_NANOSECONDS 3000000l /* after which a thread ends */
#define MAPPING ((size_t)64 << 20) /* from here on a mapping counts as the driver's */
#define HUGE ((size_t)2 << 20)
#define RANGES 256
#define KNOWN ((size_t)16 << 30) /* bytes of mappings of which is remembered what was needed */
#define PAGE ((size_t)4096)
#define POPULATE_WRITE 23 /* MADV_POPULATE_WRITE, Linux 5.14 */
#define PRESENT_OR_SWAPPED (3ull << 62) /* in an entry of /proc/PID/pagemap */
#define END_NANOSECONDS 1000000000ll

static char *stacks; /* one for each thread */
static atomic_int thread_ids[MOST_THREADS]; /* the kernel sets one to 0 when the thread has ended */
static unsigned most_threads;
static bool begun;

/* The work under way: its number << 32 | its parts << 16 | the next part. A part is taken by
 * increasing it, which fails if the work is another one by then; so what describes the work is read
 * first, and holds if it succeeds. */
static _Atomic uint64_t state;
static atomic_uint number, sleepers, done;
static atomic_bool awaited; /* whoever shared out the work sleeps until it is done */
static struct work {
	char *to;
	const char *from; /* NULL: the pages of `to` are made, part by part of a huge page */
	size_t size;
	/* /proc/self/pagemap, where zeros need not be written; -1: all are. If pages are made: 0,
	 * all of them; 1, those that were needed in the last window */
	int pages;
	size_t origin; /* where `to` lies in what the driver has mapped since the window began */
} work;
static atomic_uint first_touch[2]; /* of a huge page, even or odd: 1, by somebody; 2, done */
static atomic_flag working = ATOMIC_FLAG_INIT;

/* Private memory that libcuda has mapped since the window began, wherever it has moved it. */
static struct range {
	uintptr_t start, end;
	size_t origin;
} ranges[RANGES];
static size_t range_count, mapped, huge_left;
static atomic_flag ranges_lock = ATOMIC_FLAG_INIT;

/* By origin, a bit for each huge page: was something else than zeros copied there? */
static _Atomic uint64_t needed[KNOWN / HUGE / 64], needed_before[KNOWN / HUGE / 64];
static size_t mapped_before; /* in the last window; 0: there was none */

static long call(long number_, long a, long b, long c, long d)
{
	register long r10 __asm__("r10") = d;
	long result;

	__asm__ volatile("syscall"
	    : "=a"(result)
	    : "a"(number_), "D"(a), "S"(b), "d"(c), "r"(r10)
	    : "rcx", "r11", "memory");
	return result;
}

/* Spin for a while, then sleep until a word changes, or for a moment: whoever changes it need not
 * wake anybody, and there may be fewer processors than threads. */
static void wait_change(atomic_uint *word, unsigned seen, int *spins)
{
	struct timespec limit = {0, TICK_NANOSECONDS};

	if (++*spins < SPINS)
		__builtin_ia32_pause();
	else
		call(SYS_futex, (long)word, FUTEX_WAIT_PRIVATE, (long)seen, (long)&limit);
}

static bool all_zeros(const char *at, size_t size)
{
	const uint64_t *words = (const void *)at;
	size_t count = size / sizeof *words;

	if ((uintptr_t)at % sizeof *words)
		return false;
	for (; count >= 16; count -= 16, words += 16) {
		uint64_t some = 0;
		for (int i = 0; i < 16; i++)
			some |= words[i];
		if (some)
			return false;
	}
	for (; count; count--)
		if (*words++)
			return false;
	for (size_t i = size / sizeof *words * sizeof *words; i < size; i++)
		if (at[i])
			return false;
	return true;
}

/* Whether none of the pages of private anonymous memory was ever touched. */
static bool is_untouched(int pages, const char *at, size_t size)
{
	uint64_t entries[PART / PAGE + 2];
	uintptr_t first = (uintptr_t)at / PAGE, last = ((uintptr_t)at + size - 1) / PAGE;
	size_t count = last - first + 1;

	if (count > sizeof entries / sizeof *entries ||
	    call(SYS_pread64, pages, (long)entries, (long)(count * sizeof *entries),
		(long)(first * sizeof *entries)) != (long)(count * sizeof *entries))
		return false;
	for (size_t i = 0; i < count; i++)
		if (entries[i] & PRESENT_OR_SWAPPED)
			return false;
	return true;
}

/* Several threads that touch a new huge page at once would each clear one, and all but one in vain.
 */
static void touch(char *at)
{
	atomic_uint *first = &first_touch[(uintptr_t)at / HUGE % 2];
	unsigned none = 0;
	int spins = 0;

	if (atomic_compare_exchange_strong(first, &none, 1)) {
		*(volatile char *)at = 0;
		atomic_store(first, 2);
	}
	while (atomic_load(first) != 2)
		wait_change(first, 1, &spins);
}

static void note_needed(size_t origin, size_t size)
{
	for (size_t page = origin / HUGE; page <= (origin + size - 1) / HUGE; page++)
		if (page < KNOWN / HUGE)
			atomic_fetch_or(&needed[page / 64], 1ull << page % 64);
}

/* Whether a huge page is probably needed: as it was in the last window, if that was like this one.
 */
static bool is_needed(size_t origin)
{
	size_t page = origin / HUGE;

	return page >= KNOWN / HUGE || atomic_load(&needed_before[page / 64]) >> page % 64 & 1;
}

static void copy_part(const struct work *what, size_t part)
{
	size_t at = part * PART, size = what->size - at < PART ? what->size - at : PART;
	char *to = what->to + at;

	if (what->pages >= 0) {
		bool zeros = all_zeros(what->from + at, size);
		if (!zeros)
			note_needed(what->origin + at, size);
		if (is_untouched(what->pages, to, size)) {
			if (zeros)
				return;
			touch(to);
		}
	}
	memcpy(to, what->from + at, size);
}

static void make_part(const struct work *what, size_t part)
{
	size_t at = part * HUGE, size = what->size - at < HUGE ? what->size - at : HUGE;

	/* where it fails, pages are made when they are written to */
	if (what->pages == 0 || is_needed(what->origin + at))
		call(SYS_madvise, (long)(what->to + at), (long)size, POPULATE_WRITE, 0);
}

/* Take and copy a part; return whether there was one. */
static bool take_part(void)
{
	uint64_t now = atomic_load_explicit(&state, memory_order_acquire);

	while ((now & MOST_PARTS) < (now >> 16 & MOST_PARTS)) {
		struct work what = work;
		atomic_thread_fence(memory_order_acquire);
		if (!atomic_compare_exchange_weak(&state, &now, now + 1))
			continue;
		(what.from ? copy_part : make_part)(&what, now & MOST_PARTS);
		if (atomic_fetch_add(&done, 1) + 1 == (now >> 16 & MOST_PARTS) &&
		    atomic_load(&awaited))
			call(SYS_futex, (long)&done, FUTEX_WAKE_PRIVATE, 1, 0);
		return true;
	}
	return false;
}

static int run(void *unused)
{
	struct timespec idle = {0, IDLE_NANOSECONDS};
	int spins = 0;

	(void)unused;
	call(SYS_prctl, PR_SET_NAME, (long)COPIES_NAME, 0, 0);
	for (;;) {
		if (take_part()) {
			spins = 0;
		} else if (spins < SPINS) {
			spins++;
			__builtin_ia32_pause();
		} else {
			unsigned seen = atomic_load(&number);
			long result = 0;
			atomic_fetch_add(&sleepers, 1);
			/* the work that was begun before we looked would not wake us */
			if (seen == atomic_load(&state) >> 32)
				result = call(SYS_futex, (long)&number, FUTEX_WAIT_PRIVATE,
				    (long)seen, (long)&idle);
			atomic_fetch_sub(&sleepers, 1);
			if (result == -ETIMEDOUT)
				return 0;
			spins = 0;
		}
	}
}

static void publish(unsigned next, uint64_t parts)
{
	atomic_store(&state, (uint64_t)next << 32 | parts << 16);
	atomic_store(&number, next);
	if (atomic_load(&sleepers))
		call(SYS_futex, (long)&number, FUTEX_WAKE_PRIVATE, INT_MAX, 0);
}

static void start_threads(void)
{
	/* errors of a raw clone(2) leave nothing behind, and nothing of it allocates */
	const int flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD |
	    CLONE_SYSVSEM | CLONE_PARENT_SETTID | CLONE_CHILD_CLEARTID;
	const uint64_t all = ~0ull;
	uint64_t mask = 0;
	unsigned missing = 0;
	int before = errno;

	for (unsigned i = 0; i < most_threads; i++)
		missing += !atomic_load(&thread_ids[i]);
	if (!missing)
		return;
	/* no handler of the application's ever runs in them */
	call(SYS_rt_sigprocmask, SIG_SETMASK, (long)&all, (long)&mask, sizeof mask);
	for (unsigned i = 0; i < most_threads; i++)
		if (!atomic_load(&thread_ids[i]) &&
		    clone(run, stacks + (i + 1) * STACK, flags, NULL, &thread_ids[i], NULL,
			&thread_ids[i]) < 0)
			break;
	call(SYS_rt_sigprocmask, SIG_SETMASK, (long)&mask, 0, sizeof mask);
	errno = before;
}

static void lock_ranges(void)
{
	while (atomic_flag_test_and_set(&ranges_lock))
		__builtin_ia32_pause();
}

/* Whether all of this is memory that libcuda has mapped; from where on. */
static bool find_range(uintptr_t start, size_t size, size_t *origin)
{
	bool found = false;

	lock_ranges();
	for (size_t i = 0; !found && i < range_count; i++)
		if (start >= ranges[i].start && start + size <= ranges[i].end) {
			*origin = ranges[i].origin + (start - ranges[i].start);
			found = true;
		}
	atomic_flag_clear(&ranges_lock);
	return found;
}

static void add_range(uintptr_t start, uintptr_t end, size_t origin)
{
	if (start < end && range_count < RANGES)
		ranges[range_count++] = (struct range){start, end, origin};
}

/* What lay there is gone. With the lock. */
static void remove_ranges(uintptr_t start, uintptr_t end)
{
	for (size_t i = 0; i < range_count;) {
		struct range found = ranges[i];
		if (start >= found.end || end <= found.start) {
			i++;
			continue;
		}
		ranges[i] = ranges[--range_count];
		/* where there is no room for these, zeros are written there */
		add_range(found.start, start, found.origin);
		if (end < found.end)
			add_range(end, found.end, found.origin + (end - found.start));
	}
}

static void forget(uintptr_t start, size_t size)
{
	lock_ranges();
	remove_ranges(start, start + size);
	atomic_flag_clear(&ranges_lock);
}

/* Once the driver reads from its memory, it has no more to write there; and a restore may have put
 * a file in the place of it, which does not read as zeros where no page is. */
static void note_read(uintptr_t start, size_t size)
{
	lock_ranges();
	for (size_t i = 0; i < range_count; i++)
		if (start < ranges[i].end && start + size > ranges[i].start)
			range_count = 0;
	atomic_flag_clear(&ranges_lock);
}

static void note_mapping(uintptr_t start, size_t size)
{
	lock_ranges();
	add_range(start, start + size, mapped);
	mapped += size;
	atomic_flag_clear(&ranges_lock);
}

static void note_move(uintptr_t from, size_t old_size, uintptr_t to, size_t new_size)
{
	struct range moved[RANGES];
	size_t count = 0, size = old_size < new_size ? old_size : new_size;

	lock_ranges();
	for (size_t i = 0; i < range_count; i++) {
		uintptr_t start = ranges[i].start > from ? ranges[i].start : from,
			  end = ranges[i].end < from + size ? ranges[i].end : from + size;
		if (start < end)
			moved[count++] = (struct range){start - from + to, end - from + to,
			    ranges[i].origin + (start - ranges[i].start)};
	}
	remove_ranges(from, from + old_size);
	remove_ranges(to, to + new_size);
	for (size_t i = 0; i < count; i++)
		add_range(moved[i].start, moved[i].end, moved[i].origin);
	atomic_flag_clear(&ranges_lock);
}

/* Share out work, of which the caller has `working`. */
static void share_out(struct work what, size_t part)
{
	unsigned next = atomic_load(&number) + 1;
	uint64_t parts = (what.size + part - 1) / part;
	int spins = 0;

	work = what;
	atomic_store(&first_touch[0], 0);
	atomic_store(&first_touch[1], 0);
	atomic_store(&done, 0);
	publish(next, parts);
	start_threads();
	while (take_part())
		;
	/* The others finish theirs; a part may wait for memory that a restore still fetches. */
	for (unsigned now; (now = atomic_load(&done)) < parts;) {
		if (spins == SPINS - 1)
			atomic_store(&awaited, true);
		wait_change(&done, now, &spins);
	}
	atomic_store(&awaited, false);
}

/* What libcuda has from the C library as memcpy is memmove (GLIBC_2.2.5). */
static void *copies_memcpy(void *to, const void *from, size_t size)
{
	uintptr_t distance = (uintptr_t)to - (uintptr_t)from;
	struct work what = {to, from, size, -1, 0};

	if (size < LEAST || size > PART * MOST_PARTS || distance < size || -distance < size ||
	    atomic_flag_test_and_set(&working))
		return memmove(to, from, size);
	note_read((uintptr_t)from, size);
	if (find_range((uintptr_t)to, size, &what.origin))
		what.pages = (int)call(
		    SYS_openat, AT_FDCWD, (long)"/proc/self/pagemap", O_RDONLY | O_CLOEXEC, 0);
	share_out(what, PART);
	if (what.pages >= 0)
		call(SYS_close, what.pages, 0, 0, 0);
	atomic_flag_clear(&working);
	return to;
}

/* Make the pages that are needed; all where the last window does not tell. */
static void make_pages(char *at, size_t size, size_t origin)
{
	struct work what = {at, NULL, size, mapped_before == origin + size, origin};

	if (size > HUGE * MOST_PARTS || atomic_flag_test_and_set(&working))
		return;
	share_out(what, HUGE);
	atomic_flag_clear(&working);
}

static void *copies_mmap(void *address, size_t size, int protection, int flags, int file, off_t at)
{
	const int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE;
	bool ours =
	    size >= MAPPING && (flags & ~MAP_FIXED_NOREPLACE) == kind && protection & PROT_WRITE;
	void *found =
	    mmap(address, size, protection, ours ? flags & ~MAP_POPULATE : flags, file, at);

	if (found == MAP_FAILED)
		return found;
	forget((uintptr_t)found, size);
	if (!ours)
		return found;
	size_t huge = size < huge_left ? size : huge_left, origin = mapped;
	if (huge >= MAPPING - HUGE && !madvise(found, huge, MADV_HUGEPAGE))
		huge_left -= huge;
	note_mapping((uintptr_t)found, size);
	make_pages(found, size, origin);
	return found;
}

static int copies_munmap(void *address, size_t size)
{
	forget((uintptr_t)address, size);
	return munmap(address, size);
}

static void *copies_mremap(void *from, size_t size, size_t new_size, int flags, void *to)
{
	void *found = (void *)syscall(SYS_mremap, from, size, new_size, flags, to);

	if (found != MAP_FAILED)
		note_move((uintptr_t)from, size, (uintptr_t)found, new_size);
	return found;
}

static const struct replacement replacements[] = {
    {"memcpy", (void *)copies_memcpy},
    {"memmove", (void *)copies_memcpy},
    {"mmap", (void *)copies_mmap},
    {"mmap64", (void *)copies_mmap},
    {"munmap", (void *)copies_munmap},
    {"mremap", (void *)copies_mremap},
    {NULL, NULL},
};
enum { COPY = 1 | 2, MAP = 4 | 8, UNMAP = 16 }; /* bits of these; one of each is needed */

/* Threads that can run beside the caller's, on the processors that are allowed to it. */
static unsigned can_run(unsigned wanted)
{
	unsigned char allowed[1024] = {0};
	long size = call(SYS_sched_getaffinity, 0, sizeof allowed, (long)allowed, 0);
	unsigned some = 0;

	for (long i = 0; i < size; i++)
		some += (unsigned)__builtin_popcount(allowed[i]);
	return some && some - 1 < wanted ? some - 1 : wanted;
}

bool copies_begin(unsigned wanted, size_t huge)
{
	const struct link_map *library = driver_library();

	if (begun || !library)
		return false;
	most_threads = can_run(wanted < MOST_THREADS ? wanted : MOST_THREADS);
	if (!most_threads)
		return false;
	stacks = mmap(NULL, most_threads * STACK, PROT_READ | PROT_WRITE,
	    MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK | MAP_NORESERVE, -1, 0);
	if (stacks == MAP_FAILED)
		return false;
	begun = true;
	huge_left = huge;
	/* What the last window did not map is not known. */
	mapped_before = mapped;
	for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
		atomic_store(&needed_before[i], atomic_exchange(&needed[i], 0));
	range_count = mapped = 0;
	unsigned replaced = slots_replace(library, replacements);
	if (replaced & COPY && replaced & MAP && replaced & UNMAP)
		return true;
	copies_end();
	return false;
}

static bool has_ended(atomic_int *thread, int64_t until)
{
	for (int id; (id = atomic_load(thread));) {
		struct timespec limit = {0, TICK_NANOSECONDS};
		if (clock_now() > until)
			return false;
		/* a shared futex: that is what the kernel wakes when it sets the word */
		call(SYS_futex, (long)thread, FUTEX_WAIT, id, (long)&limit);
	}
	return true;
}

void copies_end(void)
{
	int64_t until = clock_now() + END_NANOSECONDS;

	if (!begun)
		return;
	bool over = slots_put_back();
	/* The window may have been given up while the driver, which nobody holds, still copies. */
	while (atomic_flag_test_and_set(&working))
		if (clock_now() > until)
			return; /* the next try */
	for (unsigned i = 0; over && i < most_threads; i++)
		over = has_ended(&thread_ids[i], until);
	if (over) {
		munmap(stacks, most_threads * STACK);
		most_threads = 0;
		begun = false;
	}
	atomic_flag_clear(&working);
}

void copies_in_child(void)
{
	memset(thread_ids, 0, sizeof thread_ids);
	most_threads = 0;
	begun = false;
	atomic_flag_clear(&working);
	atomic_flag_clear(&ranges_lock);
}

#else

bool copies_begin(unsigned wanted, size_t huge)
{
	(void)wanted;
	(void)huge;
	return false;
}

void copies_end(void)
{
}

void copies_in_child(void)
{
}

#endif
