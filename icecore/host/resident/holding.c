/* The connection to the keeper. If the keeper dies, allocation and release continue, and a new
 * keeper gets everything once it answers.
 *
 * All functions but holding_fetch_of and holding_yielded require table_lock. An application that
 * closes every descriptor that it finds may have closed ours, and its number may now be a file of
 * the application's: each is compared with what was opened before it is used.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "clock.h"
#include "descriptors.h"
#include "devices.h"
#include "holding.h"
#include "packet.h"

#define LIMIT_SECONDS 2
#define RETRY_NANOSECONDS 500000000ll

uint8_t holding_process_token[16];

static int link_socket = -1;
static ino_t link_inode;
static int64_t not_before;
static bool has_token, was_connected;

const char *holding_directory(void)
{
	static const char *directory; /* from the environment that the process was started with */
	static int looked;

	if (!__atomic_load_n(&looked, __ATOMIC_ACQUIRE)) {
		const char *found = getenv(RESIDENT_VARIABLE);
		directory = found && *found && strlen(found) < 80 ? strdup(found) : NULL;
		__atomic_store_n(&looked, 1, __ATOMIC_RELEASE);
	}
	return directory;
}

bool holding_keeps(const struct allocation *what)
{
	return descriptor_is(what->descriptor, what->inode);
}

void holding_close_kept(struct allocation *what)
{
	if (descriptor_is(what->descriptor, what->inode))
		close(what->descriptor);
	what->descriptor = -1;
}

int holding_socket(void)
{
	return descriptor_is(link_socket, link_inode) ? link_socket : -1;
}

static void unheld(void)
{
	for (struct allocation *at = NULL; (at = table_next_held(at));)
		at->held = false;
}

void holding_close(void)
{
	if (holding_socket() >= 0)
		close(link_socket);
	link_socket = -1;
	unheld();
}

static struct resident_message about(const struct allocation *what, uint32_t operation)
{
	struct resident_message message = {
	    .version = RESIDENT_VERSION,
	    .operation = operation,
	    .identity = what->identity,
	    .address = what->address,
	    .size = what->size,
	    .requested = what->requested,
	    .ordinal = what->device,
	    .flags = table_imported(what) ? RESIDENT_IMPORTED
		: what->exported          ? RESIDENT_EXPORTED
					  : 0,
	    .pid = getpid(),
	};

	memcpy(message.device, devices_uuid(what->device), 16);
	memcpy(message.token, holding_process_token, 16);
	return message;
}

static bool ask(struct resident_message *message)
{
	if (packet_send(link_socket, message, -1) == 0 &&
	    packet_receive(link_socket, message, NULL, 0) == 1)
		return true;
	holding_close();
	return false;
}

bool holding_token(void)
{
	if (!has_token)
		has_token = getrandom(holding_process_token, sizeof holding_process_token, 0) ==
		    (ssize_t)sizeof holding_process_token;
	return has_token;
}

/* It gets the descriptors of all our memory: it must be root's, or our user's. */
static bool is_trusted(int connection)
{
	struct ucred peer;
	socklen_t length = sizeof peer;

	return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
	    (peer.uid == 0 || peer.uid == geteuid());
}

/* A connection, or -1. */
static int call_keeper(void)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int made = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	if (made < 0)
		return -1;
	packet_limit(made, LIMIT_SECONDS);
	snprintf(address.sun_path, sizeof address.sun_path, "%s/keeper", holding_directory());
	if (connect(made, (void *)&address, sizeof address) == 0 && is_trusted(made))
		return made;
	close(made);
	return -1;
}

static bool open_link(void)
{
	struct stat found;
	int made;

	if (holding_socket() >= 0)
		return true;
	holding_close();
	if (clock_now() < not_before || !holding_directory() || !holding_token())
		return false;
	not_before = clock_now() + RETRY_NANOSECONDS;
	made = call_keeper();
	if (made < 0)
		return false;
	made = descriptor_high(made);
	if (fstat(made, &found)) {
		close(made);
		return false;
	}
	link_socket = made;
	link_inode = found.st_ino;
	struct resident_message hello = {
	    .version = RESIDENT_VERSION, .operation = KEEPER_HELLO, .pid = getpid()};
	memcpy(hello.token, holding_process_token, 16);
	if (!ask(&hello))
		return false;
	if (hello.result) {
		holding_close();
		return false;
	}
	not_before = 0;
	was_connected = true;
	return true;
}

