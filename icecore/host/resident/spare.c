/* Released memory that is kept because it is asked for again and again. To the application it is
 * released: no call tells the difference, and it is given back to the device before any allocation
 * here fails for lack of memory.
 *
 * An allocation that can be taken over costs the driver's calls for physical memory, address,
 * mapping, access and descriptor, and the keeper's answer at its release: twenty times the driver's
 * own. A loop that allocates and releases would pay that in every round. So memory stays mapped,
 * with the keeper and in the table, if the same size was asked for shortly after its last release,
 * and the next allocation of that size in that context gets it. What nobody asks for within seconds
 * is given back. What is released only once, or with others at the end of a phase, is given back at
 * once.
 *
 * It keeps its identity, by which other processes know an allocation. So memory that was ever
 * exported is not kept, nor memory with a property that fresh memory lacks.
 */
#define _GNU_SOURCE
#include <string.h>
#include <time.h>

#include "capture.h"
#include "clock.h"
#include "devices.h"
#include "holding.h"
#include "hooks.h"
#include "release.h"
#include "spare.h"
#include "threads.h"

#define SPARES 32
#define MOST_BYTES ((size_t)64 << 20) /* of each device */
#define SOON_NANOSECONDS 5000000000ll
#define SHORT_NANOSECONDS 1000000000ll /* after memory was short */
#define NOBODYS 4096ull /* an address at which there is no memory of any kind */

static struct spare {
	CUdeviceptr address;
	size_t size;
	CUcontext context;
	CUdevice device;
	int64_t since;
} spares[SPARES]; /* in order of release; changed under table_lock, as all that follows, and under
		     spares_lock */
static size_t some;
/* the innermost: who asks about an address, at each launch perhaps, waits for nobody's allocation
 */
static pthread_mutex_t spares_lock = PTHREAD_MUTEX_INITIALIZER;
static CUcontext users[DEVICES]; /* the one whose memory is on a device, as far as it is one */
static bool several[DEVICES];
static bool leaving;
static struct habit {
	CUcontext context;
	size_t size;
	int64_t released;
	bool again; /* it was asked for soon after that */
} habits[SPARES];
static int64_t last_short = -SHORT_NANOSECONDS;
static uint64_t given_back;

/* Held by the thread that gives back: a thread that is short of memory waits for one that already
 * does so. Taken before table_lock, inside threads_enter … threads_leave. */
static pthread_mutex_t giving_lock = PTHREAD_MUTEX_INITIALIZER;

/* Whether less time has passed; a restore may have set the clock back. */
static bool within(int64_t nanoseconds, int64_t since)
{
	int64_t passed = clock_now() - since;

	return passed >= 0 && passed < nanoseconds;
}

static struct habit *find_habit(CUcontext context, size_t size)
{
	for (struct habit *at = habits; at < habits + SPARES; at++)
		if (at->size == size && at->context == context)
			return at;
	return NULL;
}

static struct habit *make_habit(CUcontext context, size_t size)
{
	struct habit *oldest = habits;
	int64_t time = clock_now();

	for (struct habit *at = habits; at < habits + SPARES; at++) {
		if (at->released > time)
			at->released = INT64_MIN; /* a restore has set the clock back */
		if (at->released < oldest->released)
			oldest = at;
	}
	*oldest = (struct habit){.context = context, .size = size};
	return oldest;
}

static void take_out(size_t index)
{
	pthread_mutex_lock(&spares_lock);
	memmove(&spares[index], &spares[index + 1], (some - index - 1) * sizeof *spares);
	__atomic_store_n(&some, some - 1, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&spares_lock);
}

static void note_user(CUdevice device, CUcontext context)
{
	several[device] |= users[device] && users[device] != context;
	users[device] = context;
}

/* Whether only its own context, which has been waited for, can have used it: kernels of another may
 * still run. */
static bool is_its_contexts_alone(const struct allocation *what)
{
	return !several[what->device] && !devices_peers(what->device);
}

