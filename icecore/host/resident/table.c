/* All live allocations and mappings by address: open addressing in memory of its own. It never
 * calls the C library's allocator, whose lock a parked thread may hold. */
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>

#include "table.h"

#define VACATED 1

pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
struct resident_counts table_counts;

static uint64_t next_identity = 1;

static struct allocation *places;
static size_t room, used; /* used: with the vacated ones */

static size_t start(CUdeviceptr address, size_t size)
{
	/* the upper bits: handles are multiples of 2^40 */
	return (size_t)((address >> 9) * 0x9E3779B97F4A7C15ull >> 32) & (size - 1);
}

static void count(const struct allocation *what, int by)
{
	static uint64_t *const of[][2] = {
	    [KIND_RESIDENT] = {&table_counts.resident, &table_counts.resident_bytes},
	    [KIND_SPARE] = {&table_counts.spare, &table_counts.spare_bytes},
	    [KIND_SMALL] = {&table_counts.small, &table_counts.small_bytes},
	    [KIND_POOL] = {&table_counts.pool, &table_counts.pool_bytes},
	    [KIND_MANAGED] = {&table_counts.managed, &table_counts.managed_bytes},
	    [KIND_FOREIGN] = {&table_counts.foreign, &table_counts.foreign_bytes},
	};
	enum kind kind = what->kind;

	if (kind == KIND_MAPPING)
		return;
	if (kind == KIND_HANDLE) {
		*(what->made.imported ? &table_counts.imported : &table_counts.handles) +=
		    (uint64_t)by;
		if (what->made.imported)
			return; /* whoever allocated it counts it */
		kind = KIND_RESIDENT;
	}
	*of[kind][0] += (uint64_t)by;
	*of[kind][1] += (uint64_t)by *
	    (kind == KIND_RESIDENT || kind == KIND_SPARE ? what->size : what->requested);
}

static struct allocation *insert(
    struct allocation *into, size_t size, const struct allocation *what)
{
	size_t at = start(what->address, size);

	while (into[at].address > VACATED)
		at = (at + 1) & (size - 1);
	if (into[at].address == 0)
		used++;
	into[at] = *what;
	return &into[at];
}

static bool grow(void)
{
	size_t live = 0, before = room;
	struct allocation *old = places, *fresh;

	for (size_t i = 0; i < room; i++)
		live += places[i].address > VACATED;
	size_t wanted = 1024;
	while (wanted < 4 * live)
		wanted *= 2;
	fresh = mmap(NULL, wanted * sizeof *fresh, PROT_READ | PROT_WRITE,
	    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (fresh == MAP_FAILED)
		return false;
	used = 0;
	for (size_t i = 0; i < before; i++)
		if (old[i].address > VACATED)
			insert(fresh, wanted, &old[i]);
	/* In this order: a child that is forked meanwhile finds the old ones, none, or the fresh.
	 */
	__atomic_store_n(&room, 0, __ATOMIC_SEQ_CST);
	__atomic_store_n(&places, fresh, __ATOMIC_SEQ_CST);
	__atomic_store_n(&room, wanted, __ATOMIC_SEQ_CST);
	if (old)
		munmap(old, before * sizeof *old);
	return true;
}

struct allocation *table_find(CUdeviceptr address)
{
	if (!room || address <= VACATED)
		return NULL;
	for (size_t at = start(address, room); places[at].address; at = (at + 1) & (room - 1))
		if (places[at].address == address)
			return &places[at];
	return NULL;
}

bool table_only_noted(const struct allocation *what)
{
	return what->kind == KIND_SMALL || what->kind == KIND_POOL || what->kind == KIND_MANAGED ||
	    what->kind == KIND_FOREIGN;
}

struct allocation *table_add(const struct allocation *what)
{
	if (2 * (used + 1) > room && !grow())
		return NULL;
	/* The end of the driver's own memory is not always seen here (a pool's, a graph's), and
	 * addresses are reused. */
	struct allocation *ended = table_find(what->address);
	if (ended && table_only_noted(ended))
		table_remove(ended);
	count(what, 1);
	return insert(places, room, what);
}

void table_remove(struct allocation *what)
{
	count(what, -1);
	what->address = VACATED;
}

void table_change(struct allocation *what, enum kind to)
{
	count(what, -1);
	what->kind = to;
	count(what, 1);
}

struct allocation *table_next(struct allocation *after, enum kind kind)
{
	for (size_t at = after ? (size_t)(after - places) + 1 : 0; at < room; at++)
		if (places[at].address > VACATED && places[at].kind == kind)
			return &places[at];
	return NULL;
}

struct allocation *table_next_held(struct allocation *after)
{
	for (size_t at = after ? (size_t)(after - places) + 1 : 0; at < room; at++)
		if (places[at].address > VACATED &&
		    (places[at].kind == KIND_RESIDENT || places[at].kind == KIND_SPARE ||
			places[at].kind == KIND_HANDLE))
			return &places[at];
	return NULL;
}

bool table_imported(const struct allocation *what)
{
	return what->kind == KIND_HANDLE && what->made.imported;
}

struct allocation *table_containing(CUdeviceptr address)
{
	static const enum kind kinds[] = {KIND_MAPPING, KIND_RESIDENT};
	struct allocation *at = table_find(address);

	if (at && (at->kind == KIND_MAPPING || at->kind == KIND_RESIDENT))
		return at;
	for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
		for (at = NULL; (at = table_next(at, kinds[i]));)
			if (address >= at->address && address - at->address < at->size)
				return at;
	return NULL;
}

uint64_t table_new_identity(void)
{
	return next_identity++;
}

void table_in_child(void)
{
	pthread_mutex_init(&table_lock, NULL);
	next_identity = 1;
	places = NULL; /* a copy that nobody writes costs nothing */
	room = used = 0;
	memset(&table_counts, 0, sizeof table_counts);
}
