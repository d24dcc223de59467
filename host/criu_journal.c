/* Loaded into CRIU: notes down what a thread was before CRIU changes it; rule: the note is complete before the change, and is taken back only after it.
 *
 * CRIU has the threads that it dumps run code of its own: it blocks their signals, sets their registers, writes a few bytes over their program, and puts all back afterwards
 * (compel/src/lib/infect.c: parasite_run, restore_thread_ctx, ptrace_swap_area). Where it is killed in between, nobody puts it back, and the job dies of a SIGTRAP or goes on
 * without signals. So the registers, the mask and the bytes are noted down in memory that somebody else has too (ICECORE_JOURNAL, a descriptor; host/rescue.py reads it). CRIU has
 * one thread and changes one after the other, the leader of a process longest.
 *
 * The order of its calls says where it is: mask, registers, run, registers, mask; or for code that puts back everything by itself: mask, registers, run, then step by step to the
 * end of rt_sigreturn, and the next mask. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define NT_PRSTATUS 1
#define NT_X86_XSTATE 0x202
#define SLOTS 4
#define POKES 64

enum state { CLEAN, NOTED, ENTERED, RUNS, RETURNS, LEAVING };

struct slot {
	uint32_t thread, state;
	uint64_t mask;
	uint32_t registers, extended; /* bytes */
	uint8_t general[512], more[16384];
};

struct poke {
	uint64_t address, word;
	uint32_t thread, used;
};

/* As host/rescue.py has it. */
struct journal {
	uint32_t last, full; /* the thread that was changed last; something had no room */
	struct poke pokes[POKES];
	struct slot slots[SLOTS];
};

static struct journal *journal;

static long call(long request, pid_t thread, const void *address, const void *data)
{
	return syscall(SYS_ptrace, request, thread, address, data);
}

__attribute__((constructor)) static void begin(void)
{
	const char *number = getenv("ICECORE_JOURNAL");
	struct sigaction action;

	if (!number)
		return;
	void *found = mmap(NULL, sizeof *journal, PROT_READ | PROT_WRITE, MAP_SHARED, atoi(number), 0);
	if (found == MAP_FAILED)
		return;
	journal = found;
	/* Whoever traces CRIU, to see its end before its threads do, stops it for every signal that it gets, ignored ones too. Of its threads' stops it needs none: it waits. */
	if (sigaction(SIGCHLD, NULL, &action) == 0 && action.sa_handler == SIG_DFL) {
		action.sa_flags |= SA_NOCLDSTOP;
		sigaction(SIGCHLD, &action, NULL);
	}
}

static struct slot *slot_of(pid_t thread)
{
	for (int i = 0; i < SLOTS; i++)
		if (journal->slots[i].state != CLEAN && journal->slots[i].thread == (uint32_t)thread)
			return &journal->slots[i];
	return NULL;
}

static uint32_t get(pid_t thread, long kind, void *to, size_t room)
{
	struct iovec piece = {to, room};

	return call(PTRACE_GETREGSET, thread, (void *)kind, &piece) == 0 && piece.iov_len < room ? (uint32_t)piece.iov_len : 0;
}

static void set(struct slot *slot, enum state state)
{
	__atomic_store_n(&slot->state, state, __ATOMIC_SEQ_CST);
}

static void note(struct slot *slot, pid_t thread)
{
	for (int i = 0; !slot && i < SLOTS; i++)
		if (journal->slots[i].state == CLEAN)
			slot = &journal->slots[i];
	if (!slot) {
		journal->full = 1;
		return;
	}
	uint32_t registers, extended;
	uint64_t mask;
	/* What was noted of it stays valid until all of this is here: it stands where it was put back to. */
	struct slot fresh = {.thread = (uint32_t)thread};
	registers = get(thread, NT_PRSTATUS, fresh.general, sizeof fresh.general);
	extended = get(thread, NT_X86_XSTATE, fresh.more, sizeof fresh.more);
	if (!registers || call(PTRACE_GETSIGMASK, thread, (void *)sizeof mask, &mask))
		return;
	set(slot, CLEAN);
	slot->thread = (uint32_t)thread;
	slot->mask = mask;
	slot->registers = registers;
	slot->extended = extended;
	memcpy(slot->general, fresh.general, registers);
	memcpy(slot->more, fresh.more, extended);
	journal->last = (uint32_t)thread;
	set(slot, NOTED);
}

