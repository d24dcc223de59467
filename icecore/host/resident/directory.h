/* A directory entry as getdents64(2) returns it: readdir(3) would allocate. */
#ifndef ICECORE_RESIDENT_DIRECTORY_H
#define ICECORE_RESIDENT_DIRECTORY_H

struct directory_entry {
	unsigned long long inode;
	long long offset;
	unsigned short length;
	unsigned char type;
	char name[];
};

#endif
