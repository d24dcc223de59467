/* Parking: every thread but ours and the driver's own waits in a signal handler. No thread is
 * parked within one of our functions, where it may hold our lock: it parks itself as it leaves.
 *
 * Nor is a thread parked within one of the driver's calls, as far as its stack tells (stack.c). The
 * driver's lock waits until no thread is inside, and with threads that never rest it would wait for
 * ever, because another one has always just entered. So such threads are let go and asked again a
 * moment later, when they may be outside; since parked threads submit nothing more, the work of the
 * others comes to its end. A thread that is not met outside in time (or that seems inside, because
 * words on the stack may be old) runs on until the driver's lock is taken, which then has few
 * threads to wait for. The wait also ends once none of the remaining threads has moved for a
 * while: they sleep, mostly with old words on their stacks, and waiting longer would gain nothing.
 *
 * The signal is the one with which the C library makes every thread change its user id.
 * Applications can neither block it nor wait for it, because the library removes it from their
 * sets. Any other signal would be returned by a sigwait for all signals, and nothing tells from
 * outside that a thread is in one. Ours carry a value; signals without it are the library's and are
 * passed on. A thread that blocks the signal all the same (not through the library, or within it
 * for more than a moment) is helped from outside by ptrace: the signal that is sent then carries
 * the thread's mask, and the handler restores it, whenever it runs and whatever became of the round
 * in which it was sent.
 *
 * A thread that was asked is watched until it has arrived: it may have blocked the signal at that
 * moment, so that it stays pending, or it may have ended and its number may belong to another
 * thread. One signal too many does no harm: it parks its receiver while all are parked, and
 * otherwise does nothing.
 *
 * A parked thread may hold locks of the C library, the allocator's or the loader's, for which the
 * driver would wait without end. So once all threads are parked, a thread of ours takes each of
 * these locks; if it does not get one, all threads are let go, and another moment is tried.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "clock.h"
#include "directory.h"
#include "stack.h"
#include "threads.h"

#define PARK_SIGNAL 33 /* SIGSETXID */
#define PARK_VALUE 0x69636563

#define SEATS 65536 /* threads that can be parked */
#define PASS_NANOSECONDS 2000000ll
#define PROBE_NANOSECONDS 300000000ll
#define SETTLE_NANOSECONDS 50000000ll
#define STILL_SHARE 8 /* a thread that stays at one place for patience / STILL_SHARE is still */
#define STILL_LOOKS 16 /* it must be met there this often: a busy machine allows few looks */
#define BLOCKED_NANOSECONDS 20000000ll /* the C library blocks signals for shorter than that */
#define ASK_AGAIN_NANOSECONDS 20000000ll
#define AGAIN_NANOSECONDS \
	100000 /* between two looks at a thread that was in the driver, at most \
		*/

/* ASKED: it was sent the signal. LEAVING: parked in the driver, and let go. */
enum { SEATED, ASKED, PARKED, INSIDE, LEAVING };

/* A state belongs to one round, so that a thread that is late from another changes nothing. */
#define IN_ROUND(round, state) ((round) << 3 | (state))
#define ROUND(value) ((value) >> 3)

static struct seat {
	atomic_uint state;
	atomic_int thread;
	_Atomic(const ucontext_t *) interrupted; /* where it was, while that is of interest */
	/* the agent's own: */
	int64_t asked, blocked_since, still_since;
	unsigned still_looks; /* how often it was met at `place` since `still_since` */
	struct place place;
	bool still;
} seats[SEATS];

static atomic_uint gate; /* the round; odd: closed */
static atomic_int arrivals; /* changes whenever a thread has parked, or is found inside */
static pid_t agent_thread, probe_thread;
static atomic_int probes_wanted, probes_done;
static unsigned seated, taken[SEATS / 2]; /* places taken in `seats` */
static bool inherited; /* `seats` are those of a process that forked, in whatever state they were */

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

static unsigned round_now(void)
{
	return ROUND(IN_ROUND(atomic_load(&gate), 0u)); /* as many bits of it as a state has */
}

static void sleep_until_changed(const void *word, unsigned value, int64_t nanoseconds)
{
	struct timespec limit = {nanoseconds / 1000000000ll, nanoseconds % 1000000000ll};

	syscall(SYS_futex, word, FUTEX_WAIT, value, nanoseconds < 0 ? NULL : &limit, NULL, 0);
}

