/* The keeper: holds the descriptors of a job's GPU memory, so that the memory outlives the process
 * that allocated it.
 *
 *     icecore-keeper SOCKET [UID]
 *
 * UID is the user whose job it is, if not the keeper's own. That user owns the directory, so it is
 * touched with that user's rights only. The keeper talks to its own user, to root and to UID.
 *
 * It does nothing whose failure could lose a descriptor: no CUDA, no threads, no files except for
 * one line of the status file that it was given and a check whether a program still exists. Its
 * memory is locked, and the OOM killer chooses it last. It is written in C, because an interpreter
 * is many times larger and allocates at every message. It lets go of a process's memory when the
 * process frees it, ends, or executes another program, unless the process was parked then (its
 * memory exists only in the descriptors), or is in a snapshot of a job whose memory is to outlive a
 * crash (KEEPER_KEEP). The keeper ends when its socket has been unlinked and no process is left:
 * nobody could ask for what it still holds.
 */

#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/fsuid.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>

#include "packet.h"

#define LIMIT_SECONDS 2
#define IDLE_NANOSECONDS 300000000000ll /* without any process */
#define LOOK_MILLISECONDS 2000

struct held {
	struct resident_message what;
	int descriptor;
	bool stale;
};

struct process {
	struct process *next;
	uint8_t token[16];
	int pid, pidfd; /* pidfd: -1 once it has ended */
	/* tells whether the program that said hello still is, which a process may replace by
	 * another (exec); -1: nothing does */
	int image;
	bool alive, retained;
	bool kept; /* once it has ended, unless its job ends well */
	bool left; /* it has ended, and is retained for that alone */
	uint64_t lease; /* nanoseconds for which it is while the job runs on */
	int64_t let_go; /* when that is over; 0: never */
	struct held *held;
	size_t count, room;
	struct connection *connection;
};

struct connection {
	struct connection *next;
	int socket;
	bool job; /* of the job's user: it does not decide whether memory outlives the job */
	struct process *process; /* that said hello here */
	bool closed;
};

enum job_state { JOB_UNKNOWN, JOB_RUNS, JOB_ENDED, JOB_BROKE };

/* That of the processes that are kept. How it ended its init has written down
 * (icecore/host/jobs/init.c): nobody else sees it of a job that is nobody's child, and of a program
 * that knows nothing of us. */
static struct job {
	enum job_state state;
	int pidfd, status;
} job = {JOB_UNKNOWN, -1, -1};

static struct process *processes;
static struct connection *connections;
static int events;

static int64_t now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000ll + time.tv_nsec;
}

static void watch(int descriptor, void *what)
{
	struct epoll_event event = {.events = EPOLLIN, .data.ptr = what};

	epoll_ctl(events, EPOLL_CTL_ADD, descriptor, &event);
}

static struct process *find(const uint8_t *token)
{
	struct process *process = processes;

	while (process && memcmp(process->token, token, 16))
		process = process->next;
	return process;
}

static struct process *make(const uint8_t *token)
{
	struct process *process = find(token);

	if (process)
		return process;
	process = calloc(1, sizeof *process);
	if (!process)
		return NULL;
	memcpy(process->token, token, 16);
	process->pidfd = process->image = -1;
	process->next = processes;
	return processes = process;
}

static void drop(struct process *process, size_t index)
{
	close(process->held[index].descriptor);
	process->held[index] = process->held[--process->count];
}

static void drop_all(struct process *process)
{
	while (process->count)
		drop(process, process->count - 1);
}

static size_t place(const struct process *process, uint64_t identity)
{
	size_t index = 0;

	while (index < process->count && process->held[index].what.identity != identity)
		index++;
	return index;
}

/* Takes over the descriptor. Without one, the held one stays and is described anew. */
static int hold(struct process *process, const struct resident_message *what, int descriptor)
{
	size_t index = place(process, what->identity);

	if (descriptor < 0) {
		if (index == process->count)
			return ENOENT;
		descriptor = process->held[index].descriptor;
	} else if (index == process->count) {
		if (process->count == process->room) {
			size_t room = process->room ? 2 * process->room : 64;
			struct held *more = realloc(process->held, room * sizeof *more);
			if (!more) {
				close(descriptor);
				return ENOMEM;
			}
			process->held = more;
			process->room = room;
		}
		process->count++;
	} else
		close(process->held[index].descriptor);
	process->held[index] = (struct held){.what = *what, .descriptor = descriptor};
	memcpy(process->held[index].what.token, process->token, 16);
	return 0;
}

