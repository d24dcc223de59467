/* A plugin of CRIU (criu(8), --libdir): while a tree is stopped, the threads in which the driver
 * works may run, and no others. The peer at the socket ICECORE_DEVICES decides which threads run,
 * and for how long. If the peer is gone, a dump fails, and what a restore built is killed.
 *
 * A checkpoint by the driver removes mappings that the driver has in a process, and its restore
 * brings them back: a thread that accesses them meanwhile crashes the process. So CRIU holds all
 * other threads. A dump says "held" once the tree is stopped and before anything is collected, and
 * "end" or "failed" before the tree is released; a restore says "held" when everything is in place
 * and before anything runs. The plugin then takes orders, each one message, and answers each with
 * an errno: "let THREAD..." (they run, untraced, with all signals blocked), "take" (they are
 * stopped again, as before), "bind PROCESS..." (if CRIU ends before it releases them, the kernel
 * kills them), and finally, without an answer, "go" or "fail". See icecore.host.cuda.holder. The
 * other hooks are in device_files.c.
 */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "device_files.h"
#include "plugin.h"
#include "say.h"

static int begin(int which);
static void end(int which, int result);
static int hold(int pid);

CRIU_PLUGIN("icecore", begin, end, [DUMP_EXT_FILE] = device_file_dump,
    [RESTORE_EXT_FILE] = device_file_restore, [HANDLE_DEVICE_VMA] = device_mapping_dump,
    [UPDATE_VMA_MAP] = device_mapping_restore, [RESUME_DEVICES_LATE] = hold,
    [CHECKPOINT_DEVICES] = hold);

enum { MOST = 4096, MESSAGE = 1 << 16 };
static struct {
	pid_t id;
	uint64_t mask;
} gone[MOST];
static int gone_count;
static int peer = -1;
static bool held, doomed, bound;
static int stage;

static bool suspended(pid_t thread)
{
	char path[64], line[256];
	int mode = 0;

	snprintf(path, sizeof path, "/proc/%d/status", thread);
	FILE *file = fopen(path, "re");
	while (file && fgets(line, sizeof line, file))
		sscanf(line, "Seccomp: %d", &mode);
	if (file)
		fclose(file);
	return mode != 0;
}

static int let_go(pid_t thread)
{
	const uint64_t all = ~0ull;

	if (gone_count == MOST)
		return E2BIG;
	if (ptrace(PTRACE_GETSIGMASK, thread, sizeof all, &gone[gone_count].mask) ||
	    ptrace(PTRACE_SETSIGMASK, thread, sizeof all, &all))
		return errno;
	if (ptrace(PTRACE_DETACH, thread, NULL, NULL)) {
		int why = errno;
		ptrace(PTRACE_SETSIGMASK, thread, sizeof all, &gone[gone_count].mask);
		return why;
	}
	gone[gone_count++].id = thread;
	return 0;
}

/* Set the options that CRIU sets for its tracees (compel_wait_task), and others. A process that is
 * filtered itself may not suspend filters; CRIU continues then. */
static int set_options(pid_t thread, long others)
{
	long options = PTRACE_O_TRACESYSGOOD | others;

	if (suspended(thread) &&
	    !ptrace(PTRACE_SETOPTIONS, thread, NULL, (void *)(options | PTRACE_O_SUSPEND_SECCOMP)))
		return 0;
	return ptrace(PTRACE_SETOPTIONS, thread, NULL, (void *)options) ? errno : 0;
}

/* As CRIU had stopped it. */
static int take_back(pid_t thread, const uint64_t *mask)
{
	int status, why;

	if (ptrace(PTRACE_SEIZE, thread, NULL, 0) || ptrace(PTRACE_INTERRUPT, thread, NULL, NULL))
		return errno;
	for (;;) {
		pid_t found = waitpid(thread, &status, __WALL);
		if (found < 0 && errno == EINTR)
			continue;
		if (found < 0)
			return errno;
		if (!WIFSTOPPED(status))
			return ESRCH;
		if (status >> 16 == PTRACE_EVENT_STOP)
			break;
		/* A signal was being delivered: deliver it, and then the thread stops. */
		if (ptrace(PTRACE_CONT, thread, NULL, (void *)(long)WSTOPSIG(status)))
			return errno;
	}
	why = set_options(thread, bound ? PTRACE_O_EXITKILL : 0);
	return why ? why : ptrace(PTRACE_SETSIGMASK, thread, sizeof *mask, mask) ? errno : 0;
}

/* A thread's state and the clock ticks for which it has worked so far (proc(5), stat); 0: it has
 * ended. */
static char state_of(pid_t thread, unsigned long *worked)
{
	char path[64], text[1024], state = 0;
	unsigned long user = 0, system = 0;

	snprintf(path, sizeof path, "/proc/%d/stat", thread);
	int file = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t length = file < 0 ? -1 : read(file, text, sizeof text - 1);
	if (file >= 0)
		close(file);
	text[length < 0 ? 0 : length] = 0;
	char *name_end = strrchr(text, ')');
	if (!name_end ||
	    sscanf(name_end + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &state,
		&user, &system) != 3)
		return 0;
	*worked = user + system;
	return state;
}