static void wake(void *word)
{
	syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static pid_t self(void)
{
	return (pid_t)syscall(SYS_gettid);
}

static struct seat *find_seat(int thread)
{
	for (unsigned at = (unsigned)thread * 2654435761u % SEATS, tried = 0; tried < SEATS;
	    at = (at + 1) % SEATS, tried++) {
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
	atomic_store(&seats[at].state, IN_ROUND(round_now(), SEATED));
	atomic_store(&seats[at].thread, thread);
	return &seats[at];
}

static void clear_seats(void)
{
	if (inherited)
		memset(seats, 0, sizeof seats);
	for (unsigned at = 0; !inherited && at < seated; at++) {
		struct seat *seat = &seats[taken[at]];
		atomic_store(&seat->thread, 0);
		atomic_store(&seat->state, 0);
		atomic_store(&seat->interrupted, NULL);
		seat->asked = seat->blocked_since = 0;
		seat->still_looks = 0;
		seat->still = false;
	}
	inherited = false;
	seated = 0;
}

static unsigned state_of(struct seat *seat)
{
	return atomic_load(&seat->state) & 7;
}

/* Whether it still was in `from`, and of this round. */
static bool change(struct seat *seat, unsigned from, unsigned to)
{
	unsigned expected = IN_ROUND(round_now(), from);

	return atomic_compare_exchange_strong(&seat->state, &expected, IN_ROUND(round_now(), to));
}

/* By the thread itself; false: this round is over. */
static bool arrive(struct seat *seat, unsigned round, unsigned state)
{
	unsigned found = atomic_load(&seat->state);

	do
		if (ROUND(found) != round)
			return false;
	while (!atomic_compare_exchange_strong(&seat->state, &found, IN_ROUND(round, state)));
	atomic_fetch_add(&arrivals, 1);
	wake(&arrivals);
	return true;
}

static void sit(const ucontext_t *interrupted)
{
	unsigned round = round_now(), parked = IN_ROUND(round, PARKED),
		 let_go = IN_ROUND(round, LEAVING);
	struct seat *seat = round & 1 ? find_seat(self()) : NULL;

	if (!seat || ROUND(atomic_load(&seat->state)) != round)
		/* too late: the gate is open again, or closed anew and we are asked once more */
		return;
	atomic_store(&seat->interrupted, interrupted);
	if (!arrive(seat, round, PARKED))
		return;
	while (round_now() == round && atomic_load(&seat->state) == parked)
		sleep_until_changed(&seat->state, parked, -1);
	atomic_compare_exchange_strong(&seat->state, &let_go, IN_ROUND(round, SEATED));
}

static void on_signal(int number, siginfo_t *info, void *context)
{
	const bool queued = info->si_code == SI_QUEUE,
		   helped = queued && info->si_errno == PARK_VALUE;
	const unsigned round = round_now();
	int error = errno;

	if (!helped && (!queued || info->si_value.sival_int != PARK_VALUE)) {
		if (librarys.plain && librarys.plain != SIG_IGN)
			librarys.handler(number, info, context);
		errno = error;
		return;
	}
	/* All signals but this one were blocked when it was sent, so this is where the mask was
	 * changed. */
	if (helped)
		*(unsigned long *)&((ucontext_t *)context)->uc_sigmask =
		    (unsigned long)info->si_value.sival_ptr;
	if (!inside)
		sit(context);
	else if (round & 1) {
		struct seat *seat = find_seat(self());
		asked_inside = 1;
		if (seat)
			arrive(seat, round, INSIDE);
	}
	errno = error;
}

void threads_enter(void)
{
	inside++;
	atomic_signal_fence(memory_order_seq_cst);
}

void threads_leave(void)
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

/* What the driver calls its threads (580: "cuda00001400006", …), # a hexadecimal digit. The whole
 * name: an application has threads of its own for CUDA, which are to be parked; one of the driver's
 * that is parked may keep its lock or its checkpoint waiting, so whoever meets another name of its
 * adds it here. */
static const char *const drivers_names[] = {"cuda-EvtHandlr", "cuda###########"};

/* `name` ends with its line. */
static bool is_called(const char *name, const char *pattern)
{
	while (*pattern && *name &&
	    (*pattern == '#' ? strchr("0123456789abcdefABCDEF", *name) != NULL : *name == *pattern))
		name++, pattern++;
	return !*pattern && *name == '\n';
}

/* Threads of a program with such a name inherit it. */
static bool drivers_name(int thread, const char *name)
{
	char leader[32];
	bool found = false;

	for (size_t i = 0; i < sizeof drivers_names / sizeof *drivers_names; i++)
		found = found || is_called(name, drivers_names[i]);
	if (!found || thread == getpid())
		return false;
	return read_small("/proc/self/comm", leader, sizeof leader) ||
	    strncmp(name, leader, strlen(leader));
}

static bool has_signal(const char *text, const char *line)
{
	const char *found = strstr(text, line);

	return found && strtoull(found + strlen(line), NULL, 16) >> (PARK_SIGNAL - 1) & 1;
}

/* How to treat a thread that is not parked, and whether it has the signal pending. */
static int look_at(int thread, bool *pending)
{
	char path[64], text[2048], *found;

	*pending = false;
	snprintf(path, sizeof path, "/proc/self/task/%d/status", thread);
	if (read_small(path, text, sizeof text))
		return errno == ENOENT || errno == ESRCH ? GONE : WATCHED;
	if (!(found = strstr(text, "\nState:\t")))
		return WATCHED;
	if (found[8] == 'Z' || found[8] == 'X')
		return GONE;
	if (drivers_name(thread, text + 6) || !strncmp(text, "Name:\tiou-", 10))
		return NOT_OURS;
	*pending = has_signal(text, "\nSigPnd:\t");
	return has_signal(text, "\nSigBlk:\t") ? BLOCKS : WATCHED;
}

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
	    /* Blocked in its own handler: of two that are pending the second then comes once the
	       first has returned, to the same place. */
	    .flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK | RESTORER_FLAG,
	    .restorer = resident_return_from_signal,
	    .mask = ~0ul,
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

static bool blocks_for_long(const struct seat *seat, int64_t at)
{
	return seat->blocked_since && at - seat->blocked_since > BLOCKED_NANOSECONDS;
}

/* Handle a thread that is not parked: ask it, with `ask` even if it was not asked before. Return
 * whether it has to be helped. */
static bool see_to(struct seat *seat, int what, bool pending, bool ask)
{
	const unsigned state = state_of(seat);
	const int64_t at = clock_now();

	/* in the handler it is blocked, too */
	if (what == BLOCKS && state != LEAVING && state != INSIDE) {
		if (!seat->blocked_since)
			seat->blocked_since = at;
		return ask && blocks_for_long(seat, at);
	}
	seat->blocked_since = 0;
	if (state == ASKED ? pending || at - seat->asked < ASK_AGAIN_NANOSECONDS
			   : state != SEATED || !ask)
		return false;
	if (change(seat, state, ASKED)) {
		seat->asked = at;
		/* A pending signal already brings it here. It may carry a mask in which the signal
		 * is blocked: a second one would stay pending for ever. */
		if (!pending && ask_to_park(atomic_load(&seat->thread)) && errno == EAGAIN)
			/* too many signals pending: asked again in the next pass */
			change(seat, ASKED, SEATED);
	}
	return false;
}

/* Pass once over all threads. `blocked` receives those that have blocked the signal for a while.
 * Returns the number of those not parked yet, or -1; `complete`: there are no others. */
static int pass(char *blocked, size_t room, bool ask, bool *complete)
{
	char entries[8192];
	int waiting = 0, tasks = open("/proc/self/task", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	unsigned living = 0;
	size_t written = 0;
	struct stat all;
	long got;

	if (tasks < 0)
		return -1;
	if (room)
		blocked[0] = 0;
	while ((got = syscall(SYS_getdents64, tasks, entries, sizeof entries)) > 0) {
		for (long at = 0; at < got;
		    at += ((struct directory_entry *)(entries + at))->length) {
			int thread = atoi(((struct directory_entry *)(entries + at))->name);
			if (thread <= 0)
				continue;
			struct seat *seat = find_seat(thread);
			bool pending = false,
			     settled = thread == agent_thread || thread == probe_thread ||
			    (seat && state_of(seat) == PARKED);
			int what = settled ? NOT_OURS : look_at(thread, &pending);
			/* the first thread of a process is counted although it has ended */
			living += what != GONE || thread == getpid();
			if (what == GONE || what == NOT_OURS)
				continue;
			waiting++;
			if (!seat && ask && !(seat = take_seat(thread))) {
				close(tasks);
				return -1;
			}
			/* else told of with the next answer */
			if (seat && see_to(seat, what, pending, ask) && room - written > 12)
				written += (size_t)snprintf(
				    blocked + written, room - written, "%d ", thread);
		}
	}
	/* If a thread ends while they are listed, the kernel omits others; the directory's link
	 * count is the threads plus two. */
	*complete = fstat(tasks, &all) == 0 && living + 2 >= all.st_nlink;
	close(tasks);
	return waiting;
}

static unsigned park_count(void)
{
	unsigned parked = 0;

	for (unsigned at = 0; at < seated; at++)
		parked += state_of(&seats[taken[at]]) == PARKED;
	return parked;
}

void threads_park_end(void)
{
	const unsigned round = round_now();

	if (!(round & 1))
		return;
	atomic_fetch_add(&gate, 1);
	for (unsigned at = 0; at < seated; at++) {
		struct seat *seat = &seats[taken[at]];
		unsigned parked = IN_ROUND(round, PARKED);
		if (atomic_compare_exchange_strong(&seat->state, &parked, IN_ROUND(round, SEATED)))
			wake(&seat->state);
	}
}

/* Note where a thread was met, and whether it has been there for a while. */
static void note_place(struct seat *seat, const ucontext_t *interrupted, int64_t while_)
{
	const struct place place = stack_place(interrupted);
	const int64_t at = clock_now();

	if (place.code != seat->place.code || place.stack != seat->place.stack)
		seat->still_looks = 0;
	if (!seat->still_looks++) {
		seat->place = place;
		seat->still_since = at;
	}
	seat->still = seat->still_looks >= STILL_LOOKS && at - seat->still_since > while_;
}

/* Let threads go that were parked in the middle of a driver's call; return their number. Those
 * outside are not examined again. `while_`: nanoseconds at one place that make a thread still. */
static unsigned let_busy_go(int64_t while_)
{
	unsigned busy = 0;

	for (unsigned at = 0; at < seated; at++) {
		struct seat *seat = &seats[taken[at]];
		const ucontext_t *interrupted = atomic_load(&seat->interrupted);
		if (!interrupted || state_of(seat) != PARKED)
			continue;
		if (!stack_in_driver(interrupted)) {
			atomic_store(&seat->interrupted, NULL);
			continue;
		}
		busy++;
		note_place(seat, interrupted, while_);
		atomic_store(&seat->interrupted, NULL);
		change(seat, PARKED, LEAVING);
		wake(&seat->state);
	}
	return busy;
}

/* Whether it lives, and is to be parked. */
static bool counts_still(struct seat *seat)
{
	bool pending;
	int what = look_at(atomic_load(&seat->thread), &pending);

	return what != GONE && what != NOT_OURS;
}

/* Whether it has parked since `let_busy_go` passed: it may be in the driver. */
static bool is_unexamined(struct seat *seat)
{
	return state_of(seat) == PARKED && atomic_load(&seat->interrupted);
}

/* Whether any thread may come out of the driver soon: it is not parked outside, and did not stand
 * still when it was met last. */
static bool anyone_moves(void)
{
	for (unsigned at = 0; at < seated; at++) {
		struct seat *seat = &seats[taken[at]];
		if ((state_of(seat) != PARKED || is_unexamined(seat)) && !seat->still &&
		    counts_still(seat))
			return true;
	}
	return false;
}

static bool anyone_unexamined(void)
{
	for (unsigned at = 0; at < seated; at++)
		if (is_unexamined(&seats[taken[at]]))
			return true;
	return false;
}

static bool all_here_or_inside(void)
{
	for (unsigned at = 0; at < seated; at++) {
		unsigned state = state_of(&seats[taken[at]]);
		if (state != PARKED && state != INSIDE && counts_still(&seats[taken[at]]))
			return false;
	}
	return true;
}

/* Whether a thread that was asked, or let go, has not arrived or ended yet, and will. */
static bool on_their_way(void)
{
	for (unsigned at = 0; at < seated; at++) {
		struct seat *seat = &seats[taken[at]];
		unsigned state = state_of(seat);
		if ((state == LEAVING || (state == ASKED && !blocks_for_long(seat, clock_now()))) &&
		    counts_still(seat))
			return true;
	}
	return false;
}

/* Threads that blocked the signal have been reported and are helped now, or stop blocking by
 * themselves: next time they get a moment again. */
static void forget_blocked(void)
{
	for (unsigned at = 0; at < seated; at++)
		seats[taken[at]].blocked_since = 0;
}

/* Who did not come, for an error's message. */
static void name_missing(char *text, size_t room)
{
	size_t written = 0;

	for (unsigned at = 0; at < seated && room - written > 12; at++) {
		struct seat *seat = &seats[taken[at]];
		unsigned state = state_of(seat);
		if (state != PARKED && state != INSIDE && counts_still(seat))
			written += (size_t)snprintf(
			    text + written, room - written, "%d ", atomic_load(&seat->thread));
	}
}

int threads_park_begin(int64_t until, int64_t patience_for_busy, struct resident_message *answer)
{
	bool begun = atomic_load(&gate) & 1;
	int64_t brake_until = clock_now() + patience_for_busy;
	uint64_t random_state = (uint64_t)clock_now();
	int calm = 0, error = begun ? 0 : claim_signal();

	if (error)
		return error;
	if (!begun) {
		clear_seats();
		atomic_fetch_add(&gate, 1);
	}
	forget_blocked();
	answer->ordinal = PARK_SIGNAL;
	for (;;) {
		bool asking = !patience_for_busy || clock_now() < brake_until, complete;
		int seen = atomic_load(&arrivals),
		    waiting = pass(answer->text, sizeof answer->text, asking, &complete);
		if (waiting < 0) {
			threads_park_end();
			return ENOSPC;
		}
		if (answer->text[0])
			return EAGAIN; /* whoever asked can help them, and goes on */
		if (patience_for_busy) {
			unsigned busy = let_busy_go(patience_for_busy / STILL_SHARE);
			if (busy && !anyone_moves())
				brake_until = 0;
			if (!asking && !busy && !on_their_way() && !anyone_unexamined()) {
				answer->flags = (uint32_t)waiting;
				answer->count = park_count();
				return 0;
			}
			if (busy && clock_now() < until) {
				/* Not woken by other arrivals: the threads that were let go should
				 * leave the driver meanwhile. The pause varies: with equal pauses,
				 * a thread in step with them would be met at the same point for
				 * ever. */
				random_state =
				    random_state * 6364136223846793005u + 1442695040888963407u;
				nanosleep(&(struct timespec){0,
					      (long)((random_state >> 33) % AGAIN_NANOSECONDS)},
				    NULL);
				calm = 0;
				continue;
			}
		}
		calm = complete && (waiting == 0 || all_here_or_inside()) &&
				(!patience_for_busy || !anyone_unexamined())
		    ? calm + 1
		    : 0;
		if (calm == 2) {
			answer->count = park_count();
			return 0;
		}
		if (clock_now() > until) {
			name_missing(answer->text, sizeof answer->text);
			threads_park_end();
			return ETIMEDOUT;
		}
		if (!calm)
			sleep_until_changed(&arrivals, seen, PASS_NANOSECONDS);
	}
}

static bool allocator_is_free(void)
{
	int64_t until = clock_now() + PROBE_NANOSECONDS;
	int wanted = atomic_fetch_add(&probes_wanted, 1) + 1;

	wake(&probes_wanted);
	for (;;) {
		int done = atomic_load(&probes_done);
		if (done == wanted)
			return true;
		int64_t left = until - clock_now();
		if (left <= 0)
			break;
		sleep_until_changed(&probes_done, done, left);
	}
	threads_park_end();
	for (int done; (done = atomic_load(&probes_done)) != wanted;)
		sleep_until_changed(&probes_done, done, -1);
	return false;
}

int threads_park_settle(int64_t until)
{
	int64_t suspicious = clock_now() + SETTLE_NANOSECONDS;
	int calm = 0;
	bool is_free = false;

	if (!(atomic_load(&gate) & 1))
		return EINVAL;
	for (;;) {
		bool complete;
		int seen = atomic_load(&arrivals), waiting = pass(NULL, 0, false, &complete);
		calm = waiting == 0 && complete ? calm + 1 : 0;
		/* A thread that does not arrive may wait for what a parked thread holds. */
		if (calm == 2 || (!is_free && clock_now() > suspicious)) {
			is_free = allocator_is_free();
			if (!is_free)
				return EAGAIN;
			if (calm == 2)
				return 0;
		}
		if (waiting < 0 || clock_now() > until) {
			threads_park_end();
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

/* Take the locks that the driver may need: of the allocator's arenas, of the loader, and of the
 * threads' stacks. */
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
		/* where the allocator is another */
		for (size_t size = 16; size <= (1 << 20); size *= 4) {
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
	stack_find_driver();
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

void threads_in_child(void)
{
	atomic_store(&gate, 0);
	inside = asked_inside = 0;
	inherited = true;
	agent_thread = probe_thread = 0;
}
