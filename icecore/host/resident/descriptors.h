/* Descriptors of ours in a process whose application may close any descriptor that it finds. */
#ifndef ICECORE_RESIDENT_DESCRIPTORS_H
#define ICECORE_RESIDENT_DESCRIPTORS_H

#include <stdbool.h>
#include <sys/types.h>

#define DESCRIPTOR_HIGH 500 /* from here on numbers that applications do not expect to close */

/* moves it to a number from DESCRIPTOR_HIGH on, where one is free */
int descriptor_high(int descriptor);
int descriptor_duplicate(int descriptor); /* the same, beside it; -1: no number is free */
/* moves it to a number from `least` on, where one is free */
int descriptor_from(int descriptor, int least);
bool descriptor_is(int descriptor, ino_t inode); /* whether it is still open and the same file */

#endif
