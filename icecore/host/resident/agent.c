/* The agent: a thread that carries out what a client asks over this process's socket. A process
 * that it has parked runs again, with its memory mapped, even if the client dies: each command
 * renews a lease, and when the lease expires, the agent maps the memory and lets the process run.
 *
 * A client sends one command per connection and closes it: CRIU could not restore an open
 * connection, nor the one to the keeper, which a window closes. The lease does not run while the
 * process is frozen, and starts anew after a restore.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "clock.h"
#include "copies.h"
#include "descriptors.h"
#include "devices.h"
#include "fork.h"
#include "holding.h"
#include "packet.h"
#include "physical.h"
#include "spare.h"
#include "start.h"
#include "threads.h"
#include "window.h"

#define LIMIT_SECONDS 5
#define TICK_MILLISECONDS 1000
#define TICK_PARKED_MILLISECONDS 50
#define FROZEN_NANOSECONDS 500000000ll
#define START_NANOSECONDS 5000000000ll /* on a machine that is busy */
#define START_SOON_NANOSECONDS 100000000ll /* a constructor may hold the loader's lock */
#define LONGEST_LOOK_NANOSECONDS 10000000000ull
#define WINDOW_NANOSECONDS \
	90000000000ll /* for so long after the beginning of one, the driver's lock may be \
			 somebody's: a dumper tries for 60 s */
#define NEVER (-WINDOW_NANOSECONDS)
#define SETTLED_NANOSECONDS 500000000ll /* memory that is not released so soon stays, probably */
#define HAND_OVER_NANOSECONDS 1000000000ll /* for a client, which waits for the answer */
#define BURST_NANOSECONDS 100000000ll /* without answering clients */
#define BURST_PAUSE_MILLISECONDS 10
#define LET_OTHERS_NANOSECONDS 20000 /* a waiter for the lock needs so long to wake up */
#define BATCH 256
#define STACK ((size_t)1 << 20)

static pthread_mutex_t start_lock = PTHREAD_MUTEX_INITIALIZER;
static bool started, waited, prepared;
static int listener = -1;
static ino_t listener_inode;
static int state; /* enum resident_state; the agent's own */
static int64_t lease, lease_end, last_parked = NEVER;
static bool leaving; /* the process exits; under table_lock */

static struct sockaddr_un own_address(void)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};

	snprintf(address.sun_path, sizeof address.sun_path, "%s/agent-%d", holding_directory(),
	    getpid());
	return address;
}

/* After a restore it is another socket with the same name. A client may have connected to it before
 * we ran again, and would wait for an answer. */
static bool listens_at_our_address(int socket)
{
	struct sockaddr_un address = own_address(), found = {0};
	socklen_t length = sizeof found, size = sizeof(int);
	int accepts = 0;

	return getsockopt(socket, SOL_SOCKET, SO_ACCEPTCONN, &accepts, &size) == 0 && accepts &&
	    getsockname(socket, (void *)&found, &length) == 0 && found.sun_family == AF_UNIX &&
	    strncmp(found.sun_path, address.sun_path, sizeof found.sun_path) == 0;
}

static bool listening(void)
{
	struct stat found;

	if (listener < 0 || fstat(listener, &found))
		return false;
	/* an application may have closed ours, and got the number for a file of its own */
	if (found.st_ino != listener_inode) {
		if (!S_ISSOCK(found.st_mode) || !listens_at_our_address(listener))
			return false;
		listener_inode = found.st_ino;
	}
	return true;
}

static bool listen_again(void)
{
	struct sockaddr_un address = own_address();
	struct stat found;
	int made = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	if (made < 0)
		return false;
	unlink(address.sun_path);
	if (bind(made, (void *)&address, sizeof address) || chmod(address.sun_path, 0600) ||
	    listen(made, 16)) {
		close(made);
		return false;
	}
	made = descriptor_high(made);
	if (fstat(made, &found)) {
		close(made);
		return false;
	}
	listener_inode = found.st_ino;
	__atomic_store_n(&listener, made, __ATOMIC_RELEASE);
	return true;
}

static void run_on(void)
{
	threads_park_end();
	state = RESIDENT_RUNNING;
}

static int park(const struct resident_message *wanted, struct resident_message *answer)
{
	if (state == RESIDENT_UNMAPPED)
		return EALREADY;
	physical_looked_at(0);
	last_parked = clock_now();
	int error = threads_park_begin(
	    clock_now() + (int64_t)wanted->nanoseconds, (int64_t)wanted->requested, answer);
	if (error == 0 || error == EAGAIN)
		state = RESIDENT_PARKED;
	else
		state = RESIDENT_RUNNING;
	return error;
}

