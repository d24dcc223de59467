"""What a snapshot requires of this machine, compared with it before anything is started. Nothing is
changed here: ``--dry-run`` does only this.

`check` makes all checks and returns their `outcome`. `machine`: processor, kernel, CRIU, process ids
and ports; `gpus`: driver and GPUs; `room`: memory; `data`: data directories.
"""
