/* Preloaded into CRIU: what the kernel tells it about unix sockets (sock_diag(7)) is consistent,
 * although sockets outside of the tree come and go while the kernel tells it.
 *
 * CRIU (4.0 to 4.2: criu/sk-unix.c) fails a dump if a socket's peer is missing from the list (it
 * was closed meanwhile, or lies in another network namespace), and if a connection that waits to be
 * accepted was closed by its client. The first call that receives a part of the list receives all
 * of it. In it, a socket whose peer is missing becomes one whose peer has closed the connection, and
 * clients that are gone get a number that no socket has. Then the parts are handed out one by one.
 *
 * A connection that a server has accepted belongs to the network namespace of its client. So the
 * list of a job with a network namespace of its own is completed by that of CRIU's own namespace.
 */
#define _GNU_SOURCE
#include "conntrack.h"

#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <linux/unix_diag.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/* As large as CRIU's buffer (criu/libnetlink.c): the kernel makes no larger part than was asked for. */
#define PART ((size_t)16 << 10)
#define BOTH 3
#define NOBODY UINT32_MAX
#ifndef SO_NETNS_COOKIE /* Linux 5.14 */
#define SO_NETNS_COOKIE 71
#endif

struct part {
	size_t length;
	struct sockaddr_nl from;
	unsigned char data[];
};

/* The list that is being handed out. */
static struct {
	int of; /* the netlink socket */
	struct part **parts;
	size_t count, room, next;
} list = {.of = -1};

static struct {
	uint32_t *inodes;
	size_t count, room;
} known;

/* A socket of the namespace in which CRIU was started. */
static int own = -1;

__attribute__((constructor)) static void open_own(void)
{
	own = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);
}

static ssize_t receive(int descriptor, struct msghdr *message, int flags)
{
	return syscall(SYS_recvmsg, (long)descriptor, message, (long)flags);
}

static bool is_diag(int descriptor)
{
	int value = 0;
	socklen_t length = sizeof value;

	if (getsockopt(descriptor, SOL_SOCKET, SO_DOMAIN, &value, &length) || value != AF_NETLINK)
		return false;
	length = sizeof value;
	return !getsockopt(descriptor, SOL_SOCKET, SO_PROTOCOL, &value, &length) &&
	    value == NETLINK_SOCK_DIAG;
}

static struct part *next_part(int descriptor, int flags)
{
	struct part *part = malloc(sizeof *part + PART);
	if (!part)
		return NULL;
	struct iovec place = {part->data, PART};
	struct msghdr message = {
	    .msg_name = &part->from,
	    .msg_namelen = sizeof part->from,
	    .msg_iov = &place,
	    .msg_iovlen = 1,
	};
	ssize_t length = receive(descriptor, &message, flags);

	if (length < 0 || message.msg_flags & MSG_TRUNC) {
		free(part);
		return NULL;
	}
	part->length = (size_t)length;
	return part;
}

static struct unix_diag_msg *socket_in(struct nlmsghdr *head)
{
	struct unix_diag_msg *about = NLMSG_DATA(head);

	return head->nlmsg_type == SOCK_DIAG_BY_FAMILY &&
		head->nlmsg_len >= NLMSG_LENGTH(sizeof *about) && about->udiag_family == AF_UNIX
	    ? about
	    : NULL;
}

/* 1: the list ends here; 0: it goes on; -1: it is not one of unix sockets. */
static int kind_of(struct part *part)
{
	int left = (int)part->length;

	for (struct nlmsghdr *head = (void *)part->data; NLMSG_OK(head, left);
	     head = NLMSG_NEXT(head, left)) {
		if (head->nlmsg_type == NLMSG_DONE)
			return 1;
		if (!socket_in(head))
			return -1;
	}
	return 0;
}

static bool note(uint32_t inode)
{
	if (known.count == known.room) {
		size_t room = 2 * known.room + 256;
		uint32_t *more = realloc(known.inodes, room * sizeof *more);
		if (!more)
			return false;
		known.inodes = more;
		known.room = room;
	}
	known.inodes[known.count++] = inode;
	return true;
}

static int compare(const void *one, const void *other)
{
	uint32_t a = *(const uint32_t *)one, b = *(const uint32_t *)other;

	return a < b ? -1 : a > b;
}

static bool is_known(uint32_t inode)
{
	return bsearch(&inode, known.inodes, known.count, sizeof inode, compare);
}

static void correct(struct unix_diag_msg *about, size_t size)
{
	unsigned char *shutdown = NULL;
	bool closed = false;
	size_t at = NLMSG_ALIGN(sizeof *about);

	while (at + sizeof(struct nlattr) <= size) {
		struct nlattr *attribute = (void *)((unsigned char *)about + at);
		uint32_t *values = (void *)(attribute + 1);
		size_t length = attribute->nla_len;
		if (length < sizeof *attribute || at + length > size)
			return;
		size_t count = (length - sizeof *attribute) / sizeof *values;
		if (attribute->nla_type == UNIX_DIAG_PEER && count && *values && !is_known(*values)) {
			*values = 0;
			closed = true;
		} else if (attribute->nla_type == UNIX_DIAG_ICONS) {
			for (size_t i = 0; i < count; i++)
				if (!values[i])
					values[i] = NOBODY;
		} else if (attribute->nla_type == UNIX_DIAG_SHUTDOWN && length > sizeof *attribute)
			shutdown = (unsigned char *)values;
		at += NLMSG_ALIGN(length);
	}
	if (closed && shutdown && about->udiag_type != SOCK_DGRAM)
		*shutdown = BOTH;
}

