/* Memory that the application manages itself: physical memory from cuMemCreate or from another
 * process, and its mappings (NCCL's buffers, PyTorch's expandable segments). The application's
 * handles stay valid although the driver's change, and memory is freed when the driver would have
 * freed it.
 *
 * The application gets a number of ours in place of the driver's handle, higher than any address,
 * because after a window the driver's handle is another one. An allocation and its mappings are
 * entries of the table, by that number and by address. The driver's handle is kept until the
 * application has released all of its own and all mappings, because a window needs it. What cannot
 * be taken over (other kinds of handles, host memory, multicast objects) passes unchanged; if such
 * memory is shared, it is counted, and no window begins.
 *
 * Ranks share memory by descriptors. A descriptor that an application asks for is a duplicate of
 * one that is kept here and that the keeper has: every process that imports it has the same open
 * file, by which the memory is recognised (kcmp), and after a restore all get duplicates of one
 * again.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "clock.h"
#include "descriptors.h"
#include "devices.h"
#include "handles.h"
#include "holding.h"
#include "hooks.h"
#include "physical.h"
#include "spare.h"
#include "start.h"
#include "threads.h"

/* Numbers are never reused, and those of two allocations are further apart than their sizes: a
 * snapshot has each as a region at this address. */
#define FIRST_CREATED (1ull << 60)
#define FIRST_IMPORTED (1ull << 61)
#define END (1ull << 62)
#define UNKNOWN_SIZE \
	(1ull << 40) /* room for what was imported by the application, of which only its mappings \
			tell how large it is */
#define APART ((uint64_t)2 << 20)

static uint64_t next_created = FIRST_CREATED, next_imported = FIRST_IMPORTED; /* under table_lock */

static bool is_ours(CUhandle value)
{
	return value >= FIRST_CREATED && value < END;
}

static struct allocation *find(CUhandle value)
{
	struct allocation *found = is_ours(value) ? table_find(value) : NULL;

	return found && found->kind == KIND_HANDLE ? found : NULL;
}

/* The driver's handle for one of the application's; false: it is one of ours that was released. */
static bool translate(CUhandle value, CUhandle *handle)
{
	*handle = value;
	if (!is_ours(value))
		return true;
	pthread_mutex_lock(&table_lock);
	struct allocation *found = find(value);
	if (found)
		*handle = found->handle;
	pthread_mutex_unlock(&table_lock);
	return found != NULL;
}

static void keep_descriptor(struct allocation *what, int descriptor)
{
	struct stat about;

	if (descriptor >= 0 && fstat(descriptor, &about) == 0) {
		what->descriptor = descriptor;
		what->inode = about.st_ino;
	}
}

/* Return whether it is in the table now; *out is the application's handle. */
static bool add(struct allocation *made, CUhandle *out, int descriptor)
{
	bool added = false;

	pthread_mutex_lock(&table_lock);
	uint64_t *next = made->made.imported ? &next_imported : &next_created,
		 room = made->size ? made->size + APART : UNKNOWN_SIZE;
	if (*next + room < (made->made.imported ? END : FIRST_IMPORTED)) {
		made->address = *next;
		made->identity = table_new_identity();
		struct allocation *place = table_add(made);
		if (place) {
			*out = made->address;
			*next += room;
			holding_hello();
			holding_add(place, descriptor);
			added = true;
		}
	}
	pthread_mutex_unlock(&table_lock);
	return added;
}

/* Takes an allocation without references off the table, the driver and the keeper. Under
 * table_lock, which it releases for a while. */
static void destroy(struct allocation *at)
{
	struct allocation what = *at;

	table_remove(at);
	pthread_mutex_unlock(&table_lock);
	driver()->cuMemRelease(what.handle);
	pthread_mutex_lock(&table_lock);
	holding_free(&what);
}

/* -- handles */

/* -1: not possible here. */
static CUresult create(CUhandle *out, size_t size, const struct allocation_properties *wanted,
    unsigned long long flags)
{
	const struct driver *d = driver();
	struct allocation made = {.kind = KIND_HANDLE,
	    .size = size,
	    .requested = size,
	    .descriptor = -1,
	    .has_handle = true,
	    .made = {.references = 1}};

	if (!out || !wanted || !size || flags || !holding_directory() || !d->usable ||
	    wanted->type != ALLOCATION_PINNED || wanted->location.type != LOCATION_DEVICE ||
	    !devices_usable(wanted->location.id) || wanted->windows || wanted->flags.compression ||
	    wanted->flags.usage)
		return -1;
	made.device = wanted->location.id;
	made.made.handle_types = wanted->handle_types;
	struct allocation_properties properties = *wanted;
	properties.handle_types |= HANDLE_POSIX_DESCRIPTOR;
	if (!start_agent() || physical_create(&made.handle, size, &properties))
		return -1; /* the answer to what was asked for is the driver's */
	made.since = clock_now(); /* the agent hands it over after a while */
	if (!add(&made, out, -1)) {
		d->cuMemRelease(made.handle);
		return -1;
	}
	return CUDA_SUCCESS;
}

