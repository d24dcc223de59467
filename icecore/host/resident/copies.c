/* The driver's checkpoint copies what the GPU has for a process (its code, stacks, queues) into one
 * large new mapping of it, and its restore copies that back: through a small buffer, with memcpy(3),
 * in one thread, piece by piece of 2 MiB. That is half of each. Most of it is zeros.
 *
 * So for a window, libcuda calls what is here for memcpy: several threads share out each piece, and
 * a part that is all zeros is not written where the memory has never been touched, which reads as
 * zeros. Such memory is neither made, nor scanned, nor dumped. The new mapping is not populated
 * (MAP_POPULATE: one thread makes all of it, in pages of 4 KiB): the threads that write to it make
 * its pages, which are huge where that was allowed.
 *
 * The threads live only from the end of `window_unmap` to `window_map`. Meanwhile all others may be
 * held, by CRIU, and be part of a snapshot; these may run whenever the driver's may. The C library
 * knows nothing of them: it would call malloc for a thread, and a parked thread may hold its lock.
 * They share the agent's thread-local memory, so they make system calls without errno.
 *
 * A filter of system calls (seccomp(2)) sees only such as the driver and the agent make, too.
 *
 * Whoever stops a thread in the middle of a part has the driver wait for it. It is stopped where
 * the driver does not work (icecore.host.cuda.holder).
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
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
#define NAMED_NANOSECONDS 100000000ll
#define MAPPING ((size_t)64 << 20) /* from here on a mapping counts as the driver's */
#define HUGE ((size_t)2 << 20)
#define MAPPINGS 16
#define PAGE ((size_t)4096)
#define PRESENT_OR_SWAPPED (3ull << 62) /* in an entry of /proc/PID/pagemap */
#define END_NANOSECONDS 1000000000ll

static struct thread {
	void *stack;
	atomic_int id; /* the kernel sets it to 0 when the thread has ended */
} threads[MOST_THREADS];
static unsigned thread_count;
static bool begun;
static atomic_bool ending;
static atomic_uint named; /* threads that are called as they should be */

/* The copy under way: its number << 32 | its parts << 16 | the next part. A part is taken by
 * increasing it, which fails if the copy is another one by then; so what describes a copy is read
 * first, and holds if it succeeds. */
static _Atomic uint64_t state;
static atomic_uint number, sleepers, done;
static atomic_bool awaited; /* whoever shared out a copy sleeps until it is done */
static struct copy {
	char *to;
	const char *from;
	size_t size;
	int pages; /* /proc/self/pagemap, where zeros need not be written; -1: everything is */
} copy;
static atomic_uint first_touch[2]; /* of a huge page, even or odd: 1, by somebody; 2, done */
static atomic_flag copying = ATOMIC_FLAG_INIT;

/* Private memory that libcuda has mapped since the window began, and not unmapped. */
static struct mapping {
	uintptr_t start, end;
} mappings[MAPPINGS];
static size_t huge_left;
static atomic_flag mappings_lock = ATOMIC_FLAG_INIT;

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

/* Several threads that touch a new huge page at once would each clear one, and all but one in vain. */
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

static void copy_part(const struct copy *what, size_t part)
{
	size_t at = part * PART, size = what->size - at < PART ? what->size - at : PART;
	char *to = what->to + at;

	if (what->pages >= 0 && is_untouched(what->pages, to, size)) {
		if (all_zeros(what->from + at, size))
			return;
		touch(to);
	}
	memcpy(to, what->from + at, size);
}

/* Take and copy a part; return whether there was one. */
static bool take_part(void)
{
	uint64_t now = atomic_load_explicit(&state, memory_order_acquire);

	while ((now & MOST_PARTS) < (now >> 16 & MOST_PARTS)) {
		struct copy what = copy;
		atomic_thread_fence(memory_order_acquire);
		if (!atomic_compare_exchange_weak(&state, &now, now + 1))
			continue;
		copy_part(&what, now & MOST_PARTS);
		if (atomic_fetch_add(&done, 1) + 1 == (now >> 16 & MOST_PARTS) &&
		    atomic_load(&awaited))
			call(SYS_futex, (long)&done, FUTEX_WAKE_PRIVATE, 1, 0);
		return true;
	}
	return false;
}