static int unmap(const struct resident_message *wanted, struct resident_message *answer)
{
	int error;

	if (state != RESIDENT_PARKED)
		return state == RESIDENT_UNMAPPED ? EALREADY : EINVAL;
	error = window_unmap(clock_now() + (int64_t)wanted->nanoseconds, wanted, answer);
	if (!error) {
		state = RESIDENT_UNMAPPED;
		table_counts.windows++;
		return 0;
	}
	table_counts.cancelled++;
	/* as before; what cannot be mapped now is retried when the lease ends */
	if (window_map())
		state = RESIDENT_UNMAPPED;
	else
		run_on();
	return error;
}

static int receive_descriptors(int from, uint32_t some)
{
	struct resident_message message;
	int descriptor, error = 0;

	while (some--) { /* all of them, or who sends would not hear why */
		if (packet_receive(from, &message, &descriptor, 0) != 1)
			return EPROTO;
		if (state == RESIDENT_UNMAPPED && !error)
			error = descriptor < 0 ? EMFILE : window_give(message.identity, descriptor);
		else if (descriptor >= 0)
			close(descriptor); /* it has its memory, and nothing made room for these */
	}
	return error;
}

static int map(int from, const struct resident_message *wanted)
{
	int error = wanted->count ? receive_descriptors(from, wanted->count) : 0;

	if (!error && state == RESIDENT_UNMAPPED)
		error = window_map();
	if (!error && state == RESIDENT_UNMAPPED)
		state = RESIDENT_PARKED;
	window_drop_given();
	return error;
}

/* Between park and unmap, the holder of the lock may wait for a parked thread. */
static bool lock_for_a_while(void)
{
	struct timespec limit;

	clock_gettime(CLOCK_REALTIME, &limit);
	limit.tv_sec += 2;
	return pthread_mutex_timedlock(&table_lock, &limit) == 0;
}

static int list(int to)
{
	int result = 0;

	if (!lock_for_a_while())
		return -1;
	for (struct allocation *at = NULL; !result && (at = table_next_held(at));) {
		if (at->kind == KIND_SPARE)
			continue;
		struct resident_message one = {.version = RESIDENT_VERSION,
		    .operation = AGENT_LIST,
		    .identity = at->identity,
		    .address = at->address,
		    .size = at->size,
		    .requested = at->requested,
		    .ordinal = at->device,
		    .pid = getpid(),
		    .state = at->mapped,
		    .flags = (at->held ? RESIDENT_HELD : 0) |
			(table_imported(at)    ? RESIDENT_IMPORTED
				: at->exported ? RESIDENT_EXPORTED
					       : 0)};
		memcpy(one.device, devices_uuid(at->device), 16);
		memcpy(one.token, holding_process_token, 16);
		result = packet_send(to, &one, -1);
	}
	pthread_mutex_unlock(&table_lock);
	return result;
}

static uint64_t count_unheld(void)
{
	uint64_t some = 0;

	for (struct allocation *at = NULL; (at = table_next_held(at));)
		some += !at->held;
	return some;
}

static bool is_lacking(const struct allocation *at, int64_t now, int64_t age)
{
	/* a restore may have set the clock back */
	return !at->held && (at->since > now || now - at->since >= age);
}

/* Give the keeper what it lacks and is so old (nanoseconds), until a time; return whether some is
 * left. Between two, other threads get the lock. */
static bool hand_over(int64_t age, int64_t until)
{
	CUdeviceptr some[BATCH];
	size_t count, given;

	do {
		count = given = 0;
		pthread_mutex_lock(&table_lock);
		int64_t now = clock_now();
		bool possible = holding_socket() >= 0 && !leaving;
		for (struct allocation *at = NULL;
		     possible && count < BATCH && (at = table_next_held(at));)
			if (is_lacking(at, now, age))
				some[count++] = at->address;
		pthread_mutex_unlock(&table_lock);
		for (size_t i = 0; i < count; i++) {
			if (clock_now() >= until)
				return true;
			pthread_mutex_lock(&table_lock);
			struct allocation *at = leaving ? NULL : table_find(some[i]);
			/* else it was released meanwhile */
			if (at && !table_only_noted(at) && at->kind != KIND_MAPPING) {
				holding_hand_over(at);
				given += at->held;
			}
			pthread_mutex_unlock(&table_lock);
			nanosleep(&(struct timespec){0, LET_OTHERS_NANOSECONDS}, NULL);
		}
	} while (count == BATCH && given);
	return false;
}

