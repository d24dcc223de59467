/* Changes of names as icecore/host/criu/names.c allows them, for the other files of the library. */
#ifndef ICECORE_NAMES_H
#define ICECORE_NAMES_H

#include <sys/types.h>

int make_file(const char *path, int flags, mode_t mode);
int change_name(const char *old, const char *new);
int remove_name(int directory, const char *path, int flags);

#endif
