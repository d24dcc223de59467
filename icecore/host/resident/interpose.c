/* How applications reach our functions in place of the driver's: by linking, through dlsym, and
 * through cuGetProcAddress. Every other symbol passes unchanged, including the caller's address, on
 * which dlsym depends. Without a libcuda nothing changes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <string.h>

#include "driver.h"
#include "holding.h"
#include "hooks.h"

#define EXPORTED __attribute__((visibility("default")))

#define AS_ANSWERED 0

static const struct hook {
	const char *symbol; /* as libcuda exports it */
	const char *name; /* as cuGetProcAddress knows it */
	int since; /* the CUDA version from which the name means this symbol; AS_ANSWERED: it
		      means it if the driver answers with its address */
	void *ours, *ours_per_thread;
} hooks[] = {
    {"cuMemAlloc_v2", "cuMemAlloc", 3020, resident_cuMemAlloc_v2, NULL},
    {"cuMemAllocPitch_v2", "cuMemAllocPitch", 3020, resident_cuMemAllocPitch_v2, NULL},
    {"cuMemFree_v2", "cuMemFree", 3020, resident_cuMemFree_v2, NULL},
    {"cuMemAllocManaged", "cuMemAllocManaged", 6000, resident_cuMemAllocManaged, NULL},
    {"cuMemAllocAsync", "cuMemAllocAsync", 11020, resident_cuMemAllocAsync,
	resident_cuMemAllocAsync_ptsz},
    {"cuMemAllocAsync_ptsz", NULL, 0, resident_cuMemAllocAsync_ptsz, NULL},
    {"cuMemAllocFromPoolAsync", "cuMemAllocFromPoolAsync", 11020, resident_cuMemAllocFromPoolAsync,
	resident_cuMemAllocFromPoolAsync_ptsz},
    {"cuMemAllocFromPoolAsync_ptsz", NULL, 0, resident_cuMemAllocFromPoolAsync_ptsz, NULL},
    {"cuMemFreeAsync", "cuMemFreeAsync", 11020, resident_cuMemFreeAsync,
	resident_cuMemFreeAsync_ptsz},
    {"cuMemFreeAsync_ptsz", NULL, 0, resident_cuMemFreeAsync_ptsz, NULL},
    /* the newest that fits comes first */
    {"cuStreamBeginCapture_v2", "cuStreamBeginCapture", 10010, resident_cuStreamBeginCapture_v2,
	resident_cuStreamBeginCapture_v2_ptsz},
    {"cuStreamBeginCapture_v2_ptsz", NULL, 0, resident_cuStreamBeginCapture_v2_ptsz, NULL},
    {"cuStreamBeginCapture", "cuStreamBeginCapture", 10000, resident_cuStreamBeginCapture,
	resident_cuStreamBeginCapture_ptsz},
    {"cuStreamBeginCapture_ptsz", NULL, 0, resident_cuStreamBeginCapture_ptsz, NULL},
    {"cuStreamBeginCaptureToGraph", "cuStreamBeginCaptureToGraph", 12030,
	resident_cuStreamBeginCaptureToGraph, resident_cuStreamBeginCaptureToGraph_ptsz},
    {"cuStreamBeginCaptureToGraph_ptsz", NULL, 0, resident_cuStreamBeginCaptureToGraph_ptsz, NULL},
    {"cuStreamEndCapture", "cuStreamEndCapture", 10000, resident_cuStreamEndCapture,
	resident_cuStreamEndCapture_ptsz},
    {"cuStreamEndCapture_ptsz", NULL, 0, resident_cuStreamEndCapture_ptsz, NULL},
    {"cuStreamDestroy_v2", "cuStreamDestroy", 4000, resident_cuStreamDestroy_v2, NULL},
    {"cuMemCreate", "cuMemCreate", 10020, resident_cuMemCreate, NULL},
    {"cuMemRelease", "cuMemRelease", 10020, resident_cuMemRelease, NULL},
    {"cuMemMap", "cuMemMap", 10020, resident_cuMemMap, NULL},
    {"cuMemUnmap", "cuMemUnmap", 10020, resident_cuMemUnmap, NULL},
    {"cuMemSetAccess", "cuMemSetAccess", 10020, resident_cuMemSetAccess, NULL},
    {"cuMemExportToShareableHandle", "cuMemExportToShareableHandle", 10020,
	resident_cuMemExportToShareableHandle, NULL},
    {"cuMemImportFromShareableHandle", "cuMemImportFromShareableHandle", 10020,
	resident_cuMemImportFromShareableHandle, NULL},
    {"cuPointerGetAttribute", "cuPointerGetAttribute", 4000, resident_cuPointerGetAttribute, NULL},
    {"cuPointerGetAttributes", "cuPointerGetAttributes", 7000, resident_cuPointerGetAttributes,
	NULL},
    {"cuMemGetAddressRange_v2", "cuMemGetAddressRange", 3020, resident_cuMemGetAddressRange_v2,
	NULL},
    {"cuPointerSetAttribute", "cuPointerSetAttribute", 6000, resident_cuPointerSetAttribute, NULL},
    {"cuMemGetHandleForAddressRange", "cuMemGetHandleForAddressRange", 11070,
	resident_cuMemGetHandleForAddressRange, NULL},
    {"cuMemRetainAllocationHandle", "cuMemRetainAllocationHandle", 11000,
	resident_cuMemRetainAllocationHandle, NULL},
    {"cuMemGetAllocationPropertiesFromHandle", "cuMemGetAllocationPropertiesFromHandle", 10020,
	resident_cuMemGetAllocationPropertiesFromHandle, NULL},
    {"cuMemPoolExportToShareableHandle", "cuMemPoolExportToShareableHandle", 11020,
	resident_cuMemPoolExportToShareableHandle, NULL},
    {"cuMemPoolImportFromShareableHandle", "cuMemPoolImportFromShareableHandle", 11020,
	resident_cuMemPoolImportFromShareableHandle, NULL},
    {"cuMulticastCreate", "cuMulticastCreate", 12010, resident_cuMulticastCreate, NULL},
    {"cuMulticastAddDevice", "cuMulticastAddDevice", 12010, resident_cuMulticastAddDevice, NULL},
    {"cuMulticastBindMem_v2", "cuMulticastBindMem", 13010, resident_cuMulticastBindMem_v2, NULL},
    {"cuMulticastBindMem", "cuMulticastBindMem", 12010, resident_cuMulticastBindMem, NULL},
    {"cuIpcGetMemHandle", "cuIpcGetMemHandle", 4010, resident_cuIpcGetMemHandle, NULL},
    {"cuIpcOpenMemHandle_v2", "cuIpcOpenMemHandle", 11000, resident_cuIpcOpenMemHandle_v2, NULL},
    {"cuIpcOpenMemHandle", "cuIpcOpenMemHandle", 4010, resident_cuIpcOpenMemHandle, NULL},
    {"cuIpcCloseMemHandle", "cuIpcCloseMemHandle", 4010, resident_cuIpcCloseMemHandle, NULL},
    {"cuEventCreate", "cuEventCreate", 2000, resident_cuEventCreate, NULL},
    {"cuEventDestroy_v2", "cuEventDestroy", 4000, resident_cuEventDestroy_v2, NULL},
    {"cuEventDestroy", "cuEventDestroy", 2000, resident_cuEventDestroy, NULL},
    {"cuEventRecord", "cuEventRecord", 2000, resident_cuEventRecord, resident_cuEventRecord_ptsz},
    {"cuEventRecord_ptsz", NULL, 0, resident_cuEventRecord_ptsz, NULL},
    {"cuEventRecordWithFlags", "cuEventRecordWithFlags", 11010, resident_cuEventRecordWithFlags,
	resident_cuEventRecordWithFlags_ptsz},
    {"cuEventRecordWithFlags_ptsz", NULL, 0, resident_cuEventRecordWithFlags_ptsz, NULL},
    {"cuCtxRecordEvent", "cuCtxRecordEvent", 12050, resident_cuCtxRecordEvent, NULL},
    {"cuGreenCtxRecordEvent", "cuGreenCtxRecordEvent", 12040, resident_cuGreenCtxRecordEvent, NULL},
    {"cuGraphAddEventRecordNode", "cuGraphAddEventRecordNode", 11010,
	resident_cuGraphAddEventRecordNode, NULL},
    {"cuGraphEventRecordNodeSetEvent", "cuGraphEventRecordNodeSetEvent", 11010,
	resident_cuGraphEventRecordNodeSetEvent, NULL},
    {"cuGraphExecEventRecordNodeSetEvent", "cuGraphExecEventRecordNodeSetEvent", 11010,
	resident_cuGraphExecEventRecordNodeSetEvent, NULL},
    {"cuGraphAddNode_v2", "cuGraphAddNode", AS_ANSWERED, resident_cuGraphAddNode_v2, NULL},
    {"cuGraphAddNode", "cuGraphAddNode", AS_ANSWERED, resident_cuGraphAddNode, NULL},
    {"cuGraphNodeSetParams", "cuGraphNodeSetParams", 12020, resident_cuGraphNodeSetParams, NULL},
    {"cuGraphExecNodeSetParams", "cuGraphExecNodeSetParams", 12020,
	resident_cuGraphExecNodeSetParams, NULL},
    {"cuIpcGetEventHandle", "cuIpcGetEventHandle", 4010, resident_cuIpcGetEventHandle, NULL},
    {"cuIpcOpenEventHandle", "cuIpcOpenEventHandle", 4010, resident_cuIpcOpenEventHandle, NULL},
    {"cuCtxEnablePeerAccess", "cuCtxEnablePeerAccess", 4000, resident_cuCtxEnablePeerAccess, NULL},
    {"cuCtxDisablePeerAccess", "cuCtxDisablePeerAccess", 4000, resident_cuCtxDisablePeerAccess,
	NULL},
    {"cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain", 7000,
	resident_cuDevicePrimaryCtxRetain, NULL},
    {"cuCtxCreate_v2", "cuCtxCreate", AS_ANSWERED, resident_cuCtxCreate_v2, NULL},
    {"cuCtxCreate_v3", "cuCtxCreate", AS_ANSWERED, resident_cuCtxCreate_v3, NULL},
    {"cuCtxCreate_v4", "cuCtxCreate", AS_ANSWERED, resident_cuCtxCreate_v4, NULL},
    {"cuCtxDestroy_v2", "cuCtxDestroy", 4000, resident_cuCtxDestroy_v2, NULL},
    {"cuCtxDestroy", "cuCtxDestroy", 2000, resident_cuCtxDestroy, NULL},
    {"cuCtxDetach", "cuCtxDetach", 2000, resident_cuCtxDetach, NULL},
    {"cuDevicePrimaryCtxReset", NULL, 0, resident_cuDevicePrimaryCtxReset_v2, NULL},
    {"cuDevicePrimaryCtxReset_v2", "cuDevicePrimaryCtxReset", 7000,
	resident_cuDevicePrimaryCtxReset_v2, NULL},
    {"cuDevicePrimaryCtxRelease", NULL, 0, resident_cuDevicePrimaryCtxRelease_v2, NULL},
    {"cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxRelease", 7000,
	resident_cuDevicePrimaryCtxRelease_v2, NULL},
    /* before the older one: the newest that fits */
    {"cuGetProcAddress_v2", "cuGetProcAddress", 12000, resident_cuGetProcAddress_v2, NULL},
    {"cuGetProcAddress", "cuGetProcAddress", 11030, resident_cuGetProcAddress, NULL},
};

