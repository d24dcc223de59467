/* Preloaded into a CRIU that restores a job of a user other than root, so that CRIU makes and
 * removes names with the rights of that user.
 *
 * CRIU runs as root. It makes files and directories that the job has open but that have no name,
 * and binds unix sockets. It changes the owner and mode of both, and removes the names again. The
 * user can change each of these paths meanwhile: a link in a path would give the user a file of
 * root's. Checks before the call do not help. So a path is followed as root only as far as only
 * root can have made it. From there on, and for the change itself, the kernel applies the user's
 * rights (setfsuid(2)). If these do not allow the change, it is made as root, provided that only
 * root can change the directory.
 *
 * ICECORE_NAMES contains the user, the group and the supplementary groups, separated by spaces.
 * Without it, CRIU acts as root. Files that CRIU merely opens are checked afterwards
 * (icecore/restorer/files/held_files.py).
 */
#define _GNU_SOURCE
#include "names.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/magic.h>
#include <limits.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

/* A function of CRIU for its plugins; missing in other programs. */
extern void print_on_level(unsigned level, const char *format, ...) __attribute__((weak));

#define SHOWN __attribute__((visibility("default")))
#define OTHERS_WRITE (S_IWGRP | S_IWOTH)
/* How often a link whose name is in use is tried again; the pause in nanoseconds: 5 s in all. */
#define LINK_TRIES 5000
#define LINK_PAUSE 1000000
/* Capabilities that a file system user other than root lacks (capabilities(7)). */
#define OF_FILES \
	(1u << CAP_CHOWN | 1u << CAP_DAC_OVERRIDE | 1u << CAP_DAC_READ_SEARCH | 1u << CAP_FOWNER | \
	    1u << CAP_FSETID)

static struct {
	bool given;
	uid_t user;
	gid_t group;
	gid_t *groups;
	size_t count;
} owner;

/* Whether somebody other than root may have chosen the working directory. CRIU changes to the
 * directory to which a socket's name was relative, and follows links. */
static bool astray;
static struct stat trusted; /* the last working directory that only root can have chosen */

__attribute__((constructor)) static void learn_owner(void)
{
	const char *given = getenv("ICECORE_NAMES");

	if (!given || !print_on_level)
		return; /* this is the program that executes CRIU */
	size_t room = 1;
	for (const char *at = given; *at; at++)
		room += *at == ' ';
	gid_t *groups = calloc(room, sizeof *groups);
	char *end = (char *)given;
	unsigned long ids[2];
	bool sound = groups;
	for (size_t i = 0; i < 2; i++) {
		const char *from = end;
		ids[i] = strtoul(from, &end, 10);
		sound = sound && end != from;
	}
	while (sound && *end) {
		const char *from = end;
		gid_t one = (gid_t)strtoul(from, &end, 10);
		sound = end != from;
		if (sound)
			groups[owner.count++] = one;
	}
	if (!sound || !ids[0]) {
		fprintf(stderr, "ICECORE_NAMES: %s\n", given);
		_exit(1);
	}
	owner.user = (uid_t)ids[0];
	owner.group = (gid_t)ids[1];
	owner.groups = groups;
	owner.given = true;
	astray = stat(".", &trusted);
	unsetenv("ICECORE_NAMES"); /* the programs that CRIU starts unpack its images */
}

static bool lacks_rights_of_root(void)
{
	struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
	struct __user_cap_data_struct own[2];

	return setfsuid((uid_t)-1) == (int)owner.user && setfsgid((gid_t)-1) == (int)owner.group &&
	    !syscall(SYS_capget, &header, own) && !(own[0].effective & OF_FILES);
}

struct rights {
	gid_t *groups;
	long count;
	int dumpable, death;
	pid_t parent;
};

/* Undo `become_owner`. A process that cannot become root again must not continue. */
static void be_root(const struct rights *before)
{
	int error = errno;

	setfsuid(0);
	setfsgid(0);
	if (setfsuid((uid_t)-1) || syscall(SYS_setgroups, before->count, before->groups))
		abort();
	/* A change of the file system user resets both of these. */
	prctl(PR_SET_DUMPABLE, before->dumpable, 0, 0, 0);
	prctl(PR_SET_PDEATHSIG, before->death, 0, 0, 0);
	if (before->death && getppid() != before->parent)
		raise(before->death);
	free(before->groups);
	errno = error;
}

