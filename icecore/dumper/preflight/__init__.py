"""Refuse a dump before anything is stopped, and predict its window.

- `checks`, `checks_descriptors`, `checks_gpu`: the checks.
- `orphans`: processes with device files but no CUDA state, judged again in the window.
- `judge`: the list of all checks.
- `prediction`: how long the window will be.
"""
