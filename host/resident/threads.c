/* Parking: every thread but ours and the driver's own waits in a signal's handler; rule: nobody is parked while it is in one of our calls (it may hold our
 * lock): such a thread parks itself as it leaves.
 *
 * Nor while it is in one of the driver's, as far as its stack tells (stack.c): the driver's lock waits until nobody is, and under threads that never rest it
 * waits for ever, because there is always another that has just gone in. So these are let go and asked again a moment later, when they may be outside; and
 * as those that are parked submit nothing more, the others' work comes to its end. Who is not met outside in time (or seems not to be: what a stack tells
 * may be old) runs on until the driver's lock is on, which then has few to wait for.
 *
 * The signal is the one with which the C library has every thread change its user id: applications cannot block it, nor wait for it, because the library
 * takes it out of their sets. Any other would be returned by a sigwait for all signals, and nothing tells from outside that a thread is in one. Ours come
 * with a value; what comes without is the library's, and passed on. Who blocks it all the same (not through the library) is helped from outside, by ptrace.
 *
 * What a parked thread may hold is the C library's: the allocator's lock, or the loader's. The driver would wait for it without end. So a thread of ours
 * takes each of these once everybody is parked; where it does not get them, everybody is let go, and another moment is tried.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "resident.h"

#define PARK_SIGNAL 33 /* SIGSETXID */
#define PARK_VALUE 0x69636563

#define SEATS 65536 /* threads that can be parked */
#define PASS_NANOSECONDS 2000000ll
#define PROBE_NANOSECONDS 300000000ll
#define SETTLE_NANOSECONDS 50000000ll
#define BLOCKED_NANOSECONDS 20000000ll /* the C library blocks signals for shorter than that */
#define AGAIN_NANOSECONDS 100000 /* between two looks at a thread that was in the driver, at most */

/* REPORTED: whoever was told of it sends the signal. LEAVING: parked in the driver, and let go. */
enum { ASKED = 1, BLOCKED, REPORTED, PARKED, INSIDE, LEAVING };

static struct seat {
	atomic_int thread, state;
	_Atomic(const ucontext_t *) interrupted; /* where it was, while that is of interest */
} seats[SEATS];

static atomic_int gate;     /* odd: closed */
static atomic_int arrivals; /* changes whenever somebody has parked, or is found inside */
static pid_t agent_thread, probe_thread;
static atomic_int probes_wanted, probes_done;
static unsigned seated, taken[SEATS / 2]; /* places taken in `seats` */

struct kernel_sigaction { /* the C library's own sigaction refuses this signal */
	union {
		void (*handler)(int, siginfo_t *, void *);
		void *plain;
	};
	unsigned long flags;
	void (*restorer)(void);
	unsigned long mask;
};
static struct kernel_sigaction librarys;

/* The signal's handler reads them: static storage, no lazy allocation. */
static __thread volatile sig_atomic_t inside __attribute__((tls_model("initial-exec")));
static __thread volatile sig_atomic_t asked_inside __attribute__((tls_model("initial-exec")));

int64_t now(void)
{
	struct timespec at;

	clock_gettime(CLOCK_MONOTONIC, &at);
	return at.tv_sec * 1000000000ll + at.tv_nsec;
}

static void sleep_until_changed(atomic_int *word, int value, int64_t nanoseconds)
{
	struct timespec limit = {nanoseconds / 1000000000ll, nanoseconds % 1000000000ll};

	syscall(SYS_futex, word, FUTEX_WAIT, value, nanoseconds < 0 ? NULL : &limit, NULL, 0);
}