static void each(struct part *part, bool correcting)
{
	int left = (int)part->length;

	for (struct nlmsghdr *head = (void *)part->data; NLMSG_OK(head, left);
	     head = NLMSG_NEXT(head, left)) {
		struct unix_diag_msg *about = socket_in(head);
		if (about && correcting)
			correct(about, head->nlmsg_len - NLMSG_HDRLEN);
		else if (about)
			note(about->udiag_ino);
	}
}

static bool add(struct part *part)
{
	if (list.count == list.room) {
		size_t room = 2 * list.room + 16;
		struct part **more = realloc(list.parts, room * sizeof *more);
		if (!more) {
			free(part);
			return false;
		}
		list.parts = more;
		list.room = room;
	}
	list.parts[list.count++] = part;
	return true;
}

static bool is_elsewhere(int descriptor)
{
	uint64_t here = 0, there = 0;
	socklen_t length = sizeof here;

	return !getsockopt(own, SOL_SOCKET, SO_NETNS_COOKIE, &here, &length) &&
	    !getsockopt(descriptor, SOL_SOCKET, SO_NETNS_COOKIE, &there, &length) && here != there;
}

/* Where the end of the list begins. */
static size_t without_end(struct part *part)
{
	int left = (int)part->length;

	for (struct nlmsghdr *head = (void *)part->data; NLMSG_OK(head, left);
	     head = NLMSG_NEXT(head, left))
		if (head->nlmsg_type == NLMSG_DONE)
			return (size_t)((unsigned char *)head - part->data);
	return part->length;
}

/* The list of CRIU's namespace, as CRIU asks for it (criu/sockets.c), without its end. */
static void add_own(uint32_t sequence)
{
	struct {
		struct nlmsghdr head;
		struct unix_diag_req body;
	} request = {
	    .head =
		{
		    .nlmsg_len = sizeof request,
		    .nlmsg_type = SOCK_DIAG_BY_FAMILY,
		    .nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP,
		    .nlmsg_seq = sequence,
		},
	    .body =
		{
		    .sdiag_family = AF_UNIX,
		    .udiag_states = UINT32_MAX,
		    .udiag_show = UDIAG_SHOW_NAME | UDIAG_SHOW_VFS | UDIAG_SHOW_PEER |
			UDIAG_SHOW_ICONS | UDIAG_SHOW_RQLEN,
		},
	};
	int kind = 0;

	if (send(own, &request, sizeof request, 0) != (ssize_t)sizeof request)
		return;
	while (!kind) {
		struct part *part = next_part(own, 0);
		if (!part)
			return;
		kind = kind_of(part);
		part->length = without_end(part);
		if (kind < 0 || !part->length)
			free(part);
		else if (!add(part))
			return;
	}
}

/* Receive all parts. If this is no list of unix sockets, what was received is handed out as it is. */
static void receive_all(int descriptor, int flags)
{
	int kind = 0;

	for (size_t i = list.next; i < list.count; i++)
		free(list.parts[i]);
	list.of = descriptor;
	list.count = list.next = known.count = 0;
	struct part *part = next_part(descriptor, flags);
	if (!part)
		return;
	kind = kind_of(part);
	/* Before the first part: the last one ends the list. An empty list may be one of others. */
	struct nlmsghdr *first = (void *)part->data;
	if (own >= 0 && NLMSG_OK(first, (int)part->length) && socket_in(first) &&
	    is_elsewhere(descriptor))
		add_own(first->nlmsg_seq);
	while (add(part) && !kind && (part = next_part(descriptor, flags)))
		kind = kind_of(part);
	if (kind < 0)
		return;
	for (size_t i = 0; i < list.count; i++)
		each(list.parts[i], false);
	qsort(known.inodes, known.count, sizeof *known.inodes, compare);
	for (size_t i = 0; i < list.count; i++)
		each(list.parts[i], true);
}

/* As the kernel does it: what does not fit is cut off, and the flags say so. */
static ssize_t hand_out(struct msghdr *message)
{
	struct part *part = list.parts[list.next++];
	size_t done = 0;

	for (size_t i = 0; i < message->msg_iovlen && done < part->length; i++) {
		size_t size = message->msg_iov[i].iov_len;
		size = size < part->length - done ? size : part->length - done;
		memcpy(message->msg_iov[i].iov_base, part->data + done, size);
		done += size;
	}
	if (message->msg_name && message->msg_namelen >= sizeof part->from)
		memcpy(message->msg_name, &part->from, sizeof part->from);
	message->msg_namelen = message->msg_name ? sizeof part->from : 0;
	message->msg_controllen = 0;
	message->msg_flags = done < part->length ? MSG_TRUNC : 0;
	free(part);
	if (list.next == list.count)
		list.of = -1;
	return (ssize_t)done;
}

__attribute__((visibility("default"))) ssize_t recvmsg(
    int descriptor, struct msghdr *message, int flags)
{
	if (take_unasked(descriptor))
		return 0;
	if (list.of != descriptor || list.next == list.count) {
		if (flags || !is_diag(descriptor))
			return receive(descriptor, message, flags);
		receive_all(descriptor, flags);
		if (!list.count)
			return receive(descriptor, message, flags);
	}
	return hand_out(message);
}
