"""Read a running tree without stopping or changing it.

- `files`: open and mapped files.
- `sockets`: protocols, and where unix sockets lead.
- `gpus`: processes that use the driver.
- `resident_inspection`: their resident device memory.
- `inspection`: all of the above, read once for preflight.
- `facts`: what the manifest says of processes, namespaces and the machine.
- `deaths`: processes that end during a dump.
"""
