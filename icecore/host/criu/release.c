/* Preloaded into a CRIU that dumps: no thread of the tree runs before CRIU has finished with all of
 * them.
 *
 * CRIU (4.0 to 4.2: criu/seize.c, unseize_task_and_threads) detaches the processes one after the
 * other, the root first. If a process was stopped by a signal (job control), CRIU sends it SIGSTOP
 * right before detaching it. A process that already runs may have sent it SIGCONT by then. CRIU's
 * SIGSTOP comes later, so the process stays stopped for ever. So once CRIU detaches the root,
 * detaches are delayed until CRIU has requested one for every remaining thread.
 *
 * If CRIU exits without such a request for a thread, the others are detached then. If it is killed,
 * the kernel detaches all.
 */
#define _GNU_SOURCE
#include "traced.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct request {
	pid_t thread;
	void *address, *data;
} *waiting;
static size_t waiting_count, waiting_room;

/* Return the pid given with CRIU's option --tree; 0: there is none. */
static pid_t root(void)
{
	static pid_t found = -1;
	char words[8192], *end = words;
	bool next = false;

	if (found >= 0)
		return found;
	found = 0;
	int file = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
	ssize_t length = file < 0 ? 0 : read(file, words, sizeof words - 1);
	if (file >= 0)
		close(file);
	words[length < 0 ? 0 : length] = 0;
	for (char *word = words; word < words + length; word = end + 1) {
		end = strchr(word, 0);
		if (next)
			return found = atoi(word);
		next = !strcmp(word, "-t") || !strcmp(word, "--tree");
	}
	return found;
}

/* Delay a detach; false: out of memory. */
static bool wait_with(struct request request)
{
	if (waiting_count == waiting_room) {
		size_t room = waiting_room ? 2 * waiting_room : 1024;
		struct request *larger = realloc(waiting, room * sizeof *waiting);
		if (!larger)
			return false;
		waiting = larger;
		waiting_room = room;
	}
	waiting[waiting_count++] = request;
	return true;
}

/* Return whether any thread remains whose detach CRIU has not requested. */
static bool others_left(void)
{
	static size_t first; /* none before it remains */

	for (; first < traced.count; first++)
		if (traced.threads[first] && is_there(traced.threads[first]))
			return true;
	return false;
}

__attribute__((destructor)) static void detach_waiting(void)
{
	if (traced.of != getpid())
		return; /* a child of CRIU's traces nobody */
	for (size_t i = 0; i < waiting_count; i++)
		detach_now(waiting[i].thread, waiting[i].address, waiting[i].data);
	waiting_count = 0;
}

long let_go(pid_t thread, void *address, void *data)
{
	bool begun = waiting_count || thread == root();

	if (traced.of != getpid() || !forget(thread) || !begun ||
	    !wait_with((struct request){thread, address, data}))
		return detach_now(thread, address, data);
	if (!others_left())
		detach_waiting();
	return 0;
}
