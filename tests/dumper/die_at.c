/* Loaded into CRIU behind icecore's library, for tests: kills it with SIGKILL right after one of its calls of ptrace(2), the one whose number DIE_AT says.
 *
 * Counted are the calls that change a thread or let it run. How many there were is written to DIE_COUNT as CRIU ends by itself. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <unistd.h>

static long count;

static int counts(long request)
{
	switch (request) {
	case PTRACE_POKEDATA:
	case PTRACE_CONT:
	case PTRACE_SYSCALL:
	case PTRACE_SETREGSET:
	case PTRACE_SETSIGMASK:
	case PTRACE_POKEUSER:
	case PTRACE_INTERRUPT:
	case PTRACE_SEIZE:
	case PTRACE_DETACH:
		return 1;
	default:
		return 0;
	}
}

long syscall(long number, ...)
{
	static long (*next)(long, ...);
	const char *at = getenv("DIE_AT");
	va_list arguments;
	long a[6];

	va_start(arguments, number);
	for (int i = 0; i < 6; i++)
		a[i] = va_arg(arguments, long);
	va_end(arguments);
	if (!next)
		next = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
	long result = next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
	if (at && number == SYS_ptrace && counts(a[0]) && ++count == atol(at))
		kill(getpid(), SIGKILL);
	return result;
}

__attribute__((destructor)) static void tell(void)
{
	const char *path = getenv("DIE_COUNT");
	FILE *file = path && count ? fopen(path, "w") : NULL;

	if (file) {
		fprintf(file, "%ld", count);
		fclose(file);
	}
}
