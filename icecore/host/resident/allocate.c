/* Allocation and release: from `LEAST_SIZE` on as physical memory with an exportable handle, at an address of its own; rule: what cannot be had in this way
 * is left to the driver, whose answer the application gets, and every other answer is what the driver would have given. */
#define _GNU_SOURCE
#include <string.h>
#include <time.h>

#include "capture.h"
#include "contexts.h"
#include "hooks.h"
#include "resident.h"

#define CHILD_NANOSECONDS 200000000ll /* within which one that was forked has begun to run */

static struct device {
	bool known, usable, rdma;
	size_t granularity;
	uint8_t uuid[16];
} devices[DEVICES]; /* under table_lock */

static uint64_t next_identity = 1;
static int64_t last_fork = -CHILD_NANOSECONDS, looked_until;
static uint64_t free_clock; /* under table_lock; orders what is deferred by when its wait can have begun */

static struct allocation_properties properties_of(CUdevice device, bool rdma)
{
	struct allocation_properties properties = {
		.type = ALLOCATION_PINNED, .handle_types = HANDLE_POSIX_DESCRIPTOR, .location = {LOCATION_DEVICE, device}};

	properties.flags.rdma = rdma;
	return properties;
}

static struct device device_of(CUdevice number)
{
	const struct driver *d = driver();
	struct device found;
	int memory = 0, descriptor = 0, rdma = 0;

	pthread_mutex_lock(&table_lock);
	found = devices[number];
	pthread_mutex_unlock(&table_lock);
	if (found.known)
		return found;
	found.known = true;
	d->cuDeviceGetAttribute(&memory, ATTRIBUTE_VIRTUAL_MEMORY, number);
	d->cuDeviceGetAttribute(&descriptor, ATTRIBUTE_POSIX_DESCRIPTOR, number);
	d->cuDeviceGetAttribute(&rdma, ATTRIBUTE_RDMA_WITH_VIRTUAL_MEMORY, number);
	found.rdma = rdma;
	struct allocation_properties properties = properties_of(number, rdma);
	found.usable = memory && descriptor && !d->cuDeviceGetUuid(found.uuid, number) &&
		       !d->cuMemGetAllocationGranularity(&found.granularity, &properties, GRANULARITY_MINIMUM) && found.granularity;
	pthread_mutex_lock(&table_lock);
	devices[number] = found;
	pthread_mutex_unlock(&table_lock);
	return found;
}

const uint8_t *device_uuid(CUdevice device)
{
	return devices[device].uuid;
}

bool device_usable(CUdevice device)
{
	return device >= 0 && device < DEVICES && device_of(device).usable;
}

uint64_t new_identity(void)
{
	return next_identity++;
}

void devices_again(void)
{
	for (CUdevice number = 0; number < DEVICES; number++)
		if (devices[number].known)
			driver()->cuDeviceGetUuid(devices[number].uuid, number);
}

/* The devices are bits. */
static CUresult change_access(const struct allocation *what, uint64_t opened, uint64_t closed)
{
	struct access access[DEVICES];
	size_t some = 0;

	for (CUdevice device = 0; device < DEVICES; device++)
		if ((opened | closed) >> device & 1)
			access[some++] = (struct access){{LOCATION_DEVICE, device}, opened >> device & 1 ? ACCESS_READ_WRITE : 0};
	return driver()->cuMemSetAccess(what->address, what->size, access, some);
}

CUresult set_access(const struct allocation *what)
{
	return change_access(what, 1ull << what->device | peers_of(what->device), 0);
}

/* Takes it off the table, the device and the keeper. */
void release(struct allocation *at)
{
	const struct driver *d = driver();
	struct allocation what = *at;

	table_remove(at);
	pthread_mutex_unlock(&table_lock);
	d->cuMemUnmap(what.address, what.size);
	d->cuMemRelease(what.handle);
	d->cuMemAddressFree(what.address, what.size);
	pthread_mutex_lock(&table_lock);
	holding_free(&what);
}

