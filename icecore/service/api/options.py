"""The options of icecore's commands that a client may pass on to the service: the fields with these
names of its requests, and the options of the command lines that the service runs.

It imports nothing, because the client loads it.
"""

#: Of ``run``.
RUN = ("pid", "ipc", "network", "root", "tmp", "resident", "keep_resident", "io_uring", "log_limit")
#: Of ``run`` for a supervised job.
SUPERVISE = (
    "every",
    "on_term",
    "preempted_exit",
    "notice",
    "max_overhead",
    "max_loss",
    "requeue_command",
    "notice_command",
    "notice_url",
    "background_cpu",
)
DUMP = (
    "max_window",
    "pre_copy",
    "background_cpu",
    "memory",
    "files",
    "with_files",
    "verify_files",
    "connections",
    "gpu_shared",
)
RESTORE = ("mode", "files", "verify_files", "connections")
