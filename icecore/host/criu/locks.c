/* Preloaded into a CRIU that restores: processes keep their POSIX locks (fcntl(2), F_SETLK).
 *
 * CRIU (4.0 to 4.2: criu/cr-restore.c, restore_one_alive_task) sets a process's locks before it
 * maps the process's files, and closes a descriptor for each file that it maps. If a process closes
 * any descriptor of a file, the kernel removes all its POSIX locks of that file. SQLite maps a file
 * that it has locked: without its locks, the next process that opens the database takes that file
 * for a leftover and empties it.
 *
 * So the locks are noted while CRIU sets them, in memory that CRIU's processes share. Each process
 * is made to set its locks again right before CRIU lets the first thread go, when nothing closes
 * descriptors any more. To set a lock that a process still has changes nothing.
 */
#define _GNU_SOURCE
#include "locks.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "say.h"

#define SHOWN __attribute__((visibility("default")))
/* Address space; memory is used for the locks that there are. */
#define MOST (1 << 20)
/* Below the stack pointer, compilers may keep data (System V ABI, x86-64). */
#define RED_ZONE 128

struct lock {
	pid_t process; /* as it sees itself */
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

static int note(int descriptor, const struct flock *flock)
{
	unsigned at = noted ? atomic_fetch_add(&noted->count, 1) : MOST;

	if (at >= MOST) {
		errno = ENOLCK;
		return -1;
	}
	noted->locks[at] = (struct lock){getpid(), descriptor, *flock};
	return 0;
}

SHOWN int fcntl64(int descriptor, int command, ...)
{
	va_list arguments;

	va_start(arguments, command);
	void *argument = va_arg(arguments, void *);
	va_end(arguments);
	long result = syscall(SYS_fcntl, descriptor, command, argument);
	if (!result && command == F_SETLKW && note(descriptor, argument))
		return -1;
	return (int)result;
}

SHOWN int fcntl(int, int, ...) __attribute__((alias("fcntl64")));

#if defined(__x86_64__)
#include <sys/user.h>

/* Let a thread that stands go on until it stands at a system call. Signals that come meanwhile are
 * kept: only SIGSTOP can, because the others are blocked. */
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
		*stopped |= WSTOPSIG(status) == SIGSTOP && status >> 16 == 0;
	}
}

static int transfer(pid_t thread, bool write, void *own, uintptr_t at, size_t size)
{
	struct iovec local = {own, size}, remote = {(void *)at, size};
	ssize_t done = write ? process_vm_writev(thread, &local, 1, &remote, 1, 0)
			     : process_vm_readv(thread, &local, 1, &remote, 1, 0);
	return done == (ssize_t)size ? 0 : -1;
}

/* Where a thread makes its call: the beginning of the page that it executes is there as a whole. */
static uintptr_t page_of(const struct user_regs_struct *regs)
{
	return regs->rip & ~4095ul;
}

/* Have a thread make the call, with the registers and the memory that it has. */
static int call(pid_t thread, const struct lock *lock, const struct user_regs_struct *own,
    bool *stopped)
{
	struct user_regs_struct regs = *own;
	struct flock flock = lock->flock;
	uintptr_t at = (own->rsp - RED_ZONE - sizeof flock) & ~15ul;

	flock.l_pid = 0;
	if (transfer(thread, true, &flock, at, sizeof flock))
		return -1;
	regs.rip = page_of(own);
	regs.rax = SYS_fcntl;
	regs.orig_rax = -1;
	regs.rdi = (unsigned)lock->descriptor;
	regs.rsi = F_SETLK;
	regs.rdx = at;
	if (ptrace(PTRACE_SETREGS, thread, NULL, &regs) || step(thread, stopped) ||
	    step(thread, stopped) || ptrace(PTRACE_GETREGS, thread, NULL, &regs))
		return -1;
	errno = -(int)(long)regs.rax;
	return regs.rax ? -1 : 0;
}

/* Have a thread set the locks of its process. */
static int set(pid_t thread, pid_t process)
{
	const uint64_t all = ~0ull;
	const uint16_t instruction = 0x050f; /* syscall */
	struct user_regs_struct own;
	uint64_t mask;
	char saved[RED_ZONE + sizeof(struct flock) + 16];
	bool stopped = false;
	int why = 0;

	if (ptrace(PTRACE_GETREGS, thread, NULL, &own) ||
	    ptrace(PTRACE_GETSIGMASK, thread, sizeof mask, &mask) ||
	    ptrace(PTRACE_SETSIGMASK, thread, sizeof all, &all))
		return -1;
	uintptr_t below = own.rsp - sizeof saved;
	long code, ours;
	if (transfer(thread, false, &code, page_of(&own), sizeof code) ||
	    transfer(thread, false, saved, below, sizeof saved))
		return -1;
	ours = (code & ~0xffffl) | instruction;
	if (ptrace(PTRACE_POKETEXT, thread, page_of(&own), ours))
		return -1;
	for (unsigned i = 0; i < noted->count && !why; i++)
		if (noted->locks[i].process == process &&
		    call(thread, &noted->locks[i], &own, &stopped)) {
			why = errno;
			SAY("process %d cannot lock descriptor %d again: %s\n", process,
			    noted->locks[i].descriptor, strerror(why));
		}
	if (ptrace(PTRACE_POKETEXT, thread, page_of(&own), code) ||
	    transfer(thread, true, saved, below, sizeof saved) ||
	    ptrace(PTRACE_SETREGS, thread, NULL, &own) ||
	    ptrace(PTRACE_SETSIGMASK, thread, sizeof mask, &mask) ||
	    (stopped && kill(thread, SIGSTOP)))
		return -1;
	errno = why;
	return why ? -1 : 0;
}
#endif

/* The pid that a process has in its own namespace; 0: it has ended. */
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

static bool has_locks(pid_t process)
{
	for (unsigned i = 0; i < noted->count; i++)
		if (noted->locks[i].process == process)
			return true;
	return false;
}

int set_locks(const pid_t *threads, size_t count)
{
	if (!noted || !noted->count)
		return 0;
	for (size_t i = 0; i < count; i++) {
		pid_t process = threads[i] ? own_pid(threads[i]) : 0;
		if (!process || !has_locks(process))
			continue;
#if defined(__x86_64__)
		if (set(threads[i], process)) {
			SAY("the locks of process %d cannot be set again: %s\n", process,
			    strerror(errno));
			return -1;
		}
#else
		SAY("the locks of process %d may be lost: not implemented for this processor\n",
		    process);
#endif
	}
	return 0;
}
