"""The log of a repository, and what is decided through it.

In reading order:

- the log: `entries`, `reading` (the newest entry), `chain` (the next one), `identity`, `recovery`,
  `watermark`, `known`
- the snapshot list in its entries: `catalog`, `tables`, `notes`
- who takes part: `session`, `presence`, `keychain`, `repository`, `lease`,
  `lease_clock`
- writing objects: `uploads`
- the chunk index: `index`, `lookup`, `neighbours`, `recent`
"""
