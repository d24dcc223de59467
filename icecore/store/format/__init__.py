"""The bytes of a repository: how values become objects and objects become values.

Nothing here does input or output. In reading order:

- data of a snapshot: `cell`, `rows`, `chunk`, `codec`, `delta`, `container`, `shard`, `cellmap`
- metadata objects: `names`, `envelope`, `cipher`, `keys`, `slots`
- what a snapshot is: `manifest`, `manifest_rules`, `contract` and `contract_rules` (what
  the dumper tells the restorer), `marks`, `hints`, `fingerprints`
- the log and the index: `state`, `gaps`, `segment`, `filters`
"""