static bool become_owner(struct rights *before)
{
	before->parent = getppid();
	before->dumpable = prctl(PR_GET_DUMPABLE, 0, 0, 0, 0);
	before->death = 0;
	prctl(PR_GET_PDEATHSIG, &before->death, 0, 0, 0);
	before->count = syscall(SYS_getgroups, 0, NULL);
	before->groups = before->count < 0 ? NULL : calloc((size_t)before->count + 1, sizeof(gid_t));
	if (!before->groups)
		return false;
	if (syscall(SYS_getgroups, before->count, before->groups) != before->count ||
	    syscall(SYS_setgroups, owner.count, owner.groups)) {
		free(before->groups);
		return false;
	}
	setfsgid(owner.group);
	setfsuid(owner.user);
	if (lacks_rights_of_root())
		return true;
	be_root(before);
	errno = EPERM;
	return false;
}

/* The end of the part of a path that only root can have made. */
struct place {
	int directory; /* open; -1: it cannot be reached */
	const char *rest; /* of the path, from there */
	bool of_root; /* `rest` is one name, and only root can change the names in the directory */
};

/* A file system in user space (FUSE) may report any owner. */
static bool is_in_user_space(int directory)
{
	struct statfs kind;
	return fstatfs(directory, &kind) || kind.f_type == FUSE_SUPER_MAGIC;
}

static bool is_of_root(int directory, const struct stat *about)
{
	return !about->st_uid && !(about->st_mode & OTHERS_WRITE) && !is_in_user_space(directory);
}

/* Return whether only root can have made, and can replace, the directory `child` in `here`. */
static bool is_lasting(int here, int child)
{
	struct stat above, about;

	if (fstat(here, &above) || fstat(child, &about) || above.st_uid)
		return false;
	if (is_of_root(here, &above))
		return true;
	return above.st_mode & S_ISVTX && !about.st_uid && !is_in_user_space(here) &&
	    !is_in_user_space(child);
}

/* Return whether `name` is that of a directory that CRIU made for itself (mkdtemp(3)) in a sticky
 * directory, `here`, where only root can have made it. */
static bool is_of_criu(int here, const struct stat *above, const char *name)
{
	static const char *const own[] = {"crtools-put-root.", ".criu."};
	struct stat about;
	bool named = false;

	for (size_t i = 0; i < sizeof own / sizeof *own; i++)
		named = named || !strncmp(name, own[i], strlen(own[i]));
	return named && !above->st_uid && above->st_mode & S_ISVTX && !is_in_user_space(here) &&
	    !fstatat(here, name, &about, AT_SYMLINK_NOFOLLOW) && S_ISDIR(about.st_mode) &&
	    !about.st_uid;
}

static struct place find_place(int directory, const char *path)
{
	struct place found = {-1, path, false};
	bool lost = directory == AT_FDCWD && *path != '/' && astray;
	struct stat about;
	char name[NAME_MAX + 1];

