/* The functions of libcuda that the preload calls, declared here (CUDA's headers are not needed)
 * and looked up on first use. No others are called. */
#ifndef ICECORE_RESIDENT_DRIVER_H
#define ICECORE_RESIDENT_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr, CUhandle;
typedef void *CUcontext, *CUstream, *CUpool, *CUevent;

enum {
	CUDA_SUCCESS = 0,
	CUDA_ERROR_INVALID_VALUE = 1,
	CUDA_ERROR_OUT_OF_MEMORY = 2,
	CUDA_ERROR_NOT_INITIALIZED = 3,
	CUDA_ERROR_INVALID_CONTEXT = 201,
	CUDA_ERROR_MAP_FAILED = 205,
	CUDA_ERROR_OPERATING_SYSTEM = 304,
	CUDA_ERROR_INVALID_HANDLE = 400,
	CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
	CUDA_ERROR_NOT_SUPPORTED = 801,
	CUDA_ERROR_CAPTURE_FIRST = 900,
	CUDA_ERROR_CAPTURED_EVENT = 907,
	CUDA_ERROR_CAPTURE_WRONG_THREAD = 908,
	CUDA_ERROR_CAPTURE_LAST = 908,
};
#define PER_THREAD_STREAM ((CUstream)2)
/* In the forms for per-thread default streams, NULL is the calling thread's. */
#define OWN_OF_THREAD(stream) ((stream) ? (stream) : PER_THREAD_STREAM)

enum {
	ATTRIBUTE_VIRTUAL_MEMORY = 102,
	ATTRIBUTE_POSIX_DESCRIPTOR = 103,
	ATTRIBUTE_RDMA_WITH_VIRTUAL_MEMORY = 110,
	LOCATION_DEVICE = 1,
	ALLOCATION_PINNED = 1,
	HANDLE_POSIX_DESCRIPTOR = 1,
	ACCESS_READ = 1,
	ACCESS_READ_WRITE = 3,
	GRANULARITY_MINIMUM = 0,
	PER_THREAD_DEFAULT_STREAM = 2,
	CAPTURE_MODE_RELAXED = 2,
};

struct location {
	int type, id;
};
struct allocation_properties {
	int type, handle_types;
	struct location location;
	void *windows;
	struct {
		unsigned char compression, rdma;
		unsigned short usage;
		unsigned char reserved[4];
	} flags;
};
struct access {
	struct location location;
	int flags;
};
struct ipc_handle {
	char bytes[64];
};
/* The beginning of CUgraphNodeParams. */
struct node_parameters {
	int type, reserved[3];
	CUevent event; /* if the type is that of a node that records or waits for an event */
};
_Static_assert(sizeof(struct allocation_properties) == 32 && sizeof(struct access) == 12,
    "as cuda.h has them");

/* CALL(name, arguments): what the preload cannot do without; BOTH: that, and what applications meet
 * in our form; HOOKED: the latter alone, may be missing. */
