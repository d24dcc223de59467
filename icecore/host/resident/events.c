/* Events that processes share by CUDA's legacy IPC (cudaIpcGetEventHandle: torch.multiprocessing).
 *
 * The driver cannot restore those of its own before version 610. So none is shared: each process
 * gets an ordinary event of its own, and whatever is recorded in an event that has a handle is
 * waited for at once. Work that was recorded earlier than that is waited for when the handle is
 * made. So wherever a process has learnt that an event was recorded, in this process or another,
 * the recorded work is done, and every event of that handle says so.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "capture.h"
#include "events.h"
#include "holding.h"
#include "hooks.h"
#include "table.h"

#define INTERPROCESS 4u
#define DISABLE_TIMING 2u

/* The handle that applications pass around. */
struct reference {
	uint8_t magic[16];
	uint8_t token[16];
	uint64_t identity;
	uint8_t reserved[24];
};
_Static_assert(sizeof(struct reference) == sizeof(struct ipc_handle), "as cuda.h has it");

/* Drawn once; another one than that of memory (ipc.c). */
static const uint8_t magic[16] = {
    0x5E, 0x07, 0xB2, 0xF9, 0x8A, 0x31, 0xCC, 0x46, 0x1D, 0xE4, 0x93, 0x7F, 0x60, 0xAB, 0x28, 0xD5};

/* Those that were made for other processes. */
static struct event {
	CUevent event;
	uint64_t identity; /* of its handle; 0: it has none */
} *events;
static size_t some, room; /* all under events_lock; `some` is also read without it */
static uint64_t last_identity;
static pthread_mutex_t events_lock = PTHREAD_MUTEX_INITIALIZER;

static bool ours(void)
{
	const struct driver *d = driver();

	return d->usable && d->cuEventSynchronize && holding_directory();
}

static struct event *find(CUevent event)
{
	for (size_t i = 0; i < some; i++)
		if (events[i].event == event)
			return &events[i];
	return NULL;
}

static void forget(CUevent event)
{
	if (!__atomic_load_n(&some, __ATOMIC_ACQUIRE))
		return;
	pthread_mutex_lock(&events_lock);
	struct event *found = find(event);
	if (found) {
		*found = events[some - 1];
		__atomic_store_n(&some, some - 1, __ATOMIC_RELEASE);
	}
	pthread_mutex_unlock(&events_lock);
}

static bool add(CUevent event, uint64_t identity)
{
	bool added = true;

	pthread_mutex_lock(&events_lock);
	if (some == room) {
		size_t more = room ? 2 * room : 64;
		struct event *grown = realloc(events, more * sizeof *events);
		if (grown)
			events = grown, room = more;
		else
			added = false;
	}
	if (added) {
		events[some] = (struct event){event, identity};
		__atomic_store_n(&some, some + 1, __ATOMIC_RELEASE);
	}
	pthread_mutex_unlock(&events_lock);
	return added;
}

