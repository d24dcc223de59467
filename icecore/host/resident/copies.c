/* The driver's checkpoint copies what the GPU holds for a process (its code, stacks, queues) into
 * one large new mapping of the process, and its restore copies that back. One thread copies pieces
 * of 2 MiB through a small buffer with memcpy(3), which is a large part of each call. Part of the
 * memory is zeros.
 *
 * So for the length of a window, libcuda calls the functions of this file instead of memcpy:
 * several threads share each piece. They do not write zeros to memory that was never touched,
 * because it reads as zeros. Such memory is not allocated, scanned or dumped. The driver asks for a
 * mapping with all its pages (MAP_POPULATE), which one thread would populate, with pages of 4 KiB.
 * Here, several threads populate the memory that the last window needed, in pieces of 2 MiB, with
 * huge pages where that is allowed.
 *
 * The driver's thread starts the threads when it has something to copy, and they end after a few
 * milliseconds without work. CRIU holds all other threads meanwhile. When it continues, these
 * threads have ended (icecore.host.cuda.threads waits for that), so no snapshot contains them. The
 * C library does not know them: it would call malloc to create a thread, and a parked thread may
 * hold malloc's lock. The threads share the thread-local memory of the driver's thread, so their
 * system calls do not set errno.
 *
 * A filter of system calls (seccomp(2)) sees only calls that the driver and the agent make, too.
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
#define LEAST (4 * PART) /* the calling thread alone copies what is smaller */
#define MOST_PARTS 0xffffu
#define MOST_THREADS 16
#define STACK ((size_t)64 << 10)
#define SPINS 3000 /* about a hundred microseconds: the driver's next piece comes sooner */
#define TICK_NANOSECONDS 1000000l
#define IDLE_NANOSECONDS 3000000l /* after this time without work, a thread ends */
#define MAPPING ((size_t)64 << 20) /* the smallest mapping that counts as the driver's */
#define CONTEXT ((size_t)1 << 30) /* a smaller mapping is mostly that of a context */
#define HUGE ((size_t)2 << 20)
#define RANGES 256
#define KNOWN ((size_t)16 << 30) /* bytes of mappings for which `needed` has bits */
#define PAGE ((size_t)4096)
#define POPULATE_WRITE 23 /* MADV_POPULATE_WRITE, Linux 5.14 */
#define PRESENT_OR_SWAPPED (3ull << 62) /* in an entry of /proc/PID/pagemap */
#define ENTRIES ((size_t)512) /* of /proc/PID/pagemap, in one read */
#define END_NANOSECONDS 1000000000ll

static char *stacks; /* one for each thread */
static atomic_int thread_ids[MOST_THREADS]; /* the kernel sets an id to 0 when its thread ends */
static unsigned most_threads;
static bool begun;

/* The current work: its number << 32 | its parts << 16 | the next part. A thread takes a part by
 * increasing this value, which fails if the work has changed. So the thread reads the description
 * of the work first; it is valid if the increase succeeds. */
static _Atomic uint64_t state;
static atomic_uint number, sleepers, done;
static atomic_bool awaited; /* the thread that shares out the work sleeps until it is done */
static struct work {
	char *to;
	const char *from; /* NULL: populate `to`, in parts of a huge page */
	size_t size;
	/* For a copy: `to` is memory that libcuda has mapped since the window began. For pages to
	 * populate: `needed_before` tells which. */
	bool known;
	size_t origin; /* offset of `to` in all that the driver has mapped since the window began */
} work;
/* A bit for each part of the current copy: whether all its pages are untouched. */
static uint64_t untouched[MOST_PARTS / 64 + 2];
static atomic_uint
    first_touch[2]; /* of an even or odd huge page: 1, a thread touches it; 2, done */
static atomic_flag working = ATOMIC_FLAG_INIT;

/* Private memory that libcuda has mapped since the window began, at its current addresses. */
static struct range {
	uintptr_t start, end;
	size_t origin;
} ranges[RANGES];
static size_t range_count, mapped, huge_left;
static atomic_flag ranges_lock = ATOMIC_FLAG_INIT;

