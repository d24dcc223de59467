/* Memory with guard pages (madvise(2), MADV_GUARD_INSTALL: Linux 6.13), as threads' stacks have them from glibc 2.42 on; where the kernel has none, memory alone.

       guarded STATE_DIR [--mib 24]

   Of every 64 pages the last two are guard pages, and of every eighth MiB all. They are there as long as whoever reads them gets EFAULT. */
#include "report.h"

#include <sys/mman.h>

#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#endif

static uint8_t *base;
static uint64_t pages;
static bool with_guards;
static int through[2];

static bool guarded(uint64_t page)
{
    return with_guards && (page % 64 >= 62 || page / 256 % 8 == 7);
}

static void verify(uint64_t page)
{
    const uint8_t *at = base + page * PAGE;
    if (guarded(page)) {
        char byte;
        if (write(through[1], at, 1) != -1) {
            violation("page %llu at %p is no guard page", (unsigned long long)page, (const void *)at);
            need(read(through[0], &byte, 1) == 1, "read");
        }
        return;
    }
    int word = page_differs(at, page, 1);
    if (word >= 0)
        violation("page %llu at %p differs at word %d", (unsigned long long)page, (const void *)at, word);
}

int main(int argc, char **argv)
{
    if (argc < 2)
        return 2;
    report_open(argv[1], "guarded");
    pages = option(argc, argv, "--mib", 24) * 256;
    base = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    need(base != MAP_FAILED && !pipe(through), "mmap");
    for (uint64_t page = 0; page < pages; page++)
        page_fill(base + page * PAGE, page, 1);
    with_guards = !madvise(base + 62 * PAGE, PAGE, MADV_GUARD_INSTALL);
    for (uint64_t page = 0; page < pages; page++)
        if (guarded(page))
            need(!madvise(base + page * PAGE, PAGE, MADV_GUARD_INSTALL), "MADV_GUARD_INSTALL");
    report_region("data", base, PAGE);
    char facts[64];
    snprintf(facts, sizeof facts, "\"guards\": %s", with_guards ? "true" : "false");
    uint64_t counter = 0;
    while (!report_finish_asked()) {
        counter++;
        for (uint64_t n = 0; n < 64; n++)
            verify(mix(counter * 64 + n) % pages);
        report_write(counter, facts);
        pause_us(2000);
    }
    for (uint64_t page = 0; page < pages; page++)
        verify(page);
    return report_end(counter, facts);
}
