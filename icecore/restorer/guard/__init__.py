"""The guard: a process that outlives the restorer, and kills a tree that is not complete.

`guard_process` is the process, made of the standard library alone; `client` is the restorer's side.
"""
