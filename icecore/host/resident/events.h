/* Events that processes share by CUDA's legacy IPC. Not under table_lock. */
#ifndef ICECORE_RESIDENT_EVENTS_H
#define ICECORE_RESIDENT_EVENTS_H

void events_in_child(void);

#endif