static bool has_room(CUdevice device, size_t size)
{
	for (size_t i = 0; i < some; i++)
		size += spares[i].device == device ? spares[i].size : 0;
	return some < SPARES && size <= MOST_BYTES;
}

bool spare_keep(struct allocation *what)
{
	struct habit *habit = find_habit(what->context, what->size);

	if (!habit)
		habit = make_habit(what->context, what->size);
	habit->again = habit->again && within(SOON_NANOSECONDS, habit->released);
	habit->released = clock_now();
	if (!habit->again || within(SHORT_NANOSECONDS, last_short) || what->exported ||
	    what->resident.altered || capture_active() || !is_its_contexts_alone(what) ||
	    !has_room(what->device, what->size))
		return false;
	pthread_mutex_lock(&spares_lock);
	spares[some] =
	    (struct spare){what->address, what->size, what->context, what->device, habit->released};
	__atomic_store_n(&some, some + 1, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&spares_lock);
	table_change(what, KIND_SPARE);
	return true;
}

bool spare_take(struct allocation *wanted)
{
	struct allocation *found = NULL;

	pthread_mutex_lock(&table_lock);
	note_user(wanted->device, wanted->context);
	for (size_t i = some; i-- > 0 && !found;)
		if (spares[i].size == wanted->size && spares[i].context == wanted->context &&
		    spares[i].device == wanted->device) {
			found = table_find(spares[i].address);
			take_out(i);
		}
	if (found) {
		table_change(found, KIND_RESIDENT);
		found->resident.freed = 0;
		wanted->address = found->address;
		table_counts.allocations++;
		table_counts.recycled++;
		if (found->requested != wanted->requested) {
			found->requested = wanted->requested;
			holding_add(found, -1);
		}
	} else {
		struct habit *habit = find_habit(wanted->context, wanted->size);
		if (habit)
			habit->again = within(SOON_NANOSECONDS, habit->released);
	}
	pthread_mutex_unlock(&table_lock);
	return found != NULL;
}

/* Find one of a context (NULL: any) that was released that long ago; `some`: there is none. */
static size_t find(CUcontext context, int64_t nanoseconds)
{
	size_t at = 0;

	while (at < some &&
	    ((context && spares[at].context != context) || within(nanoseconds, spares[at].since)))
		at++;
	return at;
}

/* Under giving_lock. At most as many as there can have been at the beginning: other threads go on.
 */
static void give_back(CUcontext context, int64_t nanoseconds, bool gone)
{
	size_t at;

	pthread_mutex_lock(&table_lock);
	for (size_t left = SPARES; left && (at = find(context, nanoseconds)) < some; left--) {
		struct spare what = spares[at];
		take_out(at);
		pthread_mutex_unlock(&table_lock);
		/* the agent has none */
		bool entered = !gone && !driver()->cuCtxPushCurrent_v2(what.context);
		pthread_mutex_lock(&table_lock);
		release_now(table_find(what.address));
		__atomic_store_n(&given_back, given_back + 1, __ATOMIC_RELEASE);
		pthread_mutex_unlock(&table_lock);
		if (entered)
			driver()->cuCtxPopCurrent_v2(&what.context);
		pthread_mutex_lock(&table_lock);
	}
	pthread_mutex_unlock(&table_lock);
}

void spare_give_back(CUcontext context, bool gone)
{
	pthread_mutex_lock(&giving_lock);
	give_back(context, 0, gone);
	pthread_mutex_unlock(&giving_lock);
	if (!gone)
		return;
	pthread_mutex_lock(&table_lock);
	memset(users, 0, sizeof users);
	memset(several, 0, sizeof several);
	for (struct allocation *at = NULL; (at = table_next(at, KIND_RESIDENT));)
		if (at->context != context)
			note_user(at->device, at->context);
	pthread_mutex_unlock(&table_lock);
}

