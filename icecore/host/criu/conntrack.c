/* Preloaded into CRIU: connection tracking of a network namespace in which nothing is tracked is not
 * asked for.
 *
 * For a network namespace, even one that is external, CRIU (4.0 to 4.2: criu/net.c, dump_nf_ct) asks
 * the kernel twice for the connections that it tracks there, while the tree stands still. The kernel
 * looks through its table for all namespaces, whose size follows that of the machine's memory: 10 to
 * 20 ms each time. Where the namespace's own count is 0, CRIU's request is not sent, and the answer is
 * empty.
 */
#define _GNU_SOURCE
#include "conntrack.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/netfilter/nfnetlink.h>
#include <linux/netlink.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define COUNT "/proc/sys/net/netfilter/nf_conntrack_count"

static int unasked = -1; /* the socket through which nothing was sent */

static bool asks_for_connections(int descriptor, const struct msghdr *message)
{
	int protocol = 0;
	socklen_t length = sizeof protocol;
	struct nlmsghdr head;

	if (message->msg_iovlen != 1 || message->msg_iov->iov_len < sizeof head)
		return false;
	memcpy(&head, message->msg_iov->iov_base, sizeof head);
	return NFNL_SUBSYS_ID(head.nlmsg_type) >= NFNL_SUBSYS_CTNETLINK &&
	    NFNL_SUBSYS_ID(head.nlmsg_type) <= NFNL_SUBSYS_CTNETLINK_EXP &&
	    (head.nlmsg_flags & NLM_F_DUMP) == NLM_F_DUMP &&
	    !getsockopt(descriptor, SOL_SOCKET, SO_PROTOCOL, &protocol, &length) &&
	    protocol == NETLINK_NETFILTER;
}

/* Whether the namespace of this process has no connection in the table. */
static bool nothing_is_tracked(void)
{
	char text[2];
	int file = (int)syscall(SYS_openat, AT_FDCWD, COUNT, O_RDONLY | O_CLOEXEC, 0);
	ssize_t size = file < 0 ? -1 : read(file, text, sizeof text);

	if (file >= 0)
		close(file);
	return size == 2 && !memcmp(text, "0\n", 2);
}

bool take_unasked(int descriptor)
{
	bool is = descriptor >= 0 && descriptor == unasked;

	if (is)
		unasked = -1;
	return is;
}

__attribute__((visibility("default"))) ssize_t sendmsg(
    int descriptor, const struct msghdr *message, int flags)
{
	if (asks_for_connections(descriptor, message) && nothing_is_tracked()) {
		unasked = descriptor;
		return (ssize_t)message->msg_iov->iov_len;
	}
	return syscall(SYS_sendmsg, (long)descriptor, message, (long)flags);
}
