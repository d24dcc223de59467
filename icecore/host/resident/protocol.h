/* The messages between the preload, its keeper and their clients. One message is one packet of
 * fixed size (docs/explanation/resident-memory.md, client.py). */
#ifndef ICECORE_RESIDENT_PROTOCOL_H
#define ICECORE_RESIDENT_PROTOCOL_H

#include <stdint.h>

#define RESIDENT_VERSION 2
#define RESIDENT_OLDEST \
	1 /* that a keeper serves: processes come out of snapshots with the preload that they had. \
	     It knew nothing of shared memory */
#define RESIDENT_VARIABLE \
	"ICECORE_RESIDENT" /* a directory: "keeper" in it is the keeper's socket, "agent-PID" a \
			      process's */

enum keeper_operation {
	KEEPER_HELLO = 1, /* token, pid -> result: these descriptors are mine */
	/* one allocation and its descriptor (none: the one that is held); no answer */
	KEEPER_HOLD = 2,
	KEEPER_FREE = 3, /* identity -> result, once the descriptor is closed */
	KEEPER_CONFIRM = 4, /* -> count, identity (sum of those held) */
	/* what is not held again before KEEPER_RESYNCED is let go of; no answer */
	KEEPER_RESYNC = 5,
	KEEPER_RESYNCED = 6, /* -> count, identity, as KEEPER_CONFIRM */
	/* -> result: the descriptors are all there is of the memory now: kept although the process
	   ends, until its next hello */
	KEEPER_PARKED = 7,

	KEEPER_PROCESSES = 16, /* -> for each process token, pid, count, size, flags; KEEPER_END */
	KEEPER_LIST = 17, /* token -> for each allocation a message; KEEPER_END */
	KEEPER_TAKE = 18, /* the same with the descriptors */
	KEEPER_PUT = 19, /* token and an allocation with its descriptor -> result */
	/* token, count (0 or 1) -> result: kept although the process ends, as after KEEPER_PARKED
	 */
	KEEPER_RETAIN = 20,
	KEEPER_FORGET = 21, /* token -> result: let go of all of it */
	KEEPER_FETCH = 22, /* token, identity -> result, and that allocation with its descriptor */
	/* token, pid (of the job's init), lease, and the init's status file -> result: kept where
	   the job breaks off (docs/explanation/resident-memory.md) */
	KEEPER_KEEP = 23,
	/* -> count: of processes that ended while their job ran on, which was kept: the job needs
	   the memory */
	KEEPER_YIELD = 24,
	/* token, identity -> result: let go of that one, of a process that has ended */
	KEEPER_DROP = 25,
	KEEPER_END = 31,
};

enum agent_operation {
	/* flags -> struct resident_counts in text; RESIDENT_HAND_OVER: the keeper gets first what it
	   lacks */
	AGENT_STATUS = 64,
	AGENT_LIST = 65, /* -> for each allocation a message; AGENT_END */
	/* nanoseconds, lease, requested (nanoseconds for threads to come out of the driver; 0:
	   wherever they are) -> result, count (parked), flags (not parked: in the driver), text
	   (threads that block the signal) */
	AGENT_PARK = 66,
	/* nanoseconds, count (threads that make the driver's copies), requested (bytes of the driver's
	   mapping that may be huge pages) -> result, count, size, flags */
	AGENT_UNMAP = 67,
	/* count of descriptors that follow, each in a message with its identity; 0: from the keeper
	   -> result */
	AGENT_MAP = 68,
	AGENT_GO = 69, /* -> result */
	AGENT_LEASE = 70, /* lease -> result */
	/* -> result: every descriptor is exported anew and handed to the keeper */
	AGENT_REFRESH = 71,
	/* nanoseconds -> result: for so long (0: no more) a client has memory mapped at times:
	   allocations that find none wait */
	AGENT_LOOK = 72,
	AGENT_END = 95,
};

enum resident_state { RESIDENT_RUNNING = 0, RESIDENT_PARKED = 1, RESIDENT_UNMAPPED = 2 };

#define KEEPER_ALIVE 1u
#define KEEPER_RETAINED 2u

/* Flags of an allocation. */
#define RESIDENT_HELD 1u /* AGENT_LIST: the keeper has it */
#define RESIDENT_IMPORTED \
	16u /* its process imported it: somebody else allocated the memory, whose descriptor is \
	       the same open file */
#define RESIDENT_EXPORTED 32u /* its process made its descriptor for others */

/* A flag of the answer to AGENT_UNMAP: threads of the process make the driver's copies. */
#define RESIDENT_COPIES 2u

/* A flag of AGENT_STATUS. */
#define RESIDENT_HAND_OVER 1u

struct resident_message {
	uint32_t version, operation;
	int32_t result; /* 0, an errno, or 10000 + a CUresult */
	uint32_t count;
	uint64_t identity; /* of an allocation, within its process; from 1 on */
	uint64_t address, size, requested; /* bytes; size is what is mapped */
	uint64_t nanoseconds, lease;
	uint8_t device[16]; /* UUID */
	/* of a process, drawn when it first allocates; survives checkpoint and restore */
	uint8_t token[16];
	int32_t pid, ordinal;
	uint32_t flags, state;
	char text[400];
};

struct resident_counts {
	uint64_t resident, resident_bytes;
	uint64_t small, small_bytes; /* under the least size, live */
	uint64_t pool, pool_bytes; /* stream-ordered, live */
	uint64_t managed, managed_bytes; /* live */
	uint64_t foreign, foreign_bytes; /* large, but not possible as resident: live */
	/* freed, but released only when a stream capture is over */
	uint64_t deferred, deferred_bytes;
	/* unheld: not at the keeper now */
	uint64_t allocations, frees, out_of_memory, ipc_refused, unheld;
	uint64_t windows, cancelled;
	uint64_t captured; /* left to the driver because a stream was being captured */
	/* live: made by cuMemCreate (also among the resident), imported from others */
	uint64_t handles, imported;
	uint64_t exports; /* by the application */
	/* what was shared with other processes in a way that no window can take away: ever */
	uint64_t unparkable;
	uint64_t multicast; /* multicast objects: ever */
	/* by CUDA's legacy IPC, exported or opened, of what stayed with the driver: ever */
	uint64_t ipc_exports;
	uint64_t spare, spare_bytes; /* released, and kept for the next who asks */
	uint64_t recycled; /* allocations that got such a one */
};

#define RESIDENT_CUDA_ERROR 10000

_Static_assert(sizeof(struct resident_message) == 512, "client.py packs the same bytes");
_Static_assert(
    sizeof(struct resident_counts) <= sizeof(((struct resident_message *)0)->text), "counts fit");

#endif
