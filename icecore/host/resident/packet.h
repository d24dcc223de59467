/* Packets with a descriptor over a unix socket, for preload and keeper. No call waits longer than
 * the socket's time-out, and none allocates. */
#ifndef ICECORE_RESIDENT_PACKET_H
#define ICECORE_RESIDENT_PACKET_H

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "protocol.h"

/* 0, or -1 with errno. `descriptor` may be -1. */
static inline int packet_send(int to, const struct resident_message *message, int descriptor)
{
	char control[CMSG_SPACE(sizeof(int))] = {0};
	struct iovec piece = {(void *)message, sizeof *message};
	struct msghdr header = {.msg_iov = &piece, .msg_iovlen = 1};
	ssize_t sent;

	if (descriptor >= 0) {
		header.msg_control = control;
		header.msg_controllen = sizeof control;
		struct cmsghdr *ancillary = CMSG_FIRSTHDR(&header);
		ancillary->cmsg_level = SOL_SOCKET;
		ancillary->cmsg_type = SCM_RIGHTS;
		ancillary->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(ancillary), &descriptor, sizeof descriptor);
	}
	do
		sent = sendmsg(to, &header, MSG_NOSIGNAL);
	while (sent < 0 && errno == EINTR);
	return sent == (ssize_t)sizeof *message ? 0 : -1;
}

/* 1, 0 at the end, or -1 with errno. `*descriptor` (where asked for) is -1 or the caller's to
 * close. */
static inline int packet_receive(
    int from, struct resident_message *message, int *descriptor, int flags)
{
	char control[CMSG_SPACE(sizeof(int))];
	struct iovec piece = {message, sizeof *message};
	struct msghdr header = {.msg_iov = &piece,
	    .msg_iovlen = 1,
	    .msg_control = control,
	    .msg_controllen = sizeof control};
	ssize_t got;
	int found = -1;

	do
		got = recvmsg(from, &header, MSG_CMSG_CLOEXEC | flags);
	while (got < 0 && errno == EINTR);
	if (descriptor)
		*descriptor = -1;
	if (got <= 0)
		return (int)got;
	struct cmsghdr *ancillary = CMSG_FIRSTHDR(&header);
	if (ancillary && ancillary->cmsg_level == SOL_SOCKET && ancillary->cmsg_type == SCM_RIGHTS)
		memcpy(&found, CMSG_DATA(ancillary), sizeof found);
	if (got != (ssize_t)sizeof *message || message->version < RESIDENT_OLDEST ||
	    message->version > RESIDENT_VERSION) {
		if (found >= 0)
			close(found);
		errno = EPROTO;
		return -1;
	}
	if (descriptor)
		*descriptor = found;
	else if (found >= 0)
		close(found);
	return 1;
}

static inline void packet_limit(int descriptor, int seconds)
{
	struct timeval limit = {.tv_sec = seconds};

	setsockopt(descriptor, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
	setsockopt(descriptor, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
}

#endif