/* An event of the driver's that other processes will know by a handle of ours. */
static CUresult create(CUevent *out, unsigned flags, uint64_t identity)
{
	CUresult result = driver()->cuEventCreate(out, flags & ~INTERPROCESS);

	if (result)
		return result;
	/* A destroyed context takes its events with it unseen. */
	forget(*out);
	if (add(*out, identity))
		return CUDA_SUCCESS;
	driver()->cuEventDestroy_v2(*out);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult resident_cuEventCreate(CUevent *out, unsigned flags)
{
	if (!driver() || !driver()->cuEventCreate)
		return CUDA_ERROR_NOT_INITIALIZED;
	/* The driver has only those that measure no time. */
	if (out && (flags & INTERPROCESS) && (flags & DISABLE_TIMING) && ours())
		return create(out, flags, 0);
	CUresult result = driver()->cuEventCreate(out, flags);
	if (result == CUDA_SUCCESS)
		forget(*out);
	return result;
}

#define DESTROY(name) \
	CUresult resident_##name(CUevent event) \
	{ \
		if (!driver() || !driver()->name) \
			return CUDA_ERROR_NOT_INITIALIZED; \
		/* Before the call: another event may get its address right after. */ \
		forget(event); \
		return driver()->name(event); \
	}
DESTROY(cuEventDestroy)
DESTROY(cuEventDestroy_v2)

CUresult resident_cuIpcGetEventHandle(struct ipc_handle *out, CUevent event)
{
	struct reference made = {0};

	if (!driver() || !driver()->cuIpcGetEventHandle)
		return CUDA_ERROR_NOT_INITIALIZED;
	pthread_mutex_lock(&events_lock);
	struct event *found = out ? find(event) : NULL;
	if (found) {
		if (!found->identity)
			__atomic_store_n(&found->identity, ++last_identity, __ATOMIC_RELEASE);
		made.identity = found->identity;
	}
	pthread_mutex_unlock(&events_lock);
	if (!found)
		return driver()->cuIpcGetEventHandle(out, event);
	/* From here on, what others record in it is waited for. */
	CUresult result = driver()->cuEventSynchronize(event);
	if (result)
		return result;
	memcpy(made.magic, magic, sizeof magic);
	pthread_mutex_lock(&table_lock);
	if (holding_token())
		memcpy(made.token, holding_process_token, sizeof made.token);
	pthread_mutex_unlock(&table_lock);
	memcpy(out, &made, sizeof made);
	return CUDA_SUCCESS;
}

CUresult resident_cuIpcOpenEventHandle(CUevent *out, struct ipc_handle handle)
{
	struct reference what;

	if (!driver() || !driver()->cuIpcOpenEventHandle)
		return CUDA_ERROR_NOT_INITIALIZED;
	memcpy(&what, &handle, sizeof what);
	if (memcmp(what.magic, magic, sizeof magic) || !driver()->cuEventCreate || !ours())
		return driver()->cuIpcOpenEventHandle(out, handle);
	return out ? create(out, DISABLE_TIMING, what.identity) : CUDA_ERROR_INVALID_VALUE;
}

static bool is_shared(CUevent event)
{
	if (!__atomic_load_n(&some, __ATOMIC_ACQUIRE))
		return false;
	pthread_mutex_lock(&events_lock);
	struct event *found = find(event);
	bool shared = found && found->identity;
	pthread_mutex_unlock(&events_lock);
	return shared;
}

/* Wait for what was recorded. A record in a capture is no work, but an edge of the graph. */
static CUresult recorded(CUevent event, CUstream stream)
{
	const struct driver *d = driver();
	int capturing = 0;

	if (!is_shared(event))
		return CUDA_SUCCESS;
	if (capture_active() && d->cuStreamIsCapturing &&
	    !d->cuStreamIsCapturing(stream, &capturing) && capturing)
		return CUDA_SUCCESS;
	return d->cuEventSynchronize(event);
}

#define RECORD(name, parameters, arguments, stream) \
	CUresult resident_##name parameters \
	{ \
		if (!driver() || !driver()->name) \
			return CUDA_ERROR_NOT_INITIALIZED; \
		CUresult result = driver()->name arguments; \
		return result ? result : recorded(event, stream); \
	}
RECORD(cuEventRecord, (CUevent event, CUstream stream), (event, stream), stream)
RECORD(
    cuEventRecord_ptsz, (CUevent event, CUstream stream), (event, stream), OWN_OF_THREAD(stream))
RECORD(cuEventRecordWithFlags, (CUevent event, CUstream stream, unsigned flags),
    (event, stream, flags), stream)
RECORD(cuEventRecordWithFlags_ptsz, (CUevent event, CUstream stream, unsigned flags),
    (event, stream, flags), OWN_OF_THREAD(stream))

void events_in_child(void)
{
	pthread_mutex_init(&events_lock, NULL);
	some = 0;
}
