/* CUDA's legacy IPC of resident memory (cudaIpcGetMemHandle: torch.multiprocessing, custom
 * all-reduces). A handle names the process to ask for; opening it imports the memory and maps it,
 * and windows take that mapping away like all shared memory (handles.c).
 *
 * A handle names a process and one of its allocations for as long as the allocation lives, through
 * windows and restores; a process that opens it gets the one descriptor from the keeper. Other
 * memory passes to the driver and is counted, because no window takes it away.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>

#include "capture.h"
#include "devices.h"
#include "handles.h"
#include "holding.h"
#include "hooks.h"
#include "ipc.h"
#include "spare.h"
#include "start.h"
#include "threads.h"

#define LAZY_PEER_ACCESS 1u /* the only flag that there is */

_Static_assert(sizeof(struct ipc_reference) == sizeof(struct ipc_handle), "as cuda.h has it");

/* Drawn once; the driver's have the exporter's process id and small numbers in their first words.
 */
static const uint8_t magic[16] = {
    0x69, 0x63, 0xD3, 0x9E, 0x4B, 0xF7, 0x81, 0x2C, 0xA5, 0x60, 0xE8, 0x17, 0xBD, 0xC2, 0x36, 0xFA};

/* One opens or closes at a time; taken before table_lock, inside threads_enter … threads_leave. */
static pthread_mutex_t ipc_lock = PTHREAD_MUTEX_INITIALIZER;

static void count_driver(CUresult result)
{
	pthread_mutex_lock(&table_lock);
	*(result ? &table_counts.ipc_refused : &table_counts.ipc_exports) += 1;
	pthread_mutex_unlock(&table_lock);
}

static bool has_context(void)
{
	CUcontext context = NULL;

	return !driver()->cuCtxGetCurrent(&context) && context;
}

/* -- handles */

/* -1: not of ours. */
static CUresult refer(struct ipc_handle *out, CUdeviceptr address)
{
	struct ipc_reference made = {0};
	CUresult result = -1;

	pthread_mutex_lock(&table_lock);
	struct allocation *found = table_containing(address);
	if (found && found->kind == KIND_RESIDENT && !found->resident.freed && holding_token()) {
		bool known = found->exported && found->held;
		result = CUDA_ERROR_OPERATING_SYSTEM;
		found = handles_share(found->address, &result);
		if (found) {
			/* The receiver of the handle may reach the keeper before what was sent to
			 * it. A keeper that is not there now gets everything later. */
			if (!known)
				holding_complete();
			memcpy(made.magic, magic, sizeof magic);
			memcpy(made.token, holding_process_token, sizeof made.token);
			made.identity = found->identity;
			memcpy(out, &made, sizeof made);
			table_counts.exports++;
			result = CUDA_SUCCESS;
		}
	}
	pthread_mutex_unlock(&table_lock);
	return result;
}

CUresult resident_cuIpcGetMemHandle(struct ipc_handle *out, CUdeviceptr address)
{
	if (!driver() || !driver()->cuIpcGetMemHandle)
		return CUDA_ERROR_NOT_INITIALIZED;
	threads_enter();
	CUresult result = out && driver()->usable && has_context() ? refer(out, address) : -1;
	if (result < 0) {
		result = driver()->cuIpcGetMemHandle(out, spare_hidden(address));
		count_driver(result);
	}
	threads_leave();
	return result;
}

/* -- opened ones; all under ipc_lock */

static bool same(const struct allocation *at, const struct ipc_reference *what)
{
	return at->mapping.opened && at->mapping.source == what->identity &&
	    !memcmp(at->mapping.source_token, what->token, sizeof what->token);
}

/* Under table_lock. */
static struct allocation *find_opened(const struct ipc_reference *what)
{
	struct allocation *at = NULL;

	while ((at = table_next(at, KIND_MAPPING)))
		if (same(at, what))
			break;
	return at;
}

