/* Contexts: memory made by cuMemCreate outlives them and is closed to other devices; rule: both are made as the application knows it of cuMemAlloc:
 * a destroyed or reset context takes its memory along, and a peer that was let in reaches all of it. */
#define _GNU_SOURCE
#include <string.h>
#include <unistd.h>

#include "contexts.h"
#include "hooks.h"
#include "resident.h"

static uint64_t peers[DEVICES]; /* by owner */

uint64_t peers_of(CUdevice owner)
{
	return __atomic_load_n(&peers[owner], __ATOMIC_ACQUIRE);
}

void peers_of_child(void)
{
	memset(peers, 0, sizeof peers);
}

/* The devices of the current and of another context. */
static bool both_devices(CUcontext other, CUdevice *here, CUdevice *there)
{
	const struct driver *d = driver();
	CUcontext popped;

	if (d->cuCtxGetDevice(here) || d->cuCtxPushCurrent_v2(other))
		return false;
	bool found = !d->cuCtxGetDevice(there);
	d->cuCtxPopCurrent_v2(&popped);
	return found && *here >= 0 && *here < DEVICES && *there >= 0 && *there < DEVICES && *here != *there;
}

static void change(CUdevice accessing, CUdevice owner, bool to)
{
	static const enum kind kinds[] = {KIND_RESIDENT, KIND_SPARE};
	const struct driver *d = driver();
	struct access access = {{LOCATION_DEVICE, accessing}, to ? ACCESS_READ_WRITE : 0};

	pthread_mutex_lock(&table_lock);
	uint64_t bit = 1ull << accessing;
	__atomic_store_n(&peers[owner], to ? peers[owner] | bit : peers[owner] & ~bit, __ATOMIC_RELEASE);
	for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
		for (struct allocation *at = NULL; (at = table_next(at, kinds[i]));)
			if (at->device == owner)
				d->cuMemSetAccess(at->address, at->size, &access, 1);
	pthread_mutex_unlock(&table_lock);
}

CUresult resident_cuCtxEnablePeerAccess(CUcontext peer, unsigned flags)
{
	const struct driver *d = driver();
	CUdevice here, there;

	if (!d || !d->cuCtxEnablePeerAccess)
		return CUDA_ERROR_NOT_INITIALIZED;
	enter();
	CUresult result = d->cuCtxEnablePeerAccess(peer, flags);
	if ((result == CUDA_SUCCESS || result == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) && resident_directory() && d->usable &&
	    both_devices(peer, &here, &there))
		change(here, there, true);
	leave();
	return result;
}

CUresult resident_cuCtxDisablePeerAccess(CUcontext peer)
{
	const struct driver *d = driver();
	CUdevice here, there;

	if (!d || !d->cuCtxDisablePeerAccess)
		return CUDA_ERROR_NOT_INITIALIZED;
	enter();
	CUresult result = d->cuCtxDisablePeerAccess(peer);
	if (result == CUDA_SUCCESS && resident_directory() && d->usable && both_devices(peer, &here, &there))
		change(here, there, false);
	leave();
	return result;
}

/* What the driver takes along with a context, of what it made itself: a pool's memory is its device's. */
static const enum kind drivers_kinds[] = {KIND_SMALL, KIND_MANAGED, KIND_FOREIGN};

/* After the context is gone, and with it whatever used the memory. */
static void release_of(CUcontext context)
{
	ipc_forget_context(context);
	spares_give_back(context, true);
	pthread_mutex_lock(&table_lock);
	for (struct allocation *at = NULL; (at = table_next(at, KIND_RESIDENT));)
		if (at->context == context && !at->freed)
			defer(at);
	release_deferred(context, BEING_FREED - 1);
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
	return counts.resident || counts.spare || counts.imported || counts.small || counts.managed || counts.foreign;
}

static CUcontext primary(CUdevice device)
{
	const struct driver *d = driver();
	CUcontext context = NULL;
	unsigned flags;
	int active = 0;

	if (!d->usable || d->cuDevicePrimaryCtxGetState(device, &flags, &active) || !active || d->cuDevicePrimaryCtxRetain(&context, device))
		return NULL;
	d->cuDevicePrimaryCtxRelease_v2(device);
	return context;
}

#define ENDS(name) \
	CUresult resident_##name(CUcontext context) \
	{ \
		if (!driver() || !driver()->name) \
			return CUDA_ERROR_NOT_INITIALIZED; \
		enter(); \
		spares_give_back(context, false); \
		CUresult result = driver()->name(context); \
		if (result == CUDA_SUCCESS) \
			release_of(context); \
		leave(); \
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
	enter();
	spares_give_back(context, false);
	CUresult result = d->cuCtxDetach(context);
	if (result == CUDA_SUCCESS && d->usable && (d->cuCtxGetCurrent(&now) || now != context || d->cuCtxGetDevice(&device)))
		release_of(context);
	leave();
	return result;
}

CUresult resident_cuDevicePrimaryCtxReset_v2(CUdevice device)
{
	if (!driver() || !driver()->cuDevicePrimaryCtxReset_v2)
		return CUDA_ERROR_NOT_INITIALIZED;
	enter();
	CUcontext context = has_memory() ? primary(device) : NULL;
	if (context)
		spares_give_back(context, false);
	CUresult result = driver()->cuDevicePrimaryCtxReset_v2(device);
	if (result == CUDA_SUCCESS && context)
		release_of(context);
	leave();
	return result;
}

CUresult resident_cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
	unsigned flags;
	int active = 1;

	if (!driver() || !driver()->cuDevicePrimaryCtxRelease_v2)
		return CUDA_ERROR_NOT_INITIALIZED;
	enter();
	CUcontext context = has_memory() ? primary(device) : NULL;
	if (context)
		spares_give_back(context, false);
	CUresult result = driver()->cuDevicePrimaryCtxRelease_v2(device);
	if (result == CUDA_SUCCESS && context && !driver()->cuDevicePrimaryCtxGetState(device, &flags, &active) && !active)
		release_of(context);
	leave();
	return result;
}
