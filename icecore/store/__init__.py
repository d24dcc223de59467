"""The repository: immutable objects in a directory or a bucket, and all work on them.

The store knows no process and no machine. Its sub-packages, from the bottom to the top:

- `format`: the bytes of every object; no input or output
- `backend`: where objects lie
- `runtime`: the threads and event loops that the store runs on
- `log`: the log of commits, sessions, keys and the chunk index
- `snapshot`: writing and reading the data of snapshots
- `maintenance`: forgetting, collecting, compacting, checking and repairing
- `replication`: copying snapshots between repositories
"""
