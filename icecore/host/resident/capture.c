/* Streams that are being captured into graphs. While there is one, the preload waits for no
 * context, and leaves allocation to the driver.
 *
 * Synchronising a context in which a stream is captured makes that capture fail
 * (cuStreamBeginCapture in the driver's reference: a broader handle that encompasses an active
 * capture), and the calls that ask for a capture (cuStreamIsCapturing, cuStreamGetCaptureInfo) need
 * the stream, which is not known. So the beginning and the end of each capture pass through here;
 * launches in between do not.
 */
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <unistd.h>

#include "capture.h"
#include "hooks.h"
#include "table.h"
#include "threads.h"

#define STREAMS 1024

static struct {
	CUstream stream;
	pid_t thread; /* of a thread's own default stream */
} capturing[STREAMS]; /* under table_lock */
static int known;
static int beginning; /* captures that the driver may have begun and that are not noted yet */
/* captures for which there was no place: never forgotten, so that all is left to the driver from
 * then on */
static int unnamed;

bool capture_active(void)
{
	/* In this order: a capture is known before it stops counting as beginning. */
	return __atomic_load_n(&beginning, __ATOMIC_SEQ_CST) ||
	    __atomic_load_n(&known, __ATOMIC_ACQUIRE) ||
	    __atomic_load_n(&unnamed, __ATOMIC_ACQUIRE);
}

CUresult capture_wait_for_context(void)
{
	return capture_active() ? CUDA_ERROR_CAPTURE_FIRST : driver()->cuCtxSynchronize();
}

void capture_in_child(void)
{
	beginning = known = unnamed = 0;
}

static pid_t owner(CUstream stream)
{
	return stream == PER_THREAD_STREAM ? (pid_t)syscall(SYS_gettid) : 0;
}

static int place_of(CUstream stream)
{
	pid_t thread = owner(stream);

	for (int at = 0; at < known; at++)
		if (capturing[at].stream == stream && capturing[at].thread == thread)
			return at;
	return -1;
}

static void begun(CUstream stream)
{
	pthread_mutex_lock(&table_lock);
	if (place_of(stream) < 0) {
		if (known < STREAMS) {
			capturing[known].stream = stream;
			capturing[known].thread = owner(stream);
			__atomic_store_n(&known, known + 1, __ATOMIC_RELEASE);
		} else
			__atomic_store_n(&unnamed, unnamed + 1, __ATOMIC_RELEASE);
	}
	pthread_mutex_unlock(&table_lock);
}

static void ended(CUstream stream)
{
	pthread_mutex_lock(&table_lock);
	int at = place_of(stream);
	if (at >= 0) {
		capturing[at] = capturing[known - 1];
		__atomic_store_n(&known, known - 1, __ATOMIC_RELEASE);
	}
	pthread_mutex_unlock(&table_lock);
}

/* A stream of another thread's capture, or of none, goes on as before; every other answer ends the
 * capture, successful or not. */
static void asked_to_end(CUstream stream, CUresult result)
{
	if (result != CUDA_ERROR_CAPTURE_WRONG_THREAD && result != CUDA_ERROR_NOT_INITIALIZED)
		ended(stream);
}

#define BEGIN(name, parameters, arguments, stream) \
	CUresult resident_##name parameters \
	{ \
		if (!driver() || !driver()->name) \
			return CUDA_ERROR_NOT_INITIALIZED; \
		threads_enter(); \
		__atomic_fetch_add(&beginning, 1, __ATOMIC_SEQ_CST); \
		CUresult result = driver()->name arguments; \
		if (result == CUDA_SUCCESS) \
			begun(stream); \
		__atomic_fetch_sub(&beginning, 1, __ATOMIC_SEQ_CST); \
		threads_leave(); \
		return result; \
	}
#define END(name) \
	CUresult resident_##name(CUstream stream, void **graph) \
	{ \
		if (!driver() || !driver()->name) \
			return CUDA_ERROR_NOT_INITIALIZED; \
		threads_enter(); \
		CUresult result = driver()->name(stream, graph); \
		asked_to_end(OWN(name, stream), result); \
		threads_leave(); \
		return result; \
	}

BEGIN(cuStreamBeginCapture, (CUstream stream), (stream), stream)
BEGIN(cuStreamBeginCapture_ptsz, (CUstream stream), (stream), OWN_OF_THREAD(stream))
BEGIN(cuStreamBeginCapture_v2, (CUstream stream, int mode), (stream, mode), stream)
BEGIN(cuStreamBeginCapture_v2_ptsz, (CUstream stream, int mode), (stream, mode),
    OWN_OF_THREAD(stream))
BEGIN(cuStreamBeginCaptureToGraph,
    (CUstream stream, void *graph, const void *before, const void *edges, size_t some, int mode),
    (stream, graph, before, edges, some, mode), stream)
BEGIN(cuStreamBeginCaptureToGraph_ptsz,
    (CUstream stream, void *graph, const void *before, const void *edges, size_t some, int mode),
    (stream, graph, before, edges, some, mode), OWN_OF_THREAD(stream))
#define OWN(name, stream) stream
END(cuStreamEndCapture)
#undef OWN
#define OWN(name, stream) OWN_OF_THREAD(stream)
END(cuStreamEndCapture_ptsz)

CUresult resident_cuStreamDestroy_v2(CUstream stream)
{
	if (!driver() || !driver()->cuStreamDestroy_v2)
		return CUDA_ERROR_NOT_INITIALIZED;
	threads_enter();
	/* Before the call: another stream may get its number right after. A stream that cannot be
	 * destroyed while it is captured stays destroyed here: then a wait fails, and is deferred
	 * as well. */
	ended(stream);
	CUresult result = driver()->cuStreamDestroy_v2(stream);
	threads_leave();
	return result;
}