/* The same, also without a connection: the keeper may be another one, and gets everything then. */
static bool complete(int64_t age, int64_t until)
{
	pthread_mutex_lock(&table_lock);
	if (holding_socket() < 0)
		holding_close(); /* the application may have closed it */
	pthread_mutex_unlock(&table_lock);
	if (hand_over(age, until))
		return true;
	pthread_mutex_lock(&table_lock);
	int64_t now = clock_now();
	bool connected = holding_socket() >= 0, lacking = false;
	for (struct allocation *at = NULL; !leaving && (at = table_next_held(at));)
		if (is_lacking(at, now, age)) {
			lacking = true;
			if (connected) /* allocated meanwhile */
				holding_hand_over(at);
		}
	if (lacking && !connected)
		holding_complete();
	pthread_mutex_unlock(&table_lock);
	return false;
}

static void serve(int from)
{
	struct resident_message wanted, answer = {.version = RESIDENT_VERSION};
	struct ucred peer;
	socklen_t length = sizeof peer;

	packet_limit(from, LIMIT_SECONDS);
	if (getsockopt(from, SOL_SOCKET, SO_PEERCRED, &peer, &length) ||
	    (peer.uid != 0 && peer.uid != geteuid()))
		return;
	if (packet_receive(from, &wanted, NULL, 0) != 1 || wanted.version != RESIDENT_VERSION)
		return; /* an older client would store shared memory once for each process */
	answer.operation = wanted.operation;
	if (wanted.lease)
		lease = (int64_t)wanted.lease;
	switch (wanted.operation) {
	case AGENT_STATUS:
		if (wanted.flags & RESIDENT_HAND_OVER && state == RESIDENT_RUNNING)
			complete(0, clock_now() + HAND_OVER_NANOSECONDS);
		if (!lock_for_a_while()) {
			answer.result = EBUSY;
			break;
		}
		table_counts.unheld = count_unheld();
		memcpy(answer.text, &table_counts, sizeof table_counts);
		pthread_mutex_unlock(&table_lock);
		break;
	case AGENT_LIST:
		if (list(from))
			return;
		answer.operation = AGENT_END;
		break;
	case AGENT_PARK:
		answer.result = park(&wanted, &answer);
		break;
	case AGENT_UNMAP:
		answer.result = unmap(&wanted, &answer);
		break;
	case AGENT_MAP:
		answer.result = map(from, &wanted);
		break;
	case AGENT_GO:
		if (state == RESIDENT_UNMAPPED)
			answer.result = EINVAL;
		else
			run_on();
		break;
	case AGENT_LEASE:
		break;
	case AGENT_REFRESH:
		if (!lock_for_a_while()) {
			answer.result = EBUSY;
			break;
		}
		answer.result = state == RESIDENT_UNMAPPED ? EINVAL
		    : holding_renew()                      ? 0
							   : ENOTCONN;
		pthread_mutex_unlock(&table_lock);
		break;
	case AGENT_LOOK:
		physical_looked_at((int64_t)(wanted.nanoseconds < LONGEST_LOOK_NANOSECONDS
			? wanted.nanoseconds
			: LONGEST_LOOK_NANOSECONDS));
		break;
	default:
		answer.result = EINVAL;
	}
	answer.state = (uint32_t)state;
	answer.pid = getpid();
	memcpy(answer.token, holding_process_token, 16);
	lease_end = clock_now() + lease;
	packet_send(from, &answer, -1);
}

/* Nobody has said anything for the length of the lease. */
static void go_back(void)
{
	if (state == RESIDENT_UNMAPPED && window_map()) {
		lease_end = clock_now() + 1000000000ll;
		return;
	}
	run_on();
}

/* Return whether there is more to be done soon. */
static bool tend_keeper(bool lost)
{
	int64_t passed = clock_now() - last_parked;

	pthread_mutex_lock(&table_lock);
	if (lost)
		holding_close();
	bool cut = holding_socket() < 0;
	pthread_mutex_unlock(&table_lock);
	/* A dumper may have the driver's lock, for which an export waits; whoever dumps asks for
	 * what is lacking. */
	if (passed >= 0 && passed <= WINDOW_NANOSECONDS && !cut)
		return false;
	return complete(SETTLED_NANOSECONDS, clock_now() + BURST_NANOSECONDS);
}

static void at_exit(void)
{
	spare_at_exit();
	threads_enter(); /* not parked with the lock */
	/* The agent does not call the driver any more, which ends next. */
	if (lock_for_a_while()) {
		leaving = true;
		pthread_mutex_unlock(&table_lock);
	}
	threads_leave();
}

