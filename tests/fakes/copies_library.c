/* What copies.c requires from driver.c. The library whose calls it replaces is given by a handle from
 * dlopen(3). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stddef.h>

#include "driver.h"

static struct link_map *library;

__attribute__((visibility("default"))) int use_library(void *handle)
{
	return dlinfo(handle, RTLD_DI_LINKMAP, &library);
}

const struct link_map *driver_library(void)
{
	return library;
}
