"""Writing and reading the data of snapshots: streams, packs, deltas."""