/* A bit for each part, by origin: whether anything but zeros was copied there. */
static _Atomic uint64_t needed[KNOWN / PART / 64], needed_before[KNOWN / PART / 64];
static atomic_bool unknown; /* what is needed: pages could not be looked up */
/* `mapped` of the last window; 0: there was none; SIZE_MAX: the pages it needed are unknown. */
static size_t mapped_before;

static long call(long which, long a, long b, long c, long d)
{
	register long r10 __asm__("r10") = d;
	long result;

	__asm__ volatile("syscall"
	    : "=a"(result)
	    : "a"(which), "D"(a), "S"(b), "d"(c), "r"(r10)
	    : "rcx", "r11", "memory");
	return result;
}

/* Spin for a while, then sleep until a word changes or a short timeout passes. With the timeout,
 * the thread that changes the word need not wake others. Spinning alone would be slow with fewer
 * processors than threads. */
static void wait_change(atomic_uint *word, unsigned seen, int *spins)
{
	struct timespec limit = {0, TICK_NANOSECONDS};

	if (++*spins < SPINS)
		__builtin_ia32_pause();
	else
		call(SYS_futex, (long)word, FUTEX_WAIT_PRIVATE, (long)seen, (long)&limit);
}

/* A word at any address: source and target of a copy need not be aligned alike. */
typedef uint64_t word __attribute__((aligned(1), may_alias));

