"""The memory of a tree: scanned, compared, copied while the job runs, and stored."""
