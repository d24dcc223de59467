/* PAGEMAP_SCAN (ioctl_pagemap_scan(2)). In linux/fs.h since 6.7; the build machine's may be older. */
#ifndef ICECORE_PAGEMAP_SCAN_H
#define ICECORE_PAGEMAP_SCAN_H

#include <linux/ioctl.h>
#include <stdint.h>

/* struct pm_scan_arg */
struct scan {
	uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages, category_inverted,
	    category_mask, category_anyof_mask, return_mask;
};

/* struct page_region */
struct run {
	uint64_t start, end, categories;
};

struct range {
	uint64_t start, end;
};

#define SCAN _IOWR('f', 16, struct scan)
#define PRESENT_OR_SWAPPED (1 << 3 | 1 << 4)

#endif
