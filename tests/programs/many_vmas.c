/* A process of very many VMAs: neighbours differ in protection, some were written before they became inaccessible.

       many_vmas STATE_DIR [--vmas 20000]

   VMA i has 1 to 3 pages and is read-write, read-only or PROT_NONE by turns; one in eight was never written. The process
   keeps rewriting pages of the writable ones and keeps verifying contents and protections of all. */
#include "report.h"

#include <sys/mman.h>
#include <sys/uio.h>

static uint64_t vmas;
static uint8_t *base;
static uint32_t *first_page;                      /* of each VMA, and one more: the number of pages */
static uint32_t *version;                         /* of each VMA's pages; 0: never written, they read as zero */

static const int protections[3] = { PROT_READ | PROT_WRITE, PROT_READ, PROT_NONE };

static uint8_t *start_of(uint64_t i) { return base + (uint64_t)first_page[i] * PAGE; }
static size_t size_of(uint64_t i) { return (size_t)(first_page[i + 1] - first_page[i]) * PAGE; }

/* The kernel says whether a page may be read or written when it is asked to copy: no signal, nothing left open. */
static bool readable(uint64_t i, uint64_t *word)
{
    struct iovec here = { word, 8 }, there = { start_of(i), 8 };
    return process_vm_readv(getpid(), &here, 1, &there, 1, 0) == 8;
}

static bool writable(uint64_t i, uint64_t *word)
{
    struct iovec here = { word, 8 }, there = { start_of(i), 8 };
    return process_vm_writev(getpid(), &here, 1, &there, 1, 0) == 8;
}

static void verify(uint64_t i)
{
    int protection = protections[i % 3];
    uint64_t word0 = 0;
    bool may_read = readable(i, &word0), may_write = may_read && writable(i, &word0);
    if (may_read != (protection != PROT_NONE) || may_write != ((protection & PROT_WRITE) != 0))
        violation("VMA %llu at %p has not its protection %d any more", (unsigned long long)i, (void *)start_of(i),
                  protection);
    if (protection == PROT_NONE && mprotect(start_of(i), size_of(i), PROT_READ))
        violation("VMA %llu: mprotect: errno %d", (unsigned long long)i, errno);
    for (uint32_t page = first_page[i]; page < first_page[i + 1]; page++) {
        const uint8_t *at = base + (uint64_t)page * PAGE;
        int word = version[i] ? page_differs(at, page, version[i]) : page_not_zero(at);
        if (word >= 0)
            violation("VMA %llu (protection %d): page at %p differs from version %u at word %d%s", (unsigned long long)i,
                      protection, (const void *)at, version[i], word, page_not_zero(at) < 0 ? ", it is zero" : "");
    }
    if (protection == PROT_NONE && mprotect(start_of(i), size_of(i), PROT_NONE))
        violation("VMA %llu: mprotect back: errno %d", (unsigned long long)i, errno);
}

/* Compares the kernel's own list with ours; only at the beginning and the end, because it takes an open /proc file. */
static void verify_list(void)
{
    FILE *f = fopen("/proc/self/maps", "re");
    need(f != NULL, "/proc/self/maps");
    uint64_t start, end, i = 0;
    char flags[8], line[512];
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, "%lx-%lx %7s", &start, &end, flags) != 3 || start < (uint64_t)(uintptr_t)base ||
            start >= (uint64_t)(uintptr_t)(base + (uint64_t)first_page[vmas] * PAGE))
            continue;
        const char *wanted = i % 3 == 0 ? "rw-p" : i % 3 == 1 ? "r--p" : "---p";
        if (i >= vmas || start != (uint64_t)(uintptr_t)start_of(i) || end != start + size_of(i) || strcmp(flags, wanted)) {
            violation("VMA %llu is %lx-%lx %s, expected %p %s", (unsigned long long)i, start, end, flags,
                      i < vmas ? (void *)start_of(i) : NULL, wanted);
            break;
        }
        i++;
    }
    fclose(f);
    if (i != vmas && !report.error_count)
        violation("%llu VMAs left of %llu", (unsigned long long)i, (unsigned long long)vmas);
}

int main(int argc, char **argv)
{
    if (argc < 2)
        return 2;
    report_open(argv[1], "many_vmas");
    vmas = option(argc, argv, "--vmas", 20000);
    first_page = calloc(vmas + 1, sizeof *first_page);
    version = calloc(vmas, sizeof *version);
    need(first_page && version, "calloc");
    for (uint64_t i = 0; i < vmas; i++)
        first_page[i + 1] = first_page[i] + 1 + (uint32_t)(mix(i) % 3);
    size_t total = (size_t)first_page[vmas] * PAGE;
    base = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    need(base != MAP_FAILED, "mmap");
    for (uint64_t i = 0; i < vmas; i++) {
        if (mix(i ^ 0x77) % 8) {
            version[i] = 1;
            for (uint32_t page = first_page[i]; page < first_page[i + 1]; page++)
                page_fill(base + (uint64_t)page * PAGE, page, 1);
        }
        need(!mprotect(start_of(i), size_of(i), protections[i % 3]), "mprotect (vm.max_map_count too low?)");
    }
    verify_list();
    /* Three regions by kind of protection, each one VMA that was written: what a test may damage. */
    static const char *names[3] = { "read-write", "read-only", "inaccessible" };
    for (uint64_t kind = 0; kind < 3; kind++)
        for (uint64_t i = vmas / 2 / 3 * 3 + kind; i < vmas; i += 3)
            if (version[i]) {
                report_region(names[kind], start_of(i), size_of(i));
                break;
            }
    uint64_t counter = 0;
    while (!report_finish_asked()) {
        counter++;
        for (uint64_t n = 0; n < 40; n++) {
            uint64_t i = mix(counter * 64 + n) % (vmas / 3) * 3;
            verify(i);
            version[i]++;
            for (uint32_t page = first_page[i]; page < first_page[i + 1]; page++)
                page_fill(base + (uint64_t)page * PAGE, page, version[i]);
        }
        for (uint64_t n = 0; n < 400; n++)
            verify((counter * 400 + n) % vmas);
        report_write(counter, NULL);
        pause_us(5000);
    }
    for (uint64_t i = 0; i < vmas; i++)
        verify(i);
    verify_list();
    return report_end(counter, NULL);
}