static void *agent(void *unused)
{
	int64_t last = clock_now();
	bool more = false;
	sigset_t all;

	(void)unused;
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, NULL);
	pthread_setname_np(pthread_self(), "icecore-agent");
	if (threads_start())
		return NULL;
	/* Calls of ours that another thread's capture does not allow would make it fail. */
	int mode = CAPTURE_MODE_RELAXED;
	if (driver()->cuThreadExchangeStreamCaptureMode)
		driver()->cuThreadExchangeStreamCaptureMode(&mode);
	pthread_mutex_lock(&table_lock);
	holding_token(); /* by which clients know the process, also without any memory */
	pthread_mutex_unlock(&table_lock);
	for (;;) {
		if (!listening() && !listen_again()) {
			poll(NULL, 0, TICK_MILLISECONDS);
			continue;
		}
		int keeper = -1;
		int tick = more ? BURST_PAUSE_MILLISECONDS : TICK_MILLISECONDS;
		/* else the holder of the lock may wait for a parked thread */
		if (state == RESIDENT_RUNNING) {
			pthread_mutex_lock(&table_lock);
			keeper = holding_socket();
			pthread_mutex_unlock(&table_lock);
		}
		struct pollfd ready[2] = {
		    {.fd = listener, .events = POLLIN}, {.fd = keeper, .events = 0}};
		poll(ready, 2, state == RESIDENT_RUNNING ? tick : TICK_PARKED_MILLISECONDS);
		/* serving a client renews the lease by itself: a freeze right after that counts as
		 * one */
		int64_t before = last;
		last = clock_now();
		if (state != RESIDENT_RUNNING &&
		    (last - before > FROZEN_NANOSECONDS || last < before))
			lease_end = last + lease; /* it was frozen, or is another instance */
		if (ready[0].revents) {
			int client = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
			if (client >= 0) {
				serve(client);
				close(client);
			}
		} else if (state != RESIDENT_RUNNING && clock_now() > lease_end) {
			go_back();
			last = clock_now();
		}
		if (state == RESIDENT_RUNNING)
			/* it died: another one gets everything */
			more = tend_keeper(keeper >= 0 && ready[1].revents);
		/* a restore may have set the clock back */
		int64_t passed = clock_now() - last_parked;
		if (state == RESIDENT_RUNNING && (passed < 0 || passed > WINDOW_NANOSECONDS))
			spare_give_back_old();
	}
	return NULL;
}

static void in_child(void)
{
	pthread_mutex_init(&start_lock, NULL);
	copies_in_child();
	if (listening())
		close(listener);
	listener = -1;
	state = RESIDENT_RUNNING;
	started = waited = leaving = false;
	last_parked = NEVER;
}

/* Start the agent, and wait for so long (nanoseconds) until it listens; return whether it does. */
static bool start_within(int64_t limit)
{
	pthread_attr_t attributes;
	pthread_t made;

	if (__atomic_load_n(&listener, __ATOMIC_ACQUIRE) >= 0)
		return true;
	pthread_mutex_lock(&start_lock);
	if (!started) {
		if (!prepared) {
			fork_watch(in_child);
			atexit(at_exit);
		}
		prepared = true;
		pthread_attr_init(&attributes);
		pthread_attr_setstacksize(&attributes, STACK);
		pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
		sigset_t all, before;
		sigfillset(&all);
		/* the agent inherits it: no handler of the application's ever runs in it */
		pthread_sigmask(SIG_BLOCK, &all, &before);
		if (pthread_create(&made, &attributes, agent, NULL) == 0)
			started = true;
		pthread_sigmask(SIG_SETMASK, &before, NULL);
		pthread_attr_destroy(&attributes);
	}
	/* An agent must listen before there is resident memory, even if another thread has started
	 * it: a dump takes mapped memory without an agent for the driver's. */
	for (int64_t until = clock_now() + limit; started && !waited &&
	    __atomic_load_n(&listener, __ATOMIC_ACQUIRE) < 0 && clock_now() < until;)
		poll(NULL, 0, 1);
	waited = waited || limit >= START_NANOSECONDS;
	bool listens = listener >= 0;
	pthread_mutex_unlock(&start_lock);
	return listens;
}

static bool start(void)
{
	return start_within(START_NANOSECONDS);
}

static void start_soon(void)
{
	start_within(START_SOON_NANOSECONDS);
}

bool (*const start_agent)(void) = start;
void (*const start_agent_soon)(void) = start_soon;
