/* A process that changes its address space as fast as it can from the moment a file appears, and checks every page.

       mutator STATE_DIR [--mib 500] [--burst 20000] [--seed 1]

   Until STATE_DIR/go exists it only waits, looking at a page now and then, so that it can be dumped and restored in that state.
   From then on: forks (children check and change their copies), moves and grows (mremap), shrinks, unmaps in the middle, maps
   anew, MADV_DONTNEED, MADV_FREE, rewrites. After `burst` operations it goes on at a thousand a second. What each page must
   hold is kept apart from it: where it was first written and its version, zero, or (after MADV_FREE) either. */
#include "report.h"

#include <sys/mman.h>
#include <sys/wait.h>

#define MAX_SEGMENTS 512
#define MAX_CHILDREN 4
#define ZERO 0u                                   /* version of a page that must read as zero */
#define MAYBE 0x80000000u                         /* flag of a version: the page may read as zero */

struct page { uint32_t origin, version; };
struct segment { uint8_t *at; uint32_t pages; struct page *page; };

static struct segment segments[MAX_SEGMENTS];
static unsigned segment_count;
static uint64_t total_pages, wanted_pages, random_state;
static uint32_t next_origin;
static pid_t children[MAX_CHILDREN];
static uint64_t done[16];

enum operation { CHECK, REWRITE, DONTNEED, FREE, MOVE, GROW, SHRINK, PUNCH, RENEW, FORK, OPERATIONS };
static const char *operation_names[OPERATIONS] = {
    "check", "rewrite", "dontneed", "free", "move", "grow", "shrink", "punch", "renew", "fork"
};

static uint64_t draw(uint64_t below)
{
    random_state += 0x9e3779b97f4a7c15u;
    return mix(random_state) % below;
}

static void verify(struct segment *s, uint32_t i, const char *who)
{
    struct page *p = &s->page[i];
    const uint8_t *at = s->at + (size_t)i * PAGE;
    if (p->version & MAYBE) {
        if (page_not_zero(at) < 0)
            return;
    } else if (p->version == ZERO) {
        int word = page_not_zero(at);
        if (word >= 0)
            violation("%s: page at %p must be zero and is not, at word %d", who, (const void *)at, word);
        return;
    }
    int word = page_differs(at, p->origin, p->version & ~MAYBE);
    if (word >= 0)
        violation("%s: page at %p (first written as %u, version %u) differs at word %d%s", who, (const void *)at, p->origin,
                  p->version & ~MAYBE, word, page_not_zero(at) < 0 ? ", it is zero" : "");
}

static void rewrite(struct segment *s, uint32_t i)
{
    struct page *p = &s->page[i];
    if (p->version == ZERO)
        p->origin = next_origin++;
    p->version = (p->version & ~MAYBE) + 1;
    page_fill(s->at + (size_t)i * PAGE, p->origin, p->version);
}

/* A random part of a random segment: first page and number of pages, at least one. */
static struct segment *pick(uint32_t longest, uint32_t *first, uint32_t *count)
{
    struct segment *s = &segments[draw(segment_count)];
    *first = (uint32_t)draw(s->pages);
    *count = 1 + (uint32_t)draw(longest);
    if (*count > s->pages - *first)
        *count = s->pages - *first;
    return s;
}

static struct page *resized(struct page *page, uint32_t pages)
{
    page = realloc(page, (size_t)pages * sizeof *page);
    need(page != NULL, "realloc");
    return page;
}

/* Moves a segment to a place of the kernel's choice, with another size if wanted; what is added must be zero. */
static void move(struct segment *s, uint32_t pages)
{
    size_t size = (size_t)pages * PAGE;
    void *place = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    need(place != MAP_FAILED, "mmap for a move");
    void *at = mremap(s->at, (size_t)s->pages * PAGE, size, MREMAP_MAYMOVE | MREMAP_FIXED, place);
    need(at == place, "mremap");
    s->at = at;
    s->page = resized(s->page, pages);
    for (uint32_t i = s->pages; i < pages; i++)
        s->page[i] = (struct page){ 0, ZERO };
    total_pages += pages - s->pages;
    s->pages = pages;
}

