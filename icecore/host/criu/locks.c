/* Preloaded into a CRIU that restores: processes keep their POSIX locks (fcntl(2), F_SETLK).
 *
 * CRIU (4.0 to 4.2: criu/cr-restore.c, restore_one_alive_task) sets a process's locks before it
 * maps the process's files, and closes a descriptor for each file that it maps. When a process
 * closes any descriptor of a file, the kernel removes all POSIX locks that it holds on that file.
 * SQLite maps a file that it has locked. Without the locks, the next process that opens the
 * database takes that file for a leftover and truncates it.
 *
 * So this library notes the locks while CRIU sets them, in memory that CRIU's processes share. Once
 * all threads stand, and nothing closes descriptors any more, it has the processes that have lost
 * locks set these again: before the action script that holds the tree (stage pre-resume), because
 * the tree may be held for minutes, or before CRIU detaches from the first thread if there is no
 * script.
 */
#define _GNU_SOURCE
#include "locks.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "say.h"

#define SHOWN __attribute__((visibility("default")))
/* The most locks. The table reserves address space; each lock noted takes memory. */
#define MOST (1 << 20)

/* How often a lock that another process holds is tried again, and the pause: 5 s in all. On NFS 100 s:
 * a server keeps the locks of a machine that has crashed until its lease has ended. */
#define PATIENCE 500
#define PATIENCE_NFS 10000
#define PAUSE ((struct timespec){0, 10000000})

struct lock {
	pid_t process; /* in its own pid namespace */
	int descriptor;
	struct flock flock;
};

static struct {
	atomic_uint count;
	struct lock locks[MOST];
} *noted;

