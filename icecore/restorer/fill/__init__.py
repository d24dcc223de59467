"""Fills the memory of a tree that CRIU has built.

In reading order: `tree_fill` places all memory that comes through userfaultfd, `daemon` answers the
page faults meanwhile, and `device_file` brings large device memory to the driver through a file.
"""