	found.directory = (int)syscall(SYS_openat, *path == '/' ? AT_FDCWD : directory,
	    *path == '/' ? "/" : ".", O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
	while (found.directory >= 0) {
		found.rest += strspn(found.rest, "/");
		size_t length = strcspn(found.rest, "/");
		if (!length) {
			found.rest = ".";
			break;
		}
		if (!found.rest[length]) {
			found.of_root = !fstat(found.directory, &about) &&
			    (is_of_root(found.directory, &about) ||
			        is_of_criu(found.directory, &about, found.rest)) &&
			    strcmp(found.rest, ".") && strcmp(found.rest, "..") && !lost;
			break;
		}
		if (length > NAME_MAX || !strncmp(found.rest, "..", length < 2 ? 2 : length))
			break;
		memcpy(name, found.rest, length);
		name[length] = 0;
		int child = (int)syscall(SYS_openat, found.directory, name,
		    O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0);
		if (child < 0)
			break;
		if (!is_lasting(found.directory, child)) {
			close(child);
			break;
		}
		close(found.directory);
		found.directory = child;
		found.rest += length;
	}
	return found;
}

static void leave(const struct place *place)
{
	int error = errno;

	if (place->directory >= 0)
		close(place->directory);
	errno = error;
}

/* Makes a system call with the caller's arguments. */
typedef long call(const struct place *place, const struct place *other, const void *arguments);

/* Make a change at one or two places as the owner, or as root if only root can change it there. */
static int change(call *make, const struct place *place, const struct place *other,
    const void *arguments)
{
	struct rights before;
	long result = -1;

	if (!owner.given)
		return (int)make(place, other, arguments);
	if (become_owner(&before)) {
		result = make(place, other, arguments);
		be_root(&before);
	}
	if (result < 0 && (errno == EACCES || errno == EPERM) && place->of_root &&
	    (!other || other->of_root))
		result = make(place, other, arguments);
	return (int)result;
}

static int change_at(call *make, int directory, const char *path, const void *arguments)
{
	struct place place = {directory, path, false};

	if (owner.given && *path)
		place = find_place(directory, path);
	else
		return (int)make(&place, NULL, arguments);
	int result = place.directory < 0 ? -1 : change(make, &place, NULL, arguments);
	leave(&place);
	return result;
}

static long make_directory(const struct place *place, const struct place *other, const void *mode)
{
	(void)other;
	return syscall(SYS_mkdirat, place->directory, place->rest, (long)*(const mode_t *)mode);
}

SHOWN int mkdirat(int directory, const char *path, mode_t mode)
{
	return change_at(make_directory, directory, path, &mode);
}

struct node {
	int flags;
	mode_t mode;
	dev_t device;
};

static long open_new(const struct place *place, const struct place *other, const void *given)
{
	const struct node *node = given;
	(void)other;
	return syscall(
	    SYS_openat, place->directory, place->rest, (long)node->flags, (long)node->mode);
}

/* As open(2). The only new files (O_EXCL) are those that CRIU makes for the job. */
int make_file(const char *path, int flags, mode_t mode)
{
	struct node node = {flags, mode, 0};
	struct place here = {AT_FDCWD, path, false};

	if ((flags & (O_CREAT | O_EXCL)) != (O_CREAT | O_EXCL))
		return (int)open_new(&here, NULL, &node);
	return change_at(open_new, AT_FDCWD, path, &node);
}

static long make_node(const struct place *place, const struct place *other, const void *given)
{
	const struct node *node = given;
	(void)other;
	return syscall(SYS_mknodat, place->directory, place->rest, (long)node->mode,
	    (long)(unsigned)node->device);
}

SHOWN int mknod(const char *path, mode_t mode, dev_t device)
{
	struct node node = {0, mode, device};
	return change_at(make_node, AT_FDCWD, path, &node);
}

static long make_link(const struct place *place, const struct place *other, const void *target)
{
	(void)other;
	return syscall(SYS_symlinkat, target, place->directory, place->rest);
}

SHOWN int symlink(const char *target, const char *path)
{
	return change_at(make_link, AT_FDCWD, path, target);
}

struct inode {
	uid_t user;
	gid_t group;
	mode_t mode;
	int flags;
	struct timespec times[2];
};

static long give(const struct place *place, const struct place *other, const void *given)
{
	const struct inode *inode = given;
	(void)other;
	return syscall(SYS_fchownat, place->directory, place->rest, (long)(int)inode->user,
	    (long)(int)inode->group, (long)inode->flags);
}

SHOWN int fchownat(int directory, const char *path, uid_t user, gid_t group, int flags)
{
	struct inode inode = {.user = user, .group = group, .flags = flags};
	return change_at(give, directory, path, &inode);
}

static long set_mode(const struct place *place, const struct place *other, const void *given)
{
	const struct inode *inode = given;
	(void)other;
	return syscall(SYS_fchmodat, place->directory, place->rest, (long)inode->mode);
}

SHOWN int fchmodat(int directory, const char *path, mode_t mode, int flags)
{
	struct inode inode = {.mode = mode, .flags = flags};

	if (flags) {
		errno = EOPNOTSUPP;
		return -1;
	}
	return change_at(set_mode, directory, path, &inode);
}

static long set_times(const struct place *place, const struct place *other, const void *given)
{
	const struct inode *inode = given;
	(void)other;
	return syscall(SYS_utimensat, place->directory, place->rest, inode->times,
	    (long)AT_SYMLINK_NOFOLLOW);
}

SHOWN int lutimes(const char *path, const struct timeval times[2])
{
	struct inode inode = {0};

	for (int i = 0; i < 2; i++)
		inode.times[i] = (struct timespec){times[i].tv_sec, 1000 * times[i].tv_usec};
	return change_at(set_times, AT_FDCWD, path, &inode);
}

static long remove_at(const struct place *place, const struct place *other, const void *flags)
{
	(void)other;
	return syscall(SYS_unlinkat, place->directory, place->rest, (long)*(const int *)flags);
}

/* As unlinkat(2). */
int remove_name(int directory, const char *path, int flags)
{
	return change_at(remove_at, directory, path, &flags);
}

SHOWN int unlinkat(int directory, const char *path, int flags)
{
	return remove_name(directory, path, flags);
}

SHOWN int rmdir(const char *path)
{
	return remove_name(AT_FDCWD, path, AT_REMOVEDIR);
}

static int change_both(call *make, int from, const char *old, int to, const char *new,
    const void *arguments)
{
	struct place first = {from, old, false}, second = {to, new, false};

	if (!owner.given || !*old || !*new)
		return (int)make(&first, &second, arguments);
	first = find_place(from, old);
	second = find_place(to, new);
	int result = first.directory < 0 || second.directory < 0
	    ? -1
	    : change(make, &first, &second, arguments);
	leave(&first);
	leave(&second);
	return result;
}

static long move(const struct place *place, const struct place *other, const void *none)
{
	(void)none;
	return syscall(
	    SYS_renameat2, place->directory, place->rest, other->directory, other->rest, 0L);
}

/* As rename(2). */
int change_name(const char *old, const char *new)
{
	return change_both(move, AT_FDCWD, old, AT_FDCWD, new, NULL);
}

static long add_name(const struct place *place, const struct place *other, const void *flags)
{
	return syscall(SYS_linkat, place->directory, place->rest, other->directory, other->rest,
	    (long)*(const int *)flags);
}

/* Return whether a path is the fallback name under which CRIU links a file that has none, only
 * until it has opened the file. Another restore of the same snapshot may be using that name. */
static bool is_shared_name(const char *path)
{
	static const char end[] = ".cr_link";
	size_t length = strlen(path);

	return length >= sizeof end && !strcmp(path + length + 1 - sizeof end, end);
}

SHOWN int linkat(int from, const char *old, int to, const char *new, int flags)
{
	static const struct timespec pause = {0, LINK_PAUSE};
	static int tries; /* for all links: a killed restore may have left such names */
	int result = change_both(add_name, from, old, to, new, &flags);

	for (; result && errno == EEXIST && is_shared_name(new) && tries < LINK_TRIES; tries++) {
		nanosleep(&pause, NULL);
		result = change_both(add_name, from, old, to, new, &flags);
	}
	return result;
}

SHOWN int chdir(const char *path)
{
	if (owner.given && *path) {
		char *whole = NULL;
		struct place place = {-1, "", false};

		if (asprintf(&whole, "%s/.", path) > 0)
			place = find_place(AT_FDCWD, whole);
		/* If only root can have made the whole path, only the last "." is left. */
		astray = place.directory < 0 || strcmp(place.rest, ".") || (*path != '/' && astray);
		leave(&place);
		free(whole);
	}
	int failed = (int)syscall(SYS_chdir, path);
	if (!failed && owner.given && !astray)
		astray = stat(".", &trusted);
	return failed;
}

SHOWN int fchdir(int directory)
{
	int failed = (int)syscall(SYS_fchdir, directory);
	struct stat here, root;

	if (!failed && owner.given)
		astray = fstat(directory, &here) || stat("/", &root) ||
		    !((here.st_dev == trusted.st_dev && here.st_ino == trusted.st_ino) ||
		        (here.st_dev == root.st_dev && here.st_ino == root.st_ino));
	return failed;
}

struct address {
	int socket;
	const struct sockaddr *name;
	socklen_t length;
};

/* The kernel keeps the name as given and shows it to others, so it must not be split. */
static long bind_name(const struct place *place, const struct place *other, const void *given)
{
	const struct address *address = given;
	(void)place;
	(void)other;
	return syscall(SYS_bind, address->socket, address->name, (long)address->length);
}

SHOWN int bind(int socket, const struct sockaddr *name, socklen_t length)
{
	struct address address = {socket, name, length};
	char path[sizeof((struct sockaddr_un *)0)->sun_path + 1];
	size_t head = offsetof(struct sockaddr_un, sun_path);

	if (!owner.given || name->sa_family != AF_UNIX || length <= head ||
	    length > sizeof(struct sockaddr_un) || !*((const struct sockaddr_un *)name)->sun_path)
		return (int)bind_name(NULL, NULL, &address);
	memcpy(path, ((const struct sockaddr_un *)name)->sun_path, length - head);
	path[length - head] = 0;
	return change_at(bind_name, AT_FDCWD, path, &address);
}
