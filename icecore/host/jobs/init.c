/* The first process of a job: it starts the command, reaps orphans, passes on signals from outside,
 * and records how the command ended.
 *
 *     icecore-init STATUS_FD REPORT_FD PATH ARGV0 [ARGUMENT...]
 *     icecore-init STATUS_FD REPORT_FD - PID
 *
 * In the second form the command is the child PID that it has already.
 *
 * It keeps nothing that a restore elsewhere could lack. So it is freestanding (no libc, whose
 * start-up selects code by CPU feature), single-threaded, holds one descriptor (STATUS_FD), stays
 * in "/", and allocates no memory.
 *
 * STATUS_FD receives one line when the command has ended and all that it left behind is dead:
 * "exited CODE" or "killed SIGNAL". REPORT_FD is closed when the command has started; if it cannot
 * be started, REPORT_FD first receives {"exec_errno": N}. The exit status is the command's, or 128
 * + SIGNAL if a signal killed it.
 */

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#if defined(__x86_64__)
__asm__(
    ".globl _start\n_start:\n\txor %ebp, %ebp\n\tmov %rsp, %rdi\n\tand $-16, %rsp\n\tcall begin\n");
__asm__(".globl restore_rt\nrestore_rt:\n\tmov $15, %eax\n\tsyscall\n"); /* 15: rt_sigreturn */
void restore_rt(void);
#define KERNEL_SA_RESTORER 0x04000000
#define RESTORER restore_rt

static long call(long number, long a, long b, long c, long d, long e)
{
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	long result;

	__asm__ volatile("syscall"
	    : "=a"(result)
	    : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
	    : "rcx", "r11", "memory");
	return result;
}
#elif defined(__aarch64__)
__asm__(".globl _start\n_start:\n\tmov x29, #0\n\tmov x30, #0\n\tmov x0, sp\n\tbl begin\n");
#define KERNEL_SA_RESTORER 0 /* the vDSO has it */
#define RESTORER 0

static long call(long number, long a, long b, long c, long d, long e)
{
	register long x8 __asm__("x8") = number;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;

	__asm__ volatile("svc 0"
	    : "+r"(x0)
	    : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
	    : "memory");
	return x0;
}
#else
#error "icecore-init knows x86-64 and aarch64"
#endif

/* The kernel's own layout, the same on both architectures. */
struct kernel_sigaction {
	void (*handler)(int, siginfo_t *, void *);
	unsigned long flags;
	void (*restorer)(void);
	unsigned long mask;
};

static const unsigned long all_signals = ~0UL;
static const unsigned long no_signals = 0;
static volatile int command; /* pid; 0 before it runs and after it was reaped */
static int own_namespace; /* this process is pid 1 */

static void mask_signals(const unsigned long *mask)
{
	call(SYS_rt_sigprocmask, SIG_SETMASK, (long)mask, 0, sizeof *mask, 0);
}

/* A signal from inside the job's own namespace (si_pid is visible then, so not 0) was not meant for
 * the command. */
static void pass_on(int signal, siginfo_t *info, void *context)
{
	(void)context;
	if (command > 0 && !(own_namespace && info->si_pid != 0))
		call(SYS_kill, command, signal, 0, 0, 0);
}

static int is_passed_on(int signal)
{
	switch (signal) {
	case SIGKILL:
	case SIGSTOP: /* cannot be caught */
	case SIGCHLD: /* this process's own */
	case SIGSEGV:
	case SIGBUS:
	case SIGILL:
	case SIGFPE:
	case SIGTRAP:
	case SIGSYS: /* its own faults */
		return 0;
	}
	return 1;
}

static void catch_signals(void)
{
	struct kernel_sigaction action;

	action.handler = pass_on;
	action.flags = SA_SIGINFO | SA_RESTART | KERNEL_SA_RESTORER;
	action.restorer = RESTORER;
	action.mask = all_signals;
	for (int signal = 1; signal <= 64; signal++)
		if (is_passed_on(signal))
			call(SYS_rt_sigaction, signal, (long)&action, 0, sizeof action.mask, 0);
}

static void write_line(int fd, const char *before, unsigned number, const char *after)
{
	char line[64], digits[10];
	int length = 0, count = 0;

	while (*before)
		line[length++] = *before++;
	do
		digits[count++] = '0' + number % 10;
	while (number /= 10);
	while (count)
		line[length++] = digits[--count];
	while (*after)
		line[length++] = *after++;
	while (call(SYS_write, fd, (long)line, length, 0, 0) == -EINTR)
		;
}

