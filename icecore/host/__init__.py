"""The machine that icecore runs on: processes and their memory, CRIU, GPUs, jobs. Knows no
repository.

Sub-packages, from the kernel upwards:

- `kernel`: /proc, page maps, userfaultfd, ptrace, limits
- `rpc`: messages to the processes that icecore starts
- `criu`: CRIU and its images
- `cuda`: checkpoints of GPU processes through the driver
- `resident`: GPU memory that stays in place during a checkpoint
- `gpu`: the processes that call CUDA for a dump or restore
- `jobs`: how jobs are started, recorded and found

`workdir` manages the working directories on tmpfs.
"""
