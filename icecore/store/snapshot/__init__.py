"""Writing and reading the data of snapshots.

- writing: `writer`, `stream`, `shard_writer`, `packs`
- deltas and the choice of a codec: `bases`, `trial`
- reading: `reader`, `decoder`, `ahead`
"""
