"""Unix sockets whose peer comes later in CRIU's images."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from icecore.host.jobs.registry import Registry
from tests.host.target import eventually
from tests.roundtrip.conftest import Trip
from tests.roundtrip.test_instances import bring_back, lines, take, wait_lines

pytestmark = pytest.mark.criu

#: The parent is connected to a listener and to a datagram socket of the child. The child answers once a
#: file exists.
JOB = """
import os, socket, sys, time
data = sys.argv[1]
ready, tell = os.pipe()
if not os.fork():
    listener = socket.socket(socket.AF_UNIX); listener.bind(f"{data}/listener"); listener.listen()
    box = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); box.bind(f"{data}/box")
    os.write(tell, b"1")
    while not os.path.exists(f"{data}/go"):
        time.sleep(0.01)
    accepted, _ = listener.accept()
    accepted.sendall(b"answer to " + accepted.recv(100) + b" and " + box.recv(100))
    time.sleep(1000)
os.read(ready, 1)
waiting = socket.socket(socket.AF_UNIX); waiting.connect(f"{data}/listener")
sending = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); sending.connect(f"{data}/box")
print("connected", flush=True)
while not os.path.exists(f"{data}/go"):
    time.sleep(0.01)
sending.send(b"letter"); waiting.sendall(b"call")
print(waiting.recv(100).decode(), flush=True)
time.sleep(1000)
"""


def test_a_connection_that_waits_to_be_accepted(trip: Trip, tmp_path: Path) -> None:
    registry, data = Registry(tmp_path / "jobs"), tmp_path / "data"
    data.mkdir()
    job = registry.start([sys.executable, "-c", JOB, str(data)], name="waiting")
    try:
        wait_lines(job, 0)
        snapshot = take(trip, job, stop=True)
        job.wait(20)
        (data / "go").touch()
        restored = bring_back(trip, registry, snapshot).job
        assert restored is not None
        job = restored
        assert eventually(lambda: lines(job)[1:] == ["answer to call and letter"]), lines(job)
    finally:
        if job.alive:
            job.kill(9)
            job.wait(20)