/* For the entry below: ours for a symbol of libcuda's, or NULL. */
__attribute__((visibility("hidden"), used)) void *resident_lookup(void *library, const char *symbol)
{
	if (!driver_dlsym)
		driver_find_dlsym();
	if (!symbol || symbol[0] != 'c' || symbol[1] != 'u' || library == RTLD_NEXT ||
	    !holding_directory())
		return NULL;
	for (size_t i = 0; i < sizeof hooks / sizeof *hooks; i++)
		if (!strcmp(symbol, hooks[i].symbol)) {
			/* Only the driver's own is replaced: another preload may come before ours.
			 */
			void *found = driver() ? driver_dlsym(library, symbol) : NULL;
			return found && found == driver_symbol(symbol) ? hooks[i].ours : NULL;
		}
	return NULL;
}

#if defined(__x86_64__)
__asm__(
    ".text\n.globl dlsym\n.type dlsym, @function\ndlsym:\n"
    "\tpush %rdi\n\tpush %rsi\n\tsub $8, %rsp\n\tcall resident_lookup\n\tadd $8, %rsp\n\tpop "
    "%rsi\n\tpop %rdi\n"
    "\ttest %rax, %rax\n\tjnz 1f\n\tjmp *driver_dlsym(%rip)\n1:\tret\n.size dlsym, . - dlsym\n");
