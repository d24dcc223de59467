"""GPU memory that stays in place while the driver checkpoints its process.

A preload (`libicecore-resident.so`) allocates it as shareable physical memory, and a keeper
(`icecore-keeper`) holds its descriptors. In the window the preload unmaps the memory, so that the
driver has nothing to copy.

- `protocol`: the packets; `keeper`: starts keepers; `client`: talks to preload and keeper
- `window`, `tree`: one process, or all of a job, without its memory; `signals`: threads that block
  parking
- `sharing`: which allocations are the same memory
- `memory`: GPU memory as the worker uses it; `cuda_memory`, `fake_memory`: its implementations
- `gpu`, `gpu_thread`, `copyplan`: the copies within a window
- `kernels`, `fingerprint`, `digest`: fingerprints and chunk ids computed on the GPU

The preload's C modules, lowest first: `driver.c`, `descriptors.c`, `table.c` (all allocations),
`devices.c`, `stack.c` and `threads.c` (parking), `capture.c`, `holding.c` (the keeper's
connection), `release.c`, `spare.c`, `physical.c`; above them the forms of the driver's calls:
`allocate.c`, `handles.c`, `ipc.c`, `contexts.c`, and `interpose.c`, through which applications
reach them; then `local_memory.c`, `window.c`, `fork.c` and `agent.c`, the thread that serves
clients.
"""