static int parse_number(const char *text)
{
	int number = 0;

	while (*text >= '0' && *text <= '9')
		number = number * 10 + *text++ - '0';
	return number;
}

static long wait_any(siginfo_t *info, int options)
{
	long result;

	do
		result = call(SYS_waitid, P_ALL, 0, (long)info, WEXITED | options, 0);
	while (result == -EINTR);
	return result;
}

/* Outside a pid namespace kill(-1) would reach the whole machine: there the children are killed one
 * by one, and as subreaper this process becomes the parent of their children in turn. */
static void kill_children(void)
{
	char text[4096];
	long fd = call(
	    SYS_openat, AT_FDCWD, (long)"/proc/thread-self/children", O_RDONLY | O_CLOEXEC, 0, 0);
	long length;
	int pid = 0;

	if (fd < 0)
		return;
	while ((length = call(SYS_read, fd, (long)text, sizeof text, 0, 0)) > 0)
		for (long i = 0; i < length; i++) {
			if (text[i] != ' ') {
				pid = pid * 10 + text[i] - '0';
			} else {
				if (pid > 1)
					call(SYS_kill, pid, SIGKILL, 0, 0, 0);
				pid = 0;
			}
		}
	call(SYS_close, fd, 0, 0, 0, 0);
}

static void end_the_rest(void)
{
	siginfo_t info;

	if (own_namespace)
		call(SYS_kill, -1, SIGKILL, 0, 0, 0);
	else
		kill_children();
	while (wait_any(&info, 0) == 0)
		if (!own_namespace)
			kill_children();
}

static __attribute__((noreturn)) void leave(int status)
{
	for (;;)
		call(SYS_exit_group, status, 0, 0, 0, 0);
}

static __attribute__((noreturn)) void become(int report_fd, char **arguments, char **environment)
{
	long error;

	call(SYS_setpgid, 0, 0, 0, 0, 0); /* a kill(0) of the command's must not reach its init */
	mask_signals(&no_signals);
	error =
	    call(SYS_execve, (long)arguments[0], (long)(arguments + 1), (long)environment, 0, 0);
	write_line(report_fd, "{\"exec_errno\": ", -error, "}\n");
	leave(error == -ENOENT ? 127 : 126);
}

static __attribute__((noreturn)) void supervise(int status_fd)
{
	siginfo_t info;
	int killed, number;

	for (;;) {
		if (wait_any(&info, WNOWAIT) !=
		    0) /* no child at all, which cannot happen before the command was reaped */
			leave(125);
		if (info.si_pid == command)
			break;
		call(SYS_waitid, P_PID, info.si_pid, 0, WEXITED, 0);
	}
	mask_signals(&all_signals); /* once it is reaped, its pid may be another's */
	command = 0;
	killed = info.si_code != CLD_EXITED;
	number = info.si_status;
	end_the_rest();
	write_line(status_fd, killed ? "killed " : "exited ", number, "\n");
	leave(killed ? 128 + number : number);
}

__attribute__((noreturn, used)) void begin(long *stack)
{
	int count = (int)stack[0];
	char **arguments = (char **)(stack + 1);
	char **environment = arguments + count + 1;
	int status_fd, report_fd;
	long child;

	if (count < 5)
		leave(2);
	status_fd = parse_number(arguments[1]);
	report_fd = parse_number(arguments[2]);
	call(SYS_fcntl, status_fd, F_SETFD, FD_CLOEXEC, 0, 0);
	call(SYS_fcntl, report_fd, F_SETFD, FD_CLOEXEC, 0, 0);
	own_namespace = call(SYS_getpid, 0, 0, 0, 0, 0) == 1;
	if (!own_namespace)
		call(SYS_prctl, PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
	mask_signals(&all_signals);
	if (arguments[3][0] == '-' && !arguments[3][1])
		child = parse_number(arguments[4]);
	else
		child = call(SYS_clone, SIGCHLD, 0, 0, 0, 0);
	if (child < 0) {
		write_line(report_fd, "{\"fork_errno\": ", -child, "}\n");
		leave(126);
	}
	if (child == 0)
		become(report_fd, arguments + 3, environment);
	command = (int)child;
	call(SYS_close, report_fd, 0, 0, 0, 0);
	for (int fd = 0; fd < 3; fd++)
		if (fd != status_fd)
			call(SYS_close, fd, 0, 0, 0, 0);
	call(SYS_chdir, (long)"/", 0, 0, 0, 0);
	catch_signals();
	mask_signals(&no_signals);
	supervise(status_fd);
}
