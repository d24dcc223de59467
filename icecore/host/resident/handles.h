/* Memory that the application manages itself. handles_share requires table_lock; the others forbid
 * it. */
#ifndef ICECORE_RESIDENT_HANDLES_H
#define ICECORE_RESIDENT_HANDLES_H

#include <stddef.h>

#include "table.h"

/* once more, as the application has set it */
CUresult handles_set_access(const struct allocation *what);
/* lets go of table_lock for a while: has its descriptor ready for others; NULL: *result */
struct allocation *handles_share(CUdeviceptr address, CUresult *result);
/* takes it over; the handle is ours, with one reference */
CUresult handles_import(CUhandle *out, int descriptor, size_t size);
/* the driver's for one of ours; 0: released */
CUhandle handles_present(CUhandle value);
CUresult handles_note_mapping(struct allocation *made, CUhandle value);
void handles_forget_mappings(CUdeviceptr address, size_t size);
CUresult handles_release(CUhandle value);
void handles_in_child(void);

#endif