static void wake(atomic_int *word)
{
	syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static pid_t self(void)
{
	return (pid_t)syscall(SYS_gettid);
}

static struct seat *find_seat(int thread)
{
	for (unsigned at = (unsigned)thread * 2654435761u % SEATS, tried = 0; tried < SEATS; at = (at + 1) % SEATS, tried++) {
		int found = atomic_load(&seats[at].thread);
		if (found == thread)
			return &seats[at];
		if (!found)
			return NULL;
	}
	return NULL;
}

static struct seat *take_seat(int thread)
{
	unsigned at = (unsigned)thread * 2654435761u % SEATS;

	if (seated >= SEATS / 2)
		return NULL;
	while (atomic_load(&seats[at].thread))
		at = (at + 1) % SEATS;
	taken[seated++] = at;
	atomic_store(&seats[at].thread, thread);
	return &seats[at];
}

static void arrive(struct seat *seat, int state)
{
	atomic_store(&seat->state, state);
	atomic_fetch_add(&arrivals, 1);
	wake(&arrivals);
}

static void sit(const ucontext_t *interrupted)
{
	int closed = atomic_load(&gate);
	struct seat *seat = closed & 1 ? find_seat(self()) : NULL;

	if (!seat)
		return; /* too late: the gate is open again, or closed anew and we are asked once more */
	atomic_store(&seat->interrupted, interrupted);
	arrive(seat, PARKED);
	while (atomic_load(&gate) == closed && atomic_load(&seat->state) == PARKED)
		sleep_until_changed(&seat->state, PARKED, -1);
	int let_go = LEAVING;
	atomic_compare_exchange_strong(&seat->state, &let_go, 0);
}

static void on_signal(int number, siginfo_t *info, void *context)
{
	int error = errno;
	struct seat *seat;

	if (info->si_code != SI_QUEUE || info->si_value.sival_int != PARK_VALUE) {
		if (librarys.plain && librarys.plain != SIG_IGN)
			librarys.handler(number, info, context);
		errno = error;
		return;
	}
	seat = find_seat(self());
	/* One that had blocked the signal was helped from outside; it finds its mask as it was. */
	if (seat && atomic_load(&seat->state) == REPORTED)
		*(unsigned long *)&((ucontext_t *)context)->uc_sigmask |= 1ul << (number - 1);
	if (seat && atomic_load(&gate) & 1) {
		if (inside) {
			asked_inside = 1;
			arrive(seat, INSIDE);
		} else
			sit(context);
	}
	errno = error;
}

void enter(void)
{
	inside++;
	atomic_signal_fence(memory_order_seq_cst);
}

void leave(void)
{
	atomic_signal_fence(memory_order_seq_cst);
	inside--;
	atomic_signal_fence(memory_order_seq_cst);
	if (!inside && asked_inside) {
		const unsigned long all = ~0ul;
		unsigned long before;
		int error = errno;
		asked_inside = 0;
		syscall(SYS_rt_sigprocmask, SIG_SETMASK, &all, &before, 8);
		sit(NULL);
		syscall(SYS_rt_sigprocmask, SIG_SETMASK, &before, NULL, 8);
		errno = error;
	}
}

/* Reads a small file of /proc without the allocator. */
static int read_small(const char *path, char *into, size_t size)
{
	int file = open(path, O_RDONLY | O_CLOEXEC), error;
	ssize_t got = file < 0 ? -1 : read(file, into, size - 1);

	error = errno;
	if (file >= 0)
		close(file);
	errno = error;
	into[got > 0 ? got : 0] = 0;
	return got > 0 ? 0 : -1;
}

enum { WATCHED, GONE, NOT_OURS, BLOCKS };

/* The driver calls its threads "cuda-EvtHandlr", "cuda00001400006", …; those of a program that is called like that inherit its name. */
static bool drivers_name(int thread, const char *name)
{
	char leader[32];

	if (strncmp(name, "cuda", 4) || (name[4] != '-' && (name[4] < '0' || name[4] > '9')) || thread == getpid())
		return false;
	return read_small("/proc/self/comm", leader, sizeof leader) || strncmp(name, leader, strlen(leader));
}

/* What is to be made of a thread that is not parked. */
static int look_at(int thread)
{
	char path[64], text[2048], *found;

	snprintf(path, sizeof path, "/proc/self/task/%d/status", thread);
	if (read_small(path, text, sizeof text))
		return errno == ENOENT || errno == ESRCH ? GONE : WATCHED;
	if (!(found = strstr(text, "\nState:\t")))
		return WATCHED;
	if (found[8] == 'Z' || found[8] == 'X')
		return GONE;
	if (drivers_name(thread, text + 6) || !strncmp(text, "Name:\tiou-", 10))
		return NOT_OURS;
	found = strstr(text, "\nSigBlk:\t");
	return found && (strtoull(found + 9, NULL, 16) >> (PARK_SIGNAL - 1) & 1) ? BLOCKS : WATCHED;
}

struct directory_entry {
	unsigned long long inode;
	long long offset;
	unsigned short length;
	unsigned char type;
	char name[];
};

#ifdef __x86_64__
#define RESTORER_FLAG 0x04000000ul
void resident_return_from_signal(void);
__asm__(".text\n.local resident_return_from_signal\n.type resident_return_from_signal, @function\n"
	"resident_return_from_signal:\n\tmov $15, %rax\n\tsyscall\n");
#else
#define resident_return_from_signal NULL /* the vDSO has it */
#define RESTORER_FLAG 0
#endif

static int claim_signal(void)
{
	struct kernel_sigaction found;

	if (syscall(SYS_rt_sigaction, PARK_SIGNAL, NULL, &found, 8))
		return errno;
	if (found.handler == on_signal)
		return 0;
	librarys = found;
	struct kernel_sigaction ours = {
		.handler = on_signal,
		/* Not blocked in its own handler: who is on the way out of it would look like one that blocks it, and be helped, and then block it for good.
		 * One that is asked again right there parks within the handler, which is as good as anywhere. */
		.flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK | SA_NODEFER | RESTORER_FLAG,
		.restorer = resident_return_from_signal,
		.mask = ~(1ul << (PARK_SIGNAL - 1)),
	};
	return syscall(SYS_rt_sigaction, PARK_SIGNAL, &ours, NULL, 8) ? errno : 0;
}

static long ask_to_park(int thread)
{
	siginfo_t info = {0};

	info.si_signo = PARK_SIGNAL;
	info.si_code = SI_QUEUE;
	info.si_pid = getpid();
	info.si_uid = getuid();
	info.si_value.sival_int = PARK_VALUE;
	return syscall(SYS_rt_tgsigqueueinfo, getpid(), thread, PARK_SIGNAL, &info);
}

/* One pass over all threads; the number of those that are not parked yet, or -1. `blocked` receives those that block the signal. */
static int pass(char *blocked, size_t room, bool ask)
{
	char entries[8192];
	int waiting = 0, tasks = open("/proc/self/task", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	size_t written = 0;
	long got;

	if (tasks < 0)
		return -1;
	if (room)
		blocked[0] = 0;
	while ((got = syscall(SYS_getdents64, tasks, entries, sizeof entries)) > 0) {
		for (long at = 0; at < got; at += ((struct directory_entry *)(entries + at))->length) {
			int thread = atoi(((struct directory_entry *)(entries + at))->name);
			if (thread <= 0 || thread == agent_thread || thread == probe_thread)
				continue;
			struct seat *seat = find_seat(thread);
			int state = seat ? atomic_load(&seat->state) : 0;
			if (state == PARKED)
				continue;
			int what = look_at(thread);
			if (what == GONE || what == NOT_OURS)
				continue;
			waiting++;
			if (state == LEAVING || state == ASKED || state == INSIDE || !ask || (state == REPORTED && what != BLOCKS))
				continue;
			if (!seat && !(seat = take_seat(thread))) {
				waiting = -1;
				goto out;
			}
			if (what == BLOCKS) {
				if (room - written <= 12)
					continue; /* told of with the next answer */
				if (state != REPORTED)
					atomic_store(&seat->state, BLOCKED);
				written += (size_t)snprintf(blocked + written, room - written, "%d ", thread);
				continue;
			}
			atomic_store(&seat->state, ASKED);
			if (ask_to_park(thread) && errno == EAGAIN)
				atomic_store(&seat->state, 0); /* too many signals pending: asked again in the next pass */
		}
	}
out:
	close(tasks);
	return waiting;
}

unsigned park_count(void)
{
	unsigned parked = 0;

	for (unsigned at = 0; at < seated; at++)
		parked += atomic_load(&seats[taken[at]].state) == PARKED;
	return parked;
}

void park_end(void)
{
	if (!(atomic_load(&gate) & 1))
		return;
	atomic_fetch_add(&gate, 1);
	for (unsigned at = 0; at < seated; at++) {
		struct seat *seat = &seats[taken[at]];
		int parked = PARKED;
		if (atomic_compare_exchange_strong(&seat->state, &parked, 0))
			wake(&seat->state);
	}
}

/* Lets those go on that were parked in the middle of a driver's call; their number. Who was outside is not looked at again. */
static unsigned let_busy_go(void)
{
	unsigned busy = 0;

	for (unsigned at = 0; at < seated; at++) {
		struct seat *seat = &seats[taken[at]];
		const ucontext_t *interrupted = atomic_load(&seat->interrupted);
		if (!interrupted || atomic_load(&seat->state) != PARKED)
			continue;
		if (!in_driver(interrupted)) {
			atomic_store(&seat->interrupted, NULL);
			continue;
		}
		busy++;
		atomic_store(&seat->interrupted, NULL);
		atomic_store(&seat->state, LEAVING);
		wake(&seat->state);
	}
	return busy;
}

static bool all_here_or_inside(void)
{
	for (unsigned at = 0; at < seated; at++) {
		int thread = atomic_load(&seats[taken[at]].thread), state = atomic_load(&seats[taken[at]].state);
		if (state != PARKED && state != INSIDE) {
			int what = look_at(thread);
			if (what != GONE && what != NOT_OURS)
				return false;
		}
	}
	return true;
}

/* Whether somebody was asked, or let go, and has not come, or gone, yet. */
static bool on_their_way(void)
{
	for (unsigned at = 0; at < seated; at++) {
		int state = atomic_load(&seats[taken[at]].state);
		if ((state == ASKED || state == LEAVING) && look_at(atomic_load(&seats[taken[at]].thread)) != GONE)
			return true;
	}
	return false;
}

static void report(void)
{
	for (unsigned at = 0; at < seated; at++) {
		int blocked = BLOCKED;
		atomic_compare_exchange_strong(&seats[taken[at]].state, &blocked, REPORTED);
	}
}

int park_begin(int64_t until, int64_t patience_for_busy, struct resident_message *answer)
{
	bool begun = atomic_load(&gate) & 1;
	int64_t patience = now() + BLOCKED_NANOSECONDS, brake_until = now() + patience_for_busy;
	uint64_t random_state = (uint64_t)now();
	int calm = 0, error = begun ? 0 : claim_signal();

	if (error)
		return error;
	if (!begun) {
		memset(seats, 0, sizeof seats);
		seated = 0;
		atomic_fetch_add(&gate, 1);
	}
	answer->ordinal = PARK_SIGNAL;
	for (;;) {
		bool asking = !patience_for_busy || now() < brake_until;
		int seen = atomic_load(&arrivals), waiting = pass(answer->text, sizeof answer->text, asking);
		if (waiting < 0) {
			park_end();
			return ENOSPC;
		}
		if (patience_for_busy) {
			unsigned busy = let_busy_go();
			if (!asking && !busy && !on_their_way()) {
				answer->flags = (uint32_t)waiting;
				answer->count = park_count();
				return 0;
			}
			if (busy && !answer->text[0] && now() < until) {
				/* Not woken by others' arrivals: those that were let go are to get out of the driver meanwhile. Each time another pause: at equal
				 * ones a thread that goes round with them is met at the same point for ever. */
				random_state = random_state * 6364136223846793005u + 1442695040888963407u;
				nanosleep(&(struct timespec){0, (long)((random_state >> 33) % AGAIN_NANOSECONDS)}, NULL);
				calm = 0;
				continue;
			}
		}
		calm = waiting == 0 || all_here_or_inside() ? calm + 1 : 0;
		if (calm == 2) {
			answer->count = park_count();
			return 0;
		}
		if (answer->text[0] && now() > patience) {
			report();
			return EAGAIN; /* whoever asked can help them, and goes on */
		}
		if (now() > until) {
			park_end();
			return ETIMEDOUT;
		}
		if (!calm)
			sleep_until_changed(&arrivals, seen, PASS_NANOSECONDS);
	}
}

static bool allocator_is_free(void)
{
	int64_t until = now() + PROBE_NANOSECONDS;
	int wanted = atomic_fetch_add(&probes_wanted, 1) + 1;

	wake(&probes_wanted);
	for (;;) {
		int done = atomic_load(&probes_done);
		if (done == wanted)
			return true;
		int64_t left = until - now();
		if (left <= 0)
			break;
		sleep_until_changed(&probes_done, done, left);
	}
	park_end();
	for (int done; (done = atomic_load(&probes_done)) != wanted;)
		sleep_until_changed(&probes_done, done, -1);
	return false;
}

int park_settle(int64_t until)
{
	int64_t suspicious = now() + SETTLE_NANOSECONDS;
	int calm = 0;
	bool is_free = false;

	if (!(atomic_load(&gate) & 1))
		return EINVAL;
	for (;;) {
		int seen = atomic_load(&arrivals), waiting = pass(NULL, 0, false);
		calm = waiting == 0 ? calm + 1 : 0;
		/* One that does not arrive may be waiting for what somebody who is parked holds. */
		if (calm == 2 || (!is_free && now() > suspicious)) {
			is_free = allocator_is_free();
			if (!is_free)
				return EAGAIN;
			if (calm == 2)
				return 0;
		}
		if (waiting < 0 || now() > until) {
			park_end();
			return waiting < 0 ? ENOSPC : ETIMEDOUT;
		}
		if (!calm)
			sleep_until_changed(&arrivals, seen, PASS_NANOSECONDS);
	}
}

static void *nothing(void *unused)
{
	return unused;
}

/* Takes the locks that the driver may need: the allocator's arenas, the loader's, and that of the stacks of threads. */
static void *probe(void *unused)
{
	(void)unused;
	union {
		struct mallinfo2 (*newer)(void);
		struct mallinfo (*older)(void);
		void *found;
	} every_arena = {.found = dlsym(RTLD_DEFAULT, "mallinfo2")};
	bool newer = every_arena.found != NULL;

	if (!newer)
		every_arena.found = dlsym(RTLD_DEFAULT, "mallinfo");
	pthread_setname_np(pthread_self(), "icecore-probe");
	probe_thread = self();
	atomic_store(&probes_done, 1);
	wake(&probes_done);
	for (int last = 1;;) {
		int wanted = atomic_load(&probes_wanted);
		if (wanted == last) {
			sleep_until_changed(&probes_wanted, wanted, -1);
			continue;
		}
		last = wanted;
		if (newer)
			every_arena.newer();
		else if (every_arena.found)
			every_arena.older();
		for (size_t size = 16; size <= (1 << 20); size *= 4) { /* where the allocator is another */
			void *volatile some = malloc(size);
			free(some);
		}
		void *program = dlopen(NULL, RTLD_LAZY);
		if (program)
			dlclose(program);
		pthread_t other;
		if (!pthread_create(&other, NULL, nothing, NULL))
			pthread_join(other, NULL);
		atomic_store(&probes_done, wanted);
		wake(&probes_done);
	}
	return NULL;
}

int threads_start(void)
{
	pthread_t made;

	agent_thread = self();
	prctl(PR_SET_TIMERSLACK, 1ul); /* for pauses of a few microseconds */
	find_driver();
	atomic_store(&probes_wanted, 1);
	atomic_store(&probes_done, 0);
	int error = claim_signal();
	if (!error)
		error = pthread_create(&made, NULL, probe, NULL);
	if (error)
		return error;
	pthread_detach(made);
	while (!atomic_load(&probes_done))
		sleep_until_changed(&probes_done, 0, -1);
	return 0;
}

void threads_of_child(void)
{
	atomic_store(&gate, 0);
	inside = asked_inside = 0;
	agent_thread = probe_thread = 0;
}