static int work(void *unused)
{
	int spins = 0;

	(void)unused;
	call(SYS_prctl, PR_SET_NAME, (long)COPIES_NAME, 0, 0);
	atomic_fetch_add(&named, 1);
	while (!atomic_load(&ending)) {
		if (take_part()) {
			spins = 0;
		} else if (spins < SPINS) {
			spins++;
			__builtin_ia32_pause();
		} else {
			unsigned seen = atomic_load(&number);
			atomic_fetch_add(&sleepers, 1);
			/* the copy that was begun before we looked would not wake us */
			if (seen == atomic_load(&state) >> 32 && !atomic_load(&ending))
				call(SYS_futex, (long)&number, FUTEX_WAIT_PRIVATE, (long)seen, 0);
			atomic_fetch_sub(&sleepers, 1);
			spins = 0;
		}
	}
	return 0;
}

static void publish(unsigned next, uint64_t parts)
{
	atomic_store(&state, (uint64_t)next << 32 | parts << 16);
	atomic_store(&number, next);
	if (atomic_load(&sleepers))
		call(SYS_futex, (long)&number, FUTEX_WAKE_PRIVATE, INT_MAX, 0);
}

static void lock_mappings(void)
{
	while (atomic_flag_test_and_set(&mappings_lock))
		__builtin_ia32_pause();
}

static bool is_mapped(uintptr_t start, size_t size)
{
	bool found = false;

	lock_mappings();
	for (size_t i = 0; !found && i < MAPPINGS; i++)
		found = start >= mappings[i].start && start + size <= mappings[i].end;
	atomic_flag_clear(&mappings_lock);
	return found;
}

/* What lay there is gone; new: what libcuda has mapped there lets zeros be left out. */
static void note_mapping(uintptr_t start, size_t size, bool new)
{
	lock_mappings();
	for (size_t i = 0; i < MAPPINGS; i++)
		if (start < mappings[i].end && start + size > mappings[i].start)
			mappings[i] = (struct mapping){0, 0};
	for (size_t i = 0; new && i < MAPPINGS; i++)
		if (!mappings[i].end) {
			mappings[i] = (struct mapping){start, start + size};
			break;
		}
	atomic_flag_clear(&mappings_lock);
}

static void share_out(char *to, const char *from, size_t size)
{
	unsigned next = atomic_load(&number) + 1;
	uint64_t parts = (size + PART - 1) / PART;

	copy = (struct copy){to, from, size, -1};
	if (is_mapped((uintptr_t)to, size))
		copy.pages = (int)call(SYS_openat, AT_FDCWD, (long)"/proc/self/pagemap",
		    O_RDONLY | O_CLOEXEC, 0);
	int pages = copy.pages;
	atomic_store(&first_touch[0], 0);
	atomic_store(&first_touch[1], 0);
	atomic_store(&done, 0);
	publish(next, parts);
	while (take_part())
		;
	/* The others finish theirs; a part may wait for memory that a restore still fetches. */
	int spins = 0;
	for (unsigned now; (now = atomic_load(&done)) < parts;) {
		if (spins == SPINS - 1)
			atomic_store(&awaited, true);
		wait_change(&done, now, &spins);
	}
	atomic_store(&awaited, false);
	if (pages >= 0)
		call(SYS_close, pages, 0, 0, 0);
}

/* What libcuda has from the C library as memcpy is memmove (GLIBC_2.2.5). */
static void *copies_memcpy(void *to, const void *from, size_t size)
{
	uintptr_t distance = (uintptr_t)to - (uintptr_t)from;

	if (size < LEAST || size > PART * MOST_PARTS || distance < size || -distance < size ||
	    atomic_flag_test_and_set(&copying))
		return memmove(to, from, size);
	/* Once it reads from its mapping, it has no more to write there; and a restore may have put a
	 * file in the place of the mapping, which does not read as zeros where no page is. */
	note_mapping((uintptr_t)from, size, false);
	share_out(to, from, size);
	atomic_flag_clear(&copying);
	return to;
}