static void close_watches(struct process *process)
{
	if (process->pidfd >= 0)
		close(process->pidfd);
	if (process->image >= 0)
		close(process->image);
	process->pidfd = process->image = -1;
}

static void ended(struct process *process)
{
	close_watches(process);
	process->alive = false;
	if (process->retained)
		return;
	process->left =
	    process->kept && process->count && (job.state == JOB_RUNS || job.state == JOB_BROKE);
	process->retained = process->left;
	process->let_go = job.state == JOB_RUNS ? now() + (int64_t)process->lease : 0;
	if (!process->left)
		drop_all(process);
}

static void let_go(struct process *process)
{
	process->retained = process->left = false;
	drop_all(process);
}

/* Of what ended while its job runs on: how many processes' memory was kept until then. */
static uint32_t yield(void)
{
	uint32_t some = 0;

	for (struct process *process = processes; process && job.state == JOB_RUNS;
	    process = process->next)
		if (process->left) {
			let_go(process);
			some++;
		}
	return some;
}

static void forget_job(void)
{
	if (job.pidfd >= 0)
		close(job.pidfd);
	if (job.status >= 0)
		close(job.status);
	job = (struct job){JOB_UNKNOWN, -1, -1};
}

/* An init that recorded no status was killed, and its job with it. */
static void job_ended(void)
{
	char line[16] = "";
	bool well = pread(job.status, line, sizeof line - 1, 0) > 0 && !strcmp(line, "exited 0\n");

	forget_job();
	job.state = well ? JOB_ENDED : JOB_BROKE;
	for (struct process *process = processes; process; process = process->next) {
		process->let_go = 0;
		if (process->left && well)
			let_go(process);
	}
}

static bool is_over(int pidfd)
{
	struct pollfd look = {.fd = pidfd, .events = POLLIN};

	return pidfd >= 0 && poll(&look, 1, 0) > 0;
}

/* A file of /proc's that was opened belongs to the address space of that moment. Of one that is
 * gone nothing is read; else the kernel says that it does not read single bytes of this file, and
 * that without waiting for a lock of the process's. */
static bool is_replaced(int image)
{
	char byte;

	return image >= 0 && pread(image, &byte, 1, 0) == 0;
}

static int open_image(int pid)
{
	char path[32], own[16] = "";
	int image = -1;

	/* else its numbers are not those that we know */
	if (readlink("/proc/self", own, sizeof own - 1) > 0 && atoi(own) == getpid()) {
		snprintf(path, sizeof path, "/proc/%d/pagemap", pid);
		image = open(path, O_RDONLY | O_CLOEXEC);
	}
	if (image >= 0 && is_replaced(image)) { /* its first thread has ended: nothing is told */
		close(image);
		image = -1;
	}
	return image;
}

/* A connection closes when a program is replaced, but not only then: an application may close every
 * descriptor that it finds, and be stopped before it calls us again. */
static void look_for_replaced(void)
{
	for (struct process *process = processes; process; process = process->next)
		if (process->alive && !process->retained && !process->connection &&
		    is_replaced(process->image))
			ended(process);
}

/* A process that has ended is known to have ended, although its event may not have been seen yet.
 */
static void look_around(void)
{
	look_for_replaced();
	for (struct process *process = processes; process; process = process->next)
		if (is_over(process->pidfd))
			ended(process);
	if (is_over(job.pidfd))
		job_ended();
}

/* Without a status file: not any more. */
static int keep(const struct resident_message *message, int status)
{
	struct process *process = find(message->token);
	int init;

	if (!process || !process->alive) {
		if (status >= 0)
			close(status);
		return ENOENT;
	}
	process->kept = status >= 0;
	if (!process->kept)
		return 0;
	init = message->pid > 0 ? (int)syscall(SYS_pidfd_open, message->pid, 0) : -1;
	if (init < 0 && message->pid > 0 && errno != ESRCH) { /* nothing is known of it */
		int error = errno;
		close(status);
		process->kept = false;
		return error;
	}
	process->lease = message->lease;
	forget_job();
	job = (struct job){JOB_RUNS, init, status};
	if (job.pidfd >= 0)
		watch(job.pidfd, &job);
	else
		job_ended();
	return 0;
}