static struct allocation *find_deferred(CUcontext context, uint64_t until)
{
	struct allocation *at = NULL;

	while ((at = table_next(at, KIND_RESIDENT)))
		if (at->context == context && at->freed && at->freed <= until)
			break;
	return at;
}

void release_deferred(CUcontext context, uint64_t until)
{
	struct allocation *at;

	while (counts.deferred && (at = find_deferred(context, until))) {
		counts.deferred--;
		counts.deferred_bytes -= at->size;
		release(at);
	}
}

void defer(struct allocation *what)
{
	what->freed = ++free_clock;
	counts.deferred++;
	counts.deferred_bytes += what->size;
}

/* What a capture kept from being released, now that memory is short: whether there was any. */
static bool release_all_deferred(CUcontext context)
{
	pthread_mutex_lock(&table_lock);
	uint64_t began = free_clock;
	bool any = counts.deferred > 0 && !capture_active();
	pthread_mutex_unlock(&table_lock);
	if (!any || wait_for_context())
		return false;
	pthread_mutex_lock(&table_lock);
	release_deferred(context, began);
	pthread_mutex_unlock(&table_lock);
	return true;
}

void allocations_forked(void)
{
	__atomic_store_n(&last_fork, now(), __ATOMIC_RELAXED);
}

void allocations_looked_at(int64_t nanoseconds)
{
	__atomic_store_n(&looked_until, nanoseconds ? now() + nanoseconds : 0, __ATOMIC_RELAXED);
}

/* What was freed meanwhile is not free yet: a child has the descriptors that are kept since a window until it has begun to run, who looks at memory has it mapped. */
static bool others_may_hold_memory(void)
{
	int64_t time = now(), forked = time - __atomic_load_n(&last_fork, __ATOMIC_RELAXED);

	return time < __atomic_load_n(&looked_until, __ATOMIC_RELAXED) ||
	       (__atomic_load_n(&counts.windows, __ATOMIC_RELAXED) && forked >= 0 && forked < CHILD_NANOSECONDS); /* a restore may have set the clock back */
}

CUresult create_physical(CUhandle *out, size_t size, const struct allocation_properties *properties)
{
	const struct driver *d = driver();
	bool held = others_may_hold_memory(); /* asked first: what they let go of after that is found */
	uint64_t before = spares_given_back();
	CUresult result = d->cuMemCreate(out, size, properties, 0);
	CUcontext context;

	if (result == CUDA_ERROR_OUT_OF_MEMORY && spares_make_room(before))
		result = d->cuMemCreate(out, size, properties, 0);
	if (result == CUDA_ERROR_OUT_OF_MEMORY && !d->cuCtxGetCurrent(&context) && context && release_all_deferred(context))
		result = d->cuMemCreate(out, size, properties, 0);
	if (result == CUDA_ERROR_OUT_OF_MEMORY && holding_yielded())
		result = d->cuMemCreate(out, size, properties, 0);
	while (result == CUDA_ERROR_OUT_OF_MEMORY && (held || others_may_hold_memory())) {
		nanosleep(&(struct timespec){0, 1000000}, NULL);
		held = others_may_hold_memory();
		result = d->cuMemCreate(out, size, properties, 0);
	}
	return result;
}

