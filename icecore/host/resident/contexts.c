/* The beginning and the end of contexts, and access for peers. A process has an agent from its first
 * context on, so that a dump can ask what it shares. Memory made by cuMemCreate outlives its context
 * and is closed to other devices. Here both behave as for cuMemAlloc: a destroyed or reset context
 * takes its memory along, and an enabled peer reaches all of it. */
#define _GNU_SOURCE
#include <stddef.h>

#include "devices.h"
#include "holding.h"
#include "hooks.h"
#include "ipc.h"
#include "release.h"
#include "spare.h"
#include "start.h"
#include "threads.h"

#define BEGINS(name, parameters, arguments) \
	CUresult resident_##name parameters \
	{ \
		if (!driver() || !driver()->name) \
			return CUDA_ERROR_NOT_INITIALIZED; \
		threads_enter(); \
		CUresult result = driver()->name arguments; \
		if (result == CUDA_SUCCESS && holding_directory() && driver()->usable) \
			start_agent_soon(); \
		threads_leave(); \
		return result; \
	}
BEGINS(cuDevicePrimaryCtxRetain, (CUcontext * out, CUdevice device), (out, device))
BEGINS(cuCtxCreate_v2, (CUcontext * out, unsigned flags, CUdevice device), (out, flags, device))
BEGINS(cuCtxCreate_v3,
    (CUcontext * out, void *affinities, int count, unsigned flags, CUdevice device),
    (out, affinities, count, flags, device))
BEGINS(cuCtxCreate_v4, (CUcontext * out, void *wanted, unsigned flags, CUdevice device),
    (out, wanted, flags, device))

/* The devices of the current and of another context. */
static bool both_devices(CUcontext other, CUdevice *here, CUdevice *there)
{
	const struct driver *d = driver();
	CUcontext popped;

	if (d->cuCtxGetDevice(here) || d->cuCtxPushCurrent_v2(other))
		return false;
	bool found = !d->cuCtxGetDevice(there);
	d->cuCtxPopCurrent_v2(&popped);
	return found && *here >= 0 && *here < DEVICES && *there >= 0 && *there < DEVICES &&
	    *here != *there;
}

CUresult resident_cuCtxEnablePeerAccess(CUcontext peer, unsigned flags)
{
	const struct driver *d = driver();
	CUdevice here, there;

	if (!d || !d->cuCtxEnablePeerAccess)
		return CUDA_ERROR_NOT_INITIALIZED;
	threads_enter();
	CUresult result = d->cuCtxEnablePeerAccess(peer, flags);
	if ((result == CUDA_SUCCESS || result == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) &&
	    holding_directory() && d->usable && both_devices(peer, &here, &there))
		devices_change_peer(here, there, true);
	threads_leave();
	return result;
}

CUresult resident_cuCtxDisablePeerAccess(CUcontext peer)
{
	const struct driver *d = driver();
	CUdevice here, there;

	if (!d || !d->cuCtxDisablePeerAccess)
		return CUDA_ERROR_NOT_INITIALIZED;
	threads_enter();
	CUresult result = d->cuCtxDisablePeerAccess(peer);
	if (result == CUDA_SUCCESS && holding_directory() && d->usable &&
	    both_devices(peer, &here, &there))
		devices_change_peer(here, there, false);
	threads_leave();
	return result;
}

/* What the driver frees with a context, of its own memory: a pool's memory belongs to its device.
 */
static const enum kind drivers_kinds[] = {KIND_SMALL, KIND_MANAGED, KIND_FOREIGN};

/* After the context is gone, and with it all work that used the memory. */
static void release_of(CUcontext context)
{
	ipc_forget_context(context);
	spare_give_back(context, true);
	pthread_mutex_lock(&table_lock);
	for (struct allocation *at = NULL; (at = table_next(at, KIND_RESIDENT));)
		if (at->context == context && !at->resident.freed)
			release_defer(at);
	release_deferred(context, TABLE_BEING_FREED - 1);
	for (struct allocation *at = NULL; (at = table_next(at, KIND_MAPPING));)
		if (at->context == context)
			at->context = NULL; /* what the application maps itself outlives contexts */
	for (size_t i = 0; i < sizeof drivers_kinds / sizeof *drivers_kinds; i++)
		for (struct allocation *at = NULL; (at = table_next(at, drivers_kinds[i]));)
			if (at->context == context)
				table_remove(at);
	pthread_mutex_unlock(&table_lock);
}

/* Of a context's, or what ends with it. */
static bool has_memory(void)
{
	return table_counts.resident || table_counts.spare || table_counts.imported ||
	    table_counts.small || table_counts.managed || table_counts.foreign;
}

static CUcontext primary(CUdevice device)
{
	const struct driver *d = driver();
	CUcontext context = NULL;
	unsigned flags;
	int active = 0;

	if (!d->usable || d->cuDevicePrimaryCtxGetState(device, &flags, &active) || !active ||
	    d->cuDevicePrimaryCtxRetain(&context, device))
		return NULL;
	d->cuDevicePrimaryCtxRelease_v2(device);
	return context;
}

#define ENDS(name) \
	CUresult resident_##name(CUcontext context) \
	{ \
		if (!driver() || !driver()->name) \
			return CUDA_ERROR_NOT_INITIALIZED; \
		threads_enter(); \
		spare_give_back(context, false); \
		CUresult result = driver()->name(context); \
		if (result == CUDA_SUCCESS) \
			release_of(context); \
		threads_leave(); \
		return result; \
	}
ENDS(cuCtxDestroy)
ENDS(cuCtxDestroy_v2)

/* It must be the current one, and stays that unless this was its last use. */
CUresult resident_cuCtxDetach(CUcontext context)
{
	const struct driver *d = driver();
	CUcontext now = NULL;
	CUdevice device;

	if (!d || !d->cuCtxDetach)
		return CUDA_ERROR_NOT_INITIALIZED;
	threads_enter();
	spare_give_back(context, false);
	CUresult result = d->cuCtxDetach(context);
	if (result == CUDA_SUCCESS && d->usable &&
	    (d->cuCtxGetCurrent(&now) || now != context || d->cuCtxGetDevice(&device)))
		release_of(context);
	threads_leave();
	return result;
}

CUresult resident_cuDevicePrimaryCtxReset_v2(CUdevice device)
{
	if (!driver() || !driver()->cuDevicePrimaryCtxReset_v2)
		return CUDA_ERROR_NOT_INITIALIZED;
	threads_enter();
	CUcontext context = has_memory() ? primary(device) : NULL;
	if (context)
		spare_give_back(context, false);
	CUresult result = driver()->cuDevicePrimaryCtxReset_v2(device);
	if (result == CUDA_SUCCESS && context)
		release_of(context);
	threads_leave();
	return result;
}

CUresult resident_cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
	unsigned flags;
	int active = 1;

	if (!driver() || !driver()->cuDevicePrimaryCtxRelease_v2)
		return CUDA_ERROR_NOT_INITIALIZED;
	threads_enter();
	CUcontext context = has_memory() ? primary(device) : NULL;
	if (context)
		spare_give_back(context, false);
	CUresult result = driver()->cuDevicePrimaryCtxRelease_v2(device);
	if (result == CUDA_SUCCESS && context &&
	    !driver()->cuDevicePrimaryCtxGetState(device, &flags, &active) && !active)
		release_of(context);
	threads_leave();
	return result;
}
