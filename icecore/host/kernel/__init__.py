"""What the kernel is asked for: /proc, page maps, userfaultfd, ptrace, limits."""
