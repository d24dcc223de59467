/* Preloaded into CRIU: where a process mounts a temporary /proc of its own. The name is one that
 * nobody else uses, in a directory that root can write to.
 *
 * CRIU (4.0 to 4.2: criu/pie/parasite.c, get_proc_fd) makes a process that has its own pid
 * namespace but sees the host's /proc mount one as "proc.crtools" in its working directory, twice
 * in each dump. Dumps of two jobs that were started in one directory collide there, and one fails.
 * So does every dump of a job in a directory that is not writable (mounted read-only, or NFS with
 * root squashed), and every later dump of jobs in a directory where a CRIU was killed in between.
 *
 * The name is part of the code that CRIU injects into processes, which is data of CRIU's program:
 * it is replaced there by a name of the same length, for this CRIU alone. A program that does not
 * contain it exactly once is left unchanged.
 */
#define _GNU_SOURCE
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#define KNOWN "proc.crtools"
#define DIRECTORY "/run"
#define LETTERS "0123456789abcdefghijklmnopqrstuv" /* 32 */

struct found {
	char *at;
	size_t count;
	int protection;
};

static int look(struct dl_phdr_info *program, size_t size, void *given)
{
	struct found *found = given;

	(void)size;
	for (size_t i = 0; i < program->dlpi_phnum; i++) {
		const ElfW(Phdr) *segment = &program->dlpi_phdr[i];
		char *start = (char *)(program->dlpi_addr + segment->p_vaddr),
		     *end = start + segment->p_filesz, *at = start;

		if (segment->p_type != PT_LOAD || !(segment->p_flags & PF_R))
			continue;
		while ((at = memmem(at, (size_t)(end - at), KNOWN, sizeof KNOWN))) {
			found->at = at++;
			found->count++;
			found->protection = PROT_READ | (segment->p_flags & PF_W ? PROT_WRITE : 0) |
			    (segment->p_flags & PF_X ? PROT_EXEC : 0);
		}
	}
	return 1; /* the program itself comes first; the others are libraries */
}

__attribute__((constructor)) static void rename_proc(void)
{
	struct found found = {0};
	uint64_t random;
	char name[sizeof KNOWN], letters[sizeof KNOWN];

	dl_iterate_phdr(look, &found);
	if (found.count != 1 || getrandom(&random, sizeof random, 0) != sizeof random)
		return;
	for (size_t i = 0; i < sizeof letters - 1; i++, random >>= 5)
		letters[i] = LETTERS[random & 31];
	letters[sizeof letters - 1] = 0;
	if (access(DIRECTORY, W_OK))
		memcpy(name, letters, sizeof name); /* in the working directory, as it was */
	else
		snprintf(name, sizeof name, "%s/%s", DIRECTORY, letters + sizeof DIRECTORY);

	uintptr_t page = (uintptr_t)getpagesize(), from = (uintptr_t)found.at / page * page,
		  to = (uintptr_t)found.at + sizeof name;
	if (mprotect((void *)from, to - from, PROT_READ | PROT_WRITE))
		return;
	memcpy(found.at, name, sizeof name);
	mprotect((void *)from, to - from, found.protection);
}
