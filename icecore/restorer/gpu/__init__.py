"""Brings device memory back.

In reading order: `gpus` chooses a GPU for each that the job had, and `devices` has the driver
restore its own memory. Resident memory comes back without the driver: `resident_record` reads what
the snapshot says of it, `keepers` finds who still holds it, `resident` maps it into the processes,
and `resident_fill` fills it.
"""
