/* Whether a stopped thread is within one of the driver's calls. A wrong no is worse than a wrong
 * yes, which costs a moment.
 *
 * A thread within the driver has an address of the driver's code as its instruction pointer or as a
 * return address on its stack. Unwinding would tell exactly, but takes locks that the thread may
 * hold. So every word at the end of the stack counts, even one that an earlier call left behind.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <ucontext.h>
#include <unistd.h>

#include "driver.h"
#include "stack.h"

#define RANGES 8
#define PAGE ((uintptr_t)4096)
#define DEPTH 32 /* pages; the driver's own frames are at the end of the stack */

static struct range {
	uintptr_t low, high;
} code[RANGES];
static int ranges;

/* The executable mappings of the file that has the driver's calls. Nobody is parked when this is
 * called. */
void stack_find_driver(void)
{
	char line[4096], path[4096] = "", found[4096], protection[8];
	uintptr_t low, high, call = (uintptr_t)driver()->cuMemCreate;

	for (int second = 0; second < 2; second++) {
		FILE *maps = fopen("/proc/self/maps", "re");
		if (!maps)
			return;
		ranges = 0;
		while (fgets(line, sizeof line, maps)) {
			if (sscanf(line, "%lx-%lx %7s %*s %*s %*s %4095[^\n]", &low, &high,
				protection, found) != 4 ||
			    found[0] != '/')
				continue;
			if (!second && call >= low && call < high)
				strcpy(path, found);
			if (second && protection[2] == 'x' && !strcmp(path, found) &&
			    ranges < RANGES)
				code[ranges++] = (struct range){low, high};
		}
		fclose(maps);
	}
}

static bool is_code(uintptr_t address)
{
	for (int i = 0; i < ranges; i++)
		if (address >= code[i].low && address < code[i].high)
			return true;
	return false;
}

struct place stack_place(const ucontext_t *interrupted)
{
#ifdef __x86_64__
	return (struct place){(uintptr_t)interrupted->uc_mcontext.gregs[REG_RIP],
	    (uintptr_t)interrupted->uc_mcontext.gregs[REG_RSP]};
#else
	return (struct place){interrupted->uc_mcontext.pc, interrupted->uc_mcontext.sp};
#endif
}

bool stack_in_driver(const ucontext_t *interrupted)
{
	static uintptr_t words[4096 / sizeof(uintptr_t)];
	const struct place place = stack_place(interrupted);
	uintptr_t stack = place.stack & ~(uintptr_t)7;

	if (is_code(place.code))
		return true;
#ifndef __x86_64__
	if (is_code(interrupted->uc_mcontext.regs[30])) /* not on the stack yet */
		return true;
#endif
	for (int page = 0; page < DEPTH; page++) {
		/* Through the kernel, because the stack's start is unknown: beyond it nothing may
		 * be mapped. */
		size_t some = PAGE - stack % PAGE;
		struct iovec here = {words, some}, there = {(void *)stack, some};
		if (syscall(SYS_process_vm_readv, getpid(), &here, 1ul, &there, 1ul, 0ul) !=
		    (ssize_t)some)
			return errno != EFAULT;
		for (size_t i = 0; i < some / sizeof *words; i++)
			if (is_code(words[i]))
				return true;
		stack += some;
	}
	return false;
}
