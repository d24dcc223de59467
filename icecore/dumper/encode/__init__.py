"""Encode cells in processes, because the threads of one interpreter wait for each other.

- `zero_pages`: pages of zeros, which are not stored.
- `protocol`: the messages.
- `encoder_process`: the program.
- `encoders`: the dumper's side.
"""
