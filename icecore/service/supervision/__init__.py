"""Runs one job so that it survives: restored where it was, snapshotted in time, stopped in order.

- `supervisor`: decides, in one thread, on the messages of all the others.
- `plan`: what was asked for, and what it needs of the rest of icecore.
- `messages`: what the deciding thread hears.
- `patience`: tries again while the repository cannot be reached.
- `instances`: takes over, restores or starts an instance of the job.
- `failures`: decides from which snapshot a job that fails is brought back.
- `output`: shows what an instance writes.
- `snapshots`: takes one snapshot at a time, in a thread of its own.
- `timetable`: when the next snapshot is due.
- `notice`: asks whether the machine is about to go.
- `leaving`: runs the requeue command.
- `hold`: the lease of the job's name.
- `watchdog`: stops the job while nobody can be sure of its lease.
"""
