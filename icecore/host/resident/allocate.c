/* Allocation and release. From LEAST_SIZE on, memory is physical memory with an exportable handle,
 * at an address of its own. Where that is not possible, the allocation is left to the driver and
 * the application gets its answer. In every other case the answer is the one that the driver would
 * have given. */
#define _GNU_SOURCE
#include <unistd.h>

#include "capture.h"
#include "clock.h"
#include "devices.h"
#include "holding.h"
#include "hooks.h"
#include "physical.h"
#include "release.h"
#include "spare.h"
#include "start.h"
#include "threads.h"

#define LEAST_SIZE ((size_t)2 << 20) /* bytes; smaller allocations stay with the driver */

/* CUDA_SUCCESS, CUDA_ERROR_OUT_OF_MEMORY, or -1: left to the driver. */
static CUresult allocate(CUdeviceptr *out, size_t bytes)
{
	const struct driver *d = driver();
	struct allocation made = {.requested = bytes,
	    .kind = KIND_RESIDENT,
	    .descriptor = -1,
	    .mapped = true,
	    .has_handle = true};
	CUresult result;

	if (!d->usable || d->cuCtxGetCurrent(&made.context) || !made.context ||
	    d->cuCtxGetDevice(&made.device))
		return -1;
	if (made.device < 0 || made.device >= DEVICES)
		return -1;
	struct device device = devices_find(made.device);
	if (!device.usable || bytes > SIZE_MAX - device.granularity)
		return -1;
	made.size = (bytes + device.granularity - 1) / device.granularity * device.granularity;
	if (spare_take(&made)) {
		*out = made.address;
		return CUDA_SUCCESS;
	}
	if (!start_agent())
		return -1;
	struct allocation_properties properties = devices_properties(made.device, device.rdma);
	result = physical_create(&made.handle, made.size, &properties);
	if (result) {
		pthread_mutex_lock(&table_lock);
		table_counts.out_of_memory += result == CUDA_ERROR_OUT_OF_MEMORY;
		pthread_mutex_unlock(&table_lock);
		return result == CUDA_ERROR_OUT_OF_MEMORY ? result : -1;
	}
	if (d->cuMemAddressReserve(&made.address, made.size, 0, 0, 0))
		goto no_address;
	if (d->cuMemMap(made.address, made.size, 0, made.handle, 0))
		goto no_mapping;
	uint64_t peers = devices_peers(made.device);
	if (devices_change_access(&made, 1ull << made.device | peers, 0))
		goto no_access;
	/* The agent hands it over after a while: an export takes ten times as long as the rest, and
	 * what is released soon needs none. */
	made.since = clock_now();
	pthread_mutex_lock(&table_lock);
	made.identity = table_new_identity();
	struct allocation *added = table_add(&made);
	if (added) {
		/* who changed them meanwhile has not found this one; who does from now on finds it
		 */
		uint64_t peers_now = devices_peers(made.device);
		if (peers_now != peers)
			devices_change_access(&made, peers_now & ~peers, peers & ~peers_now);
		table_counts.allocations++;
		holding_hello();
	}
	pthread_mutex_unlock(&table_lock);
	if (!added)
		goto no_access;
	*out = made.address;
	return CUDA_SUCCESS;

no_access:
	d->cuMemUnmap(made.address, made.size);
no_mapping:
	d->cuMemAddressFree(made.address, made.size);
no_address:
	d->cuMemRelease(made.handle);
	return -1;
}

static void note(CUresult result, const CUdeviceptr *out, size_t bytes, enum kind kind)
{
	struct allocation made = {.size = bytes, .requested = bytes, .kind = kind};

	if (result || !out || !*out || !holding_directory() || !driver()->usable)
		return;
	made.address = *out;
	driver()->cuCtxGetCurrent(&made.context); /* whose end takes it along */
	pthread_mutex_lock(&table_lock);
	table_add(&made);
	pthread_mutex_unlock(&table_lock);
}

