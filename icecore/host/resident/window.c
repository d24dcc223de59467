/* The GPU memory of a parked process, taken away and brought back. Each step records its progress
 * for each allocation, so that from any point window_map leads back to mapped memory.
 *
 * Only the agent's thread runs this code, with every other thread parked, so the table does not
 * change while it is read.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "capture.h"
#include "clock.h"
#include "copies.h"
#include "descriptors.h"
#include "devices.h"
#include "directory.h"
#include "handles.h"
#include "holding.h"
#include "local_memory.h"
#include "spare.h"
#include "threads.h"
#include "window.h"

#define LEFT 64 /* descriptors that the application can have at least beside ours */
#define HIGHEST_LIMIT \
	65536 /* the kernel's table reaches to the highest number, and each fork copies it */

static struct given {
	uint64_t identity;
	int descriptor;
} *given;
static size_t given_count, given_room;
static bool given_sorted;

static rlim_t limit_before, limit_raised; /* of descriptors; raised: 0 where it was not */
static int first_number = DESCRIPTOR_HIGH;

static bool raise_limit(const struct rlimit *now, rlim_t wanted)
{
	struct rlimit more = {wanted, now->rlim_max};

	if (wanted <= now->rlim_cur)
		return true;
	return wanted <= now->rlim_max && !setrlimit(RLIMIT_NOFILE, &more);
}

static void lower_limit(void)
{
	struct rlimit found;

	if (limit_raised && !getrlimit(RLIMIT_NOFILE, &found) && found.rlim_cur == limit_raised) {
		found.rlim_cur = limit_before;
		setrlimit(RLIMIT_NOFILE, &found); /* what lies above stays open */
	}
	limit_raised = 0;
	first_number = DESCRIPTOR_HIGH;
}

static size_t count_open(void)
{
	char entries[4096] __attribute__((aligned(8)));
	int numbers = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	size_t some = 0;
	long got;

	if (numbers < 0)
		return SIZE_MAX / 2; /* none left to look with */
	while ((got = syscall(SYS_getdents64, numbers, entries, sizeof entries)) > 0)
		for (long at = 0; at < got;
		    at += ((struct directory_entry *)(entries + at))->length)
			some += ((struct directory_entry *)(entries + at))->name[0] != '.';
	close(numbers);
	return some - 1;
}

/* Every handle that is released here comes back as a descriptor, which stays open, because an
 * imported handle cannot be exported to another keeper. So room for them is made first: above the
 * application's own limit, which is raised until the memory is mapped again, so that the
 * application lacks no descriptor and gets none whose number select() cannot take. If the hard
 * limit does not allow that, they lie among the application's own, and the raised limit stays. */
static int make_room(struct resident_message *answer)
{
	struct rlimit found;
	size_t ours = 0, kept = 0, needed;

	if (getrlimit(RLIMIT_NOFILE, &found))
		return errno;
	for (struct allocation *at = NULL; (at = table_next_held(at));) {
		ours++;
		kept += holding_keeps(at);
	}
	if (found.rlim_cur <= HIGHEST_LIMIT && found.rlim_cur + ours + LEFT <= found.rlim_max) {
		/* a second try takes all once more */
		rlim_t twice = found.rlim_cur + 2 * ours + LEFT,
		       wanted = twice < found.rlim_max ? twice : found.rlim_max;
		if (raise_limit(&found, wanted)) {
			limit_before = found.rlim_cur;
			limit_raised = wanted;
			first_number = (int)found.rlim_cur;
			return 0;
		}
	}
	needed = count_open() - kept + ours + LEFT;
	if (raise_limit(&found, needed))
		return 0;
	answer->count = (uint32_t)ours;
	answer->requested = found.rlim_max;
	return EMFILE;
}

