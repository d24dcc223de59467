"""Data directories: their content as part of a snapshot, consistent with the window.

- `layout`: where the content of each file lies in the space of its directory.
- `reading`: read files into the pipeline.
- `capture`: which files are read when, and what becomes the table.
- `directories`: all data directories of one dump.
"""
