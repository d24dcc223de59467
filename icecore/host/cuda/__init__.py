"""Checkpoints of processes that use CUDA, through the NVIDIA driver.

- `api`: states, calls and errors, the same for every back end
- `driver`: the back end for the real driver; `fake`: the one for tests
- `inventory`: the GPUs and who uses them; `threads`: whether a process has CUDA state
- `holder`: CRIU holds the tree while the driver works in it; `populate`: faults in its memory
  faster
- `nccl`: how NCCL must be configured
"""
