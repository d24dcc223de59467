/* Every live allocation and mapping. `table_lock` guards all of them and the counts; whoever may
 * hold it is between threads_enter and threads_leave. */
#ifndef ICECORE_RESIDENT_TABLE_H
#define ICECORE_RESIDENT_TABLE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "driver.h"
#include "protocol.h"

#define TABLE_BEING_FREED UINT64_MAX

enum kind {
	KIND_RESIDENT, /* cuMemAlloc's, made by us */
	KIND_SPARE, /* one of these that was released, for the next who asks (spare.c) */
	KIND_SMALL, /* the driver's own, from here on, noted to be counted */
	KIND_POOL,
	KIND_MANAGED,
	KIND_FOREIGN,
	KIND_HANDLE, /* what the application made by cuMemCreate or imported (handles.c) */
	KIND_MAPPING, /* where it mapped that */
};

struct allocation {
	/* 0: an empty place in the table, 1: one that was vacated; of KIND_HANDLE, the handle that
	 * the application has */
	CUdeviceptr address;
	size_t size, requested;
	enum kind kind;
	bool mapped; /* of resident and spare ones, and mappings */
	CUcontext context; /* of all but handles; of a mapping NULL, once it has ended */
	union {
		/* KIND_RESIDENT, KIND_SPARE and KIND_HANDLE: physical memory, which the keeper
		 * holds, too */
		struct {
			uint64_t identity;
			CUhandle handle;
			CUdevice device;
			/* kept open where the handle was imported, which cannot be exported again,
			 * or where others have it; else -1 */
			int descriptor;
			ino_t inode; /* of that descriptor */
			bool held; /* by the keeper */
			bool has_handle, exported;
			int64_t since; /* when it was made, or 0: the keeper gets it after a while */
			union {
				struct { /* KIND_RESIDENT, KIND_SPARE */
					/* by the application: TABLE_BEING_FREED, or when it was
					 * deferred, because nothing can be waited for in a stream
					 * capture */
					uint64_t freed;
					/* by the application, in a way that a release would undo */
					bool altered;
				} resident;
				struct { /* KIND_HANDLE */
					uint32_t references, mappings; /* the application's */
					int handle_types; /* as it asked for them */
					bool imported;
				} made;
			};
		};
		struct { /* KIND_MAPPING */
			CUhandle of; /* as the application has it */
			size_t offset;
			uint64_t reads, writes; /* a bit for each device */
			struct access host; /* flags 0: none */
			/* only of what cuIpcOpenMemHandle made (ipc.c) */
			bool opened;
			/* less those that were closed; 0: to be unmapped after a stream capture */
			uint32_t opens;
			uint8_t source_token[16]; /* whose allocation it is */
			uint64_t source; /* that one's identity there */
		} mapping;
	};
};

extern pthread_mutex_t table_lock;
extern struct resident_counts table_counts;
struct allocation *table_find(CUdeviceptr address);
/* resident memory or a mapping that begins at an address, or has it within */
struct allocation *table_containing(CUdeviceptr address);
/* NULL: no memory; in the place of what is only noted there */
struct allocation *table_add(const struct allocation *what);
/* made by the driver's own calls, to be counted */
bool table_only_noted(const struct allocation *what);
bool table_imported(const struct allocation *what); /* from another process */
void table_remove(struct allocation *what);
void table_change(struct allocation *what, enum kind to);
/* from NULL on; until NULL */
struct allocation *table_next(struct allocation *after, enum kind kind);
/* the same of all physical memory, which the keeper holds */
struct allocation *table_next_held(struct allocation *after);
uint64_t table_new_identity(void);
void table_in_child(void);

#endif
