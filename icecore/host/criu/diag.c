/* Preloaded into CRIU: what the kernel tells it about unix sockets (sock_diag(7)) is consistent,
 * although sockets outside of the tree come and go while the kernel tells it.
 *
 * CRIU (4.0 to 4.2: criu/sk-unix.c) fails a dump if a socket's peer is missing from the list (it
 * was closed meanwhile, or lies in another network namespace), and if a connection that waits to be
 * accepted was closed by its client. The first call that receives a part of the list receives all
 * of it. In it, a socket whose peer is missing becomes one whose peer has closed the connection, and
 * clients that are gone get a number that no socket has. Then the parts are handed out one by one.
 */
#define _GNU_SOURCE
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

struct part {
	size_t length;
	struct sockaddr_nl from;
	unsigned char data[];
};

/* The list that is being handed out. */
static struct {
	int of; /* the netlink socket */
	struct part **parts;
	size_t count, next;
} list = {.of = -1};

static struct {
	uint32_t *inodes;
	size_t count, room;
} known;

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

/* Receive all parts. If this is no list of unix sockets, what was received is handed out as it is. */
static void receive_all(int descriptor, int flags)
{
	size_t room = 0;
	int kind = 0;

	for (size_t i = list.next; i < list.count; i++)
		free(list.parts[i]);
	list.of = descriptor;
	list.count = list.next = known.count = 0;
	free(list.parts);
	list.parts = NULL;
	while (!kind) {
		if (list.count == room) {
			room = 2 * room + 16;
			struct part **more = realloc(list.parts, room * sizeof *more);
			if (!more)
				return;
			list.parts = more;
		}
		struct part *part = next_part(descriptor, flags);
		if (!part)
			return;
		list.parts[list.count++] = part;
		kind = kind_of(part);
	}
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
	if (list.of != descriptor || list.next == list.count) {
		if (flags || !is_diag(descriptor))
			return receive(descriptor, message, flags);
		receive_all(descriptor, flags);
		if (!list.count)
			return receive(descriptor, message, flags);
	}
	return hand_out(message);
}