CUresult resident_cuMemCreate(CUhandle *out, size_t size,
    const struct allocation_properties *properties, unsigned long long flags)
{
	if (!driver() || !driver()->cuMemCreate)
		return CUDA_ERROR_NOT_INITIALIZED;
	threads_enter();
	CUresult result = create(out, size, properties, flags);
	if (result < 0) {
		uint64_t before = spare_given_back();
		result = driver()->cuMemCreate(out, size, properties, flags);
		if (result == CUDA_ERROR_OUT_OF_MEMORY && spare_make_room(before))
			result = driver()->cuMemCreate(out, size, properties, flags);
	}
	threads_leave();
	return result;
}

static void count_unparkable(void)
{
	pthread_mutex_lock(&table_lock);
	table_counts.unparkable++;
	pthread_mutex_unlock(&table_lock);
}

/* Whether it is memory of a device, as far as the driver tells. */
static bool describe_import(struct allocation *made)
{
	const struct driver *d = driver();
	struct allocation_properties properties = {0};
	bool described = d->cuMemGetAllocationPropertiesFromHandle &&
	    !d->cuMemGetAllocationPropertiesFromHandle(&properties, made->handle);

	/* A dump learns the GPU from the process that allocated it; this counts only once that
	 * process has released it. */
	if (described && devices_usable(properties.location.id))
		made->device = properties.location.id;
	else if (d->cuCtxGetDevice(&made->device) || !devices_usable(made->device))
		made->device = 0;
	made->made.handle_types = properties.handle_types;
	return !described || properties.location.type == LOCATION_DEVICE;
}

static CUresult import(CUhandle *out, void *shared, int type)
{
	const struct driver *d = driver();
	struct allocation made = {.kind = KIND_HANDLE,
	    .descriptor = -1,
	    .has_handle = true,
	    .made = {.references = 1, .imported = true}};
	/* what cannot be parked it tells of */
	bool told = holding_directory() && d->usable && start_agent();
	CUresult result = d->cuMemImportFromShareableHandle(&made.handle, shared, type);
	int descriptor = -1;

	if (result || !holding_directory())
		goto unchanged;
	if (told && describe_import(&made) && type == HANDLE_POSIX_DESCRIPTOR)
		descriptor = descriptor_duplicate((int)(intptr_t)shared);
	keep_descriptor(&made, descriptor);
	if (made.descriptor < 0 || !add(&made, out, made.descriptor)) {
		if (descriptor >= 0)
			close(descriptor);
		count_unparkable();
		goto unchanged;
	}
	return CUDA_SUCCESS;

unchanged:
	if (!result)
		*out = made.handle;
	return result;
}

CUresult handles_import(CUhandle *out, int descriptor, size_t size)
{
	struct allocation made = {.kind = KIND_HANDLE,
	    .size = size,
	    .requested = size,
	    .descriptor = -1,
	    .has_handle = true,
	    .made = {.references = 1, .imported = true}};
	CUresult result = driver()->cuMemImportFromShareableHandle(
	    &made.handle, (void *)(intptr_t)descriptor, HANDLE_POSIX_DESCRIPTOR);

	if (result) {
		close(descriptor);
		return result;
	}
	describe_import(&made);
	descriptor = descriptor_high(descriptor);
	keep_descriptor(&made, descriptor);
	if (made.descriptor < 0 || !add(&made, out, descriptor)) {
		close(descriptor);
		driver()->cuMemRelease(made.handle);
		result = CUDA_ERROR_OUT_OF_MEMORY;
	}
	return result;
}

CUresult resident_cuMemImportFromShareableHandle(CUhandle *out, void *shared, int type)
{
	if (!driver() || !driver()->cuMemImportFromShareableHandle)
		return CUDA_ERROR_NOT_INITIALIZED;
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	threads_enter();
	CUresult result = import(out, shared, type);
	threads_leave();
	return result;
}

/* One that this process made, by cuMemCreate or cuMemAlloc. */
static struct allocation *find_made(CUdeviceptr address)
{
	struct allocation *found = table_find(address);