/* Whether it was noted; it is not any more. */
static bool forget(CUdeviceptr address, struct allocation *copy)
{
	pthread_mutex_lock(&table_lock);
	struct allocation *found = table_find(address);
	bool noted = found && table_only_noted(found);
	if (noted) {
		*copy = *found;
		table_remove(found);
	}
	pthread_mutex_unlock(&table_lock);
	return noted;
}

static void note_again(const struct allocation *copy)
{
	pthread_mutex_lock(&table_lock);
	/* else it was gone, and another thread got the address */
	if (!table_find(copy->address))
		table_add(copy);
	pthread_mutex_unlock(&table_lock);
}

/* Call the driver, and call it again if spares took the memory. */
#define OR_WITH_ROOM(result, call) \
	do { \
		uint64_t before_ = spare_given_back(); \
		result = call; \
		if (result == CUDA_ERROR_OUT_OF_MEMORY && spare_make_room(before_)) \
			result = call; \
	} while (0)

static CUresult allocate_noting(CUdeviceptr *out, size_t bytes)
{
	CUresult result = -1;

	if (bytes >= LEAST_SIZE && out && holding_directory()) {
		if (!capture_active())
			result = allocate(out, bytes);
		else {
			/* What a capture allows, and what makes it fail, depends on its mode, which
			 * the driver knows. */
			pthread_mutex_lock(&table_lock);
			table_counts.captured++;
			pthread_mutex_unlock(&table_lock);
		}
	}
	if (result < 0) {
		OR_WITH_ROOM(result, driver()->cuMemAlloc_v2(out, bytes));
		note(result, out, bytes, bytes < LEAST_SIZE ? KIND_SMALL : KIND_FOREIGN);
	}
	return result;
}

CUresult resident_cuMemAlloc_v2(CUdeviceptr *out, size_t bytes)
{
	if (!driver() || !driver()->cuMemAlloc_v2)
		return CUDA_ERROR_NOT_INITIALIZED;
	threads_enter();
	CUresult result = allocate_noting(out, bytes);
	threads_leave();
	return result;
}

CUresult resident_cuMemAllocPitch_v2(
    CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned element)
{
	const struct driver *d = driver();
	CUdeviceptr row;
	CUresult result;

	if (!d || !d->cuMemAllocPitch_v2)
		return CUDA_ERROR_NOT_INITIALIZED;
	threads_enter();
	if (!out || !pitch || !height || !holding_directory() || !width ||
	    width > SIZE_MAX / 2 / height || width * height < LEAST_SIZE ||
	    d->cuMemAllocPitch_v2(&row, pitch, width, 1, element)) {
		OR_WITH_ROOM(result, d->cuMemAllocPitch_v2(out, pitch, width, height, element));
		if (!result)
			note(result, out, *pitch * height,
			    *pitch * height < LEAST_SIZE ? KIND_SMALL : KIND_FOREIGN);
	} else {
		/* the pitch is the driver's: that of one row */
		d->cuMemFree_v2(row);
		result = allocate_noting(out, *pitch * height);
	}
	threads_leave();
	return result;
}

