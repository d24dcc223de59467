"""Copying snapshots from one repository to another.

- `transfer`: one snapshot into a repository with other keys
- `replicas`: keeping repositories with the same keys alike
- `reconcile`: merging the pins, tags and deletions of two replicas
"""