void spare_give_back_old(void)
{
	/* A thread that gives back may wait for the driver's lock, and the agent must not wait for
	 * it. */
	if (!__atomic_load_n(&some, __ATOMIC_ACQUIRE) || capture_active() ||
	    pthread_mutex_trylock(&giving_lock))
		return;
	if (!leaving)
		give_back(NULL, SOON_NANOSECONDS, false);
	pthread_mutex_unlock(&giving_lock);
}

uint64_t spare_given_back(void)
{
	return __atomic_load_n(&given_back, __ATOMIC_ACQUIRE);
}

bool spare_make_room(uint64_t before)
{
	pthread_mutex_lock(&giving_lock);
	pthread_mutex_lock(&table_lock);
	last_short = clock_now(); /* what others release meanwhile is there for all */
	pthread_mutex_unlock(&table_lock);
	int mode = CAPTURE_MODE_RELAXED; /* somebody else's capture is not to fail by it */
	bool exchanged = driver()->cuThreadExchangeStreamCaptureMode &&
	    !driver()->cuThreadExchangeStreamCaptureMode(&mode);
	give_back(NULL, 0, false);
	if (exchanged)
		driver()->cuThreadExchangeStreamCaptureMode(&mode);
	pthread_mutex_unlock(&giving_lock);
	return spare_given_back() != before;
}

CUdeviceptr spare_hidden(CUdeviceptr address)
{
	CUdeviceptr asked = address;

	if (!__atomic_load_n(&some, __ATOMIC_ACQUIRE))
		return address;
	pthread_mutex_lock(&spares_lock);
	for (size_t i = 0; i < some; i++)
		if (address >= spares[i].address && address - spares[i].address < spares[i].size)
			asked = NOBODYS;
	pthread_mutex_unlock(&spares_lock);
	return asked;
}

void spare_at_exit(void)
{
	struct timespec until;

	/* A thread that gives back is allowed to finish; it may be at the driver's door. */
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec++;
	threads_enter(); /* not parked with the lock */
	bool alone = !pthread_mutex_timedlock(&giving_lock, &until);
	leaving = true;
	if (alone)
		pthread_mutex_unlock(&giving_lock);
	threads_leave();
}

void spare_in_child(void)
{
	pthread_mutex_init(&giving_lock, NULL);
	pthread_mutex_init(&spares_lock, NULL);
	some = 0;
	memset(users, 0, sizeof users);
	memset(several, 0, sizeof several);
	leaving = false;
	memset(habits, 0, sizeof habits);
	last_short = -SHORT_NANOSECONDS;
}

/* -- what an application asks of an address, and what it does with memory that a release does not
 * undo */

static void note_altered(CUdeviceptr address)
{
	if (!holding_directory())
		return;
	pthread_mutex_lock(&table_lock);
	struct allocation *found = table_containing(address);
	if (found && found->kind == KIND_RESIDENT)
		found->resident.altered = true;
	pthread_mutex_unlock(&table_lock);
}

#define ASKED(alters, name, parameters, arguments) \
	CUresult resident_##name parameters \
	{ \
		if (!driver() || !driver()->name) \
			return CUDA_ERROR_NOT_INITIALIZED; \
		threads_enter(); \
		address = spare_hidden(address); \
		CUresult result = driver()->name arguments; \
		if (alters && !result) \
			note_altered(address); \
		threads_leave(); \
		return result; \
	}
ASKED(false, cuPointerGetAttribute, (void *out, int attribute, CUdeviceptr address),
    (out, attribute, address))
ASKED(false, cuPointerGetAttributes,
    (unsigned count, int *attributes, void **out, CUdeviceptr address),
    (count, attributes, out, address))
ASKED(false, cuMemGetAddressRange_v2, (CUdeviceptr * base, size_t *size, CUdeviceptr address),
    (base, size, address))
ASKED(true, cuPointerSetAttribute, (const void *value, int attribute, CUdeviceptr address),
    (value, attribute, address))
ASKED(true, cuMemGetHandleForAddressRange,
    (void *out, CUdeviceptr address, size_t size, int type, unsigned long long flags),
    (out, address, size, type, flags))
