/* A process with a large sparse address space: irregularly touched pages hold data, all others read as zero.

       sparse STATE_DIR [--mib 8192] [--sparsity 128]

   Which pages are touched depends on their 1 MiB cell alone (`kind_of`): whole cells, every other page, only the first or the
   last page, runs, single pages, and pages that were written with zeros. One cell in `sparsity` / 8 is touched at all. */
#include "report.h"

#include <sys/mman.h>

#define CELL_PAGES 256u

enum kind { NONE, ALL, ALTERNATE, FIRST, LAST, RUN, SINGLES, ZEROS, KINDS };

static uint64_t pages, sparsity;
static uint8_t *base;
static uint8_t *version;

static enum kind kind_of(uint64_t cell)
{
    if (cell == 0 || (cell + 1) * CELL_PAGES == pages)
        return cell ? LAST : FIRST;
    uint64_t draw = mix(cell) % sparsity;
    return draw < KINDS ? (enum kind)draw : NONE;
}

static bool touched(uint64_t page)
{
    uint64_t cell = page / CELL_PAGES, in_cell = page % CELL_PAGES, draw = mix(cell ^ 0x5eed);
    switch (kind_of(cell)) {
    case ALL: return true;
    case ALTERNATE: return in_cell % 2;
    case FIRST: return in_cell == 0;
    case LAST: return in_cell == CELL_PAGES - 1;
    case RUN: return in_cell >= draw % 128 && in_cell < draw % 128 + 1 + draw / 128 % 128;
    case SINGLES: return mix(page) % 16 == 0;
    case ZEROS: return mix(page) % 4 == 0;
    default: return false;
    }
}

static void write_page(uint64_t page)
{
    if (kind_of(page / CELL_PAGES) == ZEROS)
        memset(base + page * PAGE, 0, PAGE);
    else
        page_fill(base + page * PAGE, page, ++version[page]);
}

static void verify(uint64_t page)
{
    const uint8_t *at = base + page * PAGE;
    bool data = version[page] || (touched(page) && kind_of(page / CELL_PAGES) != ZEROS);
    int word = data ? page_differs(at, page, version[page]) : page_not_zero(at);
    if (word >= 0)
        violation("page %llu at %p (%s, version %u) differs at word %d%s", (unsigned long long)page, (const void *)at,
                  data ? "touched" : "never touched", version[page], word,
                  data && page_not_zero(at) < 0 ? ", it is zero" : "");
}

int main(int argc, char **argv)
{
    if (argc < 2)
        return 2;
    report_open(argv[1], "sparse");
    pages = option(argc, argv, "--mib", 8192) * CELL_PAGES;
    sparsity = option(argc, argv, "--sparsity", 128);
    base = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    need(base != MAP_FAILED && sparsity >= KINDS, "mmap");
    need(!madvise(base, pages * PAGE, MADV_NOHUGEPAGE) || errno == EINVAL, "MADV_NOHUGEPAGE");
    version = calloc(pages, 1);
    uint32_t *list = malloc(pages / 4 * sizeof *list);
    uint64_t count = 0;
    need(version && list, "malloc");
    for (uint64_t page = 0; page < pages && count < pages / 4; page++)
        if (touched(page)) {
            write_page(page);
            list[count++] = (uint32_t)page;
        }
    for (uint64_t n = count / 2; n < count; n++)
        if (version[list[n]]) {
            report_region("touched", base + (uint64_t)list[n] * PAGE, PAGE);
            break;
        }
    for (uint64_t page = pages / 2; page < pages; page++)
        if (!touched(page)) {
            report_region("untouched", base + page * PAGE, PAGE);
            break;
        }
    char facts[128];
    snprintf(facts, sizeof facts, "\"pages\": %llu, \"touched\": %llu", (unsigned long long)pages, (unsigned long long)count);
    uint64_t counter = 0;
    while (!report_finish_asked()) {
        counter++;
        for (uint64_t n = 0; n < 256; n++)
            verify(list[(counter * 256 + n) % count]);
        for (uint64_t n = 0; n < 16; n++) {
            uint64_t page = list[mix(counter * 16 + n) % count];
            verify(page);
            if (version[page] < 255)
                write_page(page);
            verify(mix(counter * 16 + n + 1) % pages);
        }
        report_write(counter, facts);
        pause_us(2000);
    }
    for (uint64_t page = 0; page < pages; page++)
        verify(page);
    return report_end(counter, facts);
}
