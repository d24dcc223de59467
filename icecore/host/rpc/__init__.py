"""Messages between a process of icecore and the processes that it starts, over SOCK_SEQPACKET
sockets.

- `packets`: whole messages with descriptors and deadlines, and the death of the peer; standard
  library only
- `calls`: numbered calls, many at once, each of which returns or raises
- `peer`: what a started process does first
"""
