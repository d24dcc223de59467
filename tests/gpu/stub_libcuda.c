/* A libcuda with the checkpoint calls alone, for testing what passes through cuda.bindings: it
 * prints its arguments and keeps one process's state.
 *
 * It is no second tests/resident/fake_libcuda.c: that one is called by the processes that are
 * dumped, has memory and no checkpoint calls, and is driven through icecore.host.cuda.fake in place
 * of cuda.bindings. This one is called by icecore through cuda.bindings, and has nothing but what
 * shows which bytes arrive. */
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>

static int state;

int cuInit(unsigned flags)
{
	return 0;
}
int cuDriverGetVersion(int *version)
{
	*version = 13000;
	return 0;
}
int cuCheckpointProcessGetState(int pid, int *out)
{
	*out = state;
	return pid == 7 ? 1 : 0;
}
int cuCheckpointProcessGetRestoreThreadId(int pid, int *out)
{
	*out = pid + 1;
	return 0;
}
int cuCheckpointProcessLock(int pid, void *args)
{
	sleep(1);
	printf("lock %d %u\n", pid, *(unsigned *)args);
	fflush(stdout);
	state = 1;
	return pid == 8 ? 600 : 0;
}
int cuCheckpointProcessCheckpoint(int pid, void *args)
{
	state = 2;
	return 0;
}
int cuCheckpointProcessRestore(int pid, void *args)
{
	if (args) {
		unsigned char **pairs = args;
		unsigned count = *(unsigned *)((char *)args + sizeof(void *));
		printf("restore %d pairs %u:", pid, count);
		for (unsigned i = 0; i < 32 * count; i++)
			printf(" %02x", pairs[0][i]);
		printf("\n");
	} else
		printf("restore %d\n", pid);
	fflush(stdout);
	state = 1;
	return pid == 9 ? 801 : 0;
}
int cuCheckpointProcessUnlock(int pid, void *args)
{
	state = 0;
	return 0;
}

int cuGetProcAddress_v2(
    const char *name, void **out, int version, unsigned long long flags, int *status)
{
	*out = dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name);
	if (status)
		*status = 0;
	return *out ? 0 : 500;
}
int cuGetProcAddress(const char *name, void **out, int version, unsigned long long flags)
{
	return cuGetProcAddress_v2(name, out, version, flags, 0);
}
