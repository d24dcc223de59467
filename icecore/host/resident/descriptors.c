/* Descriptor numbers that applications leave alone. An application may still close ours and get the
 * number for a file of its own, so a descriptor is compared with what was opened before it is used.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "descriptors.h"

int descriptor_duplicate(int descriptor)
{
	int high = fcntl(descriptor, F_DUPFD_CLOEXEC, DESCRIPTOR_HIGH);

	/* the limit may lie below */
	return high < 0 ? fcntl(descriptor, F_DUPFD_CLOEXEC, 0) : high;
}

int descriptor_from(int descriptor, int least)
{
	int high = fcntl(descriptor, F_DUPFD_CLOEXEC, least);

	if (high < 0)
		return descriptor;
	close(descriptor);
	return high;
}

int descriptor_high(int descriptor)
{
	return descriptor_from(descriptor, DESCRIPTOR_HIGH);
}

bool descriptor_is(int descriptor, ino_t inode)
{
	struct stat found;

	return descriptor >= 0 && fstat(descriptor, &found) == 0 && found.st_ino == inode;
}