int window_give(uint64_t identity, int descriptor)
{
	if (given_count == given_room) {
		size_t room = given_room ? 2 * given_room : 512;
		struct given *more = mmap(NULL, room * sizeof *more, PROT_READ | PROT_WRITE,
		    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (more == MAP_FAILED) {
			close(descriptor);
			return ENOMEM;
		}
		if (given) {
			memcpy(more, given, given_count * sizeof *more);
			munmap(given, given_room * sizeof *given);
		}
		given = more;
		given_room = room;
	}
	given[given_count++] = (struct given){identity, descriptor_from(descriptor, first_number)};
	given_sorted = false;
	return 0;
}

void window_drop_given(void)
{
	while (given_count)
		if (given[--given_count].descriptor >= 0)
			close(given[given_count].descriptor);
}

/* Heapsort: qsort(3) may allocate, and a parked thread may hold the allocator's lock. */
static void sift_given(size_t at, size_t count)
{
	struct given moving = given[at];

	for (size_t child; (child = 2 * at + 1) < count; at = child) {
		if (child + 1 < count && given[child + 1].identity > given[child].identity)
			child++;
		if (given[child].identity <= moving.identity)
			break;
		given[at] = given[child];
	}
	given[at] = moving;
}

static void sort_given(void)
{
	for (size_t at = given_count / 2; at > 0;)
		sift_given(--at, given_count);
	for (size_t count = given_count; count > 1;) {
		struct given last = given[--count];
		given[count] = given[0];
		given[0] = last;
		sift_given(0, count);
	}
	given_sorted = true;
}

static int take_given(uint64_t identity)
{
	size_t first = 0, end = given_count;

	if (!given_sorted)
		sort_given();
	while (first < end) {
		size_t middle = first + (end - first) / 2;
		if (given[middle].identity < identity)
			first = middle + 1;
		else
			end = middle;
	}
	for (; first < given_count && given[first].identity == identity; first++)
		if (given[first].descriptor >= 0) {
			int descriptor = given[first].descriptor;
			given[first].descriptor = -1;
			return descriptor;
		}
	return -1;
}

static const enum kind mapped_kinds[] = {KIND_RESIDENT, KIND_MAPPING};

static int failed(CUresult result)
{
	return result ? RESIDENT_CUDA_ERROR + result : 0;
}

static int synchronise_all(void)
{
	const struct driver *d = driver();
	CUcontext last = NULL;

	for (size_t i = 0; i < sizeof mapped_kinds / sizeof *mapped_kinds; i++)
		for (struct allocation *at = NULL; (at = table_next(at, mapped_kinds[i]));) {
			if (!at->context || at->context == last)
				continue;
			last = at->context;
			CUresult result = d->cuCtxSetCurrent(last);
			if (!result)
				result = d->cuCtxSynchronize();
			if (result)
				return failed(result);
		}
	return 0;
}

static void shrink_all(void)
{
	for (size_t i = 0; i < sizeof mapped_kinds / sizeof *mapped_kinds; i++)
		for (struct allocation *at = NULL; (at = table_next(at, mapped_kinds[i]));)
			if (at->context)
				local_memory_shrink(at->context);
}

static int unmap_all(enum kind kind)
{
	int error = 0;

	for (struct allocation *at = NULL; !error && (at = table_next(at, kind));)
		if (at->mapped) {
			error = failed(driver()->cuMemUnmap(at->address, at->size));
			at->mapped = error != 0;
		}
	return error;
}

int window_unmap(
    int64_t until, const struct resident_message *wanted, struct resident_message *answer)
{
	const struct driver *d = driver();
	struct allocation *at;
	int error = threads_park_settle(until);

	if (error)
		return error;
	if (capture_active())
		/* the capture would fail when its context is synchronised; captures are short */
		return EAGAIN;
	if (table_counts.multicast || table_counts.unparkable)
		/* something shared would stay mapped: the driver's restore would fail */
		return EOPNOTSUPP;
	spare_give_back(NULL, false); /* nobody's contents */
	pthread_mutex_lock(&table_lock);
	error = synchronise_all();
	if (!error)
		error = make_room(answer);
	if (!error && !holding_park())
		error = ENOTCONN; /* nobody would have the memory when it is released here */
	for (size_t i = 0; !error && i < sizeof mapped_kinds / sizeof *mapped_kinds; i++)
		error = unmap_all(mapped_kinds[i]);
	if (!error && clock_now() > until)
		error = ETIMEDOUT;
	for (at = NULL; !error && (at = table_next_held(at));) {
		error = failed(d->cuMemRelease(at->handle));
		at->has_handle = error != 0;
		answer->count++;
		answer->size += table_imported(at) ? 0 : at->size;
	}
	if (!error)
		shrink_all();
	if (!error) {
		/* No descriptor stays here: a checkpoint of this process could not restore it. */
		for (at = NULL; (at = table_next_held(at));)
			holding_close_kept(at);
		holding_close();
	}
	d->cuCtxSetCurrent(NULL);
	pthread_mutex_unlock(&table_lock);
	if (!error && copies_begin(wanted->count, (size_t)wanted->requested))
		answer->flags |= RESIDENT_COPIES;
	return error;
}

static int import_one(struct allocation *what)
{
	struct stat found;
	int descriptor;

	descriptor = take_given(what->identity);
	if (descriptor < 0)
		return ENOENT;
	CUresult result = driver()->cuMemImportFromShareableHandle(
	    &what->handle, (void *)(intptr_t)descriptor, HANDLE_POSIX_DESCRIPTOR);
	if (result || fstat(descriptor, &found)) {
		close(descriptor);
		return result ? failed(result) : errno;
	}
	what->has_handle = true;
	/* an imported handle cannot be exported: what the next keeper gets */
	what->descriptor = descriptor;
	what->inode = found.st_ino;
	return 0;
}

/* 0, or why this one is not as the application knows it. */
static int map_one(struct allocation *what)
{
	const struct driver *d = driver();
	const struct allocation *of =
	    what->kind == KIND_MAPPING ? table_find(what->mapping.of) : what;
	CUresult result;

	if (!of)
		return ENOENT;
	result = d->cuMemMap(what->address, what->size,
	    what->kind == KIND_MAPPING ? what->mapping.offset : 0, of->handle, 0);
	if (result)
		return failed(result);
	result = what->kind == KIND_MAPPING ? handles_set_access(what) : devices_set_access(what);
	if (result) {
		d->cuMemUnmap(what->address, what->size);
		return failed(result);
	}
	what->mapped = true;
	return 0;
}

/* A context may have ended unnoticed: that is no reason to fail. */
static int in_context(struct allocation *what, int (*step)(struct allocation *))
{
	int error = what->context ? failed(driver()->cuCtxSetCurrent(what->context)) : 0,
	    result = step(what);

	return result && error ? error : result;
}

int window_map(void)
{
	const struct driver *d = driver();
	int error = 0;
	bool lacking = false, others = given_count > 0;

	copies_end();
	pthread_mutex_lock(&table_lock);
	devices_refresh();
	for (struct allocation *at = NULL; (at = table_next_held(at));)
		lacking = lacking || !at->has_handle;
	if (lacking && !given_count)
		error = holding_take(window_give);
	for (struct allocation *at = NULL; !error && (at = table_next_held(at));)
		if (!at->has_handle)
			error = in_context(at, import_one);
	for (size_t i = 0; !error && i < sizeof mapped_kinds / sizeof *mapped_kinds; i++)
		for (struct allocation *at = NULL;
		    !error && (at = table_next(at, mapped_kinds[i]));)
			if (!at->mapped)
				error = in_context(at, map_one);
	window_drop_given();
	if (!error)
		local_memory_grow();
	d->cuCtxSetCurrent(NULL);
	/* A new connection proves that the process lives. A keeper that is not there now gets them
	 * later. */
	holding_close();
	if (!error)
		lower_limit();
	if (!error && others)
		holding_replace();
	else if (!error)
		holding_complete();
	pthread_mutex_unlock(&table_lock);
	return error;
}
