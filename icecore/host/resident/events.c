/* Events that processes share by CUDA's legacy IPC (cudaIpcGetEventHandle: torch.multiprocessing).
 *
 * The driver cannot restore its own IPC events before version 610. So processes share none: each
 * gets an ordinary event. A call that records an event with a handle waits until the recorded work
 * is done. The call that makes the handle waits for work that was recorded earlier. So once a
 * process knows that an event was recorded, here or in another process, the recorded work is done,
 * and every event of that handle says so.
 *
 * A graph node records its event when the graph is launched, and no call could wait for that. So
 * nodes that record such an event are refused.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "capture.h"
#include "events.h"
#include "holding.h"
#include "hooks.h"
#include "ipc.h"
#include "table.h"
#include "threads.h"

#define BLOCKING_SYNC 1u
#define DISABLE_TIMING 2u
#define INTERPROCESS 4u
#define RECORD_EXTERNAL 1u
#define NODE_RECORDS 7 /* CU_GRAPH_NODE_TYPE_EVENT_RECORD */
#define LEAST_ROOM 64

/* Drawn once; differs from the magic of memory handles (ipc.c). */
static const uint8_t magic[16] = {
    0x5E, 0x07, 0xB2, 0xF9, 0x8A, 0x31, 0xCC, 0x46, 0x1D, 0xE4, 0x93, 0x7F, 0x60, 0xAB, 0x28, 0xD5};

/* -- interprocess events: a hash table with linear probing, at most half full */

static struct event {
	CUevent event; /* NULL: a free slot */
	uint64_t identity; /* of its handle; 0: it has none */
	unsigned flags;
} *events;
static size_t some, room; /* all under events_lock; `some` is also read without it */
static uint64_t last_identity;
static pthread_mutex_t events_lock = PTHREAD_MUTEX_INITIALIZER;

static size_t home(CUevent event)
{
	return (size_t)((uint64_t)(uintptr_t)event * 0x9E3779B97F4A7C15u >> 20) & (room - 1);
}

/* The event's slot, or the free slot where it belongs. */
static struct event *place_of(CUevent event)
{
	size_t at = home(event);

	while (events[at].event && events[at].event != event)
		at = (at + 1) & (room - 1);
	return &events[at];
}

static struct event *find(CUevent event)
{
	struct event *found = room ? place_of(event) : NULL;

	return found && found->event ? found : NULL;
}

static bool make_room(void)
{
	if (2 * (some + 1) <= room)
		return true;
	struct event *before = events;
	size_t places = room, more = room ? 2 * room : LEAST_ROOM;
	struct event *grown = calloc(more, sizeof *grown);
	if (!grown)
		return false;
	events = grown;
	room = more;
	for (size_t at = 0; at < places; at++)
		if (before[at].event)
			*place_of(before[at].event) = before[at];
	free(before);
	return true;
}

static bool add(const struct event *what)
{
	pthread_mutex_lock(&events_lock);
	bool added = make_room();
	if (added) {
		struct event *place = place_of(what->event);
		if (!place->event)
			__atomic_store_n(&some, some + 1, __ATOMIC_RELEASE);
		/* A context destroys its events unseen, so the slot may hold an old one. */
		*place = *what;
	}
	pthread_mutex_unlock(&events_lock);
	return added;
}

static void forget(CUevent event)
{
	if (!__atomic_load_n(&some, __ATOMIC_ACQUIRE))
		return;
	pthread_mutex_lock(&events_lock);
	struct event *found = find(event);
	if (found) {
		found->event = NULL;
		__atomic_store_n(&some, some - 1, __ATOMIC_RELEASE);
		/* Entries that follow may be there only because this slot was taken. */
		for (size_t at = (size_t)(found - events + 1) & (room - 1); events[at].event;
		     at = (at + 1) & (room - 1)) {
			struct event moved = events[at];
			events[at].event = NULL;
			*place_of(moved.event) = moved;
		}
	}
	pthread_mutex_unlock(&events_lock);
}

