/* Whether a stopped thread may be within the driver. By the agent alone. */
#ifndef ICECORE_RESIDENT_STACK_H
#define ICECORE_RESIDENT_STACK_H

#include <stdbool.h>
#include <stdint.h>
#include <ucontext.h>

struct place {
	uintptr_t code, stack; /* the instruction pointer and the stack pointer */
};

void stack_find_driver(void); /* once */
struct place stack_place(const ucontext_t *interrupted);
/* whether a thread that was stopped there may be within one of the driver's calls */
bool stack_in_driver(const ucontext_t *interrupted);

#endif
