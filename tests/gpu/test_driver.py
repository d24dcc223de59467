"""The driver's back end through the real cuda.bindings, down to the fake libcuda: runs where
cuda.bindings is installed, GPU or not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.fakes.machine import MIB, until, uuid_of
from tests.resident.conftest import NewMachine

_SCRIPT = """
import json, os, struct, sys, threading, time
from icecore.host.cuda.api import DeviceError
from icecore.host.cuda.driver import Driver
from icecore.host.cuda.fake import CONTROL, MILLISECONDS_AT, REQUEST_AT

order = json.loads(sys.argv[1])
driver, pid, found = Driver(), order["pid"], {}

def said(call, *arguments):
    try:
        call(*arguments)
    except DeviceError as error:
        return [type(error).__name__, error.code, error.name]

def words(at, kind):
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        return struct.unpack(kind, os.pread(memory.fileno(), struct.calcsize(kind), CONTROL + at))

found["states"] = [driver.state(pid).value, driver.state(os.getppid()).value]
found["while it is in a call"] = said(driver.lock, pid, 0.25)
found["milliseconds"] = words(MILLISECONDS_AT, "<I")
(asked, _) = words(REQUEST_AT, "<QQ")
locking = threading.Thread(target=driver.lock, args=(pid, 60.0))
locking.start()
while words(REQUEST_AT, "<QQ") != (asked + 1, asked):  # the thread is in the driver's call
    time.sleep(0.001)
os.unlink(order["pause"])
locking.join()
found["locked"] = driver.state(pid).value
found["placement"] = driver.checkpoint(pid).value
found["checkpointed"] = driver.state(pid).value
found["thread"] = driver.restore_thread(pid)
driver.restore(pid, {})
driver.checkpoint(pid)
driver.restore(pid, order["gpus"])
driver.unlock(pid)
found["state"] = driver.state(pid).value
found["not locked"] = said(driver.checkpoint, pid)
print(json.dumps(found))
"""


def test_what_reaches_the_driver(new_machine: NewMachine) -> None:
    """Also that a call does not hold the interpreter's lock: another thread ends what it waits for."""
    pytest.importorskip(
        "cuda.bindings", reason="cuda.bindings is not installed (pip install 'icecore[gpu]')"
    )
    machine = new_machine(gpus=2, world=True)
    process = machine.target(resident=False)
    context = process("start(0)")
    code, address = process("alloc(4 * MIB)")
    assert code == 0
    content = process(f"fill({address}, 4 * MIB, 7)")
    pause, paused = (machine.cuda / f"{name}-cuCtxPushCurrent_v2" for name in ("pause", "paused"))
    pause.touch()
    process(f"begun(lambda: cuda.cuCtxPushCurrent_v2(ctypes.c_void_p({context})))")
    until(paused.exists)
    order = {"pid": process.pid, "pause": str(pause), "gpus": {uuid_of(0): uuid_of(1)}}
    done = subprocess.run(
        [sys.executable, "-P", "-c", _SCRIPT, json.dumps(order)],
        env=machine.environment(resident=False),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert str(found.pop("thread")) in os.listdir(f"/proc/{process.pid}/task")
    assert found == {
        "states": ["running", "not-cuda"],
        "while it is in a call": ["LockTimeout", 600, "CUDA_ERROR_NOT_READY"],
        "milliseconds": [250],
        "locked": "locked",
        "placement": "process",
        "checkpointed": "checkpointed",
        "state": "running",
        "not locked": ["IllegalState", 401, "CUDA_ERROR_ILLEGAL_STATE"],
    }
    assert (machine.used(0), machine.used(1)) == (0, 4 * MIB), "on the GPU that the pair names"
    assert process("ended()") == 0 and process(f"hashed({address}, 4 * MIB)") == content