static void note_bytes(pid_t thread, uint64_t address)
{
	uint64_t word;

	for (int i = 0; i < POKES; i++)
		if (journal->pokes[i].used && journal->pokes[i].address == address && journal->pokes[i].thread == (uint32_t)thread)
			return;
	if (call(PTRACE_PEEKDATA, thread, (void *)address, &word))
		return;
	for (int i = 0; i < POKES; i++)
		if (!journal->pokes[i].used) {
			journal->pokes[i] = (struct poke){address, word, (uint32_t)thread, 0};
			journal->last = (uint32_t)thread;
			__atomic_store_n(&journal->pokes[i].used, 1, __ATOMIC_SEQ_CST);
			return;
		}
	journal->full = 1;
}

/* The bytes are as they were: after the call that wrote them. */
static void forget_bytes(pid_t thread, uint64_t address, uint64_t word)
{
	for (int i = 0; i < POKES; i++)
		if (journal->pokes[i].used && journal->pokes[i].address == address && journal->pokes[i].thread == (uint32_t)thread && journal->pokes[i].word == word)
			__atomic_store_n(&journal->pokes[i].used, 0, __ATOMIC_SEQ_CST);
}

static void before(long request, pid_t thread, void *address)
{
	struct slot *slot = slot_of(thread);

	switch (request) {
	case PTRACE_SETSIGMASK:
		if (!slot || slot->state == RETURNS)
			note(slot, thread);
		break;
	case PTRACE_CONT:
	case PTRACE_SYSCALL:
		if (slot && slot->state == ENTERED)
			set(slot, RUNS);
		else if (slot && slot->state == RUNS && request == PTRACE_SYSCALL)
			set(slot, RETURNS); /* it is taken to the end of rt_sigreturn */
		else if (slot && slot->state == NOTED)
			set(slot, CLEAN); /* CRIU's own child, on which it tries something */
		break;
	case PTRACE_POKEDATA:
	case PTRACE_POKETEXT:
		note_bytes(thread, (uint64_t)address);
		break;
	case PTRACE_SETREGSET:
	case PTRACE_SETREGS:
		if (slot && slot->state == NOTED)
			set(slot, ENTERED);
		else if (slot && (slot->state == ENTERED || slot->state == RUNS || slot->state == RETURNS))
			set(slot, LEAVING);
		break;
	default:
		break;
	}
}

static void after(long request, pid_t thread, void *address, void *data, enum state was)
{
	struct slot *slot = slot_of(thread);

	switch (request) {
	case PTRACE_SETSIGMASK:
		if (slot && (was == LEAVING || was == NOTED || was == ENTERED))
			set(slot, CLEAN);
		break;
	case PTRACE_POKEDATA:
	case PTRACE_POKETEXT:
		forget_bytes(thread, (uint64_t)address, (uint64_t)data);
		break;
	case PTRACE_DETACH:
		if (slot)
			set(slot, CLEAN);
		for (int i = 0; i < POKES; i++)
			if (journal->pokes[i].thread == (uint32_t)thread)
				__atomic_store_n(&journal->pokes[i].used, 0, __ATOMIC_SEQ_CST);
		break;
	default:
		break;
	}
}

/* As the C library has it: what is read is returned. */
__attribute__((visibility("default"))) long ptrace(enum __ptrace_request request, ...)
{
	va_list arguments;
	va_start(arguments, request);
	pid_t thread = va_arg(arguments, pid_t);
	void *address = va_arg(arguments, void *);
	void *data = va_arg(arguments, void *);
	va_end(arguments);
	int reads = request == PTRACE_PEEKTEXT || request == PTRACE_PEEKDATA || request == PTRACE_PEEKUSER;
	struct slot *slot = journal ? slot_of(thread) : NULL;
	enum state was = slot ? slot->state : CLEAN;
	long word = 0, result;

	if (journal)
		before(request, thread, address);
	result = call(request, thread, address, reads ? &word : data);
	if (result < 0)
		return result;
	if (journal) {
		int error = errno;
		after(request, thread, address, data, was);
		errno = error;
	}
	if (reads) {
		errno = 0;
		return word;
	}
	return result;
}
