/* The GPUs, and which of them may access whose memory. Memory made by cuMemCreate is closed to
 * other devices; an enabled peer gets access to all of it, as to memory of cuMemAlloc. */
#define _GNU_SOURCE
#include <string.h>

#include "devices.h"

static struct device devices[DEVICES]; /* under table_lock */
static uint64_t peers[DEVICES]; /* by owner */

uint64_t devices_peers(CUdevice owner)
{
	return __atomic_load_n(&peers[owner], __ATOMIC_ACQUIRE);
}

struct allocation_properties devices_properties(CUdevice device, bool rdma)
{
	struct allocation_properties properties = {.type = ALLOCATION_PINNED,
	    .handle_types = HANDLE_POSIX_DESCRIPTOR,
	    .location = {LOCATION_DEVICE, device}};

	properties.flags.rdma = rdma;
	return properties;
}

struct device devices_find(CUdevice number)
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
	struct allocation_properties properties = devices_properties(number, rdma);
	found.usable = memory && descriptor && !d->cuDeviceGetUuid(found.uuid, number) &&
	    !d->cuMemGetAllocationGranularity(
		&found.granularity, &properties, GRANULARITY_MINIMUM) &&
	    found.granularity;
	pthread_mutex_lock(&table_lock);
	devices[number] = found;
	pthread_mutex_unlock(&table_lock);
	return found;
}

const uint8_t *devices_uuid(CUdevice device)
{
	return devices[device].uuid;
}

bool devices_usable(CUdevice device)
{
	return device >= 0 && device < DEVICES && devices_find(device).usable;
}

void devices_refresh(void)
{
	for (CUdevice number = 0; number < DEVICES; number++)
		if (devices[number].known)
			driver()->cuDeviceGetUuid(devices[number].uuid, number);
}

CUresult devices_change_access(const struct allocation *what, uint64_t opened, uint64_t closed)
{
	struct access access[DEVICES];
	size_t some = 0;

	for (CUdevice device = 0; device < DEVICES; device++)
		if ((opened | closed) >> device & 1)
			access[some++] = (struct access){{LOCATION_DEVICE, device},
			    opened >> device & 1 ? ACCESS_READ_WRITE : 0};
	return driver()->cuMemSetAccess(what->address, what->size, access, some);
}

CUresult devices_set_access(const struct allocation *what)
{
	return devices_change_access(what, 1ull << what->device | devices_peers(what->device), 0);
}

void devices_change_peer(CUdevice accessing, CUdevice owner, bool to)
{
	static const enum kind kinds[] = {KIND_RESIDENT, KIND_SPARE};
	const struct driver *d = driver();
	struct access access = {{LOCATION_DEVICE, accessing}, to ? ACCESS_READ_WRITE : 0};

	pthread_mutex_lock(&table_lock);
	uint64_t bit = 1ull << accessing;
	__atomic_store_n(
	    &peers[owner], to ? peers[owner] | bit : peers[owner] & ~bit, __ATOMIC_RELEASE);
	for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
		for (struct allocation *at = NULL; (at = table_next(at, kinds[i]));)
			if (at->device == owner)
				d->cuMemSetAccess(at->address, at->size, &access, 1);
	pthread_mutex_unlock(&table_lock);
}

void devices_in_child(void)
{
	memset(devices, 0, sizeof devices);
	memset(peers, 0, sizeof peers);
}
