"""Brings device memory back.

In reading order: `gpus` chooses a GPU for each that the job had, and `devices` has the driver
restore its own memory. Resident memory comes back without the driver: `keepers` finds who still
holds it, `resident_targets` takes it from there, `resident` maps it into the processes, and
`resident_fill` fills it. What the snapshot says of both is in `icecore.store.format.contract`.
"""
