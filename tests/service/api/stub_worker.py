"""A worker that stands for a command: what it does is the first word that is no option."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

from icecore.host.jobs.description import boot_id
from icecore.host.kernel import procfs
from icecore.service.api import operation_files as files
from icecore.service.api.journal import Writer


def about_itself() -> dict[str, object]:
    """What a process has from the one that started it."""
    return {
        "session": os.getsid(0) == os.getpid(),
        "threads": len(os.listdir("/proc/self/task")),
        "standard": [os.readlink(f"/proc/self/fd/{number}") for number in range(3)],
        "others": [
            os.readlink(f"/proc/self/fd/{number}")
            for number in os.listdir("/proc/self/fd")
            if int(number) > 2 and os.path.lexists(f"/proc/self/fd/{number}")
        ],
        "limit": resource.getrlimit(resource.RLIMIT_NOFILE),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "child": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
        "environment": sorted(set(os.environ) & {"OPENBLAS_NUM_THREADS", "NOTIFY_SOCKET"}),
        "random": random.random(),
    }


def main() -> int:
    directory, descriptor, attempt = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.set_inheritable(descriptor, False)
    asked = []
    signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    pid = os.getpid()
    files.write(
        directory,
        "process.json",
        files.Process(pid, procfs.start_time(pid), boot_id(), time.time(), attempt),
    )
    if attempt > 1 and (number := files.cancelled_by(directory)):  # as the real one without a job
        files.write(
            directory, "result.json", files.Result(exit_status=128 + number, ended=time.time())
        )
        return 0
    wanted = files.read_stored(directory)
    assert wanted is not None
    words = [word for word in wanted.words if not word.startswith("--")]
    writer = Writer(directory)

    def tell(number: int) -> None:
        writer.write(b'{"do":"event","event":{"event":"stub.step","at":1.0,"number":%d}}' % number)
        writer.write(b'{"do":"line","text":"step %d"}' % number)

    status = 0
    match os.environ.get("STUB", words[0]):
        case "crash":
            os.kill(pid, signal.SIGKILL)
        case "crash-once" if attempt == 1:
            os.kill(pid, signal.SIGKILL)
        case "wait":
            tell(0)
            go = directory.parent.parent.parent / "go"
            number = 1
            while not asked and not go.exists():
                time.sleep(0.02)
            if asked:
                status = 130
            tell(number)
        case "fail":
            status = 5
        case "show":
            (directory / "about.json").write_text(json.dumps(about_itself()))
        case _:
            for number in range(5):
                tell(number)
    error = None
    if status == 5:
        error = {
            "class": "DumpFailed",
            "message": "it failed",
            "cure": "try again",
            "exit_code": 5,
        }
    files.write(
        directory,
        "result.json",
        files.Result(
            exit_status=status,
            ended=time.time(),
            error=error,
            result={"event": "stub", "attempt": attempt},
        ),
    )
    return 0