	return found &&
		((found->kind == KIND_HANDLE && !found->made.imported) ||
		    (found->kind == KIND_RESIDENT && !found->resident.freed))
	    ? found
	    : NULL;
}

/* Prepares the one descriptor of what this process made to be duplicated. Another export would not
 * be recognised as the same memory: once one was given away, it stays the one, and if the
 * application closed it, the keeper still has it. Under table_lock, which it releases during the
 * driver's call. */
static struct allocation *with_descriptor(CUdeviceptr address, CUresult *result)
{
	struct allocation *found = find_made(address);
	int made = -1;

	if (!found || holding_keeps(found))
		return found;
	if (!found->exported) {
		CUhandle handle = found->handle;
		pthread_mutex_unlock(&table_lock);
		*result = driver()->cuMemExportToShareableHandle(
		    &made, handle, HANDLE_POSIX_DESCRIPTOR, 0);
		pthread_mutex_lock(&table_lock);
		found = find_made(address);
	}
	if (found && !holding_keeps(found)) {
		bool fresh = made >= 0 && !found->exported;
		int descriptor = fresh ? made : holding_fetch(found);
		if (descriptor >= 0) {
			keep_descriptor(found, descriptor_high(descriptor));
			made = fresh ? -1 : made;
		}
	}
	if (made >= 0)
		close(made); /* another thread was faster */
	return found;
}

struct allocation *handles_share(CUdeviceptr address, CUresult *result)
{
	struct allocation *found = with_descriptor(address, result);

	if (!found)
		*result = CUDA_ERROR_INVALID_VALUE;
	else if (!holding_keeps(found)) {
		*result = *result ? *result : CUDA_ERROR_OPERATING_SYSTEM;
		found = NULL;
	} else if (!found->exported) {
		found->exported = true;
		holding_add(found, found->descriptor);
	}
	return found;
}

static CUresult give_descriptor(int *out, CUhandle value)
{
	CUresult result = CUDA_ERROR_OPERATING_SYSTEM;

	pthread_mutex_lock(&table_lock);
	struct allocation *found = handles_share(value, &result);
	if (found) {
		*out = fcntl(found->descriptor, F_DUPFD_CLOEXEC, 0);
		table_counts.exports++;
		result = *out < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&table_lock);
	return result;
}

CUresult resident_cuMemExportToShareableHandle(
    void *out, CUhandle value, int type, unsigned long long flags)
{
	const struct driver *d = driver();
	CUhandle handle = value;
	CUresult result;

	if (!d || !d->cuMemExportToShareableHandle)
		return CUDA_ERROR_NOT_INITIALIZED;
	threads_enter();
	pthread_mutex_lock(&table_lock);
	struct allocation *found = find(value);
	/* as the driver would, which now may be asked for it in any case */
	bool refused =
	    is_ours(value) && (!found || !out || flags || !(found->made.handle_types & type));
	bool own = found && type == HANDLE_POSIX_DESCRIPTOR && !found->made.imported;
	if (found)
		handle = found->handle;
	pthread_mutex_unlock(&table_lock);
	if (refused)
		result = CUDA_ERROR_INVALID_VALUE;
	else if (own)
		result = give_descriptor(out, value);
	else {
		result = d->cuMemExportToShareableHandle(out, handle, type, flags);
		if (!result && holding_directory())
			count_unparkable();
	}
	threads_leave();
	return result;
}

CUresult handles_release(CUhandle value)
{
	CUresult result = CUDA_SUCCESS;

	pthread_mutex_lock(&table_lock);
	struct allocation *found = find(value);
	if (!found || !found->made.references)
		result = CUDA_ERROR_INVALID_VALUE;
	else if (--found->made.references == 0 && !found->made.mappings)
		destroy(found);
	pthread_mutex_unlock(&table_lock);
	return result;
}

CUresult resident_cuMemRelease(CUhandle value)
{
	if (!driver() || !driver()->cuMemRelease)
		return CUDA_ERROR_NOT_INITIALIZED;
	threads_enter();
	CUresult result = is_ours(value) ? handles_release(value) : driver()->cuMemRelease(value);
	threads_leave();
	return result;
}

CUresult resident_cuMemGetAllocationPropertiesFromHandle(
    struct allocation_properties *out, CUhandle value)
{
	const struct driver *d = driver();
	CUhandle handle;

	if (!d || !d->cuMemGetAllocationPropertiesFromHandle)
		return CUDA_ERROR_NOT_INITIALIZED;
	threads_enter();
	CUresult result = translate(value, &handle)
	    ? d->cuMemGetAllocationPropertiesFromHandle(out, handle)
	    : CUDA_ERROR_INVALID_VALUE;
	if (!result && out && is_ours(value)) {
		pthread_mutex_lock(&table_lock);
		struct allocation *found = find(value);
		if (found)
			out->handle_types = found->made.handle_types;
		pthread_mutex_unlock(&table_lock);
	}
	threads_leave();
	return result;
}

