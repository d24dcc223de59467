"""Encode cells in separate processes, because the threads of one interpreter block each other.

- `zero_pages`: separates pages of zeros, which are not stored, from data.
- `protocol`: the messages between the dumper and its encoders.
- `encoder_process`: the program of an encoder.
- `encoders`: the dumper's side.
"""
