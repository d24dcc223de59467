/* A libcuda.so.1 for tests on machines without a GPU; rule: memory is real, so that what is
 * unmapped cannot be touched and what is exported can be read.
 *
 * FAKE_CUDA=DIR: DIR/gpu0, DIR/gpu1, … are the devices, directories on tmpfs whose size is the
 * device's memory: it is free again when the last mapping and descriptor of it is gone, in whatever
 * process. DIR/process-PID is mapped: its first word locks the process (callers wait at the door,
 * as under cuCheckpointProcessLock), the second counts calls under way. Host code stands for
 * kernels: it reads and writes at device addresses.
 *
 * FAKE_CUDA_WORLD=DIR: the driver's thread also does what the fake driver of icecore.host.cuda.fake
 * asks for: lock, checkpoint, restore, unlock. What processes share is as with the real driver:
 * each export is another open file, what was imported cannot be exported, physical memory lives as
 * long as a handle, a mapping or a descriptor of it, and a checkpoint with something imported still
 * mapped succeeds, but cannot be restored (801). FAKE_CUDA_UNFAIR: its lock is had only in a moment
 * in which nobody is in a call, as the real one seems to be.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "fake_control.h"

typedef unsigned long long ptr;
#define GRANULE ((size_t)2 << 20)
#define EXPORT __attribute__((visibility("default")))
enum {
	INVALID = 1,
	NO_MEMORY = 2,
	NOT_INITIALIZED = 3,
	NO_DEVICE = 101,
	NO_CONTEXT = 201,
	PEER_TWICE = 704,
	NOT_FOUND = 500,
	CAPTURING = 900
};

struct context {
	int device;
	bool destroyed, primary;
	unsigned references;
	long more_stack; /* bytes a thread beyond what the driver gives */
};
struct physical { /* what a CUhandle is */
	struct physical *next;
	int descriptor, device; /* device -1: the host */
	size_t size;
	unsigned references; /* the handles and the mappings */
	unsigned handles;
	int types; /* that were asked for */
	bool imported;
	char weight[6000]; /* so large that its release takes the lock of the arena that it came
			      from, as the driver's own blocks do */
};
struct block { /* cuMemAlloc's, and what is mapped */
	struct block *next;
	ptr address;
	size_t size;
	struct physical *mapped;
	struct context *context;
	unsigned access; /* bit per device */
	int kind; /* 0 plain, 1 managed, 2 pool, 3 mapped, 4 reserved: with what is mapped in it, 5
		     another process's by legacy IPC */
	unsigned readers;
	size_t offset;
};

static struct block *blocks;
static struct physical *physicals;
static bool spoiled; /* by a checkpoint that cannot be restored */
static struct context primaries[8];
static int devices = -1;
static int gpu_of[8] = {
    0, 1, 2, 3, 4, 5, 6, 7}; /* other than itself after a restore onto another GPU */
static bool used[8];
static atomic_int *door;
static pthread_mutex_t driver_lock =
    PTHREAD_MUTEX_INITIALIZER; /* held in every call: a thread stopped in one stops all */
/* The UUID of a GPU; machine.py knows it. */
static const unsigned char *uuid(int gpu)
{
	static unsigned char known[16][16];
	for (int i = 0; i < 16; i++)
		known[gpu][i] = (unsigned char)(i ? i : 0xA0 + gpu);
	return known[gpu];
}

static __thread struct context *stack[16];
static __thread int depth;
static unsigned peers[8]; /* by accessing device: bits of the owners that it may reach */

static const char *root(void)
{
	const char *found = getenv("FAKE_CUDA");
	return found ? found : "/nowhere";
}

static void pass_door(void)
{
	for (;;) {
		while (atomic_load(&door[0]))
			syscall(SYS_futex, &door[0], FUTEX_WAIT, 1, NULL, NULL, 0);
		atomic_fetch_add(&door[1], 1);
		if (!atomic_load(&door[0]))
			return;
		atomic_fetch_sub(&door[1], 1);
	}
}

static struct tally {
	struct tally *next;
	const char *name;
	unsigned long calls;
} *tallies;

static void count_call(struct tally *what, const char *name)
{
	if (!what->calls++) {
		what->name = name;
		what->next = tallies;
		tallies = what;
	}
}

/* For tests: how often it was called; NULL: anything. */
EXPORT unsigned long fake_calls(const char *name)
{
	unsigned long some = 0;
	for (struct tally *at = tallies; at; at = at->next)
		some += !name || !strcmp(name, at->name) ? at->calls : 0;
	return some;
}

#define ENTER \
	if (!door) \
		return NOT_INITIALIZED; \
	pass_door(); \
	pthread_mutex_lock(&driver_lock); \
	static struct tally tally_; \
	count_call(&tally_, __func__); \
	free(malloc(3000 + (size_t)depth))
#define LEAVE(result) \
	do { \
		int result_ = (result); \
		pthread_mutex_unlock(&driver_lock); \
		atomic_fetch_sub(&door[1], 1); \
		return result_; \
	} while (0)

/* A test's: waits there, others let in, as long as there is DIR/pause-NAME; DIR/paused-NAME tells
 * that somebody does. */
static void pause_in(const char *name)
{
	char path[256];
	snprintf(path, sizeof path, "%s/pause-%s", root(), name);
	if (access(path, F_OK))
		return;
	pthread_mutex_unlock(&driver_lock);
	snprintf(path, sizeof path, "%s/paused-%s", root(), name);
	close(open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
	snprintf(path, sizeof path, "%s/pause-%s", root(), name);
	while (!access(path, F_OK))
		usleep(1000);
	pthread_mutex_lock(&driver_lock);
}

static _Noreturn void *driver_thread(void *unused);
static sem_t driver_listens;
static void begin_to_use(int device);

/* Device memory is its process's alone: here it is files, which a child would have too. */
static void in_child(void)
{
	for (struct physical *at = physicals; at; at = at->next)
		close(at->descriptor);
}

EXPORT int cuInit(unsigned flags)
{
	char path[256];
	struct stat found;

	(void)flags;
	if (door)
		return 0;
	for (devices = 0; devices < 8; devices++) {
		snprintf(path, sizeof path, "%s/gpu%d", root(), devices);
		if (stat(path, &found))
			break;
	}
	if (!devices)
		return NO_DEVICE;
	if (getenv("FAKE_CUDA_WORLD")) /* nobody but our own thread locks */
		door = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	else {
		snprintf(path, sizeof path, "%s/process-%d", root(), getpid());
		int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
		if (file < 0 || ftruncate(file, 4096))
			return NO_DEVICE;
		door = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
		close(file);
	}
	pthread_t made;
	sigset_t all, before;
	pthread_atfork(NULL, NULL, in_child);
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, &before);
	sem_init(&driver_listens, 0, 0);
	pthread_create(&made, NULL, driver_thread, NULL);
	pthread_detach(made);
	while (sem_wait(&driver_listens)) /* who has initialised CUDA can be checkpointed */
		;
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return 0;
}

