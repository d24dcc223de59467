"""The phases of a dump, in order. Each takes the values of the phase before it.

- `request`: what the caller asked for; every phase reads it.
- `preflight`: refuse what would lose or hang the job.
- `prepare`: set up everything that can be set up while the job runs.
- `freeze`: start CRIU, then stop the tree.
- `capture`: read the stopped tree, then let it run again.
- `commit`: store what was read and commit the snapshot.
"""
