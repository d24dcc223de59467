/* What a process that the application forks must forget. */
#ifndef ICECORE_RESIDENT_FORK_H
#define ICECORE_RESIDENT_FORK_H

/* Watches forks, once. `agents` is called in each child, before the other modules forget what they
 * know. */
void fork_watch(void (*agents)(void));

#endif