/* Whether a thread waits, and how much it has worked so far: -1, it is at work; clock ticks
 * otherwise. */
static long idle_after(pid_t thread)
{
	unsigned long worked = 0;
	char state = state_of(thread, &worked);

	return !state ? 0 : state == 'S' ? (long)worked : -1;
}

/* A process may lack memory that only CRIU's hold keeps it from touching: it must not outlive that
 * hold. */
static int bind_process(pid_t pid)
{
	char path[64];
	unsigned long worked;
	int failed = 0;

	snprintf(path, sizeof path, "/proc/%d/task", pid);
	DIR *folder = opendir(path);
	if (!folder)
		return errno;
	for (struct dirent *entry; !failed && (entry = readdir(folder));) {
		pid_t thread = atoi(entry->d_name);
		int why = thread ? set_options(thread, PTRACE_O_EXITKILL) : 0;
		if (why && state_of(thread, &worked) != 'Z')
			failed = why;
	}
	closedir(folder);
	return failed;
}

static int bind_all(char *words)
{
	char *rest = NULL;

	bound = true;
	for (char *word = strtok_r(words, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
		int why = bind_process(atoi(word));
		if (why) {
			SAY("process %s cannot be bound: %s\n", word, strerror(why));
			return why;
		}
	}
	return 0;
}

/* Wait until the driver rests. The client is gone, perhaps in the middle of a call, and the driver
 * finishes by itself what it has begun. */
static void let_end(void)
{
	enum { PAUSE_MS = 20, QUIET = 10, MOST_SECONDS = 60 };

	static long before[MOST];
	int quiet = 0;

	for (int at = 0; at < gone_count; at++)
		before[at] = -1;
	for (int left = MOST_SECONDS * 1000 / PAUSE_MS; gone_count && quiet < QUIET && left;
	    left--) {
		bool rests = true;
		for (int at = 0; at < gone_count; at++) {
			long now = idle_after(gone[at].id);
			rests = rests && now >= 0 && now == before[at];
			before[at] = now;
		}
		quiet = rests ? quiet + 1 : 0;
		usleep(PAUSE_MS * 1000);
	}
}

static int take_all(void)
{
	int failed = 0;

	while (gone_count) {
		gone_count--;
		int why = take_back(gone[gone_count].id, &gone[gone_count].mask);
		if (why) {
			SAY("thread %d does not stand again: %s\n", gone[gone_count].id,
			    strerror(why));
			failed = why;
		}
	}
	return failed;
}

static int let_all(char *words)
{
	char *rest = NULL;

	for (char *word = strtok_r(words, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
		int why = let_go(atoi(word));
		if (why) {
			SAY("thread %s cannot be let go: %s\n", word, strerror(why));
			return why;
		}
	}
	return 0;
}

static bool say(const char *words)
{
	ssize_t done;

	do
		done = send(peer, words, strlen(words), MSG_NOSIGNAL);
	while (done < 0 && errno == EINTR);
	return done >= 0;
}

/* Take orders until CRIU may go on; 0, or -1: this has failed. */
static int serve(const char *word)
{
	static char order[MESSAGE];
	char answer[32];
	int result = -1;

	for (bool there = say(word); there;) {
		ssize_t length = recv(peer, order, sizeof order - 1, 0);
		if (length < 0 && errno == EINTR)
			continue;
		if (length <= 0)
			break;
		order[length] = 0;
		if (!strcmp(order, "go") || !strcmp(order, "fail")) {
			result = take_all() || *order == 'f' ? -1 : 0;
			return result;
		}
		int why = EINVAL;
		if (!strncmp(order, "let ", 4))
			why = let_all(order + 4);
		else if (!strncmp(order, "bind ", 5))
			why = bind_all(order + 5);
		else if (!strcmp(order, "take"))
			why = take_all();
		snprintf(answer, sizeof answer, "%d", why);
		there = say(answer);
	}
	SAY("nobody says any more what is to be done\n");
	let_end();
	take_all();
	close(peer);
	peer = -1;
	return -1;
}

static int begin(int which)
{
	const char *number = getenv("ICECORE_DEVICES");

	stage = which;
	if (stage != STAGE_PRE_DUMP && number && fcntl(atoi(number), F_SETFD, FD_CLOEXEC) == 0)
		peer = atoi(number);
	return stage == STAGE_DUMP   ? device_files_begin_dump()
	    : stage == STAGE_RESTORE ? device_files_begin_restore()
				     : 0;
}

/* Called for each process when all are stopped. CRIU ignores what a restore's hook returns, so no
 * process that lacks something may run. */
static int hold(int pid)
{
	if (!held && peer < 0)
		return -ENOTSUP;
	if (!held) {
		alarm(0); /* CRIU 4.0 calls this while its time-out for freezing runs */
		held = true;
		doomed = serve("held") != 0;
	}
	if (doomed && stage == STAGE_RESTORE)
		kill(pid, SIGKILL);
	return doomed ? -1 : 0;
}

static void end(int which, int result)
{
	if (which == STAGE_DUMP && held && peer >= 0)
		serve(result ? "failed" : "end");
}
