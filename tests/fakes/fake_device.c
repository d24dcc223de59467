/* The driver's side of fake_cuda.py: device memory outside of the process, and a thread that moves it in and out; rule: that thread needs no other one.
 *
 * All others may be frozen while it checkpoints and restores, so from "lock" on it takes no lock that one of them might hold: no malloc, no stdio stream,
 * nothing of Python. It acts on what icecore.host.cuda.fake leaves in the page at CONTROL; all that it knows is in the process, and so is in its snapshots.
 *
 * It is no second fake_libcuda.c, which offers the driver's calls to programs that the preload supervises. Its process makes no CUDA call:
 * CRIU and icecore find in it what a driver leaves in a process, a thread, mappings and device files, and nothing else.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "fake_control.h"

#define DEVICE ((char *)DEVICE_IMAGE)
#define BESIDE ((uint64_t *)(DEVICE + size)) /* memory of the process: the kernel makes one mapping of it and of device memory */
#define WRITTEN 0x656469736562ull
#define LENT ((char *)0x6FA4F0000000)
#define CONTROL ((struct control *)CONTROL_PAGE)
#define REGISTERS ((char *)0x6FA4D0000000) /* a shared mapping of the GPU's device file, where that is one */
enum { PAGE = 4096, LENT_BYTES = 16 * PAGE, MOST_GPUS = 16 };
enum { OK = 0, INVALID = 1, ILLEGAL = 401, NOT_READY = 600 };
enum { MOST_PAIRS = (PAGE - sizeof(struct control)) / 32 };

static char world[PATH_MAX / 2], place[PATH_MAX], lent_place[PATH_MAX];
static uint8_t uuids[MOST_GPUS][16]; /* by number */
static unsigned gpus, gpu;
static size_t size;
static int file, nodes[3];
static bool lent, registers;
static enum control_state state;
static pthread_mutex_t calls = PTHREAD_MUTEX_INITIALIZER; /* held in each CUDA call, and while it is locked */

static void must(bool good, const char *what)
{
	if (good)
		return;
	dprintf(STDERR_FILENO, "fake_device: %s: errno %d\n", what, errno);
	abort();
}

static void nap(long nanoseconds)
{
	nanosleep(&(struct timespec){.tv_nsec = nanoseconds}, NULL);
}

static void map(char *address, size_t length, int flags, int descriptor)
{
	must(mmap(address, length, PROT_READ | PROT_WRITE, flags | MAP_FIXED_NOREPLACE, descriptor, 0) == address, "mmap");
}

/* Create a file of a random name; its descriptor, negative where there is no such folder. */
static int create(char *path, const char *begin)
{
	uint64_t name;
	must(getrandom(&name, sizeof name, 0) == sizeof name, "getrandom");
	must(snprintf(path, PATH_MAX, "%s%016llx", begin, (unsigned long long)name) < PATH_MAX, "path");
	return open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
}