#elif defined(__aarch64__)
__asm__(".text\n.globl dlsym\n.type dlsym, %function\ndlsym:\n"
	"\tstp x29, x30, [sp, #-32]!\n\tstp x0, x1, [sp, #16]\n\tmov x29, sp\n\tbl "
	"resident_lookup\n\tmov x9, x0\n"
	"\tldp x0, x1, [sp, #16]\n\tldp x29, x30, [sp], #32\n\tcbnz x9, 1f\n\tadrp x9, "
	"driver_dlsym\n\tldr x9, [x9, #:lo12:driver_dlsym]\n\tbr x9\n"
	"1:\tmov x0, x9\n\tret\n.size dlsym, . - dlsym\n");
#else
#error "the preload knows x86-64 and aarch64"
#endif

static bool means(const struct hook *hook, int version, const void *found)
{
	return hook->since == AS_ANSWERED ? found == driver_symbol(hook->symbol)
					  : version >= hook->since;
}

static void replace(const char *name, void **found, int version, unsigned long long flags)
{
	if (!name || !found || !*found || !holding_directory())
		return;
	for (size_t i = 0; i < sizeof hooks / sizeof *hooks; i++) {
		const struct hook *hook = &hooks[i];
		if (!strcmp(name, hook->symbol) && (!hook->name || strcmp(name, hook->name))) {
			*found = hook->ours;
			return;
		}
		if (hook->name && !strcmp(name, hook->name) && means(hook, version, *found)) {
			*found = (flags & PER_THREAD_DEFAULT_STREAM) && hook->ours_per_thread
			    ? hook->ours_per_thread
			    : hook->ours;
			return;
		}
	}
}

