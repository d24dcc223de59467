"""Stop a process tree, and let it run again whatever happens.

- `claim`: one window of a process at a time.
- `waiting_criu`: a CRIU that is started ahead and waits.
- `guard_process`: the process that runs CRIU and outlives a dumper that dies; `guard`: the dumper's
  side of it.
- `window`: the time in which the job stands still, and its limit.
- `streamed`: the fallback in which CRIU sends all memory.
"""
