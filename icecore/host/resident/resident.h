/* What the preload's modules know of each other; rule: `table_lock` guards all allocations, and a thread that may hold it is inside `enter` … `leave`. */
#ifndef ICECORE_RESIDENT_H
#define ICECORE_RESIDENT_H

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/types.h>
#include <ucontext.h>

#include "driver.h"
#include "protocol.h"

#define EXPORTED __attribute__((visibility("default")))
#define LEAST_SIZE ((size_t)2 << 20) /* bytes; smaller allocations stay with the driver */
#define DEVICES 64
#define HIGH_DESCRIPTOR 500 /* from here on numbers that applications do not expect to close */

#define BEING_FREED UINT64_MAX

struct directory_entry { /* as getdents64 has it: readdir would allocate */
	unsigned long long inode;
	long long offset;
	unsigned short length;
	unsigned char type;
	char name[];
};

enum kind {
	KIND_RESIDENT, /* cuMemAlloc's, made by us */
	KIND_SPARE,    /* one of these that was released, for the next who asks (spare.c) */
	KIND_SMALL,
	KIND_POOL,
	KIND_MANAGED,
	KIND_FOREIGN,
	KIND_HANDLE,  /* what the application made by cuMemCreate or imported (handles.c) */
	KIND_MAPPING, /* where it mapped that */
};

struct allocation {
	CUdeviceptr address; /* 0: an empty place in the table, 1: one that was vacated; of KIND_HANDLE, the handle that the application has */
	size_t size, requested;
	enum kind kind;
	/* only of resident and spare ones, handles and (context, mapped) mappings; the context also of what the driver made */
	uint64_t identity;
	CUhandle handle;
	CUcontext context;
	CUdevice device;
	int descriptor; /* kept open where the handle was imported, which cannot be exported again, or where others have it; else -1 */
	ino_t inode;    /* of that descriptor */
	bool held;      /* by the keeper */
	uint64_t freed; /* by the application: BEING_FREED, or when it was deferred, because nothing can be waited for in a stream capture */
	bool mapped, has_handle;
	bool altered; /* by the application, in a way that a release would undo */
	/* only of handles */
	uint32_t references, mappings; /* the application's */
	int handle_types;              /* as it asked for them */
	bool imported, exported;
	/* only of mappings */
	CUhandle of; /* as the application has it */
	size_t offset;
	uint64_t reads, writes; /* a bit for each device */
	struct access host;     /* flags 0: none */
	/* only of mappings that cuIpcOpenMemHandle made (ipc.c) */
	bool opened;
	uint32_t opens;           /* less those that were closed; 0: to be unmapped after a stream capture */
	uint8_t source_token[16]; /* whose allocation it is */
	uint64_t source;          /* that one's identity there */
};

/* table.c */
extern pthread_mutex_t table_lock;
extern struct resident_counts counts; /* also under table_lock */
struct allocation *table_find(CUdeviceptr address);
struct allocation *table_add(const struct allocation *what); /* NULL: no memory; in the place of what is only noted there */
bool only_noted(const struct allocation *what); /* made by the driver's own calls, to be counted */
void table_remove(struct allocation *what);
void table_change(struct allocation *what, enum kind to);
struct allocation *table_next(struct allocation *after, enum kind kind); /* from NULL on; until NULL */
struct allocation *table_next_held(struct allocation *after);            /* the same of all that the keeper has: resident and spare ones, and handles */
void table_clear(void);

/* interpose.c */
void interposition_of_child(void);

/* allocate.c */
const uint8_t *device_uuid(CUdevice device);
bool device_usable(CUdevice device); /* not under table_lock, as the next */
CUresult create_physical(CUhandle *out, size_t size, const struct allocation_properties *properties); /* waits for what others still hold */
uint64_t new_identity(void);                                                                        /* under table_lock */
void devices_again(void); /* after a restore, which may have been onto other GPUs */
CUresult set_access(const struct allocation *what);
void release(struct allocation *at); /* under table_lock, which it lets go of for a while: one whose use has ended */
void defer(struct allocation *what); /* under table_lock, as the next */
void release_deferred(CUcontext context, uint64_t until); /* of what was deferred until then; the context has been synchronised since */
void allocations_forked(void); /* in the parent */
void allocations_looked_at(int64_t nanoseconds); /* by a client, for so long; 0: no more */
void allocations_of_child(void);

