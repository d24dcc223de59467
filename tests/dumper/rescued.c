/* rescued PROCESSES THREADS FILE: each thread checks what it computes, in general and floating-point registers, and counts its steps in the file. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
static volatile uint64_t *counts;
static int threads;
static int pipes[2];
static void *work(void *which)
{
	long at = (long)which;
	double real = 1.0;
	uint64_t word = 88172645463325252ull;
	for (uint64_t step = 0;; step++) {
		double before = real; uint64_t was = word;
		for (int i = 0; i < 2000; i++) { real = real * 1.0000001 + 0.5; word ^= word << 13; word ^= word >> 7; word ^= word << 17; }
		double again = before; uint64_t same = was;
		for (int i = 0; i < 2000; i++) { again = again * 1.0000001 + 0.5; same ^= same << 13; same ^= same >> 7; same ^= same << 17; }
		if (again != real || same != word) abort();
		if (real > 1e100) real = 1;
		counts[at]++;
		if (at % 3 == 1) usleep(500);
		if (at % 3 == 2) { char c = 'x'; if (write(pipes[1], &c, 1) != 1 || read(pipes[0], &c, 1) != 1) abort(); }
	}
}
int main(int count, char **words)
{
	if (count != 4)
		return 2;
	int processes = atoi(words[1]); threads = atoi(words[2]);
	FILE *file = fopen(words[3], "w+");
	if (ftruncate(fileno(file), 4096 * 4)) return 1;
	counts = mmap(NULL, 4096 * 4, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
	int me = 0;
	for (int p = 1; p < processes; p++) if (fork() == 0) { me = p; break; }
	if (pipe(pipes)) return 1;
	sigset_t set; sigemptyset(&set); sigaddset(&set, SIGUSR2); sigprocmask(SIG_BLOCK, &set, NULL);
	char *big = mmap(NULL, 8 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	memset(big, 7, 8 << 20);
	mmap(NULL, 1 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	for (long t = 1; t < threads; t++) { pthread_t made; pthread_create(&made, NULL, work, (void *)(me * threads + t)); }
	work((void *)(long)(me * threads));
}
