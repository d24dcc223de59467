"""Encode cells in processes, because the threads of one interpreter wait for each other.

- `protocol`: the messages.
- `encoder_process`: the program.
- `encoders`: the dumper's side.
"""