/* spare.c */
bool spare_keep(struct allocation *what);   /* under table_lock: whether one that was released, and waited for, stays for the next who asks */
bool spare_take(struct allocation *wanted); /* not under table_lock, as all that follow: by context, device and size; whether `address` is there now */
void spares_give_back(CUcontext context, bool gone); /* NULL: of all contexts; `gone`: it has been destroyed */
void spares_give_back_old(void);            /* by the agent */
uint64_t spares_given_back(void);           /* how many were so far: asked before memory turns out to be short */
bool spares_make_room(uint64_t before);     /* memory is short: gives all back; whether there is more of it than before */
CUdeviceptr spare_hidden(CUdeviceptr address); /* with which the driver is asked: of memory that was released, one that is nobody's */
void spares_at_exit(void); /* what libcuda tears down is not given back any more */
void spares_of_child(void);

/* handles.c */
CUresult set_access_again(const struct allocation *mapping);
struct allocation *containing(CUdeviceptr address);                         /* under table_lock: what was mapped at an address, or has it within */
struct allocation *share(CUdeviceptr address, CUresult *result);            /* under table_lock, which it lets go of: has its descriptor ready for others; NULL: *result */
CUresult import_descriptor(CUhandle *out, int descriptor, size_t size);     /* takes it over; the handle is ours, with one reference */
CUhandle present(CUhandle value);                                           /* the driver's for one of ours; 0: released */
CUresult note_mapping(struct allocation *made, CUhandle value);
void forget_mappings(CUdeviceptr address, size_t size);
CUresult release_handle(CUhandle value);
void handles_of_child(void);

/* ipc.c */
void ipc_forget_context(CUcontext context); /* which is gone; not under table_lock */
void ipc_of_child(void);

/* holding.c: the connection to the keeper; all under table_lock */
extern uint8_t process_token[16];
const char *resident_directory(void); /* NULL: not wanted */
void holding_add(struct allocation *what, int descriptor); /* does not take over the descriptor */
void holding_free(struct allocation *what);
bool holding_complete(void);  /* whether the keeper holds every descriptor; hands over those that it lacks */
bool holding_replace(void);   /* it hands over all, whatever the keeper holds */
bool holding_park(void);      /* the same, and the keeper keeps them whatever becomes of this process, until it reconnects */
bool holding_renew(void);     /* every descriptor exported anew and handed over */
int holding_socket(void);     /* -1: not connected */
void holding_close(void);
bool holding_keeps(const struct allocation *what); /* whether it has a descriptor of its own that is still what it was */
void holding_close_kept(struct allocation *what); /* its descriptor, where it has one */
void holding_of_child(void);
int holding_take(int (*each)(uint64_t identity, int descriptor)); /* 0, or an errno; `each` takes over the descriptor */
bool holding_token(void); /* draws process_token, where that was not done yet; false: not possible */
int holding_fetch_of(const uint8_t *token, uint64_t identity, size_t *size, int *descriptor); /* another process's, not under table_lock: 0, or an errno, ENOENT: it is gone */
bool holding_yielded(void); /* not under table_lock: whether the keeper had memory of processes of this job that have ended, and has let go of it */
int holding_fetch(const struct allocation *what); /* its descriptor, the caller's; -1: the keeper does not have it */
int high_descriptor(int descriptor); /* the same file under a number that applications do not expect to close */
int duplicate(int descriptor);       /* the same, beside it; -1: there is none left */
int descriptor_from(int descriptor, int least); /* the same under a number from `least` on, where there is one */

/* threads.c */
void enter(void);
void leave(void);
/* 0, EAGAIN: some block the signal; else an errno, and nobody is parked. With patience nobody is parked in the driver; answer->flags: how many run on for that. */
int park_begin(int64_t until, int64_t patience_for_busy, struct resident_message *answer);
int park_settle(int64_t until); /* waits for threads that were inside; EAGAIN: another moment has to be found. Else than 0, nobody is parked. */
void park_end(void);
unsigned park_count(void);
int threads_start(void); /* once; from the agent's thread */
void threads_of_child(void);
int64_t now(void); /* nanoseconds, monotonic */

/* stack.c: called by the agent alone */
void find_driver(void); /* once */
bool in_driver(const ucontext_t *interrupted); /* whether a thread that was stopped there may be within one of the driver's calls */

/* local_memory.c: called by the agent alone, with every other thread parked */
void local_memory_shrink(CUcontext context); /* which has been synchronised */
void local_memory_grow(void);                /* of all that were shrunk */

/* window.c: called by the agent alone */
int window_unmap(int64_t until, struct resident_message *answer);
int window_map(void); /* with the descriptors that were given, or the keeper's */
int window_give(uint64_t identity, int descriptor);
void window_drop_given(void);

/* agent.c */
bool agent_start(void); /* before there is resident memory; whether it listens: else there must be none */

#endif
