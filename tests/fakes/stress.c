/* A job under load: threads rewrite device buffers, and check before each time that they hold what
 * was written last; links libcuda.
 *
 *     stress THREADS BUFFERS MIB DEVICES
 *
 * Beside them: threads that are born and die, one that forks, one that sleeps, one that waits for
 * all signals with sigwait, one that blocks them, one that is always within the driver, and all
 * allocate from the C library. Standard input's end ends it; it prints its rounds, or what was
 * wrong, with a status of 1.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long ptr;
int cuInit(unsigned), cuCtxCreate_v2(void **, unsigned, int), cuCtxSetCurrent(void *),
    cuMemAlloc_v2(ptr *, size_t), cuMemFree_v2(ptr);
int cuMemsetD8_v2(ptr, unsigned char, size_t);

static void *contexts[4]; /* two on each device */
static int threads, buffers, devices;
static size_t words;
static atomic_int stop;
static atomic_long rounds, births, forks;

static void wrong(const char *what, long value)
{
	printf("WRONG %s %ld\n", what, value);
	fflush(stdout);
	_exit(1);
}

static uint64_t next(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	return *state ^= *state << 17;
}

static ptr get(size_t bytes)
{
	ptr made;
	int code = cuMemAlloc_v2(&made, bytes);
	if (code)
		wrong("allocation", code);
	return made;
}

static void *worker(void *number)
{
	uint64_t state = 88172645463325252ull + (uintptr_t)number;
	ptr at[buffers];
	uint64_t seeds[buffers];

	cuCtxSetCurrent(contexts[(uintptr_t)number % (2 * devices)]);
	for (int i = 0; i < buffers; i++) {
		at[i] = get(words * 8);
		seeds[i] = 0;
		memset((void *)at[i], 0, words * 8);
	}
	while (!stop) {
		int i = (int)(next(&state) % buffers);
		uint64_t *buffer = (uint64_t *)at[i], fresh = next(&state) | 1;
		for (size_t k = 0; k < words; k += 61)
			if (buffer[k] != seeds[i] * (seeds[i] ? k + 1 : 0))
				wrong("contents", (long)k);
		for (size_t k = 0; k < words; k += 61)
			buffer[k] = fresh * (k + 1);
		seeds[i] = fresh;
		void *some[8];
		for (int k = 0; k < 8; k++)
			some[k] = malloc(next(&state) % 200000 + 1);
		for (int k = 0; k < 8; k++)
			free(some[k]);
		if (rounds % 16 == 0) {
			if (cuMemFree_v2(at[i]))
				wrong("free", i);
			at[i] = get(words * 8);
			memset((void *)at[i], 0, words * 8);
			seeds[i] = 0;
		}
		rounds++;
	}
	for (int i = 0; i < buffers; i++)
		cuMemFree_v2(at[i]);
	return NULL;
}

static void *short_lived(void *unused)
{
	births++;
	return unused;
}

static void *bearing(void *unused)
{
	pthread_t made;

	while (!stop)
		if (!pthread_create(&made, NULL, short_lived, NULL))
			pthread_join(made, NULL);
	return unused;
}

static void *forking(void *unused)
{
	while (!stop) {
		pid_t child = fork();
		if (child == 0)
			_exit(0);
		int status;
		if (child > 0 && (waitpid(child, &status, 0) != child || status))
			wrong("child", status);
		forks++;
		usleep(2000);
	}
	return unused;
}

static void *sleeping(void *unused)
{
	struct timespec long_time = {3600, 0};

	while (!stop)
		nanosleep(&long_time, NULL);
	return unused;
}

static void *waiting(void *unused)
{
	sigset_t all;
	int number;

	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, NULL);
	for (;;)
		if (sigwait(&all, &number) == 0 && number != SIGCHLD)
			wrong("signal", number);
	return unused;
}

/* As a runtime that makes its system calls itself. */
static void *blocking(void *unused)
{
	unsigned long all = ~0ul, found;

	syscall(SYS_rt_sigprocmask, SIG_SETMASK, &all, NULL, 8);
	for (;;) {
		usleep(500);
		syscall(SYS_rt_sigprocmask, SIG_SETMASK, NULL, &found, 8);
		if ((found | 1ul << (SIGKILL - 1) | 1ul << (SIGSTOP - 1)) != all)
			wrong("mask", (long)found);
	}
	return unused;
}

static void *driving(void *unused)
{
	cuCtxSetCurrent(contexts[0]);
	ptr mine = get(words * 8);

	while (!stop)
		if (cuMemsetD8_v2(mine, 1, words * 8))
			wrong("memset", 0);
	cuMemFree_v2(mine);
	return unused;
}

int main(int count, char **arguments)
{
	void *(*const others[])(void *) = {bearing, forking, sleeping, waiting, blocking, driving};
	pthread_t made[64], other;

	if (count != 5)
		return 2;
	threads = atoi(arguments[1]);
	buffers = atoi(arguments[2]);
	words = (size_t)atoi(arguments[3]) << 17;
	devices = atoi(arguments[4]);
	if (cuInit(0))
		wrong("init", 0);
	for (int i = 0; i < 2 * devices; i++)
		if (cuCtxCreate_v2(&contexts[i], 0, i % devices))
			wrong("context", i);
	for (int i = 0; i < threads; i++)
		pthread_create(&made[i], NULL, worker, (void *)(uintptr_t)i);
	for (size_t i = 0; i < sizeof others / sizeof *others; i++)
		pthread_create(&other, NULL, others[i], NULL);
	while (rounds < 100)
		usleep(1000);
	printf("ready\n");
	fflush(stdout);
	char line[8];
	while (fgets(line, sizeof line, stdin)) {
		printf("%ld %ld %ld\n", (long)rounds, (long)births, (long)forks);
		fflush(stdout);
	}
	stop = 1;
	for (int i = 0; i < threads; i++)
		pthread_join(made[i], NULL);
	printf("done %ld\n", (long)rounds);
	fflush(stdout);
	_exit(0);
}