EXPORT int cuDeviceGetCount(int *out)
{
	ENTER;
	*out = devices;
	LEAVE(0);
}
EXPORT int cuDeviceGet(int *out, int ordinal)
{
	ENTER;
	*out = ordinal;
	LEAVE(ordinal < devices ? 0 : NO_DEVICE);
}
EXPORT int cuDeviceGetAttribute(int *out, int attribute, int device)
{
	ENTER;
	*out = attribute >= 102 && attribute <= 103 && !getenv("FAKE_CUDA_NO_VMM");
	LEAVE(device < devices ? 0 : NO_DEVICE);
}
EXPORT int cuDeviceGetUuid(unsigned char *out, int device)
{
	ENTER;
	memcpy(out, uuid(gpu_of[device]), 16);
	LEAVE(0);
}

/* -- contexts */

static struct context *current(void)
{
	return depth ? stack[depth - 1] : NULL;
}
static struct context *usable(void)
{
	return current() && !current()->destroyed ? current() : NULL;
}

EXPORT int cuCtxCreate_v2(void **out, unsigned flags, int device)
{
	ENTER;
	(void)flags;
	struct context *made = calloc(1, sizeof *made);
	made->device = device;
	begin_to_use(device);
	stack[depth++] = *out = made;
	LEAVE(0);
}
EXPORT int cuCtxPushCurrent_v2(struct context *context)
{
	ENTER;
	pause_in(__func__);
	if (!context || context->destroyed)
		LEAVE(NO_CONTEXT);
	stack[depth++] = context;
	LEAVE(0);
}
EXPORT int cuCtxPopCurrent_v2(void **out)
{
	ENTER;
	if (!depth)
		LEAVE(NO_CONTEXT);
	*out = stack[--depth];
	LEAVE(0);
}
EXPORT int cuCtxSetCurrent(struct context *context)
{
	ENTER;
	char path[256];
	snprintf(path, sizeof path, "%s/fail-current",
	    root()); /* a test's: fails as long as it is there */
	if (context && (context->destroyed || !access(path, F_OK)))
		LEAVE(NO_CONTEXT);
	depth = context ? (depth ? depth : 1) : (depth ? depth - 1 : 0);
	if (context)
		stack[depth - 1] = context;
	LEAVE(0);
}
EXPORT int cuCtxGetCurrent(void **out)
{
	ENTER;
	*out = current();
	LEAVE(0);
}
static size_t least_stack = 1024; /* that any context was ever set to */
EXPORT size_t fake_least_stack(void)
{
	return least_stack;
}
EXPORT int cuCtxGetLimit(size_t *out, int limit)
{
	ENTER;
	if (!usable())
		LEAVE(NO_CONTEXT);
	*out = 1024 + current()->more_stack;
	LEAVE(limit ? INVALID : 0);
}
EXPORT int cuCtxSetLimit(int limit, size_t value)
{
	ENTER;
	if (!usable())
		LEAVE(NO_CONTEXT);
	current()->more_stack = (long)value - 1024;
	least_stack = value < least_stack ? value : least_stack;
	LEAVE(limit ? INVALID : 0);
}
EXPORT int cuCtxGetDevice(int *out)
{
	ENTER;
	if (!usable())
		LEAVE(NO_CONTEXT);
	*out = current()->device;
	LEAVE(0);
}

/* -- stream captures: what is forbidden meanwhile makes them fail */

enum {
	GLOBAL = 0,
	RELAXED = 2,
	INVALID_HANDLE = 400,
	INVALIDATED = 901,
	WRONG_THREAD = 908,
	ILLEGAL_STATE = 401
};
static struct capture {
	void *stream;
	int mode, thread;
	bool used, failed;
} captures[16];
static __thread int thread_mode;

static struct capture *capture_of(void *stream)
{
	for (int i = 0; i < 16; i++)
		if (captures[i].used && captures[i].stream == stream)
			return &captures[i];
	return NULL;
}
/* Of a wait for a stream, or for all (NULL). */
static bool fails_captures(void *stream)
{
	bool any = false;
	for (int i = 0; i < 16; i++)
		if (captures[i].used && (!stream || captures[i].stream == stream))
			any = captures[i].failed = true;
	return any;
}
/* Of calls that may wait, as allocation and release do. */
static bool forbidden(void)
{
	bool any = false;
	int thread = (int)syscall(SYS_gettid);
	for (int i = 0; i < 16; i++)
		if (captures[i].used && thread_mode != RELAXED &&
		    ((captures[i].thread == thread && captures[i].mode != RELAXED) ||
			(captures[i].mode == GLOBAL && thread_mode == GLOBAL)))
			any = captures[i].failed = true;
	return any;
}
EXPORT int cuThreadExchangeStreamCaptureMode(int *mode)
{
	ENTER;
	int before = thread_mode;
	thread_mode = *mode;
	*mode = before;
	LEAVE(0);
}
EXPORT int cuCtxSynchronize(void)
{
	ENTER;
	LEAVE(!usable() ? NO_CONTEXT : fails_captures(NULL) ? CAPTURING : 0);
}
#define NO_STREAM ((void *)0xBAD)
/* What is wrong with one, if anything. */
static int about(void *stream)
{
	return stream == NO_STREAM             ? INVALID_HANDLE
	    : !usable() && stream <= (void *)2 ? NO_CONTEXT
					       : 0;
}
static void *waited_for = NO_STREAM;
/* For tests: the stream that was waited for last. */
EXPORT void *fake_waited_for(void)
{
	return waited_for;
}
EXPORT int cuStreamSynchronize(void *stream)
{
	ENTER;
	if (about(stream))
		LEAVE(about(stream));
	waited_for = stream;
	LEAVE(fails_captures(stream) ? CAPTURING : 0);
}
EXPORT int cuStreamBeginCapture_v2(void *stream, int mode)
{
	ENTER;
	int at = 0;
	while (at < 16 && captures[at].used)
		at++;
	if (at == 16 || capture_of(stream))
		LEAVE(ILLEGAL_STATE);
	captures[at] = (struct capture){stream, mode, (int)syscall(SYS_gettid), true, false};
	pause_in(__func__);
	LEAVE(0);
}
EXPORT int cuStreamEndCapture(void *stream, void **graph)
{
	ENTER;
	struct capture *found = capture_of(stream);
	if (!found)
		LEAVE(ILLEGAL_STATE);
	if (found->mode != RELAXED && found->thread != (int)syscall(SYS_gettid))
		LEAVE(WRONG_THREAD);
	found->used = false;
	*graph = found->failed ? NULL : (void *)1;
	LEAVE(found->failed ? INVALIDATED : 0);
}
EXPORT int cuStreamDestroy_v2(void *stream)
{
	ENTER;
	struct capture *found = capture_of(stream);
	if (found)
		found->used = false;
	LEAVE(0);
}

