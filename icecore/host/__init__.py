"""What the machine offers (procfs, process memory, userfaultfd, CRIU, namespaces); it knows no
repository.
"""