__attribute__((constructor)) static void share(void)
{
	void *memory = mmap(NULL, sizeof *noted, PROT_READ | PROT_WRITE,
	    MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	noted = memory == MAP_FAILED ? NULL : memory;
}

/* A lock that cannot be noted may be lost, as all would be without the library. */
static void note(int descriptor, const struct flock *flock)
{
	unsigned at = noted ? atomic_fetch_add(&noted->count, 1) : MOST;

	if (at < MOST)
		noted->locks[at] = (struct lock){getpid(), descriptor, *flock};
	else
		SAY("a lock of process %d is not noted\n", getpid());
}

static unsigned count_noted(void)
{
	unsigned count = noted ? noted->count : 0;

	return count < MOST ? count : MOST;
}

static int patience(int descriptor)
{
	struct statfs about;

	return !fstatfs(descriptor, &about) && about.f_type == NFS_SUPER_MAGIC ? PATIENCE_NFS
									       : PATIENCE;
}

SHOWN int fcntl64(int descriptor, int command, ...)
{
	va_list arguments;

	va_start(arguments, command);
	void *argument = va_arg(arguments, void *);
	va_end(arguments);
	if (command != F_SETLKW)
		return (int)syscall(SYS_fcntl, descriptor, command, argument);
	/* Without the library, CRIU waits for ever for a lock that another process holds. */
	for (int turn = 0; syscall(SYS_fcntl, descriptor, F_SETLK, argument); turn++) {
		if ((errno != EAGAIN && errno != EACCES) || turn == patience(descriptor))
			return -1;
		nanosleep(&PAUSE, NULL);
	}
	note(descriptor, argument);
	return 0;
}

SHOWN int fcntl(int, int, ...) __attribute__((alias("fcntl64")));

/* Whether a process does not hold a lock that was noted (/proc/PID/fdinfo in proc(5)). */
static bool is_lost(pid_t thread, const struct lock *lock)
{
	char path[64], line[256], mode[16], end[32], wanted[32] = "EOF";
	long long start;
	bool found = false;

	if (lock->flock.l_len)
		snprintf(wanted, sizeof wanted, "%lld",
		    (long long)(lock->flock.l_start + lock->flock.l_len - 1));
	snprintf(path, sizeof path, "/proc/%d/fdinfo/%d", thread, lock->descriptor);
	FILE *file = fopen(path, "re");
	while (file && !found && fgets(line, sizeof line, file))
		found = sscanf(line, "lock: %*d: POSIX %*s %15s %*d %*s %lld %31s", mode, &start, end) == 3 &&
		    !strcmp(mode, lock->flock.l_type == F_WRLCK ? "WRITE" : "READ") &&
		    start == lock->flock.l_start && !strcmp(end, wanted);
	if (file)
		fclose(file);
	return !found;
}

#if defined(__x86_64__)
#include <sys/user.h>

/* The code segment of 64-bit code. */
#define CODE_64 0x33

/* What is written to a thread's memory for one call. */
struct request {
	unsigned char instruction[8];
	struct flock flock;
};

/* Run a stopped thread until it enters or leaves a system call. All signals that can be blocked are
 * blocked. If SIGSTOP arrives, withhold it and set *stopped: the caller sends it again. Any other
 * signal means that the thread cannot run the instruction. */
static int step(pid_t thread, bool *stopped)
{
	for (;;) {
		int status;

		if (ptrace(PTRACE_SYSCALL, thread, NULL, NULL))
			return -1;
		while (waitpid(thread, &status, __WALL) < 0)
			if (errno != EINTR)
				return -1;
		if (!WIFSTOPPED(status)) {
			errno = ESRCH;
			return -1;
		}
		if ((WSTOPSIG(status) & 0x7f) == SIGTRAP && status >> 16 == 0)
			return 0;
		if (WSTOPSIG(status) == SIGSTOP && status >> 16 == 0) {
			*stopped = true;
		} else if (status >> 16 != PTRACE_EVENT_STOP) {
			errno = EFAULT;
			return -1;
		}
	}
}

/* Return where a thread makes its calls: the start of a private mapping with code, to which a
 * tracer can write. 0: there is none. */
static uintptr_t code_of(pid_t thread)
{
	char path[64], line[512];
	unsigned long start, found = 0;

	snprintf(path, sizeof path, "/proc/%d/maps", thread);
	FILE *file = fopen(path, "re");
	while (file && !found && fgets(line, sizeof line, file))
		if (strstr(line, " r-xp ") && sscanf(line, "%lx-", &start) == 1)
			found = start;
	if (file)
		fclose(file);
	return found;
}

static int put(pid_t thread, uintptr_t at, const struct request *request)
{
	const long *words = (const long *)request;

	for (size_t i = 0; i < sizeof *request / sizeof *words; i++)
		if (ptrace(PTRACE_POKETEXT, thread, at + i * sizeof *words, words[i]))
			return -1;
	return 0;
}

/* Have a thread set one lock.
 *
 * own: the thread's registers. */
static int call(pid_t thread, uintptr_t at, const struct lock *lock,
    const struct user_regs_struct *own, bool *stopped)
{
	struct user_regs_struct regs = *own;
	struct request request = {{0x0f, 0x05}, lock->flock}; /* syscall */

	request.flock.l_pid = 0;
	regs.rip = at;
	regs.rax = SYS_fcntl;
	regs.orig_rax = -1;
	regs.rdi = (unsigned)lock->descriptor;
	regs.rsi = F_SETLK;
	regs.rdx = at + offsetof(struct request, flock);
	if (put(thread, at, &request) || ptrace(PTRACE_SETREGS, thread, NULL, &regs) ||
	    step(thread, stopped) || step(thread, stopped) ||
	    ptrace(PTRACE_GETREGS, thread, NULL, &regs))
		return -1;
	errno = -(int)(long)regs.rax;
	return regs.rax ? -1 : 0;
}

/* Have a thread set the locks that its process has lost. */
static int set(pid_t thread, pid_t process)
{
	const uint64_t all = ~0ull;
	struct user_regs_struct own;
	struct request before;
	struct iovec local = {&before, sizeof before}, remote = {NULL, sizeof before};
	uint64_t mask;
	bool stopped = false;
	int why = 0;

	if (ptrace(PTRACE_GETREGS, thread, NULL, &own))
		return -1;
	if (own.cs != CODE_64) {
		SAY("the locks of process %d may be lost: it is a 32-bit process\n", process);
		return 0;
	}
	uintptr_t at = code_of(thread);
	remote.iov_base = (void *)at;
	errno = EFAULT; /* unless a call says more */
	if (!at || process_vm_readv(thread, &local, 1, &remote, 1, 0) != sizeof before ||
	    ptrace(PTRACE_GETSIGMASK, thread, sizeof mask, &mask) ||
	    ptrace(PTRACE_SETSIGMASK, thread, sizeof all, &all))
		return -1;
	for (unsigned i = 0; i < count_noted() && !why; i++)
		if (noted->locks[i].process == process && is_lost(thread, &noted->locks[i]) &&
		    call(thread, at, &noted->locks[i], &own, &stopped)) {
			why = errno;
			SAY("process %d cannot lock descriptor %d again: %s\n", process,
			    noted->locks[i].descriptor, strerror(why));
		}
	if (put(thread, at, &before) || ptrace(PTRACE_SETREGS, thread, NULL, &own) ||
	    ptrace(PTRACE_SETSIGMASK, thread, sizeof mask, &mask) ||
	    (stopped && kill(thread, SIGSTOP)))
		return -1;
	errno = why;
	return why ? -1 : 0;
}
#endif

/* Return the pid of a thread in its own pid namespace; 0: the thread has ended. */
static pid_t own_pid(pid_t thread)
{
	char path[64], line[256], *last;
	pid_t found = 0;

	snprintf(path, sizeof path, "/proc/%d/status", thread);
	FILE *file = fopen(path, "re");
	while (file && fgets(line, sizeof line, file))
		if (!strncmp(line, "NSpid:", 6) && (last = strrchr(line, '\t')))
			found = atoi(last + 1);
	if (file)
		fclose(file);
	return found;
}

static bool has_lost(pid_t thread, pid_t process)
{
	for (unsigned i = 0; i < count_noted(); i++)
		if (noted->locks[i].process == process && is_lost(thread, &noted->locks[i]))
			return true;
	return false;
}

int set_locks(const pid_t *threads, size_t count)
{
	if (!count_noted())
		return 0;
	for (size_t i = 0; i < count; i++) {
		pid_t process = threads[i] ? own_pid(threads[i]) : 0;
		if (!process || !has_lost(threads[i], process))
			continue;
#if defined(__x86_64__)
		if (set(threads[i], process)) {
			SAY("the locks of process %d cannot be set again: %s\n", process,
			    strerror(errno));
			return -1;
		}
#else
		SAY("the locks of process %d are lost: not implemented for this processor\n",
		    process);
#endif
	}
	return 0;
}