/* -- mappings; all under table_lock */

static bool lies_in(const struct allocation *what, CUdeviceptr address, size_t size)
{
	return what->address >= address && what->address + what->size <= address + size;
}

/* The mappings of a range, from NULL until NULL: ranges consist of whole mappings, mostly of one.
 */
static struct allocation *next_in(struct allocation *after, CUdeviceptr address, size_t size)
{
	struct allocation *at;

	if (!after) {
		at = table_find(address);
		if (at && at->kind == KIND_MAPPING && at->size <= size)
			return at;
	} else {
		at = table_find(after->address + after->size);
		if (at && at->kind == KIND_MAPPING && lies_in(at, address, size))
			return at;
	}
	return NULL;
}

/* By cuMemAlloc or cuIpcOpenMemHandle, as the application knows it, or one that it has released. */
static bool mapped_by_us(CUdeviceptr address)
{
	pthread_mutex_lock(&table_lock);
	struct allocation *found = table_find(address);
	bool is = found &&
	    (found->kind == KIND_RESIDENT || found->kind == KIND_SPARE ||
		(found->kind == KIND_MAPPING && found->mapping.opened));
	pthread_mutex_unlock(&table_lock);
	return is;
}

CUresult handles_note_mapping(struct allocation *made, CUhandle value)
{
	CUresult result = CUDA_SUCCESS;

	pthread_mutex_lock(&table_lock);
	if (!find(value)) /* released by another thread meanwhile */
		result = CUDA_ERROR_INVALID_VALUE;
	else if (!table_add(made))
		result = CUDA_ERROR_OUT_OF_MEMORY;
	struct allocation *of = find(value);
	if (!result) {
		of->made.mappings++;
		if (of->made.imported && made->mapping.offset + made->size > of->size) {
			of->size = of->requested = made->mapping.offset + made->size;
			holding_add(of, holding_keeps(of) ? of->descriptor : -1);
		}
	}
	pthread_mutex_unlock(&table_lock);
	return result;
}

CUresult resident_cuMemMap(
    CUdeviceptr address, size_t size, size_t offset, CUhandle value, unsigned long long flags)
{
	const struct driver *d = driver();
	struct allocation made = {.address = address,
	    .size = size,
	    .kind = KIND_MAPPING,
	    .mapped = true,
	    .mapping = {.of = value, .offset = offset}};
	CUhandle handle;

	if (!d || !d->cuMemMap)
		return CUDA_ERROR_NOT_INITIALIZED;
	threads_enter();
	CUresult result = translate(value, &handle)
	    ? d->cuMemMap(address, size, offset, handle, flags)
	    : CUDA_ERROR_INVALID_VALUE;
	if (!result && is_ours(value)) {
		d->cuCtxGetCurrent(&made.context); /* to be waited for before it is unmapped */
		result = handles_note_mapping(&made, value);
		if (result)
			d->cuMemUnmap(address, size);
	}
	threads_leave();
	return result;
}

void handles_forget_mappings(CUdeviceptr address, size_t size)
{
	struct allocation *at, *of;

	pthread_mutex_lock(&table_lock);
	for (CUdeviceptr end = address + size; (at = next_in(NULL, address, size));) {
		CUhandle value = at->mapping.of;
		address += at->size;
		size = (size_t)(end - address);
		table_remove(at);
		of = find(value);
		if (of && --of->made.mappings == 0 && !of->made.references)
			destroy(of);
	}
	pthread_mutex_unlock(&table_lock);
}

CUresult resident_cuMemUnmap(CUdeviceptr address, size_t size)
{
	if (!driver() || !driver()->cuMemUnmap)
		return CUDA_ERROR_NOT_INITIALIZED;
	threads_enter();
	CUresult result =
	    mapped_by_us(address) ? CUDA_ERROR_INVALID_VALUE : driver()->cuMemUnmap(address, size);
	if (!result)
		handles_forget_mappings(address, size);
	threads_leave();
	return result;
}

static void note_access(struct allocation *what, const struct access *access)
{
	if (access->location.type == LOCATION_DEVICE && access->location.id >= 0 &&
	    access->location.id < DEVICES) {
		uint64_t bit = 1ull << access->location.id;
		what->mapping.reads =
		    access->flags ? what->mapping.reads | bit : what->mapping.reads & ~bit;
		what->mapping.writes = access->flags == ACCESS_READ_WRITE
		    ? what->mapping.writes | bit
		    : what->mapping.writes & ~bit;
	} else
		/* device memory that the host accesses: it has only one place */
		what->mapping.host = *access;
}

