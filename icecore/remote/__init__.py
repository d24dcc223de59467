"""The command line as a client of the node service: same output and exit statuses, through its
socket. The standard library alone, so that commands start fast.
"""