/* Without a descriptor, the keeper only gets a new description of what it holds. */
static bool hand_over(struct allocation *what, int descriptor)
{
	struct resident_message message = about(what, KEEPER_HOLD);

	if (packet_send(link_socket, &message, descriptor)) {
		holding_close();
		return false;
	}
	what->held = what->held || descriptor >= 0;
	return true;
}

/* A descriptor of one allocation on its way to the keeper: a child that is forked meanwhile closes
 * it. */
static int in_flight = -1;

static void close_in_flight(void)
{
	int descriptor = in_flight;

	in_flight = -1;
	if (descriptor >= 0)
		close(descriptor);
}

/* Exports it, or duplicates the one that was kept; false: not possible. */
static bool take_flight(const struct allocation *what)
{
	if (what->descriptor >= 0)
		in_flight = descriptor_is(what->descriptor, what->inode)
		    ? descriptor_duplicate(what->descriptor)
		    : -1;
	else if (!what->has_handle ||
	    driver()->cuMemExportToShareableHandle(
		&in_flight, what->handle, HANDLE_POSIX_DESCRIPTOR, 0))
		in_flight = -1;
	return in_flight >= 0;
}

static bool confirmed(struct resident_message *answer)
{
	uint64_t sum = 0;
	uint32_t count = 0;

	for (struct allocation *at = NULL; (at = table_next_held(at));) {
		count++;
		sum += at->identity;
	}
	return answer->result == 0 && answer->count == count && answer->identity == sum;
}

static bool resync(void)
{
	struct resident_message message = {.version = RESIDENT_VERSION, .operation = KEEPER_RESYNC};

	if (packet_send(link_socket, &message, -1)) {
		holding_close();
		return false;
	}
	for (struct allocation *at = NULL; (at = table_next_held(at));) {
		/* none: one that the application closed; if the keeper lacks it, that shows in the
		 * confirmation */
		take_flight(at);
		bool handed = hand_over(at, in_flight);
		close_in_flight();
		if (!handed)
			return false;
	}
	message.operation = KEEPER_RESYNCED;
	if (!ask(&message) || !confirmed(&message))
		return false;
	for (struct allocation *at = NULL; (at = table_next_held(at));)
		at->held = true;
	return true;
}

void holding_add(struct allocation *what, int descriptor)
{
	if (descriptor < 0 && !what->held)
		return; /* the keeper gets it with its descriptor */
	if (holding_socket() >= 0)
		hand_over(what, descriptor);
	else if (open_link())
		resync(); /* the new one with all others */
}

void holding_hello(void)
{
	bool again = was_connected;

	/* Meanwhile memory may have been released without the keeper's knowledge. */
	if (holding_socket() < 0 && open_link() && again)
		resync();
}

void holding_hand_over(struct allocation *what)
{
	if (what->held || holding_socket() < 0 || !take_flight(what))
		return;
	hand_over(what, in_flight);
	close_in_flight();
}

void holding_free(struct allocation *what)
{
	struct resident_message message = about(what, KEEPER_FREE);

	if (descriptor_is(what->descriptor, what->inode))
		close(what->descriptor);
	/* The keeper answers once it has closed its descriptor: only then is the memory free for
	 * the next allocation. */
	if (what->held && holding_socket() >= 0)
		ask(&message);
}

bool holding_complete(void)
{
	struct resident_message message = {
	    .version = RESIDENT_VERSION, .operation = KEEPER_CONFIRM};
	bool connected = holding_socket() >= 0;

	not_before = 0;
	if (!open_link())
		return false;
	/* over a new connection it is not known what the keeper has */
	for (struct allocation *at = NULL; connected && (at = table_next_held(at));)
		holding_hand_over(at);
	if (holding_socket() < 0)
		return open_link() && resync();
	if (ask(&message) && confirmed(&message)) {
		for (struct allocation *at = NULL; (at = table_next_held(at));)
			at->held = true;
		return true;
	}
	return open_link() && resync();
}