CUresult resident_cuGetProcAddress(
    const char *name, void **found, int version, unsigned long long flags)
{
	const struct driver *d = driver();
	if (!d || !d->cuGetProcAddress)
		return CUDA_ERROR_NOT_INITIALIZED;
	CUresult result = d->cuGetProcAddress(name, found, version, flags);

	if (result == CUDA_SUCCESS)
		replace(name, found, version, flags);
	return result;
}

CUresult resident_cuGetProcAddress_v2(
    const char *name, void **found, int version, unsigned long long flags, int *status)
{
	const struct driver *d = driver();
	if (!d || !d->cuGetProcAddress_v2)
		return CUDA_ERROR_NOT_INITIALIZED;
	CUresult result = d->cuGetProcAddress_v2(name, found, version, flags, status);

	if (result == CUDA_SUCCESS)
		replace(name, found, version, flags);
	return result;
}

/* For programs that link libcuda. */
#define LINKED(name, parameters, arguments) \
	EXPORTED CUresult name parameters \
	{ \
		return resident_##name arguments; \
	}
LINKED(cuMemAlloc_v2, (CUdeviceptr * a, size_t b), (a, b))
LINKED(cuMemAllocPitch_v2, (CUdeviceptr * a, size_t *b, size_t c, size_t d, unsigned e),
    (a, b, c, d, e))