static CUresult give_access(CUdeviceptr address, size_t size, CUdevice device)
{
	struct access access = {{LOCATION_DEVICE, device}, ACCESS_READ_WRITE};

	return driver()->cuMemSetAccess(address, size, &access, 1) ? CUDA_ERROR_MAP_FAILED
								   : CUDA_SUCCESS;
}

/* Once more; -1: it is not open here. */
static CUresult open_again(CUdeviceptr *out, const struct ipc_reference *what, CUdevice device)
{
	CUresult result = -1;

	pthread_mutex_lock(&table_lock);
	struct allocation *found = find_opened(what);
	if (found) {
		uint64_t bit = 1ull << device;
		result = found->mapping.reads & found->mapping.writes & bit
		    ? CUDA_SUCCESS
		    : give_access(found->address, found->size, device);
		if (!result) {
			found->mapping.reads |= bit;
			found->mapping.writes |= bit;
			found->mapping.opens++;
			*out = found->address;
		}
	}
	pthread_mutex_unlock(&table_lock);
	return result;
}

static CUresult open_first(
    CUdeviceptr *out, const struct ipc_reference *what, CUcontext context, CUdevice device)
{
	const struct driver *d = driver();
	struct allocation made = {.kind = KIND_MAPPING,
	    .context = context,
	    .mapped = true,
	    .mapping = {.reads = 1ull << device,
		.writes = 1ull << device,
		.opened = true,
		.opens = 1,
		.source = what->identity}};
	int descriptor,
	    error = holding_fetch_of(what->token, what->identity, &made.size, &descriptor);

	if (error)
		return error == ENOENT ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_MAP_FAILED;
	memcpy(made.mapping.source_token, what->token, sizeof made.mapping.source_token);
	made.requested = made.size;
	/* takes it over */
	CUresult result = handles_import(&made.mapping.of, descriptor, made.size);
	if (result)
		return CUDA_ERROR_MAP_FAILED;
	result = CUDA_ERROR_MAP_FAILED;
	if (d->cuMemAddressReserve(&made.address, made.size, 0, 0, 0))
		goto no_address;
	if (d->cuMemMap(made.address, made.size, 0, handles_present(made.mapping.of), 0))
		goto no_mapping;
	if (give_access(made.address, made.size, device) ||
	    handles_note_mapping(&made, made.mapping.of))
		goto no_access;
	*out = made.address;
	result = CUDA_SUCCESS;
	goto no_address; /* the mapping keeps it */

no_access:
	d->cuMemUnmap(made.address, made.size);
no_mapping:
	d->cuMemAddressFree(made.address, made.size);
no_address:
	handles_release(made.mapping.of);
	return result;
}

static CUresult open_reference(CUdeviceptr *out, const struct ipc_reference *what, unsigned flags)
{
	const struct driver *d = driver();
	CUcontext context = NULL;
	CUdevice device;

	if (!out || flags & ~LAZY_PEER_ACCESS)
		return CUDA_ERROR_INVALID_VALUE;
	if (d->cuCtxGetCurrent(&context) || !context || d->cuCtxGetDevice(&device) ||
	    !devices_usable(device))
		return CUDA_ERROR_INVALID_CONTEXT;
	pthread_mutex_lock(&table_lock);
	bool own = holding_token() &&
	    !memcmp(what->token, holding_process_token, sizeof holding_process_token);
	pthread_mutex_unlock(&table_lock);
	if (own)
		/* as of any handle in the process that made it */
		return CUDA_ERROR_INVALID_CONTEXT;
	if (!start_agent())
		return CUDA_ERROR_MAP_FAILED;
	pthread_mutex_lock(&ipc_lock);
	CUresult result = open_again(out, what, device);
	if (result < 0)
		result = open_first(out, what, context, device);
	pthread_mutex_unlock(&ipc_lock);
	return result;
}

