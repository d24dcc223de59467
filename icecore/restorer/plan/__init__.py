"""Decides what a restore reads, without I/O.

`cells` says which pages of which cell go where, and `memory` in which order and in which batches
cells are read.
"""