static void forget_empty(void)
{
	for (struct process **at = &processes; *at;) {
		struct process *process = *at;
		if (process->alive || process->count || process->connection) {
			at = &process->next;
			continue;
		}
		*at = process->next;
		free(process->held);
		free(process);
	}
}

static int hello(struct connection *connection, const struct resident_message *message)
{
	struct ucred peer;
	socklen_t length = sizeof peer;
	struct process *process = make(message->token);

	if (!process)
		return ENOMEM;
	if (getsockopt(connection->socket, SOL_SOCKET, SO_PEERCRED, &peer, &length))
		return errno;
	look_for_replaced();
	if (process->alive && process->pid != peer.pid && !is_over(process->pidfd))
		return EBUSY; /* two copies of one process need a keeper each */
	for (struct process *other = processes; other; other = other->next)
		if (other != process && other->alive && other->pid == peer.pid && peer.pid > 0 &&
		    !other->retained && !other->connection && other->image < 0)
			/* of the same process, and nothing else tells that it was replaced */
			ended(other);
	if (!process->kept)
		yield(); /* the job goes on with others */
	close_watches(process);
	process->image = peer.pid > 0 ? open_image(peer.pid) : -1;
	process->pidfd = peer.pid > 0 ? (int)syscall(SYS_pidfd_open, peer.pid, 0) : -1;
	process->pid = peer.pid;
	process->alive = true;
	process->retained = process->left = false;
	if (process->pidfd >= 0)
		watch(process->pidfd, process);
	if (process->connection)
		process->connection->process = NULL;
	process->connection = connection;
	connection->process = process;
	return 0;
}

static void sum(const struct process *process, struct resident_message *answer)
{
	for (size_t i = 0; i < process->count; i++) {
		answer->count++;
		answer->identity += process->held[i].what.identity;
		answer->size += process->held[i].what.size;
	}
}

/* -1: the connection is to be closed. */
static int list_processes(int to, uint32_t version)
{
	for (struct process *process = processes; process; process = process->next) {
		struct resident_message one = {
		    .version = version, .operation = KEEPER_PROCESSES, .pid = process->pid};
		memcpy(one.token, process->token, 16);
		one.flags =
		    (process->alive ? KEEPER_ALIVE : 0) | (process->retained ? KEEPER_RETAINED : 0);
		sum(process, &one);
		if (packet_send(to, &one, -1))
			return -1;
	}
	return 0;
}

static int list(int to, const struct resident_message *message)
{
	struct process *process = find(message->token);

	for (size_t i = 0; process && i < process->count; i++) {
		struct resident_message one = process->held[i].what;
		one.operation = message->operation;
		one.version = message->version;
		one.pid = process->pid;
		if (packet_send(to, &one,
			message->operation == KEEPER_TAKE ? process->held[i].descriptor : -1))
			return -1;
	}
	return 0;
}

