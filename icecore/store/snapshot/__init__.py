"""Writing and reading the data of snapshots.

- writing: `writer`, `stream`, `shard_writer`, `packs`
- the form of a chunk, which is deltas and the choice of a codec: `forms`, `bases`, `trial`
- reading: `reader`, `decoder`, `ahead`
"""
