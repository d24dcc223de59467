"""Stop a process tree, and let it run again whatever happens.

- `claim`: one window of a process at a time.
- `waiting_criu`: a CRIU that is started ahead and waits.
- `guard`: the process that runs CRIU and outlives a dumper that dies.
- `window`: the time in which the job stands still, and its limit.
- `streamed`: the fallback in which CRIU sends all memory.
"""