LINKED(cuMemFree_v2, (CUdeviceptr a), (a))
LINKED(cuMemAllocManaged, (CUdeviceptr * a, size_t b, unsigned c), (a, b, c))
LINKED(cuMemAllocAsync, (CUdeviceptr * a, size_t b, CUstream c), (a, b, c))
LINKED(cuMemAllocAsync_ptsz, (CUdeviceptr * a, size_t b, CUstream c), (a, b, c))
LINKED(cuMemAllocFromPoolAsync, (CUdeviceptr * a, size_t b, CUpool c, CUstream d), (a, b, c, d))
LINKED(
    cuMemAllocFromPoolAsync_ptsz, (CUdeviceptr * a, size_t b, CUpool c, CUstream d), (a, b, c, d))
LINKED(cuMemFreeAsync, (CUdeviceptr a, CUstream b), (a, b))
LINKED(cuMemFreeAsync_ptsz, (CUdeviceptr a, CUstream b), (a, b))
LINKED(cuStreamBeginCapture, (CUstream a), (a))
LINKED(cuStreamBeginCapture_ptsz, (CUstream a), (a))
LINKED(cuStreamBeginCapture_v2, (CUstream a, int b), (a, b))
LINKED(cuStreamBeginCapture_v2_ptsz, (CUstream a, int b), (a, b))
LINKED(cuStreamBeginCaptureToGraph,
    (CUstream a, void *b, const void *c, const void *d, size_t e, int f), (a, b, c, d, e, f))
LINKED(cuStreamBeginCaptureToGraph_ptsz,
    (CUstream a, void *b, const void *c, const void *d, size_t e, int f), (a, b, c, d, e, f))
LINKED(cuStreamEndCapture, (CUstream a, void **b), (a, b))
LINKED(cuStreamEndCapture_ptsz, (CUstream a, void **b), (a, b))
LINKED(cuStreamDestroy_v2, (CUstream a), (a))
LINKED(cuMemCreate,
    (CUhandle * a, size_t b, const struct allocation_properties *c, unsigned long long d),
    (a, b, c, d))
LINKED(cuMemRelease, (CUhandle a), (a))
LINKED(cuMemMap, (CUdeviceptr a, size_t b, size_t c, CUhandle d, unsigned long long e),
    (a, b, c, d, e))
LINKED(cuMemUnmap, (CUdeviceptr a, size_t b), (a, b))
LINKED(cuMemSetAccess, (CUdeviceptr a, size_t b, const struct access *c, size_t d), (a, b, c, d))
LINKED(
    cuMemExportToShareableHandle, (void *a, CUhandle b, int c, unsigned long long d), (a, b, c, d))
LINKED(cuMemImportFromShareableHandle, (CUhandle * a, void *b, int c), (a, b, c))
LINKED(cuPointerGetAttribute, (void *a, int b, CUdeviceptr c), (a, b, c))
LINKED(cuPointerGetAttributes, (unsigned a, int *b, void **c, CUdeviceptr d), (a, b, c, d))
LINKED(cuMemGetAddressRange_v2, (CUdeviceptr * a, size_t *b, CUdeviceptr c), (a, b, c))
LINKED(cuPointerSetAttribute, (const void *a, int b, CUdeviceptr c), (a, b, c))
LINKED(cuMemGetHandleForAddressRange,
    (void *a, CUdeviceptr b, size_t c, int d, unsigned long long e), (a, b, c, d, e))
LINKED(cuMemRetainAllocationHandle, (CUhandle * a, CUdeviceptr b), (a, b))
LINKED(
    cuMemGetAllocationPropertiesFromHandle, (struct allocation_properties * a, CUhandle b), (a, b))
LINKED(cuMemPoolExportToShareableHandle, (void *a, CUpool b, int c, unsigned long long d),
    (a, b, c, d))
LINKED(cuMemPoolImportFromShareableHandle, (CUpool * a, void *b, int c, unsigned long long d),
    (a, b, c, d))
LINKED(cuMulticastCreate, (CUhandle * a, const void *b), (a, b))
LINKED(cuMulticastAddDevice, (CUhandle a, CUdevice b), (a, b))
LINKED(cuMulticastBindMem,
    (CUhandle a, size_t b, CUhandle c, size_t d, size_t e, unsigned long long f),
    (a, b, c, d, e, f))
