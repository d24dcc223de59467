/*
 * A process whose threads each do one thing that an interruption could disturb, and look at every result; its rule: what is wrong is said, and it ends with 1.
 *
 * calls BYTES [NAME]: maps BYTES of memory and prints "ready ADDRESS"; when its standard input ends, all threads end, and it prints "ROUNDS NAME" for each.
 * With NAME there is that thread and no other.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/rseq.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static atomic_int over, wrong;
static int quiet[2];
static uint32_t word;

#define MUST(what)                                                                                                     \
	do {                                                                                                           \
		if (!(what)) {                                                                                         \
			dprintf(2, "line %d: %s (errno %d)\n", __LINE__, #what, errno);                               \
			over = wrong = 1;                                                                              \
		}                                                                                                      \
	} while (0)

static double now(void)
{
	struct timespec at;
	clock_gettime(CLOCK_MONOTONIC, &at);
	return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
}

/* Restarted with the time that is left: it never takes less than it should. */
static void sleeping(void)
{
	struct timespec pause = {0, 30000000};
	double before = now();
	MUST(nanosleep(&pause, NULL) == 0);
	MUST(now() - before >= 0.03);
}

static void waiting(void)
{
	struct timespec pause = {0, 30000000};
	double before = now();
	long found = syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, &pause, NULL, 0);
	MUST(found == -1 && errno == ETIMEDOUT);
	MUST(now() - before >= 0.03);
}

/* Until it is closed. */
static void reading(void)
{
	char byte;
	MUST(read(quiet[0], &byte, 1) == 0);
}

/* This one is not restarted after a stop (signal(7)). */
static void watching(void)
{
	int set = epoll_create1(0);
	struct epoll_event event;
	int found = epoll_wait(set, &event, 1, 30);
	MUST(found == 0 || (found == -1 && errno == EINTR));
	close(set);
}

/* With another set of signals blocked meanwhile. */
static void polling(void)
{
	sigset_t none, before, after;
	struct timespec pause = {0, 30000000};
	sigemptyset(&none);
	pthread_sigmask(SIG_SETMASK, NULL, &before);
	int found = ppoll(NULL, 0, &pause, &none);
	MUST(found == 0 || (found == -1 && errno == EINTR));
	pthread_sigmask(SIG_SETMASK, NULL, &after);
	MUST(sigismember(&before, SIGUSR2) == 1 && memcmp(&before, &after, 16) == 0);
}

static void asking(void)
{
	static const char *path = "/proc/self/stat";
	MUST(syscall(SYS_getppid) == getppid());
	MUST(syscall(SYS_gettid) > 0);
	MUST(access(path, R_OK) == 0);
	MUST(syscall(SYS_close, -1) == -1 && errno == EBADF);
}

/* All general and some vector registers hold what they should, over and over. */
static void computing(void)
{
	uint64_t general = 0;
	double vector[2] = {0, 0};
	__asm__ volatile("push %%rbp\n\t"
			 "mov $1, %%rax\n\tmov $2, %%rbx\n\tmov $3, %%rcx\n\tmov $4, %%rdx\n\tmov $5, %%rbp\n\t"
			 "mov $6, %%r8\n\tmov $7, %%r9\n\tmov $8, %%r10\n\tmov $9, %%r11\n\tmov $10, %%r12\n\t"
			 "mov $11, %%r13\n\tmov $12, %%r14\n\t"
			 "pcmpeqd %%xmm0, %%xmm0\n\tpsrlq $54, %%xmm0\n\tpsllq $52, %%xmm0\n\t" /* 1.0, 1.0 */
			 "pxor %%xmm15, %%xmm15\n\t"
			 "mov $1000000, %%r15\n"
			 "1:\taddpd %%xmm0, %%xmm15\n\t"
			 "add %%rax, %%rsi\n\tadd %%rbx, %%rsi\n\tadd %%rcx, %%rsi\n\tadd %%rdx, %%rsi\n\tadd %%rbp, %%rsi\n\t"
			 "add %%r8, %%rsi\n\tadd %%r9, %%rsi\n\tadd %%r10, %%rsi\n\tadd %%r11, %%rsi\n\tadd %%r12, %%rsi\n\t"
			 "add %%r13, %%rsi\n\tadd %%r14, %%rsi\n\t"
			 "dec %%r15\n\tjnz 1b\n\t"
			 "movupd %%xmm15, (%%rdi)\n\tpop %%rbp"
			 : "+S"(general)
			 : "D"(vector)
			 : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm15", "memory", "cc");
	MUST(general == 78000000);
	MUST(vector[0] == 1e6 && vector[1] == 1e6);
}

/* A critical section (rseq(2)), begun again wherever it was left. */
static void section(void)
{
	struct rseq *area = (void *)((char *)__builtin_thread_pointer() + __rseq_offset);
	__asm__ volatile(".pushsection sections, \"aw\"\n\t.balign 32\n3:\t.long 0, 0\n\t.quad 1f, 2f - 1f, 4f\n\t.popsection\n\t"
			 "jmp 5f\n\t"
			 ".byte 0x0f, 0xb9, 0x3d\n\t.long 0x53053053\n" /* RSEQ_SIG, where the kernel looks for it */
			 "4:\n5:\tmov $2000000, %%rcx\n\tlea 3b(%%rip), %%rax\n\tmov %%rax, %0\n"
			 "1:\tdec %%rcx\n\tjnz 1b\n2:\tmovq $0, %0"
			 : "+m"(area->rseq_cs)
			 :
			 : "rax", "rcx", "memory", "cc");
}

static const struct {
	const char *name;
	void (*once)(void);
} WORK[] = {{"sleeping", sleeping}, {"waiting", waiting}, {"reading", reading}, {"watching", watching}, {"polling", polling}, {"asking", asking}, {"computing", computing}, {"section", section}};
enum { KINDS = sizeof(WORK) / sizeof(WORK[0]), USUAL = KINDS - 1 };

static long rounds[KINDS];

static void *run(void *which)
{
	size_t kind = (size_t)which;
	sigset_t one;
	sigemptyset(&one);
	sigaddset(&one, SIGUSR2);
	pthread_sigmask(SIG_SETMASK, &one, NULL);
	prctl(PR_SET_NAME, WORK[kind].name);
	while (!over) {
		WORK[kind].once();
		rounds[kind]++;
	}
	return NULL;
}

static int wanted(size_t kind, const char *only)
{
	return only ? strcmp(WORK[kind].name, only) == 0 : kind < USUAL;
}

int main(int count, char **arguments)
{
	pthread_t threads[KINDS];
	if (count < 2)
		return 2;
	size_t size = strtoull(arguments[1], NULL, 0);
	void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	MUST(memory != MAP_FAILED && pipe(quiet) == 0);
	for (size_t kind = 0; kind < KINDS; kind++)
		if (wanted(kind, arguments[2]))
			MUST(pthread_create(&threads[kind], NULL, run, (void *)kind) == 0);
	printf("ready %p\n", memory);
	fflush(stdout);
	char byte;
	MUST(read(0, &byte, 1) == 0); /* the main thread's own work */
	over = 1;
	close(quiet[1]);
	for (size_t kind = 0; kind < KINDS; kind++) {
		if (!wanted(kind, arguments[2]))
			continue;
		pthread_join(threads[kind], NULL);
		printf("%ld %s\n", rounds[kind], WORK[kind].name);
	}
	return wrong;
}
