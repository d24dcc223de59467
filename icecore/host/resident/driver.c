/* The real driver's functions, looked up on first use. Without a libcuda, driver() is NULL. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdlib.h>

#include "driver.h"

driver_lookup *driver_dlsym;

static struct driver calls;
static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER;
static int loaded; /* 1: found, -1: there is none */
static void *libcuda;
static struct link_map *libcuda_map;

void driver_find_dlsym(void)
{
	static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17"};

	for (size_t i = 0; !driver_dlsym && i < sizeof versions / sizeof *versions; i++)
		driver_dlsym = (driver_lookup *)dlvsym(RTLD_NEXT, "dlsym", versions[i]);
	if (!driver_dlsym)
		/* an unknown C library: nobody could look up any symbol */
		abort();
}

const struct driver *driver(void)
{
	if (__atomic_load_n(&loaded, __ATOMIC_ACQUIRE) == 0) {
		driver_find_dlsym();
		/* outside our lock: its constructors may call us */
		void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
		pthread_mutex_lock(&load_lock);
		if (library && !loaded) {
			libcuda = library;
			if (dlinfo(library, RTLD_DI_LINKMAP, &libcuda_map))
				libcuda_map = NULL;
			calls.usable = 1;
#define CALL(call, arguments) \
	calls.call = (CUresult(*) arguments)driver_dlsym(library, #call); \
	calls.usable = calls.usable && calls.call;
#define HOOKED(call, arguments) calls.call = (CUresult(*) arguments)driver_dlsym(library, #call);
			DRIVER_CALLS(CALL, CALL, HOOKED)
#undef CALL
#undef HOOKED
			calls.cuThreadExchangeStreamCaptureMode = (CUresult (*)(int *))driver_dlsym(
			    library, "cuThreadExchangeStreamCaptureMode");
			calls.cuCtxGetLimit =
			    (CUresult (*)(size_t *, int))driver_dlsym(library, "cuCtxGetLimit");
			calls.cuCtxSetLimit =
			    (CUresult (*)(int, size_t))driver_dlsym(library, "cuCtxSetLimit");
			calls.cuEventSynchronize =
			    (CUresult (*)(CUevent))driver_dlsym(library, "cuEventSynchronize");
			calls.cuStreamIsCapturing = (CUresult (*)(CUstream, int *))driver_dlsym(
			    library, "cuStreamIsCapturing");
		}
		__atomic_store_n(&loaded, library ? 1 : -1, __ATOMIC_RELEASE);
		pthread_mutex_unlock(&load_lock);
	}
	return loaded > 0 ? &calls : NULL;
}

void *driver_symbol(const char *symbol)
{
	return driver() ? driver_dlsym(libcuda, symbol) : NULL;
}

const struct link_map *driver_library(void)
{
	return driver() ? libcuda_map : NULL;
}

void driver_in_child(void)
{
	pthread_mutex_init(&load_lock, NULL);
}
