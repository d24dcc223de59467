/* The page through which icecore reaches the driver's thread in a fake CUDA process: HEADER of
 * icecore.host.cuda.fake, and the pairs of GPUs. */
#ifndef FAKE_CONTROL_H
#define FAKE_CONTROL_H

#include <stdint.h>

/* Where the process has it. */
#define CONTROL_PAGE 0x6FA4E0000000
/* Where the driver maps device memory while the process is checkpointed. */
#define DEVICE_IMAGE 0x6FA500000000

enum control_operation { LOCK = 1, CHECKPOINT, RESTORE, UNLOCK };
enum control_state { RUNNING, LOCKED, CHECKPOINTED };

struct control {
	char magic[8]; /* "FAKECUDA" */
	uint64_t request, answer; /* their numbers; who asks writes the request's last */
	uint32_t operation;
	int32_t result; /* CUresult */
	uint32_t state, thread, milliseconds, pairs;
	uint64_t bytes; /* of device memory */
	uint8_t gpu[16]; /* the UUID of its GPU */
	uint8_t pair[][2][16]; /* from, to */
};
_Static_assert(sizeof(struct control) == 72, "the layout of HEADER");

#endif