bool holding_replace(void)
{
	holding_close();
	not_before = 0;
	return open_link() && resync();
}

bool holding_renew(void)
{
	not_before = 0;
	for (struct allocation *at = NULL; (at = table_next_held(at));) {
		int made = -1;
		if (table_imported(at) || at->exported)
			continue; /* another export would be the same memory without being
				     recognised as such */
		if (at->has_handle &&
		    !driver()->cuMemExportToShareableHandle(
			&made, at->handle, HANDLE_POSIX_DESCRIPTOR, 0)) {
			if (descriptor_is(at->descriptor, at->inode))
				close(at->descriptor);
			at->descriptor = -1;
			close(made);
		}
	}
	return open_link() && resync();
}

bool holding_park(void)
{
	struct resident_message message = {.version = RESIDENT_VERSION, .operation = KEEPER_PARKED};

	return holding_complete() && ask(&message) && message.result == 0;
}

int holding_take(int (*each)(uint64_t identity, int descriptor))
{
	struct resident_message message = {.version = RESIDENT_VERSION, .operation = KEEPER_TAKE};
	int descriptor, result = 0;

	not_before = 0;
	if (!open_link())
		return ENOTCONN;
	memcpy(message.token, holding_process_token, 16);
	if (packet_send(link_socket, &message, -1))
		goto lost;
	for (;;) {
		if (packet_receive(link_socket, &message, &descriptor, 0) != 1)
			goto lost;
		if (message.operation == KEEPER_END)
			return result;
		if (descriptor < 0)
			result = result ? result : EMFILE; /* this process has none left */
		else if (!result)
			result = each(message.identity, descriptor);
		else
			close(descriptor);
	}
lost:
	holding_close();
	return ENOTCONN;
}

static uint64_t wanted;
static int fetched;

static int fetch(uint64_t identity, int descriptor)
{
	if (identity == wanted)
		fetched = descriptor;
	else
		close(descriptor);
	return 0;
}

int holding_fetch(const struct allocation *what)
{
	wanted = what->identity;
	fetched = -1;
	holding_take(fetch);
	return fetched;
}

/* Over a connection of its own: only processes with memory say hello. */
int holding_fetch_of(const uint8_t *token, uint64_t identity, size_t *size, int *descriptor)
{
	struct resident_message message = {
	    .version = RESIDENT_VERSION, .operation = KEEPER_FETCH, .identity = identity};
	int keeper = call_keeper(), error = ENOTCONN;

	*descriptor = -1;
	memcpy(message.token, token, sizeof message.token);
	if (keeper >= 0 && packet_send(keeper, &message, -1) == 0 &&
	    packet_receive(keeper, &message, descriptor, 0) == 1)
		error = message.result ? message.result : *descriptor < 0 ? EBADF : 0;
	if (keeper >= 0)
		close(keeper);
	if (error && *descriptor >= 0)
		close(*descriptor);
	*size = (size_t)message.size;
	return error;
}

/* Over a connection of its own, too: a thread that waits for memory may be within anything. */
bool holding_yielded(void)
{
	struct resident_message message = {.version = RESIDENT_VERSION, .operation = KEEPER_YIELD};
	int keeper = holding_directory() ? call_keeper() : -1;
	bool some = keeper >= 0 && packet_send(keeper, &message, -1) == 0 &&
	    packet_receive(keeper, &message, NULL, 0) == 1 && !message.result && message.count;

	if (keeper >= 0)
		close(keeper);
	return some;
}

/* What a child kept open, its parent could not free. */
void holding_in_child(void)
{
	for (struct allocation *at = NULL; (at = table_next_held(at));)
		holding_close_kept(at);
	close_in_flight();
	if (holding_socket() >= 0)
		close(link_socket);
	link_socket = -1;
	not_before = 0;
	has_token = was_connected = false;
}
