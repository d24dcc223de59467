"""The processes that call CUDA for a dump or a restore, and their clients.

- `backend`: chooses the driver or a fake
- `helper`: checkpoints processes; `undo`: brings them back to running; `client`: its client
- `worker`: maps and copies resident memory; `working`: its client
"""
