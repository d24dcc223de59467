"""Where objects lie, and wrappers that add a property to any such place.

- the contract, and its conformance suite: `base`, `testing`
- places: `local`, `memory`, `s3` (with `s3_errors`)
- wrappers: `wrapper` (their base), `retry`, `limits`, `metrics`, `cached` (with `blocks`),
  `replicas`, `faulty` (for tests)
- `beneath`: opening files below a folder without following links
"""