static bool all_zeros(const char *at, size_t size)
{
	const word *words = (const word *)at;
	size_t count = size / sizeof *words;

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

/* Find the parts of private anonymous memory whose pages were never touched. One thread does this
 * for all threads: each lookup takes the lock of the address space, and the threads would compete
 * for it. */
static void find_untouched(const char *at, size_t size)
{
	uint64_t entries[ENTRIES];
	size_t first = (uintptr_t)at / PAGE, end = ((uintptr_t)at + size + PAGE - 1) / PAGE,
	       part = (uintptr_t)at / PART;
	int file =
	    (int)call(SYS_openat, AT_FDCWD, (long)"/proc/self/pagemap", O_RDONLY | O_CLOEXEC, 0);

	memset(untouched, 0xff, size / PART / 8 + sizeof *untouched);
	for (size_t count; first < end; first += count) {
		count = end - first < ENTRIES ? end - first : ENTRIES;
		bool found =
		    call(SYS_pread64, file, (long)entries, (long)(count * sizeof *entries),
			(long)(first * sizeof *entries)) == (long)(count * sizeof *entries);
		if (!found)
			atomic_store(&unknown, true);
		for (size_t i = 0; i < count; i++) {
			size_t one = (first + i) * PAGE / PART - part;
			if (!found || entries[i] & PRESENT_OR_SWAPPED)
				untouched[one / 64] &= ~(1ull << one % 64);
		}
	}
	if (file >= 0)
		call(SYS_close, file, 0, 0, 0);
}

/* A part of the work. Parts begin at multiples of their size: two threads that populate one huge
 * page would each clear it, and zeros written across the end of a touched page would allocate the
 * next page. */
struct span {
	size_t start, end;
};

static struct span span_of(const struct work *what, size_t part)
{
	size_t size = what->from ? PART : HUGE, lead = (uintptr_t)what->to % size;
	struct span found = {part ? part * size - lead : 0, (part + 1) * size - lead};

	if (found.end > what->size)
		found.end = what->size;
	return found;
}

/* Let one thread touch a new huge page: several at once would each clear one, all but one in vain.
 */
static void touch(char *at)
{
	atomic_uint *first = &first_touch[(uintptr_t)at / HUGE % 2];
	unsigned none = 0;
	int spins = 0;

	if (atomic_compare_exchange_strong(first, &none, 1)) {
		*(volatile char *)at = 0;
		atomic_store(first, 2);
		call(SYS_futex, (long)first, FUTEX_WAKE_PRIVATE, INT_MAX, 0);
	}
	while (atomic_load(first) != 2)
		wait_change(first, 1, &spins);
}

static void note_needed(size_t origin, size_t size)
{
	for (size_t part = origin / PART; part <= (origin + size - 1) / PART; part++)
		if (part < KNOWN / PART)
			atomic_fetch_or(&needed[part / 64], 1ull << part % 64);
}

/* Return whether this memory is probably needed, assuming that this window is like the last one. */
static bool is_needed(size_t origin, size_t size)
{
	for (size_t part = origin / PART; part <= (origin + size - 1) / PART; part++)
		if (part >= KNOWN / PART || atomic_load(&needed_before[part / 64]) >> part % 64 & 1)
			return true;
	return false;
}

static void copy_part(const struct work *what, size_t part)
{
	struct span span = span_of(what, part);
	size_t size = span.end - span.start;
	char *to = what->to + span.start;
	const char *from = what->from + span.start;

	if (what->known) {
		bool zeros = all_zeros(from, size);
		if (!zeros)
			note_needed(what->origin + span.start, size);
		if (untouched[part / 64] >> part % 64 & 1) {
			if (zeros)
				return;
			touch(to);
		}
	}
	memcpy(to, from, size);
}

static void make_part(const struct work *what, size_t part)
{
	struct span span = span_of(what, part);
	size_t size = span.end - span.start;

	/* if this fails, the kernel allocates pages when they are written to */
	if (!what->known || is_needed(what->origin + span.start, size))
		call(SYS_madvise, (long)(what->to + span.start), (long)size, POPULATE_WRITE, 0);
}

/* Take a part and do its work; return whether there was one. */
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
			/* work that began before sleepers was increased would not wake this thread
			 */
			if (seen == atomic_load(&state) >> 32)
				result = call(SYS_futex, (long)&number, FUTEX_WAIT_PRIVATE,
				    (long)seen, (long)&idle);
			atomic_fetch_sub(&sleepers, 1);
			if (result && result != -EAGAIN && result != -EINTR)
				return 0; /* most often -ETIMEDOUT */
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
	/* a clone(2) that fails leaves nothing behind, and clone(2) allocates no memory */
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
	/* the application's signal handlers must not run in these threads */
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

/* Return whether all of this memory is in one range that libcuda has mapped; set its origin. */
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

/* Forget what was there. The caller holds the lock. */
static void remove_ranges(uintptr_t start, uintptr_t end)
{
	for (size_t i = 0; i < range_count;) {
		struct range found = ranges[i];
		if (start >= found.end || end <= found.start) {
			i++;
			continue;
		}
		ranges[i] = ranges[--range_count];
		/* if there is no room for these ranges, zeros are written there */
		add_range(found.start, start, found.origin);
		if (end < found.end)
			add_range(end, found.end, found.origin + (end - found.start));
	}
}

/* The kernel maps and unmaps whole pages. */
static size_t whole_pages(size_t size)
{
	return (size + PAGE - 1) & ~(PAGE - 1);
}

static void forget(uintptr_t start, size_t size)
{
	lock_ranges();
	remove_ranges(start, start + whole_pages(size));
	atomic_flag_clear(&ranges_lock);
}

/* Forget all ranges when the driver reads from one: it writes no more there. A restore may also
 * have mapped a file there, and then memory without a page does not read as zeros. */
static void note_read(uintptr_t start, size_t size)
{
	lock_ranges();
	for (size_t i = 0; i < range_count; i++)
		if (start < ranges[i].end && start + size > ranges[i].start)
			range_count = 0;
	atomic_flag_clear(&ranges_lock);
}

/* Note a new mapping, and return its origin. */
static size_t note_mapping(uintptr_t start, size_t size)
{
	size_t origin;

	lock_ranges();
	origin = mapped;
	add_range(start, start + size, origin);
	mapped += size;
	atomic_flag_clear(&ranges_lock);
	return origin;
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
	remove_ranges(from, from + whole_pages(old_size));
	remove_ranges(to, to + whole_pages(new_size));
	for (size_t i = 0; i < count; i++)
		add_range(moved[i].start, moved[i].end, moved[i].origin);
	atomic_flag_clear(&ranges_lock);
}

/* Share out work. The caller holds `working`. */
static void share_out(struct work what)
{
	unsigned next = atomic_load(&number) + 1;
	size_t part = what.from ? PART : HUGE, lead = (uintptr_t)what.to % part;
	uint64_t parts = (what.size + lead + part - 1) / part;
	int spins = 0;

	work = what;
	atomic_store(&first_touch[0], 0);
	atomic_store(&first_touch[1], 0);
	atomic_store(&done, 0);
	publish(next, parts);
	start_threads();
	while (take_part())
		;
	/* Wait for the other threads' parts. A part may wait for memory that a restore still
	 * fetches. */
	for (unsigned now; (now = atomic_load(&done)) < parts;) {
		if (spins == SPINS - 1)
			atomic_store(&awaited, true);
		wait_change(&done, now, &spins);
	}
	atomic_store(&awaited, false);
}

/* The memcpy that libcuda imports from the C library is memmove (GLIBC_2.2.5). */
static void *copies_memcpy(void *to, const void *from, size_t size)
{
	uintptr_t distance = (uintptr_t)to - (uintptr_t)from;
	struct work what = {to, from, size, false, 0};

	if (size < LEAST || size > PART * (MOST_PARTS - 1) || distance < size || -distance < size ||
	    atomic_flag_test_and_set(&working))
		return memmove(to, from, size);
	note_read((uintptr_t)from, size);
	what.known = find_range((uintptr_t)to, size, &what.origin);
	if (what.known)
		find_untouched(to, size);
	share_out(what);
	atomic_flag_clear(&working);
	return to;
}

/* Populate the pages that are needed, or all pages if the last window does not tell which. In the
 * first window, a small mapping is the exception: most often it holds only a context, which
 * is nearly all zeros, so none of its pages is populated. */
static void make_pages(char *at, size_t size, size_t origin)
{
	bool known = mapped_before ? mapped_before == origin + size : size <= CONTEXT;
	struct work what = {at, NULL, size, known, origin};

	if (size > HUGE * (MOST_PARTS - 1) || atomic_flag_test_and_set(&working))
		return;
	share_out(what);
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
	size_t huge = size < huge_left ? size : huge_left;
	if (huge >= MAPPING - HUGE && !madvise(found, huge, MADV_HUGEPAGE))
		huge_left -= huge;
	make_pages(found, size, note_mapping((uintptr_t)found, size));
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
enum { COPY = 1 | 2, MAP = 4 | 8, UNMAP = 16 }; /* bits of these; one of each group is required */

/* Return how many threads can run beside the caller's, on the processors that it may use. */
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

	copies_end(); /* if that had to give up */
	if (begun || !library)
		return false;
	wanted = can_run(wanted < MOST_THREADS ? wanted : MOST_THREADS);
	if (!wanted)
		return false;
	char *made = mmap(NULL, wanted * STACK, PROT_READ | PROT_WRITE,
	    MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK | MAP_NORESERVE, -1, 0);
	if (made == MAP_FAILED)
		return false;
	begun = true;
	huge_left = huge;
	/* What is needed is known from the last window in which the driver mapped memory. */
	for (size_t i = 0; mapped && i < sizeof needed / sizeof *needed; i++)
		atomic_store(&needed_before[i], atomic_exchange(&needed[i], 0));
	if (mapped)
		mapped_before = atomic_exchange(&unknown, false) ? SIZE_MAX : mapped;
	range_count = mapped = 0;
	stacks = made;
	most_threads = wanted;
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
		/* a shared futex, because the kernel wakes such a one when it sets the word */
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
	/* If the window was cancelled, the driver's thread is not held and may still copy. */
	while (atomic_flag_test_and_set(&working))
		if (clock_now() > until)
			return; /* the next call tries again */
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