LINKED(cuMulticastBindMem_v2,
    (CUhandle a, CUdevice b, size_t c, CUhandle d, size_t e, size_t f, unsigned long long g),
    (a, b, c, d, e, f, g))
LINKED(cuIpcGetMemHandle, (struct ipc_handle * a, CUdeviceptr b), (a, b))
LINKED(cuIpcOpenMemHandle, (CUdeviceptr * a, struct ipc_handle b, unsigned c), (a, b, c))
LINKED(cuIpcOpenMemHandle_v2, (CUdeviceptr * a, struct ipc_handle b, unsigned c), (a, b, c))
LINKED(cuIpcCloseMemHandle, (CUdeviceptr a), (a))
LINKED(cuEventCreate, (CUevent * a, unsigned b), (a, b))
LINKED(cuEventDestroy, (CUevent a), (a))
LINKED(cuEventDestroy_v2, (CUevent a), (a))
LINKED(cuEventRecord, (CUevent a, CUstream b), (a, b))
LINKED(cuEventRecord_ptsz, (CUevent a, CUstream b), (a, b))
LINKED(cuEventRecordWithFlags, (CUevent a, CUstream b, unsigned c), (a, b, c))
LINKED(cuEventRecordWithFlags_ptsz, (CUevent a, CUstream b, unsigned c), (a, b, c))
LINKED(cuCtxRecordEvent, (CUcontext a, CUevent b), (a, b))
LINKED(cuGreenCtxRecordEvent, (CUcontext a, CUevent b), (a, b))
LINKED(cuGraphAddEventRecordNode, (void **a, void *b, const void *c, size_t d, CUevent e),
    (a, b, c, d, e))
LINKED(cuGraphEventRecordNodeSetEvent, (void *a, CUevent b), (a, b))
LINKED(cuGraphExecEventRecordNodeSetEvent, (void *a, void *b, CUevent c), (a, b, c))
LINKED(cuGraphAddNode,
    (void **a, void *b, const void *c, size_t d, const struct node_parameters *e), (a, b, c, d, e))
LINKED(cuGraphAddNode_v2,
    (void **a, void *b, const void *c, const void *d, size_t e, const struct node_parameters *f),
    (a, b, c, d, e, f))
LINKED(cuGraphNodeSetParams, (void *a, const struct node_parameters *b), (a, b))
LINKED(cuGraphExecNodeSetParams, (void *a, void *b, const struct node_parameters *c), (a, b, c))
LINKED(cuIpcGetEventHandle, (struct ipc_handle * a, CUevent b), (a, b))
LINKED(cuIpcOpenEventHandle, (CUevent * a, struct ipc_handle b), (a, b))
LINKED(cuCtxEnablePeerAccess, (CUcontext a, unsigned b), (a, b))
LINKED(cuCtxDisablePeerAccess, (CUcontext a), (a))
LINKED(cuDevicePrimaryCtxRetain, (CUcontext * a, CUdevice b), (a, b))
LINKED(cuCtxCreate_v2, (CUcontext * a, unsigned b, CUdevice c), (a, b, c))
LINKED(cuCtxCreate_v3, (CUcontext * a, void *b, int c, unsigned d, CUdevice e), (a, b, c, d, e))
LINKED(cuCtxCreate_v4, (CUcontext * a, void *b, unsigned c, CUdevice d), (a, b, c, d))
LINKED(cuCtxDestroy, (CUcontext a), (a))
LINKED(cuCtxDestroy_v2, (CUcontext a), (a))
LINKED(cuCtxDetach, (CUcontext a), (a))
LINKED(cuDevicePrimaryCtxReset_v2, (CUdevice a), (a))
LINKED(cuDevicePrimaryCtxRelease_v2, (CUdevice a), (a))
LINKED(cuGetProcAddress, (const char *a, void **b, int c, unsigned long long d), (a, b, c, d))
LINKED(cuGetProcAddress_v2, (const char *a, void **b, int c, unsigned long long d, int *e),
    (a, b, c, d, e))
