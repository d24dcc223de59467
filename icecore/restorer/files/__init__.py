"""A job's files and CRIU's images.

The job's files, in reading order: `plan` decides what is done to each, `copies` which of them the
instance gets as copies, and `beside` finds processes that have them open. `jobpaths` and `jobfiles`
(with `job_directories`, `job_inodes` and `rights`) are the only way to write to them. `put_back`
writes new files beside the old ones and exchanges them, `file_changes` makes and undoes each
change, `file_journal` records it first, and `file_recovery` undoes it after a crash. `held_files`
checks what CRIU opened.

CRIU's images: `images` rebuilds them, `filewriter` fills files from cells, and `exporter` writes a
directory for plain ``criu restore``.
"""
