/* Replace functions that one library calls, without taking a lock: a parked thread may hold the
 * loader's. So this file reads the library's own tables.
 *
 * It changes only the slots of this library, not what a symbol means to others. So the calls of
 * other libraries do not become slower. A slot is one word, and is written atomically.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "slots.h"

#define MOST 16
#define PAGE ((uintptr_t)4096)

#if defined __x86_64__
#define IS_SLOT(type) ((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT)
#else
#define IS_SLOT(type) ((void)(type), 0)
#endif

static struct slot {
	void **at, *before;
	bool read_only;
} slots[MOST];
static size_t slot_count;

/* The part that the loader made read-only after it had filled the slots (PT_GNU_RELRO). */
struct part {
	uintptr_t start, end;
};

static struct part read_only_part(const struct link_map *library)
{
	const ElfW(Ehdr) *header = (const void *)library->l_addr;
	struct part found = {0, 0};

	/* a library linked to a fixed address has no header there */
	if (!library->l_addr || memcmp(header->e_ident, ELFMAG, SELFMAG) != 0)
		return found;
	const ElfW(Phdr) *parts = (const void *)(library->l_addr + header->e_phoff);
	for (int i = 0; i < header->e_phnum; i++)
		if (parts[i].p_type == PT_GNU_RELRO) {
			found.start = library->l_addr + parts[i].p_vaddr;
			found.end = found.start + parts[i].p_memsz;
		}
	/* the loader protects whole pages */
	found.start &= ~(PAGE - 1);
	found.end &= ~(PAGE - 1);
	return found;
}

static bool set(const struct slot *slot, void *function)
{
	void *page = (void *)((uintptr_t)slot->at & ~(PAGE - 1));

	if (slot->read_only && mprotect(page, PAGE, PROT_READ | PROT_WRITE))
		return false;
	__atomic_store_n(slot->at, function, __ATOMIC_RELEASE);
	return !slot->read_only || !mprotect(page, PAGE, PROT_READ);
}

static unsigned replace_in(const struct link_map *library, const ElfW(Rela) * entries, size_t size,
    const ElfW(Sym) * symbols, const char *names, const struct replacement *by)
{
	struct part read_only = read_only_part(library);
	unsigned done = 0;

	for (size_t i = 0; i < size / sizeof *entries; i++) {
		if (!IS_SLOT(ELF64_R_TYPE(entries[i].r_info)))
			continue;
		const char *name = names + symbols[ELF64_R_SYM(entries[i].r_info)].st_name;
		for (const struct replacement *one = by; one->name; one++) {
			if (slot_count == MOST || strcmp(name, one->name) != 0)
				continue;
			uintptr_t at = library->l_addr + entries[i].r_offset;
			struct slot *slot = &slots[slot_count];
			*slot = (struct slot){
			    (void **)at, *(void **)at, at >= read_only.start && at < read_only.end};
			slot_count++; /* put it back, too, if only its protection failed */
			if (set(slot, one->function))
				done |= 1u << (one - by);
		}
	}
	return done;
}

/* The loader has made these addresses absolute, unless it could not write to them. */
static const void *address_of(const struct link_map *library, const ElfW(Dyn) * entry)
{
	ElfW(Addr) value = entry->d_un.d_ptr;

	return (const void *)(value < library->l_addr ? library->l_addr + value : value);
}

unsigned slots_replace(const struct link_map *library, const struct replacement *by)
{
	const ElfW(Rela) *jumps = NULL, *others = NULL;
	const ElfW(Sym) *symbols = NULL;
	const char *names = NULL;
	size_t jumps_size = 0, others_size = 0;
	unsigned done = 0;

	for (const ElfW(Dyn) *entry = library->l_ld; entry->d_tag != DT_NULL; entry++)
		switch (entry->d_tag) {
		case DT_JMPREL:
			jumps = address_of(library, entry);
			break;
		case DT_PLTRELSZ:
			jumps_size = entry->d_un.d_val;
			break;
		case DT_RELA:
			others = address_of(library, entry);
			break;
		case DT_RELASZ:
			others_size = entry->d_un.d_val;
			break;
		case DT_SYMTAB:
			symbols = address_of(library, entry);
			break;
		case DT_STRTAB:
			names = address_of(library, entry);
			break;
		}
	if (!symbols || !names)
		return 0;
	if (jumps)
		done |= replace_in(library, jumps, jumps_size, symbols, names, by);
	if (others)
		done |= replace_in(library, others, others_size, symbols, names, by);
	return done;
}

bool slots_put_back(void)
{
	while (slot_count) {
		const struct slot *slot = &slots[slot_count - 1];
		if (!set(slot, slot->before))
			return false; /* the next call tries again */
		slot_count--;
	}
	return true;
}
