"""The driver's back end through the real cuda.bindings, down to a libcuda that prints what it is
given: runs where cuda.bindings is installed, GPU or not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import threading, time
from icecore.host.cuda.api import DeviceError
from icecore.host.cuda.driver import Driver

driver = Driver()
began = time.monotonic()
threads = [threading.Thread(target=driver.lock, args=(pid, 1.5)) for pid in (21, 22, 23)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("parallel", time.monotonic() - began < 2.8)
print(driver.state(21).value, driver.state(7).value, driver.restore_thread(21), driver.checkpoint(21).value)
driver.restore(21, {})
driver.restore(21, {"GPU-00112233-4455-6677-8899-aabbccddeeff": "GPU-ffffffff-4455-6677-8899-aabbccddee00"})
driver.unlock(21)
print(driver.state(21).value)
for call in (lambda: driver.lock(8, 0.1), lambda: driver.restore(9, {})):
    try: call()
    except DeviceError as error: print(type(error).__name__, error.code, error.name)
"""


def test_what_reaches_the_driver(tmp_path: Path) -> None:
    pytest.importorskip(
        "cuda.bindings", reason="cuda.bindings is not installed (pip install 'icecore[gpu]')"
    )
    source = Path(__file__).with_name("stub_libcuda.c")
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source],
        check=True,
        timeout=60,
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", "-u", "-c", _SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = done.stdout.splitlines()
    assert sorted(lines[:3]) == [f"lock {pid} 1500" for pid in (21, 22, 23)], done.stderr
    old = "00 11 22 33 44 55 66 77 88 99 aa bb cc dd ee ff"
    new = "ff ff ff ff 44 55 66 77 88 99 aa bb cc dd ee 00"
    assert lines[3:] == [
        "parallel True",
        "locked not-cuda 22 process",
        "restore 21",
        f"restore 21 pairs 1: {old} {new}",
        "running",
        "lock 8 100",
        "LockTimeout 600 CUDA_ERROR_NOT_READY",
        "restore 9",
        "NotSupported 801 CUDA_ERROR_NOT_SUPPORTED",
    ]