static CUresult open_handle(CUresult (*call)(CUdeviceptr *, struct ipc_handle, unsigned),
    CUdeviceptr *out, struct ipc_handle handle, unsigned flags)
{
	struct ipc_reference what;

	memcpy(&what, &handle, sizeof what);
	if (!memcmp(what.magic, magic, sizeof magic) && holding_directory() && driver()->usable)
		return open_reference(out, &what, flags);
	CUresult result = call(out, handle, flags);
	if (!result)
		count_driver(result);
	return result;
}

#define OPEN(name) \
	CUresult resident_##name(CUdeviceptr *out, struct ipc_handle handle, unsigned flags) \
	{ \
		if (!driver() || !driver()->name) \
			return CUDA_ERROR_NOT_INITIALIZED; \
		threads_enter(); \
		CUresult result = open_handle(driver()->name, out, handle, flags); \
		threads_leave(); \
		return result; \
	}
OPEN(cuIpcOpenMemHandle)
OPEN(cuIpcOpenMemHandle_v2)

static void unmap(const struct allocation *what)
{
	driver()->cuMemUnmap(what->address, what->size);
	handles_forget_mappings(what->address, what->size);
	driver()->cuMemAddressFree(what->address, what->size);
}

/* One that everybody here has closed; of a context (NULL: any). */
static bool next_closed(struct allocation *copy, CUcontext context)
{
	struct allocation *at = NULL;

	pthread_mutex_lock(&table_lock);
	while ((at = table_next(at, KIND_MAPPING)))
		if (at->mapping.opened && !at->mapping.opens &&
		    (!context || at->context == context)) {
			*copy = *at;
			break;
		}
	pthread_mutex_unlock(&table_lock);
	return at != NULL;
}

/* Work that may still use it ends first. In a stream capture nothing can be waited for: then it is
 * left for the next close. */
static CUresult unmap_closed(void)
{
	const struct driver *d = driver();
	CUresult result = CUDA_SUCCESS;
	struct allocation closed;
	CUcontext before = NULL;

	while (!result && !capture_active() && next_closed(&closed, NULL)) {
		d->cuCtxGetCurrent(&before);
		if (before && before != closed.context) /* another one that opened it, too */
			result = capture_wait_for_context();
		if (!result && closed.context &&
		    !(result = d->cuCtxPushCurrent_v2(closed.context))) {
			result = capture_wait_for_context();
			d->cuCtxPopCurrent_v2(&before);
		}
		if (result >= CUDA_ERROR_CAPTURE_FIRST && result <= CUDA_ERROR_CAPTURE_LAST)
			return CUDA_SUCCESS;
		/* also after an error of the context, which the application gets */
		unmap(&closed);
	}
	return result;
}

CUresult resident_cuIpcCloseMemHandle(CUdeviceptr address)
{
	CUresult result = -1;

	if (!driver() || !driver()->cuIpcCloseMemHandle)
		return CUDA_ERROR_NOT_INITIALIZED;
	threads_enter();
	pthread_mutex_lock(&ipc_lock);
	pthread_mutex_lock(&table_lock);
	struct allocation *found = table_find(address);
	if (found && found->kind == KIND_MAPPING && found->mapping.opened) {
		result = found->mapping.opens ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
		found->mapping.opens -= found->mapping.opens > 0;
	}
	pthread_mutex_unlock(&table_lock);
	if (!result)
		result = unmap_closed();
	pthread_mutex_unlock(&ipc_lock);
	if (result < 0)
		result = driver()->cuIpcCloseMemHandle(address);
	threads_leave();
	return result;
}

void ipc_forget_context(CUcontext context)
{
	struct allocation closed;

	pthread_mutex_lock(&ipc_lock);
	pthread_mutex_lock(&table_lock);
	for (struct allocation *at = NULL; (at = table_next(at, KIND_MAPPING));)
		if (at->mapping.opened && at->context == context)
			at->mapping.opens = 0;
	pthread_mutex_unlock(&table_lock);
	while (next_closed(&closed, context))
		unmap(&closed);
	pthread_mutex_unlock(&ipc_lock);
}

void ipc_in_child(void)
{
	pthread_mutex_init(&ipc_lock, NULL);
}