#define DRIVER_CALLS(CALL, BOTH, HOOKED) \
	BOTH(cuMemCreate, \
	    (CUhandle *, size_t, const struct allocation_properties *, unsigned long long)) \
	BOTH(cuMemRelease, (CUhandle)) \
	BOTH(cuMemMap, (CUdeviceptr, size_t, size_t, CUhandle, unsigned long long)) \
	BOTH(cuMemUnmap, (CUdeviceptr, size_t)) \
	BOTH(cuMemSetAccess, (CUdeviceptr, size_t, const struct access *, size_t)) \
	CALL( \
	    cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long)) \
	CALL(cuMemAddressFree, (CUdeviceptr, size_t)) \
	BOTH(cuMemExportToShareableHandle, (void *, CUhandle, int, unsigned long long)) \
	BOTH(cuMemImportFromShareableHandle, (CUhandle *, void *, int)) \
	CALL(cuMemGetAllocationGranularity, (size_t *, const struct allocation_properties *, int)) \
	CALL(cuDeviceGetAttribute, (int *, int, CUdevice)) \
	CALL(cuDeviceGetUuid, (void *, CUdevice)) \
	CALL(cuCtxGetDevice, (CUdevice *)) \
	CALL(cuCtxGetCurrent, (CUcontext *)) \
	CALL(cuCtxSetCurrent, (CUcontext)) \
	CALL(cuCtxPushCurrent_v2, (CUcontext)) \
	CALL(cuCtxPopCurrent_v2, (CUcontext *)) \
	CALL(cuCtxSynchronize, (void)) \
	CALL(cuStreamSynchronize, (CUstream)) \
	BOTH(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice)) \
	CALL(cuDevicePrimaryCtxGetState, (CUdevice, unsigned *, int *)) \
	HOOKED(cuMemAlloc_v2, (CUdeviceptr *, size_t)) \
	HOOKED(cuMemAllocPitch_v2, (CUdeviceptr *, size_t *, size_t, size_t, unsigned)) \
	HOOKED(cuMemFree_v2, (CUdeviceptr)) \
	HOOKED(cuMemAllocManaged, (CUdeviceptr *, size_t, unsigned)) \
	HOOKED(cuMemAllocAsync, (CUdeviceptr *, size_t, CUstream)) \
	HOOKED(cuMemAllocAsync_ptsz, (CUdeviceptr *, size_t, CUstream)) \
	HOOKED(cuMemAllocFromPoolAsync, (CUdeviceptr *, size_t, CUpool, CUstream)) \
	HOOKED(cuMemAllocFromPoolAsync_ptsz, (CUdeviceptr *, size_t, CUpool, CUstream)) \
	HOOKED(cuMemFreeAsync, (CUdeviceptr, CUstream)) \
	HOOKED(cuMemFreeAsync_ptsz, (CUdeviceptr, CUstream)) \
	HOOKED(cuStreamBeginCapture, (CUstream)) \
	HOOKED(cuStreamBeginCapture_ptsz, (CUstream)) \
	HOOKED(cuStreamBeginCapture_v2, (CUstream, int)) \
	HOOKED(cuStreamBeginCapture_v2_ptsz, (CUstream, int)) \
	HOOKED(cuStreamBeginCaptureToGraph, \
	    (CUstream, void *, const void *, const void *, size_t, int)) \
	HOOKED(cuStreamBeginCaptureToGraph_ptsz, \
	    (CUstream, void *, const void *, const void *, size_t, int)) \
	HOOKED(cuStreamEndCapture, (CUstream, void **)) \
	HOOKED(cuStreamEndCapture_ptsz, (CUstream, void **)) \
	HOOKED(cuStreamDestroy_v2, (CUstream)) \
	HOOKED(cuPointerGetAttribute, (void *, int, CUdeviceptr)) \
	HOOKED(cuPointerGetAttributes, (unsigned, int *, void **, CUdeviceptr)) \
	HOOKED(cuMemGetAddressRange_v2, (CUdeviceptr *, size_t *, CUdeviceptr)) \
	HOOKED(cuPointerSetAttribute, (const void *, int, CUdeviceptr)) \
	HOOKED( \
	    cuMemGetHandleForAddressRange, (void *, CUdeviceptr, size_t, int, unsigned long long)) \
	HOOKED(cuMemRetainAllocationHandle, (CUhandle *, CUdeviceptr)) \
	HOOKED(cuMemGetAllocationPropertiesFromHandle, (struct allocation_properties *, CUhandle)) \
	HOOKED(cuMemPoolExportToShareableHandle, (void *, CUpool, int, unsigned long long)) \
	HOOKED(cuMemPoolImportFromShareableHandle, (CUpool *, void *, int, unsigned long long)) \
	HOOKED(cuMulticastCreate, (CUhandle *, const void *)) \
	HOOKED(cuMulticastAddDevice, (CUhandle, CUdevice)) \
	HOOKED( \
	    cuMulticastBindMem, (CUhandle, size_t, CUhandle, size_t, size_t, unsigned long long)) \
	HOOKED(cuMulticastBindMem_v2, \
	    (CUhandle, CUdevice, size_t, CUhandle, size_t, size_t, unsigned long long)) \
	HOOKED(cuIpcGetMemHandle, (struct ipc_handle *, CUdeviceptr)) \
	HOOKED(cuIpcOpenMemHandle, (CUdeviceptr *, struct ipc_handle, unsigned)) \
	HOOKED(cuIpcOpenMemHandle_v2, (CUdeviceptr *, struct ipc_handle, unsigned)) \
	HOOKED(cuIpcCloseMemHandle, (CUdeviceptr)) \
	HOOKED(cuEventCreate, (CUevent *, unsigned)) \
	HOOKED(cuEventDestroy, (CUevent)) \
	HOOKED(cuEventDestroy_v2, (CUevent)) \
	HOOKED(cuEventRecord, (CUevent, CUstream)) \
	HOOKED(cuEventRecord_ptsz, (CUevent, CUstream)) \
	HOOKED(cuEventRecordWithFlags, (CUevent, CUstream, unsigned)) \
	HOOKED(cuEventRecordWithFlags_ptsz, (CUevent, CUstream, unsigned)) \
	HOOKED(cuCtxRecordEvent, (CUcontext, CUevent)) \
	HOOKED(cuGreenCtxRecordEvent, (CUcontext, CUevent)) \
	HOOKED(cuGraphAddEventRecordNode, (void **, void *, const void *, size_t, CUevent)) \
	HOOKED(cuGraphEventRecordNodeSetEvent, (void *, CUevent)) \
	HOOKED(cuGraphExecEventRecordNodeSetEvent, (void *, void *, CUevent)) \
	HOOKED(cuGraphAddNode, \
	    (void **, void *, const void *, size_t, const struct node_parameters *)) \
	HOOKED(cuGraphAddNode_v2, \
	    (void **, void *, const void *, const void *, size_t, \
		const struct node_parameters *)) \
	HOOKED(cuGraphNodeSetParams, (void *, const struct node_parameters *)) \
	HOOKED(cuGraphExecNodeSetParams, (void *, void *, const struct node_parameters *)) \
	HOOKED(cuIpcGetEventHandle, (struct ipc_handle *, CUevent)) \
	HOOKED(cuIpcOpenEventHandle, (CUevent *, struct ipc_handle)) \
	HOOKED(cuCtxEnablePeerAccess, (CUcontext, unsigned)) \
	HOOKED(cuCtxDisablePeerAccess, (CUcontext)) \
	HOOKED(cuCtxCreate_v2, (CUcontext *, unsigned, CUdevice)) \
	HOOKED(cuCtxCreate_v3, (CUcontext *, void *, int, unsigned, CUdevice)) \
	HOOKED(cuCtxCreate_v4, (CUcontext *, void *, unsigned, CUdevice)) \
	HOOKED(cuCtxDestroy, (CUcontext)) \
	HOOKED(cuCtxDestroy_v2, (CUcontext)) \
	HOOKED(cuCtxDetach, (CUcontext)) \
	HOOKED(cuDevicePrimaryCtxReset_v2, (CUdevice)) \
	HOOKED(cuDevicePrimaryCtxRelease_v2, (CUdevice)) \
	HOOKED(cuGetProcAddress, (const char *, void **, int, unsigned long long)) \
	HOOKED(cuGetProcAddress_v2, (const char *, void **, int, unsigned long long, int *))

struct driver {
#define MEMBER(name, arguments) CUresult(*name) arguments;
	DRIVER_CALLS(MEMBER, MEMBER, MEMBER)
#undef MEMBER
	/* These may be missing. */
	CUresult (*cuThreadExchangeStreamCaptureMode)(int *);
	CUresult (*cuCtxGetLimit)(size_t *, int);
	CUresult (*cuCtxSetLimit)(int, size_t);
	CUresult (*cuEventSynchronize)(CUevent);
	CUresult (*cuStreamIsCapturing)(CUstream, int *);
	int usable; /* every CALL was found */
};

/* NULL where there is no libcuda. */
const struct driver *driver(void);

typedef void *driver_lookup(void *, const char *);
/* The C library's dlsym, which our own hides; found by the first of the other functions here.
 * Assembly names it. */
extern __attribute__((visibility("hidden"))) driver_lookup *driver_dlsym;
void driver_find_dlsym(void);
void *driver_symbol(const char *symbol); /* libcuda's own */
struct link_map;
const struct link_map *driver_library(void); /* the loader's entry for libcuda; NULL: unknown */
void driver_in_child(void);

#endif
