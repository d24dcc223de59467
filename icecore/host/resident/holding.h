/* The connection to the keeper, which holds a descriptor of all memory. The functions require
 * table_lock, but for holding_fetch_of and holding_yielded, which forbid it. */
#ifndef ICECORE_RESIDENT_HOLDING_H
#define ICECORE_RESIDENT_HOLDING_H

#include <stdbool.h>
#include <stdint.h>

#include "table.h"

extern uint8_t holding_process_token[16];
/* of the keeper's and the agents' sockets; NULL: the preload is to do nothing */
const char *holding_directory(void);
void holding_add(struct allocation *what, int descriptor); /* does not take over the descriptor */
void holding_hand_over(struct allocation *what); /* exports it; does nothing if it is held */
void holding_hello(void); /* connects, so that the keeper knows that the process has memory */
void holding_free(struct allocation *what);
/* whether the keeper holds every descriptor; hands over those that it lacks */
bool holding_complete(void);
bool holding_replace(void); /* hands over all, whatever the keeper holds */
/* as holding_complete, and the keeper keeps them whatever becomes of this process, until it
 * reconnects */
bool holding_park(void);
bool holding_renew(void); /* exports every descriptor anew and hands it over */
int holding_socket(void); /* -1: not connected */
void holding_close(void);
/* whether it has a descriptor of its own that is still what it was */
bool holding_keeps(const struct allocation *what);
void holding_close_kept(struct allocation *what); /* its descriptor, where it has one */
/* 0, or an errno; `each` takes over the descriptor */
int holding_take(int (*each)(uint64_t identity, int descriptor));
/* draws holding_process_token, unless that was done; false: not possible */
bool holding_token(void);
/* another process's: 0, or an errno; ENOENT: it is gone */
int holding_fetch_of(const uint8_t *token, uint64_t identity, size_t *size, int *descriptor);
/* whether the keeper had memory of processes of this job that have ended, and has let go of it */
bool holding_yielded(void);
/* its descriptor, the caller's; -1: the keeper does not have it */
int holding_fetch(const struct allocation *what);
void holding_in_child(void);

#endif
