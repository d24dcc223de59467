/* Whether a stream is being captured into a graph; asking touches no stream. */
#ifndef ICECORE_RESIDENT_CAPTURE_H
#define ICECORE_RESIDENT_CAPTURE_H

#include <stdbool.h>

#include "driver.h"

bool capture_active(void); /* of any thread, in any context; also one that may just be beginning */
/* the current one, but in a capture: then it answers as the wait would, at the price of the capture
 */
CUresult capture_wait_for_context(void);
void capture_in_child(void);

#endif