/* One message; -1: the connection is to be closed. */
static int serve(struct connection *connection)
{
	struct resident_message message, answer = {0};
	struct process *process = connection->process;
	int descriptor,
	    got = packet_receive(connection->socket, &message, &descriptor, MSG_DONTWAIT);
	size_t index;

	if (got < 0 && errno == EAGAIN)
		return 0;
	if (got <= 0)
		return -1;
	answer.version = message.version;
	answer.operation = message.operation;
	if (message.operation > KEEPER_HELLO && message.operation <= KEEPER_PARKED && !process) {
		if (descriptor >= 0)
			close(descriptor);
		return -1;
	}
	switch (message.operation) {
	case KEEPER_HELLO:
		answer.result = hello(connection, &message);
		break;
	case KEEPER_HOLD:
		hold(process, &message, descriptor);
		return 0;
	case KEEPER_FREE:
		index = place(process, message.identity);
		if (index < process->count)
			drop(process, index);
		else
			answer.result = ENOENT;
		break;
	case KEEPER_RESYNC:
		for (index = 0; index < process->count; index++)
			process->held[index].stale = true;
		return 0;
	case KEEPER_RESYNCED:
		for (index = process->count; index-- > 0;)
			if (process->held[index].stale)
				drop(process, index);
		sum(process, &answer);
		break;
	case KEEPER_CONFIRM:
		sum(process, &answer);
		break;
	case KEEPER_PARKED:
		process->retained = true;
		break;
	case KEEPER_PROCESSES:
		look_around();
		if (list_processes(connection->socket, message.version))
			return -1;
		answer.operation = KEEPER_END;
		break;
	case KEEPER_LIST:
	case KEEPER_TAKE:
		if (list(connection->socket, &message))
			return -1;
		answer.operation = KEEPER_END;
		break;
	case KEEPER_FETCH:
		process = find(message.token);
		index = process ? place(process, message.identity) : 0;
		if (process && !process->left && index < process->count) {
			answer = process->held[index].what;
			answer.version = message.version;
			answer.operation = message.operation;
			answer.result = packet_send(
			    connection->socket, &answer, process->held[index].descriptor);
			if (descriptor >= 0)
				close(descriptor);
			return answer.result;
		}
		answer.result = ENOENT;
		break;
	case KEEPER_PUT:
		process = make(message.token);
		if (process && descriptor >= 0) {
			process->retained = true;
			answer.result = hold(process, &message, descriptor);
			descriptor = -1;
		} else
			answer.result = process ? EINVAL : ENOMEM;
		break;
	case KEEPER_RETAIN:
		process = find(message.token);
		if (process) {
			process->retained = message.count != 0;
			process->left = false;
			if (!process->alive && !process->retained)
				drop_all(process);
		} else
			answer.result = ENOENT;
		break;
	case KEEPER_FORGET:
		process = find(message.token);
		if (process)
			let_go(process);
		else
			answer.result = ENOENT;
		break;
	case KEEPER_KEEP:
		if (connection->job) {
			answer.result = EPERM;
			break;
		}
		answer.result = keep(&message, descriptor);
		descriptor = -1;
		break;
	case KEEPER_YIELD:
		look_around();
		answer.count = yield();
		break;
	case KEEPER_DROP:
		look_around();
		process = find(message.token);
		index = process ? place(process, message.identity) : 0;
		if (process && process->alive)
			answer.result = EBUSY;
		else if (process && index < process->count)
			drop(process, index);
		else
			answer.result = ENOENT;
		break;
	default:
		answer.result = EINVAL;
	}
	if (descriptor >= 0)
		close(descriptor);
	return packet_send(connection->socket, &answer, -1);
}

static void hang_up(struct connection *connection)
{
	epoll_ctl(events, EPOLL_CTL_DEL, connection->socket, NULL);
	close(connection->socket);
	connection->closed = true;
	if (connection->process) {
		struct process *process = connection->process;
		process->connection = NULL;
		connection->process = NULL;
		/* not visible from here: its connection is all that is known of it */
		if (process->pidfd < 0)
			ended(process);
	}
}

static void sweep(void)
{
	for (struct connection **at = &connections; *at;) {
		struct connection *connection = *at;
		if (!connection->closed) {
			at = &connection->next;
			continue;
		}
		*at = connection->next;
		free(connection);
	}
	forget_empty();
}

static uid_t owner; /* the job's user */

static void greet(int listener)
{
	struct ucred peer;
	socklen_t length = sizeof peer;
	int found = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	struct connection *connection;

	if (found < 0)
		return;
	if (getsockopt(found, SOL_SOCKET, SO_PEERCRED, &peer, &length) ||
	    (peer.uid != 0 && peer.uid != geteuid() && peer.uid != owner) ||
	    !(connection = calloc(1, sizeof *connection))) {
		close(found);
		return;
	}
	packet_limit(found, LIMIT_SECONDS);
	connection->socket = found;
	connection->job = peer.uid != 0 && peer.uid != geteuid();
	connection->next = connections;
	connections = connection;
	watch(found, connection);
}

static int listen_at(const char *path)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int found = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	if (found < 0)
		return -1;
	if (strlen(path) < sizeof address.sun_path)
		strcpy(address.sun_path, path);
	else {
		/* Longer than a socket's address may be: through the directory. */
		char folder[4096];
		const char *name = strrchr(path, '/');
		size_t length = name ? (size_t)(name - path) : 0;
		if (!name || length >= sizeof folder || strlen(name) > 60) {
			errno = ENAMETOOLONG;
			return -1;
		}
		memcpy(folder, path, length);
		folder[length] = 0;
		int directory = open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC);
		if (directory < 0)
			return -1;
		snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d%s", directory,
		    name);
	}
	if (connect(found, (void *)&address, sizeof address) == 0) {
		errno = EADDRINUSE;
		return -1;
	}
	unlink(path);
	umask(0077);
	if (bind(found, (void *)&address, sizeof address) || listen(found, 64))
		return -1;
	return found;
}

