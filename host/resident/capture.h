/* Whether a stream is being captured into a graph; rule: asking touches no stream. */
#ifndef ICECORE_RESIDENT_CAPTURE_H
#define ICECORE_RESIDENT_CAPTURE_H

#include <stdbool.h>

bool capture_active(void); /* of any thread, in any context */
void captures_of_child(void);

#endif