/* CUDA_SUCCESS, CUDA_ERROR_OUT_OF_MEMORY, or -1: it is the driver's. */
static CUresult allocate(CUdeviceptr *out, size_t bytes)
{
	const struct driver *d = driver();
	struct allocation made = {.requested = bytes, .kind = KIND_RESIDENT, .descriptor = -1, .mapped = true, .has_handle = true};
	int descriptor = -1;
	CUresult result;

	if (!d->usable || d->cuCtxGetCurrent(&made.context) || !made.context || d->cuCtxGetDevice(&made.device))
		return -1;
	if (made.device < 0 || made.device >= DEVICES)
		return -1;
	struct device device = device_of(made.device);
	if (!device.usable || bytes > SIZE_MAX - device.granularity)
		return -1;
	made.size = (bytes + device.granularity - 1) / device.granularity * device.granularity;
	if (spare_take(&made)) {
		*out = made.address;
		return CUDA_SUCCESS;
	}
	if (!agent_start())
		return -1;
	struct allocation_properties properties = properties_of(made.device, device.rdma);
	result = create_physical(&made.handle, made.size, &properties);
	if (result) {
		pthread_mutex_lock(&table_lock);
		counts.out_of_memory += result == CUDA_ERROR_OUT_OF_MEMORY;
		pthread_mutex_unlock(&table_lock);
		return result == CUDA_ERROR_OUT_OF_MEMORY ? result : -1;
	}
	if (d->cuMemAddressReserve(&made.address, made.size, 0, 0, 0))
		goto no_address;
	if (d->cuMemMap(made.address, made.size, 0, made.handle, 0))
		goto no_mapping;
	uint64_t peers = peers_of(made.device);
	if (change_access(&made, 1ull << made.device | peers, 0))
		goto no_access;
	if (d->cuMemExportToShareableHandle(&descriptor, made.handle, HANDLE_POSIX_DESCRIPTOR, 0))
		descriptor = -1; /* none left in this process: handed over later */
	pthread_mutex_lock(&table_lock);
	made.identity = new_identity();
	struct allocation *added = table_add(&made);
	if (added) {
		uint64_t peers_now = peers_of(made.device); /* who changed them meanwhile has not found this one; who does from now on finds it */
		if (peers_now != peers)
			change_access(&made, peers_now & ~peers, peers & ~peers_now);
		counts.allocations++;
		holding_add(added, descriptor);
	}
	pthread_mutex_unlock(&table_lock);
	if (descriptor >= 0)
		close(descriptor);
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
	struct allocation made = {.size = bytes, .requested = bytes, .kind = kind, .descriptor = -1};

	if (result || !out || !*out || !resident_directory() || !driver()->usable)
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
	bool noted = found && only_noted(found);
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
	if (!table_find(copy->address)) /* else it was not there any more, and another thread got the address */
		table_add(copy);
	pthread_mutex_unlock(&table_lock);
}

/* What the driver is asked for: once more where spares were in its way. */
#define OR_WITH_ROOM(result, call) \
	do { \
		uint64_t before_ = spares_given_back(); \
		result = call; \
		if (result == CUDA_ERROR_OUT_OF_MEMORY && spares_make_room(before_)) \
			result = call; \
	} while (0)