static void free_plain_of(struct context *context)
{
	for (struct block **at = &blocks; *at;) {
		struct block *found = *at;
		if (found->context != context || found->kind > 1) {
			at = &found->next;
			continue;
		}
		munmap((void *)found->address, found->size);
		*at = found->next;
		free(found);
	}
}

static int destroy(struct context *context)
{
	if (context->destroyed)
		return NO_CONTEXT;
	context->destroyed = true;
	free_plain_of(context);
	if (current() == context)
		depth--;
	return 0;
}
EXPORT int cuCtxDestroy_v2(struct context *context)
{
	ENTER;
	LEAVE(destroy(context));
}
EXPORT int cuCtxDestroy(struct context *context)
{
	ENTER;
	LEAVE(destroy(context));
}
EXPORT int cuCtxAttach(void **out, unsigned flags)
{
	ENTER;
	if (!usable() || flags)
		LEAVE(INVALID);
	current()->references++;
	*out = current();
	LEAVE(0);
}
EXPORT int cuCtxDetach(struct context *context)
{
	ENTER;
	if (context != usable())
		LEAVE(NO_CONTEXT);
	LEAVE(context->references-- ? 0 : destroy(context)); /* made with one that is not counted */
}
EXPORT int cuGreenCtxDestroy(struct context *context)
{
	ENTER;
	LEAVE(destroy(context));
} /* as for what was made of it */
EXPORT int cuDevicePrimaryCtxRetain(void **out, int device)
{
	ENTER;
	struct context *found = &primaries[device];
	found->device = device;
	begin_to_use(device);
	found->primary = true;
	found->references++;
	found->destroyed = false;
	*out = found;
	LEAVE(0);
}
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
	ENTER;
	*flags = 0;
	*active = primaries[device].references > 0;
	LEAVE(0);
}
static void end_primary(int device)
{
	free_plain_of(&primaries[device]);
	primaries[device].destroyed = true;
	primaries[device].references = 0;
}
EXPORT int cuDevicePrimaryCtxRelease_v2(int device)
{
	ENTER;
	if (!primaries[device].references)
		LEAVE(NO_CONTEXT);
	if (--primaries[device].references == 0)
		end_primary(device);
	LEAVE(0);
}
EXPORT int cuDevicePrimaryCtxReset_v2(int device)
{
	ENTER;
	end_primary(device);
	LEAVE(0);
}

/* -- physical memory */

