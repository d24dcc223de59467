"""Puts bytes into processes whose address spaces change meanwhile, by threads and by processes of
their own (placers).

In reading order: `addressmap` says where bytes belong now, `members` places cells in a process and
its children, and `locks` keeps that apart from the kernel's events. `placing` is the protocol
between the restorer and its placers, `placers` the restorer's side and `placer_process` the other.
There `reading` reads what is needed next, `stager` brings cells to GPUs, and `file_placer` and
`file_table` put device memory into a file.
"""
