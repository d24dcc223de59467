/* Progress and verdict of a test program in C: the same state.json as report.py's, replaced atomically; and page patterns. */
#ifndef REPORT_H
#define REPORT_H

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096u
#define WORDS (PAGE / 8)
#define KEPT_ERRORS 8
#define KEPT_REGIONS 8

struct report {
    const char *program;
    char state[4096], temporary[4096], finish[4096];
    char errors[KEPT_ERRORS][256];
    struct { char name[32]; uint64_t address, bytes; } regions[KEPT_REGIONS];
    unsigned region_count;
    uint64_t error_count, writes;
    uint64_t written_at_ms;
    pid_t owner;
};

static struct report report;

static inline uint64_t clock_ns(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline void pause_us(long us)
{
    struct timespec t = { us / 1000000, us % 1000000 * 1000 };
    nanosleep(&t, NULL);
}

static inline void report_path(char out[4096], const char *dir, const char *name)
{
    if (snprintf(out, 4096, "%s/%s", dir, name) >= 4096) {
        fprintf(stderr, "the state directory's name is too long\n");
        exit(2);
    }
}

static inline void report_open(const char *dir, const char *program)
{
    report.program = program;
    report.owner = getpid();
    report_path(report.state, dir, "state.json");
    report_path(report.temporary, dir, ".state.json.new");
    report_path(report.finish, dir, "finish");
}

/* Names memory that the program verifies, so that a test can damage it from outside and see it noticed. */
static inline void report_region(const char *name, const void *address, uint64_t bytes)
{
    if (report.region_count == KEPT_REGIONS)
        return;
    snprintf(report.regions[report.region_count].name, sizeof report.regions[0].name, "%s", name);
    report.regions[report.region_count].address = (uint64_t)(uintptr_t)address;
    report.regions[report.region_count++].bytes = bytes;
}

/* Records a broken expectation: the first ones word for word, the others counted. The text must need no JSON escapes. */
static inline void __attribute__((format(printf, 1, 2))) violation(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    if (report.error_count < KEPT_ERRORS) {
        char *text = report.errors[report.error_count];
        vsnprintf(text, sizeof report.errors[0], format, arguments);
        fprintf(stderr, "%s\n", text);
        report.written_at_ms = 0;
    }
    report.error_count++;
    va_end(arguments);
}

/* Returns false if the new file vanished before it was renamed. */
static inline bool report_put(uint64_t counter, bool finished, const char *facts)
{
    FILE *f = fopen(report.temporary, "we");
    if (!f) {
        perror(report.temporary);
        exit(2);
    }
    fprintf(f, "{\"program\": \"%s\", \"pid\": %d, \"counter\": %llu, \"writes\": %llu, \"errors\": [", report.program,
            (int)getpid(), (unsigned long long)counter, (unsigned long long)++report.writes);
    for (uint64_t i = 0; i < report.error_count && i < KEPT_ERRORS; i++)
        fprintf(f, "%s\"%s\"", i ? ", " : "", report.errors[i]);
    fprintf(f, "], \"error_count\": %llu, \"finished\": %s, \"passed\": %s, \"regions\": [",
            (unsigned long long)report.error_count, finished ? "true" : "false",
            !finished ? "null" : report.error_count ? "false" : "true");
    for (unsigned i = 0; i < report.region_count; i++)
        fprintf(f, "%s{\"name\": \"%s\", \"address\": %llu, \"bytes\": %llu, \"pid\": %d}", i ? ", " : "",
                report.regions[i].name, (unsigned long long)report.regions[i].address,
                (unsigned long long)report.regions[i].bytes, (int)report.owner);
    fprintf(f, "], \"facts\": {%s}}", facts ? facts : "");
    if (!fclose(f) && !rename(report.temporary, report.state))
        return true;
    if (errno == ENOENT)
        return false;
    perror(report.state);
    exit(2);
}

/* A snapshot may lie between the file's end and its rename. The first instance that is restored renames the file; a later
   one has to write it again. */
static inline void report_replace(uint64_t counter, bool finished, const char *facts)
{
    if (!report_put(counter, finished, facts) && !report_put(counter, finished, facts)) {
        fprintf(stderr, "%s vanished twice\n", report.temporary);
        exit(2);
    }
}

/* Replaces the state file unless that was done less than 20 ms ago. `facts` is the inside of a JSON object, or NULL. */
static inline void report_write(uint64_t counter, const char *facts)
{
    uint64_t ms = clock_ns(CLOCK_MONOTONIC) / 1000000;
    if (report.written_at_ms && ms - report.written_at_ms < 20)
        return;
    report.written_at_ms = ms;
    report_replace(counter, false, facts);
}

static inline bool report_finish_asked(void)
{
    return access(report.finish, F_OK) == 0;
}

/* Writes the verdict; returns the exit status that goes with it. */
static inline int report_end(uint64_t counter, const char *facts)
{
    report_replace(counter, true, facts);
    return report.error_count ? 1 : 0;
}

/* splitmix64's finaliser: the source of everything pseudo-random here. */
static inline uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* The content of a page is a function of where it was first written and of its version. */
static inline uint64_t page_key(uint64_t index, uint64_t version)
{
    return mix(index ^ mix(version ^ 0x69636563u));
}

static inline void page_fill(void *page, uint64_t index, uint64_t version)
{
    uint64_t *word = page, key = page_key(index, version);
    for (unsigned i = 0; i < WORDS; i++)
        word[i] = mix(key + i);
}

/* The first word that is not as written, or -1. */
static inline int page_differs(const void *page, uint64_t index, uint64_t version)
{
    const uint64_t *word = page;
    uint64_t key = page_key(index, version), all = 0;
    for (unsigned i = 0; i < WORDS; i++)
        all |= word[i] ^ mix(key + i);
    if (!all)
        return -1;
    for (unsigned i = 0; i < WORDS; i++)
        if (word[i] != mix(key + i))
            return (int)i;
    return (int)WORDS;                            /* it has changed between the two looks */
}

/* The first word that is not zero, or -1. */
static inline int page_not_zero(const void *page)
{
    const uint64_t *word = page;
    for (unsigned i = 0; i < WORDS; i++)
        if (word[i])
            return (int)i;
    return -1;
}

/* The value of "--name N" among the arguments, or the default. */
static inline uint64_t option(int argc, char **argv, const char *name, uint64_t otherwise)
{
    for (int i = 2; i + 1 < argc; i++)
        if (!strcmp(argv[i], name))
            return strtoull(argv[i + 1], NULL, 0);
    return otherwise;
}

/* Ends the program when a call failed that must not fail; that is a verdict too. A forked child only dies. */
static inline void need(bool holds, const char *what)
{
    if (holds)
        return;
    int error = errno;
    if (!report.program || report.owner != getpid()) {
        fprintf(stderr, "%s: %s\n", what, strerror(error));
        _exit(2);
    }
    violation("%s: %s", what, strerror(error));
    exit(report_end(0, NULL));
}

#endif
