/* Preloaded into CRIU: it does not ask for the tracked connections of a network namespace that has
 * none.
 *
 * For each network namespace that it dumps, even an external one, CRIU (4.0 to 4.2: criu/net.c,
 * dump_nf_ct) asks the kernel twice for the connections tracked there, while the tree stands still.
 * (The second request is meant for expectations.) Each time, the kernel searches its table for all
 * namespaces, which has 262,144 buckets by default on a machine with 4 GiB or more: 10 to 20 ms.
 * Where the namespace's own count is 0, CRIU's request is not sent, and the answer is empty.
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

static int unasked = -1; /* the socket whose request was not sent */

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

/* Return whether no connection is tracked in the network namespace of this process. */
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
