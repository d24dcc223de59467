"""What keeps a repository small and sound.

- deleting: `forget` decides which snapshots go, `gc` deletes what no snapshot reaches (`reach`,
  `pieces`)
- rewriting: `compact`, `rewrite`, `rebase`, `reindex`
- `stats`
- damage: `check` finds it (`check_log`, `check_maps`, `check_shards`) and collects `findings`,
  `diagnosis` plans, `repair` acts (with `salvage`), and `relog` rebuilds a lost log
"""