static bool is_known(CUevent event, bool with_handle)
{
	if (!__atomic_load_n(&some, __ATOMIC_ACQUIRE))
		return false;
	pthread_mutex_lock(&events_lock);
	struct event *found = find(event);
	bool known = found && (found->identity || !with_handle);
	pthread_mutex_unlock(&events_lock);
	return known;
}

/* -- creation */

static bool ours(void)
{
	const struct driver *d = driver();

	return d->usable && d->cuEventSynchronize && d->cuEventDestroy_v2 && holding_directory();
}

/* Create an ordinary driver event that stands for an interprocess one. */
static CUresult create(CUevent *out, unsigned flags, uint64_t identity)
{
	CUresult result = driver()->cuEventCreate(out, flags & ~INTERPROCESS);

	if (result || add(&(struct event){*out, identity, flags}))
		return result;
	driver()->cuEventDestroy_v2(*out);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult resident_cuEventCreate(CUevent *out, unsigned flags)
{
	if (!driver() || !driver()->cuEventCreate)
		return CUDA_ERROR_NOT_INITIALIZED;
	/* The driver refuses interprocess events with timing. */
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
		/* Before the call: another event may get the address right after it. */ \
		forget(event); \
		return driver()->name(event); \
	}
DESTROY(cuEventDestroy)
DESTROY(cuEventDestroy_v2)

/* -- handles */

/* In relaxed mode, so that the wait does not invalidate the capture of another stream. */
static CUresult wait_for(CUevent event)
{
	const struct driver *d = driver();
	int mode = CAPTURE_MODE_RELAXED;
	bool exchanged =
	    d->cuThreadExchangeStreamCaptureMode && !d->cuThreadExchangeStreamCaptureMode(&mode);
	CUresult result = d->cuEventSynchronize(event);

	if (exchanged)
		d->cuThreadExchangeStreamCaptureMode(&mode);
	return result;
}

static void fill_token(uint8_t *out)
{
	/* No window may park this thread while it holds the lock. */
	threads_enter();
	pthread_mutex_lock(&table_lock);
	if (holding_token())
		memcpy(out, holding_process_token, sizeof holding_process_token);
	pthread_mutex_unlock(&table_lock);
	threads_leave();
}

CUresult resident_cuIpcGetEventHandle(struct ipc_handle *out, CUevent event)
{
	struct ipc_reference made = {0};

	if (!driver() || !driver()->cuIpcGetEventHandle)
		return CUDA_ERROR_NOT_INITIALIZED;
	pthread_mutex_lock(&events_lock);
	struct event *found = out ? find(event) : NULL;
	if (found) {
		if (!found->identity)
			found->identity = ++last_identity;
		made.identity = found->identity;
		made.reserved[0] = found->flags & BLOCKING_SYNC;
	}
	pthread_mutex_unlock(&events_lock);
	if (!found)
		return driver()->cuIpcGetEventHandle(out, event);
	/* From here on, other threads that record the event wait for the work. */
	CUresult result = wait_for(event);
	/* An event that was recorded in a capture has no work to wait for. */
	if (result && result != CUDA_ERROR_CAPTURED_EVENT)
		return result;
	memcpy(made.magic, magic, sizeof magic);
	fill_token(made.token);
	memcpy(out, &made, sizeof made);
	return CUDA_SUCCESS;
}

CUresult resident_cuIpcOpenEventHandle(CUevent *out, struct ipc_handle handle)
{
	struct ipc_reference what;

	if (!driver() || !driver()->cuIpcOpenEventHandle)
		return CUDA_ERROR_NOT_INITIALIZED;
	memcpy(&what, &handle, sizeof what);
	if (!memcmp(what.magic, magic, sizeof magic) && driver()->cuEventCreate && ours())
		return out ? create(out, DISABLE_TIMING | what.reserved[0], what.identity)
			   : CUDA_ERROR_INVALID_VALUE;
	CUresult result = driver()->cuIpcOpenEventHandle(out, handle);
	if (result == CUDA_SUCCESS)
		forget(*out);
	return result;
}

/* -- records */

static bool is_capturing(CUstream stream)
{
	const struct driver *d = driver();
	int capturing = 0;

	return capture_active() && d->cuStreamIsCapturing &&
	    !d->cuStreamIsCapturing(stream, &capturing) && capturing;
}

/* A captured record only becomes a dependency in the graph: there is no work to wait for. */
static CUresult recorded(CUevent event, CUstream stream)
{
	return is_known(event, true) && !is_capturing(stream) ? wait_for(event) : CUDA_SUCCESS;
}

#define RECORD(name, stream) \
	CUresult resident_##name(CUevent event, CUstream in) \
	{ \
		if (!driver() || !driver()->name) \
			return CUDA_ERROR_NOT_INITIALIZED; \
		CUresult result = driver()->name(event, in); \
		return result ? result : recorded(event, stream(in)); \
	}
/* In a capture, an external record becomes a node, which records at each launch. */
#define RECORD_WITH_FLAGS(name, stream) \
	CUresult resident_##name(CUevent event, CUstream in, unsigned flags) \
	{ \
		if (!driver() || !driver()->name) \
			return CUDA_ERROR_NOT_INITIALIZED; \
		if ((flags & RECORD_EXTERNAL) && is_known(event, false) && \
		    is_capturing(stream(in))) \
			return CUDA_ERROR_NOT_SUPPORTED; \
		CUresult result = driver()->name(event, in, flags); \
		return result ? result : recorded(event, stream(in)); \
	}
#define SAME(stream) stream
RECORD(cuEventRecord, SAME)
RECORD(cuEventRecord_ptsz, OWN_OF_THREAD)
RECORD_WITH_FLAGS(cuEventRecordWithFlags, SAME)
RECORD_WITH_FLAGS(cuEventRecordWithFlags_ptsz, OWN_OF_THREAD)

/* Records of all streams of a context; they cannot be captured. */
#define RECORD_OF_CONTEXT(name) \
	CUresult resident_##name(CUcontext context, CUevent event) \
	{ \
		if (!driver() || !driver()->name) \
			return CUDA_ERROR_NOT_INITIALIZED; \
		CUresult result = driver()->name(context, event); \
		return result || !is_known(event, true) ? result : wait_for(event); \
	}
RECORD_OF_CONTEXT(cuCtxRecordEvent)
RECORD_OF_CONTEXT(cuGreenCtxRecordEvent)

/* -- graph nodes that record events */

static bool records_known(const struct node_parameters *what)
{
	return what && what->type == NODE_RECORDS && is_known(what->event, false);
}

#define NODE(name, parameters, arguments, refused) \
	CUresult resident_##name parameters \
	{ \
		if (!driver() || !driver()->name) \
			return CUDA_ERROR_NOT_INITIALIZED; \
		return refused ? CUDA_ERROR_NOT_SUPPORTED : driver()->name arguments; \
	}
NODE(cuGraphAddEventRecordNode,
    (void **out, void *graph, const void *before, size_t count, CUevent event),
    (out, graph, before, count, event), is_known(event, false))
NODE(cuGraphEventRecordNodeSetEvent, (void *node, CUevent event), (node, event),
    is_known(event, false))
NODE(cuGraphExecEventRecordNodeSetEvent, (void *graph, void *node, CUevent event),
    (graph, node, event), is_known(event, false))
NODE(cuGraphAddNode,
    (void **out, void *graph, const void *before, size_t count, const struct node_parameters *what),
    (out, graph, before, count, what), records_known(what))
NODE(cuGraphAddNode_v2,
    (void **out, void *graph, const void *before, const void *edges, size_t count,
	const struct node_parameters *what),
    (out, graph, before, edges, count, what), records_known(what))
NODE(cuGraphNodeSetParams, (void *node, const struct node_parameters *what), (node, what),
    records_known(what))
NODE(cuGraphExecNodeSetParams, (void *graph, void *node, const struct node_parameters *what),
    (graph, node, what), records_known(what))

void events_in_child(void)
{
	pthread_mutex_init(&events_lock, NULL);
	events = NULL;
	some = room = 0;
}