/* Memory on a GPU, with that content; also opens what a CUDA process has open. False: there is no such GPU. */
static bool take(unsigned number, const char *content)
{
	char path[PATH_MAX];
	const uint8_t *u = uuids[number];
	snprintf(path, sizeof path, "%s/gpu/GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x/", world, u[0], u[1], u[2], u[3], u[4], u[5],
	         u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
	file = create(place, path);
	if (file < 0)
		return false;
	for (size_t at = 0; at < size; at += PAGE)
		(void)*(const volatile char *)(content + at); /* restored lazily, it might be missing in a system call that is interrupted */
	must(pwrite(file, content, size, 0) == (ssize_t)size, "device memory");
	for (int i = 0; i < 3; i++) {
		snprintf(path, sizeof path, "%s/dev/nvidia", world);
		if (i)
			strcat(path, i == 1 ? "ctl" : "-uvm");
		else
			snprintf(path + strlen(path), 16, "%u", number);
		nodes[i] = open(path, O_RDWR | O_CLOEXEC);
		must(nodes[i] >= 0, path);
	}
	struct stat about;
	registers = !fstat(nodes[0], &about) && !S_ISREG(about.st_mode);
	if (registers)
		map(REGISTERS, PAGE, MAP_SHARED, nodes[0]);
	gpu = number;
	return true;
}

/* Move the content into the process; the GPU is let go. */
static void leave(void)
{
	map(DEVICE, size, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1); /* as the real one has it */
	must(pread(file, DEVICE, size, 0) == (ssize_t)size, "device memory");
	close(file);
	if (registers)
		munmap(REGISTERS, PAGE);
	for (int i = 0; i < 3; i++)
		close(nodes[i]);
	must(unlink(place) == 0, place);
}

static void map_lent_file(void)
{
	char begin[PATH_MAX];
	snprintf(begin, sizeof begin, "%s/dev/lent-", world);
	int made = create(lent_place, begin);
	must(made >= 0 && ftruncate(made, LENT_BYTES) == 0, lent_place);
	map(LENT, LENT_BYTES, MAP_SHARED, made);
	close(made);
}

/* Memory of the driver becomes the process's own, or the driver's again: in between it is not there. */
static void turn_lent(bool own)
{
	static char aside[LENT_BYTES];
	memcpy(aside, LENT, LENT_BYTES);
	munmap(LENT, LENT_BYTES);
	nap(20000000);
	if (own) {
		map(LENT, LENT_BYTES, MAP_PRIVATE | MAP_ANONYMOUS, -1);
		must(unlink(lent_place) == 0, lent_place);
	} else
		map_lent_file();
	memcpy(LENT, aside, LENT_BYTES);
}

/* A thread that uses memory of the driver and makes no CUDA call: no lock holds it back. */
static void *use_lent(void *unused)
{
	for (uint64_t count = 0;; count++) {
		for (char *page = LENT; page < LENT + LENT_BYTES; page += PAGE) {
			must(*(volatile uint64_t *)page == count, "memory of the driver is not what was written");
			*(volatile uint64_t *)page = count + 1;
		}
		nap(100000);
	}
	return unused;
}

static int lock(uint32_t milliseconds)
{
	struct timespec end;
	if (!milliseconds)
		return pthread_mutex_lock(&calls) ? NOT_READY : OK;
	clock_gettime(CLOCK_REALTIME, &end);
	uint64_t nanoseconds = end.tv_nsec + milliseconds * 1000000ull;
	end.tv_sec += nanoseconds / 1000000000;
	end.tv_nsec = nanoseconds % 1000000000;
	return pthread_mutex_timedlock(&calls, &end) ? NOT_READY : OK;
}

/* The number of the GPU to restore onto; `gpus`: none. */
static unsigned destination(unsigned pairs)
{
	unsigned to = 0;
	if (!pairs)
		return gpu;
	for (unsigned i = 0; i < pairs && i < MOST_PAIRS; i++)
		if (!memcmp(CONTROL->pair[i][0], uuids[gpu], 16)) {
			while (to < gpus && memcmp(CONTROL->pair[i][1], uuids[to], 16))
				to++;
			return to;
		}
	return gpus;
}

static int act(uint32_t operation, uint32_t milliseconds, uint32_t pairs)
{
	if (operation == LOCK && state == RUNNING) {
		if (lock(milliseconds))
			return NOT_READY;
		state = LOCKED;
	} else if (operation == CHECKPOINT && state == LOCKED) {
		leave();
		if (lent)
			turn_lent(true);
		state = CHECKPOINTED;
	} else if (operation == RESTORE && state == CHECKPOINTED) {
		unsigned to = destination(pairs);
		if (to == gpus || !take(to, DEVICE))
			return INVALID;
		munmap(DEVICE, size);
		must(*(volatile uint64_t *)BESIDE == WRITTEN, "memory beside the driver's is not what was written");
		if (lent)
			turn_lent(false);
		state = LOCKED;
	} else if (operation == UNLOCK && state == LOCKED) {
		pthread_mutex_unlock(&calls);
		state = RUNNING;
	} else
		return ILLEGAL;
	return OK;
}

static void tell(uint64_t answer, int result)
{
	CONTROL->result = result;
	CONTROL->state = state;
	CONTROL->thread = syscall(SYS_gettid); /* as it is now: it may have been restored elsewhere */
	CONTROL->bytes = size;
	memcpy(CONTROL->gpu, uuids[gpu], 16);
	memcpy(CONTROL->magic, "FAKECUDA", 8);
	__atomic_store_n(&CONTROL->answer, answer, __ATOMIC_RELEASE);
}

/* Device memory is its process's alone: here it is a file, which a child would have too. */
static void in_child(void)
{
	close(file);
}

static sem_t served;

static void *serve(void *unused)
{
	uint64_t answered = 0;
	pthread_setname_np(pthread_self(), "cuda-EvtHandlr");
	tell(0, OK);
	sem_post(&served);
	for (;;) {
		uint64_t request = __atomic_load_n(&CONTROL->request, __ATOMIC_ACQUIRE);
		if (request == answered) {
			nap(1000000);
			continue;
		}
		answered = request;
		tell(request, act(CONTROL->operation, CONTROL->milliseconds, CONTROL->pairs));
	}
	return unused;
}

/* Begin, once in a process: device memory of `bytes` with that content on GPU `number` of `count`. Zero, or an errno. */
int device_start(const char *root, const uint8_t *known, unsigned count, unsigned number, const char *content, size_t bytes, int with_lent)
{
	pthread_t thread;
	sigset_t all, before;
	if (strlen(root) >= sizeof world - 64 || count > MOST_GPUS || number >= count)
		return EINVAL;
	strcpy(world, root);
	memcpy(uuids, known, 16 * count);
	gpus = count;
	size = bytes;
	lent = with_lent;
	if (!take(number, content))
		return errno;
	map((char *)CONTROL, PAGE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1);
	must(madvise(CONTROL, PAGE, MADV_DONTFORK) == 0, "madvise"); /* the driver knows nothing of a child */
	must(pthread_atfork(NULL, NULL, in_child) == 0, "atfork");
	map((char *)BESIDE, PAGE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	*BESIDE = WRITTEN;
	if (lent) {
		map_lent_file();
		must(pthread_create(&thread, NULL, use_lent, NULL) == 0, "thread");
	}
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	sem_init(&served, 0, 0);
	must(pthread_create(&thread, NULL, serve, NULL) == 0, "thread");
	while (sem_wait(&served)) /* who has initialised CUDA can be checkpointed */
		;
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return 0;
}

/* Begin a CUDA call; the descriptor of device memory. */
int device_enter(void)
{
	pthread_mutex_lock(&calls);
	return file;
}

void device_leave(void)
{
	pthread_mutex_unlock(&calls);
}
