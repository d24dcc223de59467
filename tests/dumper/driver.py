"""A dumper in a process of its own, for tests that kill it: dumps one tree, says on standard output
what happens, pauses where it is told to.

python driver.py '{"repository": …, "workdir": …, "pid": …, "pause": ["dump.files", "begin"],
"options": {…}}'
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

from icecore.dumper.dump import dump
from icecore.dumper.options import DumpOptions
from icecore.dumper.target import Target
from icecore.errors import IcecoreError
from icecore.events import Event
from icecore.store.backend.local import LocalBackend
from icecore.store.log.repository import StoredRepository
from icecore.store.runtime.loop import LoopThread

#: Runs it in a fork (`tests.zygote`), with the order as its only word.
PROGRAM = """
import json, sys
from tests.dumper.driver import main
sys.exit(main(json.loads(sys.argv[1])))
"""


def drop_capabilities() -> None:
    """Give up all capabilities (capset(2)), though not the user id."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)()):
        raise OSError("capset failed")


def main(order: dict[str, object]) -> int:
    # A shell starts background processes, such as a whole test run, with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pause = order.get("pause")

    def say(event: Event) -> None:
        about = [event.name, str(event.fields.get("state", ""))]
        os.write(1, json.dumps(about).encode() + b"\n")
        if about == pause:
            time.sleep(60)

    async def reopen() -> StoredRepository:
        return await StoredRepository.open(LocalBackend(Path(str(order["repository"]))))

    options = order.get("options")
    if order.get("powerless"):
        drop_capabilities()
    if order.get("descriptors"):
        most = int(str(order["descriptors"]))
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with LoopThread() as loop:
        try:
            result = dump(
                loop.run(reopen()),
                loop,
                Target.of_process(int(str(order["pid"])), "job"),
                DumpOptions(**options) if isinstance(options, dict) else None,
                workdir=str(order["workdir"]),
                emit=say,
            )
        except IcecoreError as error:
            os.write(1, json.dumps(["error", type(error).__name__, str(error)]).encode() + b"\n")
            return error.exit_code
    os.write(1, json.dumps(["snapshot", result.snapshot]).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
