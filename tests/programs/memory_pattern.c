/* Private anonymous memory of a given size whose pages change only on request: the input of measurements.

       memory_pattern STATE_DIR [--mib 4096] [--huge 0] [--seed 1]

   A request is the file STATE_DIR/change, put there by a rename: "ID CELLS PAGES", that is, rewrite PAGES percent of the
   pages in CELLS percent of the 1 MiB cells (10 100: a tenth of the cells, wholly; 100 10: a tenth of the pages of every
   cell). It is taken away at once and answered by STATE_DIR/changed with the ID and the number of pages.

   Each millisecond one page is verified and STATE_DIR/progress, a mapped file, gets three 64-bit words: the counter, the time
   of this step in ns (CLOCK_REALTIME: CRIU restores into a time namespace, where CLOCK_MONOTONIC is another one), and the
   index of the page. `--huge 1` asks for huge pages. */
#include "report.h"

#include <sys/mman.h>

#define CELL_PAGES 256u

static uint8_t *base;
static uint32_t *version;
static uint64_t pages;

static void verify(uint64_t page)
{
    const uint8_t *at = base + page * PAGE;
    int word = page_differs(at, page, version[page]);
    if (word >= 0)
        violation("page %llu at %p (version %u) differs at word %d%s", (unsigned long long)page, (const void *)at,
                  version[page], word, page_not_zero(at) < 0 ? ", it is zero" : "");
}

/* `percent` of `count` things, the same number of them in each full run of them, chosen by `key`. */
static bool chosen(uint64_t key, uint64_t number, uint64_t percent)
{
    if (percent >= 100)
        return true;
    uint64_t place = (number + mix(key ^ (number / 100)) % 100) % 100;
    return place * 37 % 100 < percent;
}

static void take_request(const char *request, const char *taken, const char *answer, const char *answer_new)
{
    unsigned long long id, cell_percent, page_percent, changed = 0;
    if (rename(request, taken))
        return;
    FILE *f = fopen(taken, "re");
    need(f != NULL, taken);
    if (fscanf(f, "%llu %llu %llu", &id, &cell_percent, &page_percent) != 3) {
        fclose(f);
        violation("a request that is not three numbers");
        return;
    }
    fclose(f);
    for (uint64_t page = 0; page < pages; page++)
        if (chosen(id, page / CELL_PAGES, cell_percent) && chosen(id ^ 0xabcdef ^ page / CELL_PAGES, page, page_percent)) {
            page_fill(base + page * PAGE, page, ++version[page]);
            changed++;
        }
    f = fopen(answer_new, "we");
    need(f != NULL, answer_new);
    fprintf(f, "{\"id\": %llu, \"pages\": %llu}\n", id, changed);
    need(!fclose(f) && !rename(answer_new, answer), answer);
    unlink(taken);
}

int main(int argc, char **argv)
{
    if (argc < 2)
        return 2;
    report_open(argv[1], "memory_pattern");
    char request[4096], taken[4096], answer[4096], answer_new[4096], progress[4096];
    report_path(request, argv[1], "change");
    report_path(taken, argv[1], "change.taken");
    report_path(answer, argv[1], "changed");
    report_path(answer_new, argv[1], ".changed.new");
    report_path(progress, argv[1], "progress");
    pages = option(argc, argv, "--mib", 4096) * CELL_PAGES;
    uint64_t first_version = 1 + option(argc, argv, "--seed", 1) * 1000;
    base = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    version = malloc(pages * sizeof *version);
    need(base != MAP_FAILED && version, "memory");
    if (option(argc, argv, "--huge", 0))
        need(!madvise(base, pages * PAGE, MADV_HUGEPAGE), "MADV_HUGEPAGE");
    for (uint64_t page = 0; page < pages; page++)
        page_fill(base + page * PAGE, page, version[page] = (uint32_t)first_version);
    report_region("data", base, pages * PAGE);
    int fd = open(progress, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    need(fd >= 0 && !ftruncate(fd, PAGE), progress);
    volatile uint64_t *shared = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    need(shared != MAP_FAILED, progress);
    close(fd);
    uint64_t counter = 0;
    while (!report_finish_asked()) {
        uint64_t page = mix(++counter) % pages;
        verify(page);
        shared[2] = page;
        shared[1] = clock_ns(CLOCK_REALTIME);
        shared[0] = counter;
        take_request(request, taken, answer, answer_new);
        report_write(counter, NULL);
        pause_us(1000);
    }
    for (uint64_t page = 0; page < pages; page++)
        verify(page);
    return report_end(counter, NULL);
}
