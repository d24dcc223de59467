/* What a forked child forgets. It has none of the parent's GPU memory, because CUDA does not work
 * in it; it may start anew. No lock is taken before the fork, because a parked thread may hold one
 * that fork waits for. So whatever another thread was changing is dropped, not tidied up. */
#include <pthread.h>
#include <stddef.h>

#include "capture.h"
#include "devices.h"
#include "driver.h"
#include "events.h"
#include "fork.h"
#include "handles.h"
#include "holding.h"
#include "ipc.h"
#include "physical.h"
#include "release.h"
#include "spare.h"
#include "table.h"
#include "threads.h"

static void (*agent_in_child)(void);

static void in_child(void)
{
	agent_in_child();
	/* before the table is emptied: it closes what the parent could not release */
	holding_in_child();
	table_in_child();
	release_in_child();
	physical_in_child();
	devices_in_child();
	spare_in_child();
	handles_in_child();
	ipc_in_child();
	events_in_child();
	capture_in_child();
	threads_in_child();
	driver_in_child();
}

void fork_watch(void (*agents)(void))
{
	agent_in_child = agents;
	pthread_atfork(NULL, physical_forked, in_child);
}