CUresult resident_cuMemSetAccess(
    CUdeviceptr address, size_t size, const struct access *access, size_t some)
{
	if (!driver() || !driver()->cuMemSetAccess)
		return CUDA_ERROR_NOT_INITIALIZED;
	threads_enter();
	CUresult result = mapped_by_us(address)
	    ? CUDA_ERROR_INVALID_VALUE
	    : driver()->cuMemSetAccess(address, size, access, some);
	if (!result) {
		pthread_mutex_lock(&table_lock);
		for (struct allocation *at = NULL; (at = next_in(at, address, size));)
			for (size_t i = 0; i < some; i++)
				note_access(at, &access[i]);
		pthread_mutex_unlock(&table_lock);
	}
	threads_leave();
	return result;
}

CUresult handles_set_access(const struct allocation *what)
{
	struct access access[DEVICES + 1];
	size_t some = 0;

	for (CUdevice device = 0; device < DEVICES; device++)
		if (what->mapping.reads >> device & 1)
			access[some++] = (struct access){{LOCATION_DEVICE, device},
			    what->mapping.writes >> device & 1 ? ACCESS_READ_WRITE : ACCESS_READ};
	if (what->mapping.host.flags)
		access[some++] = what->mapping.host;
	return some ? driver()->cuMemSetAccess(what->address, what->size, access, some)
		    : CUDA_SUCCESS;
}

CUresult resident_cuMemRetainAllocationHandle(CUhandle *out, CUdeviceptr address)
{
	const struct driver *d = driver();
	CUresult result = -1;

	if (!d || !d->cuMemRetainAllocationHandle)
		return CUDA_ERROR_NOT_INITIALIZED;
	threads_enter();
	pthread_mutex_lock(&table_lock);
	struct allocation *at = out ? table_containing(address) : NULL,
			  *of = at && at->kind == KIND_MAPPING && !at->mapping.opened
	    ? find(at->mapping.of)
	    : NULL;
	if (of) {
		of->made.references++;
		*out = of->address;
		result = CUDA_SUCCESS;
	} else if (at &&
	    (at->kind == KIND_RESIDENT || (at->kind == KIND_MAPPING && at->mapping.opened)))
		result = CUDA_ERROR_INVALID_VALUE; /* as of cuMemAlloc's own */
	pthread_mutex_unlock(&table_lock);
	if (result < 0)
		result = d->cuMemRetainAllocationHandle(out, spare_hidden(address));
	threads_leave();
	return result;
}

/* -- multicast objects and shared pools, which no window can take away: a process that had one is
 * not snapshotable */

#define COUNTED(name, counter, parameters, arguments) \
	CUresult resident_##name parameters \
	{ \
		if (!driver() || !driver()->name) \
			return CUDA_ERROR_NOT_INITIALIZED; \
		threads_enter(); \
		CUresult result = driver()->name arguments; \
		if (!result) { \
			pthread_mutex_lock(&table_lock); \
			table_counts.counter++; \
			pthread_mutex_unlock(&table_lock); \
		} \
		threads_leave(); \
		return result; \
	}
COUNTED(cuMemPoolExportToShareableHandle, unparkable,
    (void *out, CUpool pool, int type, unsigned long long flags), (out, pool, type, flags))
COUNTED(cuMemPoolImportFromShareableHandle, unparkable,
    (CUpool * out, void *shared, int type, unsigned long long flags), (out, shared, type, flags))
COUNTED(cuMulticastCreate, multicast, (CUhandle * out, const void *properties), (out, properties))

CUhandle handles_present(CUhandle value)
{
	CUhandle handle;

	return translate(value, &handle) ? handle : 0;
}

COUNTED(cuMulticastAddDevice, multicast, (CUhandle object, CUdevice device),
    (handles_present(object), device))
COUNTED(cuMulticastBindMem, multicast,
    (CUhandle object, size_t at, CUhandle memory, size_t offset, size_t size,
	unsigned long long flags),
    (handles_present(object), at, handles_present(memory), offset, size, flags))
COUNTED(cuMulticastBindMem_v2, multicast,
    (CUhandle object, CUdevice device, size_t at, CUhandle memory, size_t offset, size_t size,
	unsigned long long flags),
    (handles_present(object), device, at, handles_present(memory), offset, size, flags))

void handles_in_child(void)
{
	next_created = FIRST_CREATED;
	next_imported = FIRST_IMPORTED;
}