static CUresult allocate_noting(CUdeviceptr *out, size_t bytes)
{
	CUresult result = -1;

	if (bytes >= LEAST_SIZE && out && resident_directory()) {
		if (!capture_active())
			result = allocate(out, bytes);
		else {
			/* What is allowed then, and what fails a capture, depends on its mode: the driver knows. */
			pthread_mutex_lock(&table_lock);
			counts.captured++;
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
	enter();
	CUresult result = allocate_noting(out, bytes);
	leave();
	return result;
}

CUresult resident_cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned element)
{
	const struct driver *d = driver();
	CUdeviceptr row;
	CUresult result;

	if (!d || !d->cuMemAllocPitch_v2)
		return CUDA_ERROR_NOT_INITIALIZED;
	enter();
	if (!out || !pitch || !height || !resident_directory() || !width || width > SIZE_MAX / 2 / height || width * height < LEAST_SIZE ||
	    d->cuMemAllocPitch_v2(&row, pitch, width, 1, element)) {
		OR_WITH_ROOM(result, d->cuMemAllocPitch_v2(out, pitch, width, height, element));
		if (!result)
			note(result, out, *pitch * height, *pitch * height < LEAST_SIZE ? KIND_SMALL : KIND_FOREIGN);
	} else {
		/* the pitch is the driver's: that of one row */
		d->cuMemFree_v2(row);
		result = allocate_noting(out, *pitch * height);
	}
	leave();
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
	if (found->freed) { /* a second time */
		pthread_mutex_unlock(&table_lock);
		return CUDA_ERROR_INVALID_VALUE;
	}
	found->freed = BEING_FREED;
	context = found->context;
	counts.frees++;
	uint64_t began = free_clock;
	pthread_mutex_unlock(&table_lock);

	/* As the driver's own: what uses it has come to its end first. */
	if (capture_active())
		result = CUDA_ERROR_CAPTURE_FIRST;
	else if (wait)
		result = wait(stream);
	else if (!(result = d->cuCtxPushCurrent_v2(context))) {
		result = wait_for_context(); /* one may have begun at the driver's door */
		d->cuCtxPopCurrent_v2(&before);
	}
	pthread_mutex_lock(&table_lock);
	found = table_find(address);
	if (result >= CUDA_ERROR_CAPTURE_FIRST && result <= CUDA_ERROR_CAPTURE_LAST) {
		defer(found); /* nothing can be waited for in a stream capture: released with the next that is freed outside of one */
		result = CUDA_SUCCESS;
	} else if (wait && (result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_INVALID_HANDLE)) {
		found->freed = 0; /* no such stream: the driver would have refused it */
		counts.frees--;
	} else {
		if (wait || result || !spare_keep(found)) /* a stream's end is not that of all that may use it */
			release(found);
		if (!wait && !result)
			release_deferred(context, began);
	}
	pthread_mutex_unlock(&table_lock);
	return result;
}

static CUresult free_noted(CUdeviceptr address, CUresult (*call)(CUdeviceptr, CUstream), CUstream stream)
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
	enter();
	CUresult result = free_resident(address, NULL, NULL);
	if (result < 0)
		result = free_noted(address, NULL, NULL);
	leave();
	return result;
}

#define FREE_ASYNC(name, waited_for) \
	CUresult resident_##name(CUdeviceptr address, CUstream stream) \
	{ \
		if (!driver() || !driver()->name) \
			return CUDA_ERROR_NOT_INITIALIZED; \
		enter(); \
		CUresult result = free_resident(address, driver()->cuStreamSynchronize, waited_for); \
		if (result < 0) \
			result = free_noted(address, driver()->name, stream); \
		leave(); \
		return result; \
	}
FREE_ASYNC(cuMemFreeAsync, stream)
FREE_ASYNC(cuMemFreeAsync_ptsz, OWN_OF_THREAD(stream))

#define NOTED(name, kind, parameters, arguments) \
	CUresult resident_##name parameters \
	{ \
		if (!driver() || !driver()->name) \
			return CUDA_ERROR_NOT_INITIALIZED; \
		enter(); \
		CUresult result; \
		OR_WITH_ROOM(result, driver()->name arguments); \
		note(result, out, bytes, kind); \
		leave(); \
		return result; \
	}
NOTED(cuMemAllocManaged, KIND_MANAGED, (CUdeviceptr * out, size_t bytes, unsigned flags), (out, bytes, flags))
NOTED(cuMemAllocAsync, KIND_POOL, (CUdeviceptr * out, size_t bytes, CUstream stream), (out, bytes, stream))
NOTED(cuMemAllocAsync_ptsz, KIND_POOL, (CUdeviceptr * out, size_t bytes, CUstream stream), (out, bytes, stream))
NOTED(cuMemAllocFromPoolAsync, KIND_POOL, (CUdeviceptr * out, size_t bytes, CUpool pool, CUstream stream), (out, bytes, pool, stream))
NOTED(cuMemAllocFromPoolAsync_ptsz, KIND_POOL, (CUdeviceptr * out, size_t bytes, CUpool pool, CUstream stream), (out, bytes, pool, stream))

void allocations_of_child(void)
{
	next_identity = 1;
	free_clock = 0;
	looked_until = 0;
	memset(devices, 0, sizeof devices);
	table_clear();
}
