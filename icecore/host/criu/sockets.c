/* A plugin of CRIU (criu(8), --libdir): unix sockets that are connected to sockets outside of the
 * tree are dumped, without their peers. icecore.host.criu.socket_images then makes closed
 * connections of them in the images, so a restore needs no plugin.
 *
 * CRIU refuses them otherwise, except for a datagram socket whose peer has a name, to which it
 * connects again. The dump of a socket reads its queue without taking anything out of it, so the
 * peer notices nothing.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "plugin.h"

static int begin(int stage)
{
	(void)stage;
	return 0;
}

static void end(int stage, int result)
{
	(void)stage, (void)result;
}

static int dump(int descriptor, int inode)
{
	struct sockaddr_un peer;
	int kind = 0;
	socklen_t length = sizeof kind;

	(void)inode;
	if (getsockopt(descriptor, SOL_SOCKET, SO_TYPE, &kind, &length))
		return -ENOTSUP;
	length = sizeof peer;
	if (kind == SOCK_DGRAM && !getpeername(descriptor, (struct sockaddr *)&peer, &length) &&
	    length > offsetof(struct sockaddr_un, sun_path))
		return -ENOTSUP;
	return 0;
}

CRIU_PLUGIN("icecore-sockets", begin, end, [DUMP_UNIX_SK] = dump);
