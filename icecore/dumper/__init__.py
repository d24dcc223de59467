"""Capture a running process tree as a snapshot. Whatever fails, the job runs on.

- `options`, `target`: what a caller asks for.
- `dump`: the entry, which runs the `phases` in order.
- `preflight`: refuse what would lose or hang the job, judged by what `observe` reads.
- `freeze`: the window, in which the job stands still, and the guard that ends it in any case.
- `memory`: scan, compare, stage and pre-copy the tree's memory.
- `data`: the content of data directories.
- `gpu`: the same for device memory.
- `capture`: read a frozen tree.
- `storing`: the storing side of a snapshot, shared with `importer`, which stores an image directory
  that CRIU wrote.
- `hooks`: a user's commands before and after a dump.
"""
