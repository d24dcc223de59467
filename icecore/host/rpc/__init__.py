"""Messages between a process of icecore and the processes that it starts, over SOCK_SEQPACKET
sockets.

- `packets`: whole messages with descriptors, deadlines, and detection of the peer's death; standard
  library only
- `calls`: numbered calls, many in flight at once; each returns or raises
- `peer`: the first steps of a started process
- `family`: processes that are forked from one that has loaded what they need
"""