static void shrink(struct segment *s, uint32_t pages)
{
    if (draw(2))
        need(mremap(s->at, (size_t)s->pages * PAGE, (size_t)pages * PAGE, 0) == s->at, "mremap to shrink");
    else
        need(!munmap(s->at + (size_t)pages * PAGE, (size_t)(s->pages - pages) * PAGE), "munmap of an end");
    total_pages -= s->pages - pages;
    s->pages = pages;
}

/* Unmaps the middle of a segment, which makes two of it. */
static void punch(struct segment *s)
{
    if (segment_count == MAX_SEGMENTS || s->pages < 3)
        return;
    uint32_t first = 1 + (uint32_t)draw(s->pages - 2), count = 1 + (uint32_t)draw(s->pages - 1 - first);
    need(!munmap(s->at + (size_t)first * PAGE, (size_t)count * PAGE), "munmap of a middle");
    struct segment *rest = &segments[segment_count++];
    rest->at = s->at + (size_t)(first + count) * PAGE;
    rest->pages = s->pages - first - count;
    rest->page = resized(NULL, rest->pages);
    memcpy(rest->page, s->page + first + count, rest->pages * sizeof *rest->page);
    s->pages = first;
    total_pages -= count;
}

/* Unmaps a segment and maps another one, half of it written at once. */
static void renew(struct segment *s)
{
    need(!munmap(s->at, (size_t)s->pages * PAGE), "munmap");
    total_pages -= s->pages;
    s->pages = 16 + (uint32_t)draw(total_pages < wanted_pages ? 2048 : 64);
    total_pages += s->pages;
    s->at = mmap(NULL, (size_t)s->pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    need(s->at != MAP_FAILED, "mmap");
    s->page = resized(s->page, s->pages);
    for (uint32_t i = 0; i < s->pages; i++) {
        s->page[i] = (struct page){ 0, ZERO };
        if (draw(2))
            rewrite(s, i);
    }
}

/* What a child does with its copy of everything: check, change, check again; its status is the verdict. */
static void child(void)
{
    report.error_count = 0;
    for (int n = 0; n < 400; n++) {
        uint32_t first, count;
        struct segment *s = pick(16, &first, &count);
        if (draw(2))
            for (uint32_t i = first; i < first + count; i++)
                verify(s, i, "child");
        switch (draw(8)) {
        case 0:
            need(!madvise(s->at + (size_t)first * PAGE, (size_t)count * PAGE, MADV_DONTNEED), "MADV_DONTNEED in a child");
            for (uint32_t i = first; i < first + count; i++)
                s->page[i].version = ZERO;
            break;
        case 1:
            if (s->pages < 1024)
                move(s, s->pages + (uint32_t)draw(32));
            break;
        case 2:
        case 3:
            for (uint32_t i = first; i < first + count; i++)
                rewrite(s, i);
        }
        for (uint32_t i = 0; i < 4; i++)
            verify(s, (uint32_t)draw(s->pages), "child");
    }
    _exit(report.error_count ? 1 : 0);
}

static void collect(bool all)
{
    for (int n = 0; n < MAX_CHILDREN; n++) {
        int status;
        if (!children[n] || waitpid(children[n], &status, all ? 0 : WNOHANG) != children[n])
            continue;
        children[n] = 0;
        if (status)
            violation("a child found its copy damaged or died: wait status %#x", status);
    }
}

static void fork_one(void)
{
    for (int n = 0; n < MAX_CHILDREN; n++)
        if (!children[n]) {
            pid_t pid = fork();
            need(pid >= 0, "fork");
            if (!pid)
                child();
            children[n] = pid;
            return;
        }
}

static void operate(void)
{
    static const uint8_t weights[OPERATIONS] = { 30, 20, 12, 6, 8, 4, 4, 2, 4, 1 };
    uint32_t first, count, ticket = (uint32_t)draw(91);
    enum operation op = CHECK;
    while (ticket >= weights[op])
        ticket -= weights[op++];
    struct segment *s = pick(64, &first, &count);
    /* Half of the time not: a page that nobody has looked at since the restore may still be on its way. */
    if (op == CHECK || draw(2))
        for (uint32_t i = first; i < first + count; i++)
            verify(s, i, operation_names[op]);
    switch (op) {
    case REWRITE:
        for (uint32_t i = first; i < first + count; i++)
            rewrite(s, i);
        break;
    case DONTNEED:
        need(!madvise(s->at + (size_t)first * PAGE, (size_t)count * PAGE, MADV_DONTNEED), "MADV_DONTNEED");
        for (uint32_t i = first; i < first + count; i++)
            s->page[i].version = ZERO;
        break;
    case FREE:
        need(!madvise(s->at + (size_t)first * PAGE, (size_t)count * PAGE, MADV_FREE), "MADV_FREE");
        for (uint32_t i = first; i < first + count; i++)
            if (s->page[i].version != ZERO)
                s->page[i].version |= MAYBE;
        break;
    case MOVE: move(s, s->pages); break;
    case GROW:
        if (total_pages < wanted_pages + wanted_pages / 8)
            move(s, s->pages + 1 + (uint32_t)draw(256));
        break;
    case SHRINK:
        if (s->pages > 16 && total_pages > wanted_pages / 2)
            shrink(s, s->pages - 1 - (uint32_t)draw(s->pages < 256 ? s->pages / 2 : 128));
        break;
    case PUNCH: punch(s); break;
    case RENEW:
        if (s->pages < 4096)
            renew(s);
        break;
    case FORK: fork_one(); break;
    default: break;
    }
    done[op]++;
    for (uint32_t n = 0; n < 4; n++)
        verify(s, (uint32_t)draw(s->pages), operation_names[op]);
    collect(false);
}

int main(int argc, char **argv)
{
    if (argc < 2)
        return 2;
    report_open(argv[1], "mutator");
    char go[4096];
    report_path(go, argv[1], "go");
    wanted_pages = total_pages = option(argc, argv, "--mib", 500) * 256;
    uint64_t burst = option(argc, argv, "--burst", 20000), counter = 0, operations = 0;
    random_state = mix(option(argc, argv, "--seed", 1));
    uint8_t *base = mmap(NULL, wanted_pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    need(base != MAP_FAILED, "mmap");
    report_region("data", base, wanted_pages * PAGE);
    segment_count = 128;
    for (unsigned n = 0; n < segment_count; n++) {
        struct segment *s = &segments[n];
        uint64_t from = wanted_pages * n / segment_count, to = wanted_pages * (n + 1) / segment_count;
        s->at = base + from * PAGE;
        s->pages = (uint32_t)(to - from);
        s->page = resized(NULL, s->pages);
        for (uint32_t i = 0; i < s->pages; i++) {
            s->page[i] = (struct page){ 0, ZERO };
            if (mix(from + i) % 16)               /* one page in sixteen stays untouched */
                rewrite(s, i);
        }
    }
    char facts[512] = "\"phase\": \"waiting\"";
    bool going = false;
    while (!report_finish_asked()) {
        counter++;
        if (!going && access(go, F_OK) == 0)
            going = true;
        if (going) {
            operate();
            operations++;
            int used = snprintf(facts, sizeof facts, "\"phase\": \"%s\", \"operations\": %llu, \"segments\": %u, \"pages\": %llu",
                                operations < burst ? "burst" : "after", (unsigned long long)operations, segment_count,
                                (unsigned long long)total_pages);
            for (int op = 0; op < OPERATIONS; op++)
                used += snprintf(facts + used, sizeof facts - (size_t)used, ", \"%s\": %llu", operation_names[op],
                                 (unsigned long long)done[op]);
        } else if (counter % 64 == 0) {
            uint32_t first, count;
            struct segment *s = pick(1, &first, &count);
            verify(s, first, "waiting");
        }
        report_write(counter, facts);
        if (!going || operations >= burst)
            pause_us(1000);
    }
    collect(true);
    for (unsigned n = 0; n < segment_count; n++)
        for (uint32_t i = 0; i < segments[n].pages; i++)
            verify(&segments[n], i, "final");
    return report_end(counter, facts);
}