static int make_file(int device, size_t size)
{
	char path[256];

	snprintf(path, sizeof path, "%s/gpu%d", root(), gpu_of[device]);
	int made = open(path, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
	if (made >= 0 && posix_fallocate(made, 0, (off_t)size)) {
		close(made);
		return -1;
	}
	return made;
}

struct properties {
	int type, handles, location_type, device;
	void *windows;
	char flags[8];
};
struct access {
	int location_type, device, flags;
};

static struct physical *new_physical(int file, int device, size_t size, int types)
{
	struct physical *made = malloc(sizeof *made);
	*made = (struct physical){.next = physicals,
	    .descriptor = file,
	    .device = device,
	    .size = size,
	    .references = 1,
	    .handles = 1,
	    .types = types};
	return physicals = made;
}
static bool known(struct physical *what)
{
	struct physical *at = physicals;
	while (at && at != what)
		at = at->next;
	return at && at->handles;
}
static void unreference(struct physical *what)
{
	if (--what->references)
		return;
	struct physical **at = &physicals;
	while (*at != what)
		at = &(*at)->next;
	*at = what->next;
	close(what->descriptor);
	free(what);
}
EXPORT int cuMemGetAllocationGranularity(size_t *out, const struct properties *what, int option)
{
	ENTER;
	(void)what;
	(void)option;
	*out = GRANULE;
	LEAVE(0);
}
EXPORT int cuMemCreate(
    struct physical **out, size_t size, const struct properties *what, unsigned long long flags)
{
	ENTER;
	if (forbidden())
		LEAVE(CAPTURING);
	bool host = what->location_type == 3;
	if (!size || size % GRANULE || what->type != 1 || (what->location_type != 1 && !host) ||
	    flags)
		LEAVE(INVALID);
	int file = host ? memfd_create("host", MFD_CLOEXEC) : make_file(what->device, size);
	if (file < 0 || (host && ftruncate(file, (off_t)size)))
		LEAVE(NO_MEMORY);
	*out = new_physical(file, host ? -1 : what->device, size, what->handles);
	LEAVE(0);
}
EXPORT int cuMemRelease(struct physical *what)
{
	ENTER;
	if (!known(what))
		LEAVE(INVALID);
	what->handles--;
	unreference(what);
	LEAVE(0);
}
EXPORT int cuMemExportToShareableHandle(
    int *out, struct physical *what, int type, unsigned long long flags)
{
	char path[64];
	ENTER;
	if (!known(what) || type != 1 || flags || what->imported || !(what->types & type))
		LEAVE(INVALID);
	snprintf(path, sizeof path, "/proc/self/fd/%d", what->descriptor);
	*out = open(path, O_RDWR | O_CLOEXEC); /* another open file */
	pause_in(__func__);
	LEAVE(*out < 0 ? 304 : 0);
}
/* Whose memory a file is. */
static int device_of(int file)
{
	struct stat found, directory;
	char path[256];
	for (int device = 0; device < devices; device++) {
		snprintf(path, sizeof path, "%s/gpu%d", root(), gpu_of[device]);
		if (fstat(file, &found) == 0 && stat(path, &directory) == 0 &&
		    found.st_dev == directory.st_dev)
			return device;
	}
	return -1;
}
EXPORT int cuMemImportFromShareableHandle(struct physical **out, void *descriptor, int type)
{
	struct stat found;
	ENTER;
	int file = type == 1 ? fcntl((int)(intptr_t)descriptor, F_DUPFD_CLOEXEC, 3) : -1;
	if (file < 0 || fstat(file, &found) || !S_ISREG(found.st_mode))
		LEAVE(INVALID);
	*out = new_physical(file, device_of(file), (size_t)found.st_size, 1);
	(*out)->imported = true;
	LEAVE(0);
}
EXPORT int cuMemGetAllocationPropertiesFromHandle(struct properties *out, struct physical *what)
{
	ENTER;
	if (!known(what))
		LEAVE(INVALID);
	*out = (struct properties){.type = 1,
	    .handles = what->types,
	    .location_type = what->device < 0 ? 3 : 1,
	    .device = what->device < 0 ? 0 : what->device};
	LEAVE(0);
}
static struct block *find_kind(ptr address, int kind)
{
	struct block *at = blocks;
	while (at && (at->address != address || at->kind != kind))
		at = at->next;
	return at;
}
static struct block *find(ptr address) /* of cuMemAlloc's */
{
	struct block *at = blocks;
	while (at && (at->address != address || at->kind > 2))
		at = at->next;
	return at;
}
static struct block *add(ptr address, size_t size, int kind)
{
	struct block *made = calloc(1, sizeof *made);
	*made = (struct block){
	    .next = blocks, .address = address, .size = size, .kind = kind, .context = current()};
	return blocks = made;
}
static void drop(struct block *what)
{
	struct block **at = &blocks;
	while (*at != what)
		at = &(*at)->next;
	*at = what->next;
	free(what);
}
/* One that has a byte of a range. */
static struct block *meets(ptr address, size_t size, int kind)
{
	struct block *at = blocks;
	while (at &&
	    (at->kind != kind || at->address >= address + size ||
		address >= at->address + at->size))
		at = at->next;
	return at;
}
EXPORT int cuMemAddressReserve(
    ptr *out, size_t size, size_t alignment, ptr hint, unsigned long long flags)
{
	ENTER;
	(void)alignment, (void)hint, (void)flags;
	char *found = mmap(
	    NULL, size + GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	char *aligned = (char *)(((uintptr_t)found + GRANULE - 1) & ~(GRANULE - 1));
	if (aligned > found)
		munmap(found, (size_t)(aligned - found));
	if (aligned < found + GRANULE)
		munmap(aligned + size, (size_t)(found + GRANULE - aligned));
	*out = (ptr)aligned;
	add(*out, size, 4);
	LEAVE(0);
}
EXPORT int cuMemAddressFree(ptr address, size_t size)
{
	ENTER;
	struct block *found = find_kind(address, 4);
	if (!found || found->size != size || meets(address, size, 3))
		LEAVE(INVALID);
	munmap((void *)address, size);
	drop(found);
	LEAVE(0);
}
static int place(struct block *what)
{
	int protection = what->access ? PROT_READ | PROT_WRITE
	    : what->readers           ? PROT_READ
				      : PROT_NONE;

	if (mmap((void *)what->address, what->size, protection, MAP_SHARED | MAP_FIXED,
		what->mapped->descriptor, (off_t)what->offset) == MAP_FAILED)
		return INVALID;
	madvise((void *)what->address, what->size, MADV_DONTFORK);
	return 0;
}
EXPORT int cuMemMap(
    ptr address, size_t size, size_t offset, struct physical *what, unsigned long long flags)
{
	ENTER;
	struct block *in = meets(address, 1, 4);
	if (!in || address + size > in->address + in->size || !size || address % GRANULE ||
	    size % GRANULE || offset % GRANULE || flags || !known(what) ||
	    offset + size > what->size || meets(address, size, 3))
		LEAVE(INVALID);
	struct block *made = add(address, size, 3);
	made->mapped = what;
	made->offset = offset;
	what->references++;
	LEAVE(place(made));
}
/* Whether a range consists of whole mappings. */
static bool whole(ptr address, size_t size)
{
	ptr end = address + size;
	while (address < end) {
		struct block *at = find_kind(address, 3);
		if (!at || at->address + at->size > end)
			return false;
		address += at->size;
	}
	return size > 0;
}
EXPORT int cuMemSetAccess(ptr address, size_t size, const struct access *access, size_t some)
{
	ENTER;
	pause_in(__func__);
	if (!whole(address, size))
		LEAVE(INVALID);
	for (ptr end = address + size; address < end;) {
		struct block *found = find_kind(address, 3);
		for (size_t i = 0; i < some; i++) {
			unsigned bit =
			    access[i].location_type == 1 ? 1u << access[i].device : 1u << 31;
			found->access =
			    access[i].flags == 3 ? found->access | bit : found->access & ~bit;
			found->readers =
			    access[i].flags ? found->readers | bit : found->readers & ~bit;
		}
		if (place(found))
			LEAVE(INVALID);
		address += found->size;
	}
	LEAVE(0);
}
EXPORT int cuMemUnmap(ptr address, size_t size)
{
	ENTER;
	char path[256];
	snprintf(path, sizeof path, "%s/fail-unmap",
	    root()); /* a test's: fails as long as it is there, from the second on */
	static int unmapped;
	if (!access(path, F_OK) && unmapped++ % 2)
		LEAVE(999);
	if (!whole(address, size))
		LEAVE(INVALID);
	mmap((void *)address, size, PROT_NONE,
	    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
	for (ptr end = address + size; address < end;) {
		struct block *found = find_kind(address, 3);
		address += found->size;
		unreference(found->mapped);
		drop(found);
	}
	LEAVE(0);
}
EXPORT int cuMemRetainAllocationHandle(struct physical **out, ptr address)
{
	ENTER;
	struct block *found = meets(address, 1, 3);
	if (!found)
		LEAVE(INVALID);
	*out = found->mapped;
	found->mapped->references++;
	found->mapped->handles++;
	LEAVE(0);
}
EXPORT int cuMemPoolExportToShareableHandle(
    int *out, void *pool, int type, unsigned long long flags)
{
	ENTER;
	(void)pool, (void)type, (void)flags;
	*out = memfd_create("pool", 0);
	LEAVE(0);
}
EXPORT int cuMulticastCreate(void **out, const void *properties)
{
	ENTER;
	(void)properties;
	*out = (void *)0x4D43;
	LEAVE(0);
}
/* -- what is told of an address, and done to it for good */
static struct block *holding(ptr address)
{
	for (int kind = 0; kind < 4; kind++)
		if (meets(address, 1, kind))
			return meets(address, 1, kind);
	return NULL;
}
EXPORT int cuPointerGetAttribute(unsigned *out, int attribute, ptr address)
{
	ENTER;
	(void)attribute;
	*out = 2;
	LEAVE(holding(address) ? 0 : INVALID);
}
EXPORT int cuPointerGetAttributes(unsigned count, int *attributes, unsigned **out, ptr address)
{
	ENTER;
	(void)attributes;
	for (unsigned i = 0; i < count; i++)
		*out[i] = holding(address) ? 2 : 0; /* never an error */
	LEAVE(0);
}
EXPORT int cuMemGetAddressRange_v2(ptr *base, size_t *size, ptr address)
{
	ENTER;
	struct block *found = holding(address);
	if (!found)
		LEAVE(INVALID);
	*base = found->address;
	*size = found->size;
	LEAVE(0);
}
EXPORT int cuPointerSetAttribute(const void *value, int attribute, ptr address)
{
	ENTER;
	(void)value, (void)attribute;
	LEAVE(holding(address) ? 0 : INVALID);
}
EXPORT int cuMemGetHandleForAddressRange(
    int *out, ptr address, size_t size, int type, unsigned long long flags)
{
	ENTER;
	(void)size, (void)type, (void)flags;
	if (!holding(address))
		LEAVE(INVALID);
	*out = memfd_create("dma-buf", MFD_CLOEXEC);
	LEAVE(0);
}
/* For tests: the devices that reach an address, as bits; 0 where nothing is mapped. */
EXPORT unsigned fake_access(ptr address)
{
	struct block *found = find_kind(address, 3);
	return found ? found->access : 0;
}
/* -- the driver's own allocations */

static int plain(ptr *out, size_t size, int kind)
{
	if (kind != 2 && forbidden())
		return CAPTURING;
	if (!usable())
		return NO_CONTEXT;
	if (!size || !out)
		return INVALID;
	size_t whole = (size + 4095) & ~(size_t)4095;
	int file = make_file(current()->device, whole);
	if (file < 0)
		return NO_MEMORY;
	*out = (ptr)mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	madvise((void *)*out, whole, MADV_DONTFORK);
	close(file);
	add(*out, whole, kind);
	return 0;
}
EXPORT int cuMemAlloc_v2(ptr *out, size_t size)
{
	ENTER;
	LEAVE(plain(out, size, 0));
}
EXPORT int cuMemAllocPitch_v2(
    ptr *out, size_t *pitch, size_t width, size_t height, unsigned element)
{
	ENTER;
	if (element != 4 && element != 8 && element != 16)
		LEAVE(INVALID);
	*pitch = (width + 511) & ~(size_t)511;
	LEAVE(plain(out, *pitch * height, 0));
}
EXPORT int cuMemAllocManaged(ptr *out, size_t size, unsigned flags)
{
	ENTER;
	(void)flags;
	LEAVE(plain(out, size, 1));
}
EXPORT int cuMemAllocAsync(ptr *out, size_t size, void *stream)
{
	ENTER;
	(void)stream;
	LEAVE(plain(out, size, 2));
}
EXPORT int cuMemAllocAsync_ptsz(ptr *out, size_t size, void *stream)
{
	ENTER;
	(void)stream;
	LEAVE(plain(out, size, 2));
}
EXPORT int cuMemAllocFromPoolAsync(ptr *out, size_t size, void *pool, void *stream)
{
	ENTER;
	(void)pool, (void)stream;
	LEAVE(plain(out, size, 2));
}
static int free_plain(ptr address)
{
	struct block *found = find(address);
	if (!address)
		return 0;
	if (!found || found->kind > 2)
		return INVALID;
	munmap((void *)address, found->size);
	drop(found);
	return 0;
}
EXPORT int cuMemFree_v2(ptr address)
{
	ENTER;
	LEAVE(address && forbidden() ? CAPTURING : free_plain(address));
}
EXPORT int cuMemFreeAsync(ptr address, void *stream)
{
	ENTER;
	LEAVE(about(stream) ? about(stream) : free_plain(address));
}
EXPORT int cuMemFreeAsync_ptsz(ptr address, void *stream)
{
	ENTER;
	LEAVE(about(stream) ? about(stream) : free_plain(address));
}
/* Legacy IPC of such memory: by the exporter's own mapping of it, whose file the importer opens. */
struct ipc_handle {
	int pid, reserved;
	ptr address;
	size_t size;
	char rest[40];
};
EXPORT int cuIpcGetMemHandle(struct ipc_handle *out, ptr address)
{
	ENTER;
	struct block *found = blocks;
	while (found &&
	    (found->kind || address < found->address || address >= found->address + found->size))
		found = found->next;
	if (!out || !found)
		LEAVE(INVALID);
	*out = (struct ipc_handle){.pid = getpid(), .address = found->address, .size = found->size};
	LEAVE(0);
}
static int open_ipc(ptr *out, const struct ipc_handle *what, unsigned flags)
{
	char path[96];
	if (flags != 1 || !what->pid || !what->size)
		return INVALID;
	if (!usable() || what->pid == getpid())
		return NO_CONTEXT;
	snprintf(path, sizeof path, "/proc/%d/map_files/%llx-%llx", what->pid, what->address,
	    what->address + what->size);
	int file = open(path, O_RDWR | O_CLOEXEC);
	if (file < 0)
		return 400;
	*out = (ptr)mmap(NULL, what->size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	madvise((void *)*out, what->size, MADV_DONTFORK);
	close(file);
	add(*out, what->size, 5);
	return 0;
}
EXPORT int cuIpcOpenMemHandle(ptr *out, struct ipc_handle what, unsigned flags)
{
	ENTER;
	LEAVE(open_ipc(out, &what, flags));
}
EXPORT int cuIpcOpenMemHandle_v2(ptr *out, struct ipc_handle what, unsigned flags)
{
	ENTER;
	LEAVE(open_ipc(out, &what, flags));
}
EXPORT int cuIpcCloseMemHandle(ptr address)
{
	ENTER;
	struct block *found = find_kind(address, 5);
	if (!found)
		LEAVE(INVALID);
	munmap((void *)address, found->size);
	drop(found);
	LEAVE(0);
}
/* Events. Recorded work stays pending until a call waits for it. */
enum { NOT_READY = 600, CAPTURED = 907 };
struct event {
	unsigned flags;
	bool pending, captured;
};
static unsigned long shared_events;
/* For tests: how many interprocess events were ever created. */
EXPORT unsigned long fake_shared_events(void)
{
	return shared_events;
}
EXPORT int cuEventCreate(struct event **out, unsigned flags)
{
	ENTER;
	if (!usable())
		LEAVE(NO_CONTEXT);
	if ((flags & 4) && !(flags & 2))
		LEAVE(INVALID);
	*out = calloc(1, sizeof **out);
	(*out)->flags = flags;
	shared_events += !!(flags & 4);
	LEAVE(0);
}
EXPORT int cuEventDestroy_v2(struct event *event)
{
	ENTER;
	free(event);
	LEAVE(0);
}
EXPORT int cuEventDestroy(struct event *event)
{
	ENTER;
	free(event);
	LEAVE(0);
}
static int record(struct event *event, void *stream)
{
	if (about(stream))
		return about(stream);
	event->captured = capture_of(stream) != NULL;
	event->pending = !event->captured;
	return 0;
}
EXPORT int cuEventRecord(struct event *event, void *stream)
{
	ENTER;
	LEAVE(record(event, stream));
}
EXPORT int cuEventRecord_ptsz(struct event *event, void *stream)
{
	ENTER;
	LEAVE(record(event, stream ? stream : (void *)2));
}
EXPORT int cuEventRecordWithFlags(struct event *event, void *stream, unsigned flags)
{
	ENTER;
	LEAVE(flags > 1 ? INVALID : record(event, stream));
}
EXPORT int cuEventRecordWithFlags_ptsz(struct event *event, void *stream, unsigned flags)
{
	ENTER;
	LEAVE(flags > 1 ? INVALID : record(event, stream ? stream : (void *)2));
}
EXPORT int cuEventQuery(const struct event *event)
{
	ENTER;
	LEAVE(event->captured ? CAPTURED : event->pending ? NOT_READY : 0);
}
EXPORT int cuEventSynchronize(struct event *event)
{
	ENTER;
	if (event->captured)
		LEAVE(CAPTURED);
	if (forbidden())
		LEAVE(CAPTURING);
	event->pending = false;
	LEAVE(0);
}
EXPORT int cuCtxRecordEvent(const struct context *context, struct event *event)
{
	ENTER;
	event->pending = true;
	LEAVE(context ? 0 : NO_CONTEXT);
}
EXPORT int cuGraphAddEventRecordNode(
    void **out, const void *graph, const void *before, size_t count, const struct event *event)
{
	ENTER;
	*out = (void *)1;
	LEAVE(graph && event && !before == !count ? 0 : INVALID);
}
EXPORT int cuGraphAddNode_v2(void **out, const void *graph, const void *before, const void *edges,
    size_t count, const int *what)
{
	ENTER;
	*out = (void *)1;
	LEAVE(graph && what && !edges && !before == !count ? 0 : INVALID);
}
EXPORT int cuStreamIsCapturing(void *stream, int *out)
{
	ENTER;
	*out = capture_of(stream) != NULL;
	LEAVE(0);
}
EXPORT int cuIpcGetEventHandle(struct ipc_handle *out, const struct event *event)
{
	ENTER;
	if (!(event->flags & 4))
		LEAVE(INVALID_HANDLE);
	*out = (struct ipc_handle){.pid = getpid(), .address = (ptr)event};
	LEAVE(0);
}
EXPORT int cuIpcOpenEventHandle(struct event **out, struct ipc_handle what)
{
	ENTER;
	if (!usable() || what.pid == getpid())
		LEAVE(NO_CONTEXT);
	*out = calloc(1, sizeof **out);
	LEAVE(0);
}
EXPORT int cuMemGetInfo_v2(size_t *unused, size_t *total)
{
	struct statvfs found;
	char path[256];
	ENTER;
	if (!usable())
		LEAVE(NO_CONTEXT);
	snprintf(path, sizeof path, "%s/gpu%d", root(), gpu_of[current()->device]);
	statvfs(path, &found);
	*unused = found.f_bfree * found.f_bsize;
	*total = found.f_blocks * found.f_bsize;
	LEAVE(0);
}
EXPORT int cuMemsetD8_v2(
    ptr address, unsigned char value, size_t some) /* takes its time within the driver */
{
	ENTER;
	memset((void *)address, value, some);
	const char *slow = getenv("FAKE_CUDA_SLOW");
	if (slow) { /* others may come in meanwhile */
		pthread_mutex_unlock(&driver_lock);
		struct timespec end;
		clock_gettime(CLOCK_MONOTONIC, &end);
		end.tv_nsec += 1000l * atoi(slow);
		end.tv_sec += end.tv_nsec / 1000000000;
		end.tv_nsec %= 1000000000;
		while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, NULL) == EINTR)
			;
		pthread_mutex_lock(&driver_lock);
	}
	LEAVE(0);
}
EXPORT int cuCtxEnablePeerAccess(struct context *peer, unsigned flags)
{
	ENTER;
	if (!usable() || flags)
		LEAVE(INVALID);
	unsigned bit = 1u << peer->device, *mine = &peers[current()->device];
	int result = *mine & bit ? PEER_TWICE : 0;
	*mine |= bit;
	LEAVE(result);
}
EXPORT int cuCtxDisablePeerAccess(struct context *peer)
{
	ENTER;
	peers[current()->device] &= ~(1u << peer->device);
	LEAVE(0);
}

/* -- the driver's thread: checkpoints, as icecore.host.cuda.fake asks for them through a page at a
 * fixed address */

#define IMAGE ((char *)DEVICE_IMAGE)
enum { NO_GPU = 1 };
static struct control *control;
static int nodes[10];
static int node_count;

static void open_nodes(void)
{
	char path[256];
	const char *world = getenv("FAKE_CUDA_WORLD");

	for (int device = 0; world && device < devices + 2; device++) {
		if (device < devices && !used[device])
			continue;
		if (device < devices)
			snprintf(path, sizeof path, "%s/dev/nvidia%d", world, gpu_of[device]);
		else
			snprintf(path, sizeof path, "%s/dev/%s", world,
			    device == devices ? "nvidiactl" : "nvidia-uvm");
		nodes[node_count++] = open(path, O_RDWR | O_CLOEXEC);
	}
}

static void close_nodes(void)
{
	while (node_count)
		close(nodes[--node_count]);
}

static void begin_to_use(int device)
{
	if (used[device])
		return;
	used[device] = true;
	close_nodes();
	open_nodes();
	if (control && !control->bytes)
		memcpy(control->gpu, uuid(gpu_of[device]), 16);
}

/* What the driver moves: imported memory is somebody else's. */
static size_t device_bytes(void)
{
	size_t all = 0;
	for (struct block *at = blocks; at; at = at->next)
		all += at->kind <= 2 ? at->size : 0;
	for (struct physical *at = physicals; at; at = at->next)
		all += at->imported ? 0 : at->size;
	return all;
}

static int lock_calls(unsigned milliseconds)
{
	bool unfair = getenv("FAKE_CUDA_UNFAIR") != NULL;

	for (unsigned waited = 0; waited < milliseconds * 10; waited++) {
		if (!unfair || atomic_load(&door[1]) == 0) {
			atomic_store(&door[0], 1);
			if (atomic_load(&door[1]) == 0)
				return 0;
			if (unfair)
				atomic_store(&door[0], 0);
		}
		usleep(100);
	}
	atomic_store(&door[0], 0);
	syscall(SYS_futex, &door[0], FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
	return NOT_READY;
}

/* Copy as the real driver does: piece by piece through a small buffer, with memcpy(3). */
static char staging[GRANULE];

static bool piecewise(char *at, size_t size, ptr device, int descriptor, bool out)
{
	for (size_t done = 0, some; done < size; done += some) {
		some = size - done < sizeof staging ? size - done : sizeof staging;
		if (out) {
			if (descriptor < 0)
				memmove(staging, (char *)device + done, some);
			else if (pread(descriptor, staging, some, (off_t)done) != (ssize_t)some)
				return false;
			memcpy(at + done, staging, some);
			continue;
		}
		memcpy(staging, at + done, some);
		if (descriptor < 0)
			memmove((char *)device + done, staging, some);
		else if (pwrite(descriptor, staging, some, (off_t)done) != (ssize_t)some)
			return false;
	}
	return true;
}

/* What is there moves into memory of the process; what is exported is left to whoever has it, and
 * so is what is written there from then on. */
static int save(void)
{
	size_t all = device_bytes(), done = 0;

	if (all &&
	    mmap(IMAGE, all, PROT_READ | PROT_WRITE,
		MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE | MAP_FIXED_NOREPLACE, -1,
		0) != IMAGE)
		return NO_MEMORY;
	for (struct physical *at = physicals; at; at = at->next) {
		if (at->imported)
			spoiled = true;
		else if (piecewise(IMAGE + done, at->size, 0, at->descriptor, true))
			done += at->size;
		close(at->descriptor);
		at->descriptor = -1;
	}
	for (struct block *at = blocks; at; at = at->next) {
		if (at->kind >= 4) {
			spoiled |= at->kind == 5;
			continue;
		}
		if (at->kind <= 2) {
			piecewise(IMAGE + done, at->size, at->address, -1, true);
			done += at->size;
		}
		mmap((void *)at->address, at->size, PROT_NONE,
		    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
	}
	close_nodes();
	return 0;
}

static int load(void)
{
	size_t done = 0;
	char path[256];
	struct stat found;

	if (spoiled)
		return 801;
	for (unsigned i = 0; i < control->pairs; i++)
		for (int device = 0; device < devices; device++)
			if (used[device] && !memcmp(control->pair[i][0], uuid(gpu_of[device]), 16)) {
				int to = 0;
				while (to < devices && memcmp(control->pair[i][1], uuid(to), 16))
					to++;
				gpu_of[device] = to;
				break;
			}
	for (int device = 0; device < devices; device++) {
		snprintf(path, sizeof path, "%s/gpu%d", root(), gpu_of[device]);
		if (used[device] && stat(path, &found))
			return NO_GPU;
	}
	for (struct physical *at = physicals; at; at = at->next) {
		at->descriptor = at->device < 0 ? memfd_create("host", MFD_CLOEXEC)
						: make_file(at->device, at->size);
		if (at->descriptor < 0 ||
		    !piecewise(IMAGE + done, at->size, 0, at->descriptor, false))
			return NO_MEMORY;
		done += at->size;
	}
	for (struct block *at = blocks; at; at = at->next) {
		if (at->kind == 3 && place(at))
			return NO_MEMORY;
		if (at->kind > 2)
			continue;
		int file = make_file(at->context->device, at->size);
		if (file < 0)
			return NO_MEMORY;
		mmap((void *)at->address, at->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
		    file, 0);
		madvise((void *)at->address, at->size, MADV_DONTFORK);
		piecewise(IMAGE + done, at->size, at->address, -1, false);
		done += at->size;
		close(file);
	}
	if (done)
		munmap(IMAGE, done);
	open_nodes();
	return 0;
}

static int act(void)
{
	int result = ILLEGAL_STATE;

	if (control->operation == LOCK && control->state == RUNNING) {
		result = lock_calls(control->milliseconds);
		control->state = result ? RUNNING : LOCKED;
	} else if (control->operation == CHECKPOINT && control->state == LOCKED) {
		result = save();
		control->state = result ? LOCKED : CHECKPOINTED;
	} else if (control->operation == RESTORE && control->state == CHECKPOINTED) {
		result = load();
		control->state = result ? CHECKPOINTED : LOCKED;
	} else if (control->operation == UNLOCK && control->state == LOCKED) {
		atomic_store(&door[0], 0);
		syscall(SYS_futex, &door[0], FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
		control->state = RUNNING;
		result = 0;
	}
	return result;
}

static void tell_bytes(void)
{
	if (pthread_mutex_trylock(&driver_lock))
		return;
	control->bytes = device_bytes();
	pthread_mutex_unlock(&driver_lock);
}

static _Noreturn void *driver_thread(void *unused)
{
	(void)unused;
	pthread_setname_np(pthread_self(), "cuda-EvtHandlr");
	if (!getenv("FAKE_CUDA_WORLD")) {
		sem_post(&driver_listens);
		for (;;)
			pause();
	}
	control = mmap((void *)CONTROL_PAGE, 4096, PROT_READ | PROT_WRITE,
	    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	madvise(control, 4096, MADV_DONTFORK); /* the driver knows nothing of a child */
	control->thread = (unsigned)syscall(SYS_gettid);
	for (int device = 0; device < devices; device++)
		if (used[device])
			memcpy(control->gpu, uuid(gpu_of[device]), 16);
	memcpy(control->magic, "FAKECUDA", 8);
	sem_post(&driver_listens);
	for (;;) {
		uint64_t request = __atomic_load_n(&control->request, __ATOMIC_ACQUIRE);
		if (request == control->answer) {
			if (control->state == RUNNING)
				tell_bytes();
			usleep(1000);
			continue;
		}
		control->result = act();
		__atomic_store_n(&control->answer, request, __ATOMIC_RELEASE);
	}
}

/* -- the calls that icecore makes for other processes: the driver's thread there does the work */

/* The control page of a process; 0, or INVALID if it has none. */
static int look_at(int pid, struct control *found)
{
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/mem", pid);
	int memory = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t size = memory < 0 ? -1 : pread(memory, found, sizeof *found, CONTROL_PAGE);
	if (memory >= 0)
		close(memory);
	return size == sizeof *found && !memcmp(found->magic, "FAKECUDA", 8) ? 0 : INVALID;
}

static int ask(int pid, uint32_t operation, uint32_t milliseconds, const void *pair, uint32_t pairs)
{
	struct control now;
	char path[64];
	if (look_at(pid, &now))
		return INVALID;
	uint64_t request = now.request + 1;
	uint32_t arguments[2] = {milliseconds, pairs};
	snprintf(path, sizeof path, "/proc/%d/mem", pid);
	int memory = open(path, O_WRONLY | O_CLOEXEC);
	struct {
		const void *data;
		size_t size, at;
	} parts[] = {
	    {pair, 32 * (size_t)pairs, offsetof(struct control, pair)},
	    {arguments, sizeof arguments, offsetof(struct control, milliseconds)},
	    {&operation, sizeof operation, offsetof(struct control, operation)},
	    {&request, sizeof request, offsetof(struct control, request)},
	};
	bool wrote = memory >= 0;
	for (size_t i = 0; wrote && i < sizeof parts / sizeof parts[0]; i++)
		wrote = pwrite(memory, parts[i].data, parts[i].size, (off_t)(CONTROL_PAGE + parts[i].at)) ==
			(ssize_t)parts[i].size;
	if (memory >= 0)
		close(memory);
	while (wrote && !look_at(pid, &now)) {
		if (now.answer == request)
			return now.result;
		usleep(1000);
	}
	return INVALID;
}

EXPORT int cuCheckpointProcessGetState(int pid, int *state)
{
	struct control now;
	if (look_at(pid, &now))
		return INVALID;
	*state = (int)now.state;
	return 0;
}
EXPORT int cuCheckpointProcessGetRestoreThreadId(int pid, int *thread)
{
	struct control now;
	if (look_at(pid, &now))
		return INVALID;
	*thread = (int)now.thread;
	return 0;
}
EXPORT int cuCheckpointProcessLock(int pid, const unsigned *milliseconds)
{
	return ask(pid, LOCK, *milliseconds, NULL, 0);
}
EXPORT int cuCheckpointProcessCheckpoint(int pid, const void *unused)
{
	(void)unused;
	return ask(pid, CHECKPOINT, 0, NULL, 0);
}
struct gpu_pairs {
	const void *pair;
	unsigned pairs;
};
EXPORT int cuCheckpointProcessRestore(int pid, const struct gpu_pairs *gpus)
{
	return gpus ? ask(pid, RESTORE, 0, gpus->pair, gpus->pairs) : ask(pid, RESTORE, 0, NULL, 0);
}
EXPORT int cuCheckpointProcessUnlock(int pid, const void *unused)
{
	(void)unused;
	return ask(pid, UNLOCK, 0, NULL, 0);
}

/* -- entry points */

static int lookup(const char *name, void **out, int version, unsigned long long flags)
{
	static const char *const newer[] = {"_v2", ""};
	char symbol[96];
	void *self = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);

	if (flags & 2) {
		snprintf(symbol, sizeof symbol, "%s_ptsz", name);
		if ((*out = dlvsym(self, symbol, "FAKE")))
			return 0;
	}
	for (int i = !strncmp(name, "cuGetProcAddress", 16) && version < 12000; i < 2; i++) {
		snprintf(symbol, sizeof symbol, "%s%s", name, newer[i]);
		if ((*out = dlvsym(self, symbol, "FAKE")))
			return 0;
	}
	return NOT_FOUND;
}
EXPORT int cuGetProcAddress(const char *name, void **out, int version, unsigned long long flags)
{
	return lookup(name, out, version, flags);
}
EXPORT int cuGetProcAddress_v2(
    const char *name, void **out, int version, unsigned long long flags, int *status)
{
	int result = lookup(name, out, version, flags);
	if (status)
		*status = result ? 1 : 0;
	return result;
}