static void *copies_mmap(void *address, size_t size, int protection, int flags, int file, off_t at)
{
	const int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE;
	bool ours = size >= MAPPING && (flags & ~MAP_FIXED_NOREPLACE) == kind &&
	    protection & PROT_WRITE;
	void *found =
	    mmap(address, size, protection, ours ? flags & ~MAP_POPULATE : flags, file, at);

	if (found == MAP_FAILED)
		return found;
	note_mapping((uintptr_t)found, size, ours);
	size_t huge = size < huge_left ? size : huge_left;
	if (ours && huge >= MAPPING - HUGE && !madvise(found, huge, MADV_HUGEPAGE))
		huge_left -= huge;
	return found;
}

static int copies_munmap(void *address, size_t size)
{
	note_mapping((uintptr_t)address, size, false);
	return munmap(address, size);
}

static const struct replacement replacements[] = {
    {"memcpy", (void *)copies_memcpy},
    {"memmove", (void *)copies_memcpy},
    {"mmap", (void *)copies_mmap},
    {"mmap64", (void *)copies_mmap},
    {"munmap", (void *)copies_munmap},
    {NULL, NULL},
};
enum { COPY = 1 | 2, MAP = 4 | 8, UNMAP = 16 }; /* bits of these; one of each is needed */

static bool start_thread(struct thread *thread)
{
	/* errors of a raw clone(2) leave errno alone, and nothing of it allocates */
	const int flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD |
	    CLONE_SYSVSEM | CLONE_PARENT_SETTID | CLONE_CHILD_CLEARTID;

	thread->stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE,
	    MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK | MAP_NORESERVE, -1, 0);
	if (thread->stack == MAP_FAILED)
		return false;
	if (clone(work, (char *)thread->stack + STACK, flags, NULL, &thread->id, NULL,
		&thread->id) > 0)
		return true;
	munmap(thread->stack, STACK);
	return false;
}

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
	int64_t until = clock_now() + NAMED_NANOSECONDS;

	wanted = can_run(wanted);
	if (begun || !wanted || !library)
		return false;
	begun = true;
	note_mapping(0, SIZE_MAX, false);
	huge_left = huge;
	atomic_store(&ending, false);
	atomic_store(&named, 0);
	while (thread_count < wanted && thread_count < MOST_THREADS &&
	    start_thread(&threads[thread_count]))
		thread_count++;
	int spins = 0;
	for (unsigned now; (now = atomic_load(&named)) < thread_count && clock_now() < until;)
		wait_change(&named, now, &spins);
	unsigned replaced = thread_count ? slots_replace(library, replacements) : 0;
	if (replaced & COPY && replaced & MAP && replaced & UNMAP)
		return true;
	copies_end();
	return false;
}

static bool has_ended(struct thread *thread, int64_t until)
{
	for (int id; (id = atomic_load(&thread->id));) {
		struct timespec limit = {0, 10000000};
		if (clock_now() > until)
			return false;
		/* a shared futex: that is what the kernel wakes when it sets the word */
		syscall(SYS_futex, &thread->id, FUTEX_WAIT, id, &limit);
	}
	return true;
}

void copies_end(void)
{
	int64_t until = clock_now() + END_NANOSECONDS;

	if (!begun)
		return;
	bool back = slots_put_back();
	/* A copy under way would lose its parts: nobody holds the driver's thread if the window was
	 * given up. */
	while (atomic_flag_test_and_set(&copying))
		if (clock_now() > until)
			return; /* the next try */
	atomic_store(&ending, true);
	publish(atomic_load(&number) + 1, 0);
	atomic_flag_clear(&copying);
	while (thread_count && has_ended(&threads[thread_count - 1], until))
		munmap(threads[--thread_count].stack, STACK);
	begun = thread_count > 0 || !back; /* one is stopped: the next try */
}

void copies_in_child(void)
{
	thread_count = 0;
	begun = false;
	atomic_flag_clear(&copying);
	atomic_flag_clear(&mappings_lock);
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