/* The path by way of its directory, which is opened: who started us may have named it through a
 * process (/proc/PID/root) that ends. */
static const char *pinned(const char *path)
{
	static char found[128];
	char folder[4096];
	const char *name = strrchr(path, '/');
	size_t length = name ? (size_t)(name - path) : 0;
	struct stat there;
	int directory;

	if (!name || !length || length >= sizeof folder || strlen(name) > 60)
		return path;
	memcpy(folder, path, length);
	folder[length] = 0;
	directory = open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (directory < 0)
		return path;
	snprintf(found, sizeof found, "/proc/self/fd/%d%s", directory, name);
	if (!stat(found, &there))
		return found;
	close(directory);
	return path; /* there is no /proc */
}

/* Whether somebody who comes now would find us. */
static bool is_found(const char *path, const struct stat *ours)
{
	struct stat there;

	if (stat(path, &there))
		return errno != ENOENT && errno != ENOTDIR;
	return there.st_ino == ours->st_ino && there.st_dev == ours->st_dev;
}

/* Somebody may still ask for what we hold. */
static bool is_used(void)
{
	for (struct process *process = processes; process; process = process->next)
		if (process->alive)
			return true;
	return connections != NULL;
}

static void harden(void)
{
	struct rlimit files;
	int adjustment = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);

	if (adjustment >= 0) {
		if (write(adjustment, "-1000", 5) != 5 && write(adjustment, "0", 1) != 1)
			(void)0; /* neither is permitted: it keeps what it inherited */
		close(adjustment);
	}
	if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
		struct rlimit more = {1 << 20, 1 << 20};
		if (setrlimit(RLIMIT_NOFILE, &more)) {
			files.rlim_cur = files.rlim_max;
			setrlimit(RLIMIT_NOFILE, &files);
		}
	}
	mlockall(MCL_CURRENT | MCL_FUTURE);
	signal(SIGPIPE, SIG_IGN);
	signal(SIGHUP, SIG_IGN);
	signal(SIGINT, SIG_IGN);
}

int main(int count, char **words)
{
	struct stat ours;
	const char *place;
	int64_t last_used = now();
	int listener;

	if (count != 2 && count != 3) {
		fprintf(stderr, "usage: icecore-keeper SOCKET [UID]\n");
		return 2;
	}
	owner = count == 3 ? (uid_t)strtoul(words[2], NULL, 10) : geteuid();
	events = epoll_create1(EPOLL_CLOEXEC);
	setfsuid(owner);
	listener = listen_at(words[1]);
	if (listener < 0 || events < 0 || stat(words[1], &ours)) {
		perror(words[1]);
		return errno == EADDRINUSE ? 3 : 1;
	}
	place = pinned(words[1]);
	setfsuid(geteuid());
	harden();
	watch(listener, NULL);
	printf("ready\n");
	fflush(stdout);
	for (;;) {
		struct epoll_event ready[16];
		int some = epoll_wait(events, ready, 16, LOOK_MILLISECONDS);
		for (int i = 0; i < some; i++) {
			void *what = ready[i].data.ptr;
			bool was_process = false;
			if (!what) {
				greet(listener);
				continue;
			}
			if (what == &job) {
				/* else the event was another's, before KEEPER_KEEP */
				if (is_over(job.pidfd))
					job_ended();
				continue;
			}
			for (struct process *process = processes; process && !was_process;
			    process = process->next)
				if (process == what) {
					was_process = true;
					/* else the event was of what it was before it came back */
					if (process->pidfd >= 0 && is_over(process->pidfd))
						ended(process);
				}
			if (!was_process && !((struct connection *)what)->closed && serve(what))
				hang_up(what);
		}
		look_for_replaced();
		for (struct process *process = processes; process; process = process->next)
			if (process->left && process->let_go && now() > process->let_go)
				let_go(process);
		sweep();
		if (processes)
			last_used = now();
		if (now() - last_used > IDLE_NANOSECONDS) {
			setfsuid(owner);
			if (is_found(place, &ours)) /* else it is another's by now */
				/* its job is over; one that is not gets another with its next dump
				 */
				unlink(place);
			return 0;
		}
		if (some == 0 && !is_used() && !is_found(place, &ours))
			return 0;
	}
}