/* -1: not one of ours. */
static CUresult free_resident(CUdeviceptr address, CUresult (*wait)(CUstream), CUstream stream)
{
	const struct driver *d = driver();
	CUcontext context, before;
	CUresult result;

	pthread_mutex_lock(&table_lock);
	struct allocation *found = table_find(address);
	if (!found || found->kind != KIND_RESIDENT) {
		pthread_mutex_unlock(&table_lock);
		return -1;
	}
	if (found->resident.freed) { /* a second time */
		pthread_mutex_unlock(&table_lock);
		return CUDA_ERROR_INVALID_VALUE;
	}
	found->resident.freed = TABLE_BEING_FREED;
	context = found->context;
	table_counts.frees++;
	uint64_t began = release_clock();
	pthread_mutex_unlock(&table_lock);

	/* As in the driver's own, work that uses the memory ends first. */
	if (capture_active())
		result = CUDA_ERROR_CAPTURE_FIRST;
	else if (wait)
		result = wait(stream);
	else if (!(result = d->cuCtxPushCurrent_v2(context))) {
		result = capture_wait_for_context(); /* one may have begun at the driver's door */
		d->cuCtxPopCurrent_v2(&before);
	}
	pthread_mutex_lock(&table_lock);
	found = table_find(address);
	if (result >= CUDA_ERROR_CAPTURE_FIRST && result <= CUDA_ERROR_CAPTURE_LAST) {
		/* nothing can be waited for in a stream capture: released with the next that is
		 * freed outside of one */
		release_defer(found);
		result = CUDA_SUCCESS;
	} else if (wait &&
	    (result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_INVALID_HANDLE)) {
		found->resident.freed = 0; /* no such stream: the driver would have refused it */
		table_counts.frees--;
	} else {
		/* a stream's end is not that of all that may use it */
		if (wait || result || !spare_keep(found))
			release_now(found);
		if (!wait && !result)
			release_deferred(context, began);
	}
	pthread_mutex_unlock(&table_lock);
	return result;
}

static CUresult free_noted(
    CUdeviceptr address, CUresult (*call)(CUdeviceptr, CUstream), CUstream stream)
{
	struct allocation copy;
	bool noted = address && forget(address, &copy);
	CUdeviceptr asked = spare_hidden(address);
	CUresult result = call ? call(asked, stream) : driver()->cuMemFree_v2(asked);

	if (result && noted)
		note_again(&copy);
	return result;
}

CUresult resident_cuMemFree_v2(CUdeviceptr address)
{
	if (!driver() || !driver()->cuMemFree_v2)
		return CUDA_ERROR_NOT_INITIALIZED;
	threads_enter();
	CUresult result = free_resident(address, NULL, NULL);
	if (result < 0)
		result = free_noted(address, NULL, NULL);
	threads_leave();
	return result;
}

#define FREE_ASYNC(name, waited_for) \
	CUresult resident_##name(CUdeviceptr address, CUstream stream) \
	{ \
		if (!driver() || !driver()->name) \
			return CUDA_ERROR_NOT_INITIALIZED; \
		threads_enter(); \
		CUresult result = \
		    free_resident(address, driver()->cuStreamSynchronize, waited_for); \
		if (result < 0) \
			result = free_noted(address, driver()->name, stream); \
		threads_leave(); \
		return result; \
	}
FREE_ASYNC(cuMemFreeAsync, stream)
FREE_ASYNC(cuMemFreeAsync_ptsz, OWN_OF_THREAD(stream))

#define NOTED(name, kind, parameters, arguments) \
	CUresult resident_##name parameters \
	{ \
		if (!driver() || !driver()->name) \
			return CUDA_ERROR_NOT_INITIALIZED; \
		threads_enter(); \
		CUresult result; \
		OR_WITH_ROOM(result, driver()->name arguments); \
		note(result, out, bytes, kind); \
		threads_leave(); \
		return result; \
	}
NOTED(cuMemAllocManaged, KIND_MANAGED, (CUdeviceptr * out, size_t bytes, unsigned flags),
    (out, bytes, flags))
NOTED(cuMemAllocAsync, KIND_POOL, (CUdeviceptr * out, size_t bytes, CUstream stream),
    (out, bytes, stream))
NOTED(cuMemAllocAsync_ptsz, KIND_POOL, (CUdeviceptr * out, size_t bytes, CUstream stream),
    (out, bytes, stream))
NOTED(cuMemAllocFromPoolAsync, KIND_POOL,
    (CUdeviceptr * out, size_t bytes, CUpool pool, CUstream stream), (out, bytes, pool, stream))
NOTED(cuMemAllocFromPoolAsync_ptsz, KIND_POOL,
    (CUdeviceptr * out, size_t bytes, CUpool pool, CUstream stream), (out, bytes, pool, stream))
