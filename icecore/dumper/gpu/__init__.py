"""Capture device memory: the driver moves it to the host, except resident memory, which stays in
place and is copied there.

- `devices`: the GPU processes of a dump, locked, checkpointed and brought back.
- `locking`: how they are locked.
- `recorded`: what a manifest says of them.
- `resident`: their resident memory, taken away for the driver's checkpoint and given back after it.
- `resident_cells`: its cells, fingerprinted on the GPU and compared with the parent's.
- `resident_ahead`: how much of it has changed, found while the job runs.
- `resident_copy`: what changed, copied aside in the window and stored after it.
- `resident_precopy`: what would find no room in the window, stored before it.
"""
