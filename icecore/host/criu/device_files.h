/* Device files of NVIDIA's driver in processes that have no CUDA state (device_files.c): CRIU's
 * hooks, and what precedes them. */
#ifndef ICECORE_CRIU_DEVICE_FILES_H
#define ICECORE_CRIU_DEVICE_FILES_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

/* Prepare for a dump: read which device files are the driver's. Zero, or -1. */
int device_files_begin_dump(void);
/* Prepare for a restore: read what the dump recorded. Zero, or -1. */
int device_files_begin_restore(void);

/* DUMP_EXT_FILE, RESTORE_EXT_FILE, HANDLE_DEVICE_VMA, UPDATE_VMA_MAP (criu-plugin.h). */
int device_file_dump(int descriptor, int id);
int device_file_restore(int id, bool *retry);
int device_mapping_dump(int descriptor, const struct stat *about);
int device_mapping_restore(
    const char *path, uint64_t address, uint64_t offset, uint64_t *new_offset, int *descriptor);

#endif
