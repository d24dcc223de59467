"""A fake driver for tests without a GPU. The state lives in the target process, so that it outlives
the caller.

The target (tests/fakes/fake_device.c) has a page at a fixed address in which this leaves its
request; a thread of the target, as the driver has one there, acts on it and answers. So it works by
pid, from any process, through dumps, restores and namespaces. The *world* is a directory:

- ``inventory.json``: ``{"driver": "580.159.03", "gpus": [{"uuid": …, "name": …, "memory": …,
  "minor": …}]}``; ``used``, ``mig`` as in `Gpu`; ``mps``: pids; ``no_context``: pids of
  targets that are reported without a context;
- ``dev/nvidia0``, …: what the target has open while it uses a GPU;
- ``gpu/UUID/…``: device memory, which no process maps;
- ``faults/…``: one JSON object each, used once and then removed: ``{"call": "restore", "code": 999,
  "pid": null, "seconds": 0, "after": false, "die": false}``: the next such call (of that pid)
  sleeps, then fails with that code, instead of or after having been carried out, or its helper
  dies.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from icecore.errors import NotFound
from icecore.host.cuda.api import DriverMissing, Placement, State, device_error
from icecore.host.cuda.driver import EXTRA_CURE, uuid_bytes
from icecore.host.cuda.inventory import Gpu, Inventory
from icecore.host.kernel import procfs

#: Where the target has its page.
CONTROL = 0x6FA4E0000000
MAGIC = b"FAKECUDA"
#: magic, request number, answer number, operation, result, state, thread, milliseconds, pairs,
#: device bytes, UUID of its GPU; then the pairs.
HEADER = struct.Struct("<8sQQIiIIIIQ16s")
REQUEST_AT, OPERATION_AT, MILLISECONDS_AT, PAIRS_AT = 8, 24, 40, HEADER.size
OPERATIONS = {"lock": 1, "checkpoint": 2, "restore": 3, "unlock": 4}
STATES = (State.RUNNING, State.LOCKED, State.CHECKPOINTED, State.FAILED)
_NAMES = {
    1: "CUDA_ERROR_INVALID_VALUE",
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    304: "CUDA_ERROR_OPERATING_SYSTEM",
    401: "CUDA_ERROR_ILLEGAL_STATE",
    600: "CUDA_ERROR_NOT_READY",
    801: "CUDA_ERROR_NOT_SUPPORTED",
    999: "CUDA_ERROR_UNKNOWN",
}
_ANSWER_SECONDS = 120.0
_POLL_SECONDS = 0.001
_PAGE_SECONDS = 10.0


class _Fault(NamedTuple):
    call: str
    code: int = 999
    pid: int | None = None
    seconds: float = 0.0
    after: bool = False
    die: bool = False


class FakeDriver:
    """The calls of `DeviceCheckpoint`."""

    def __init__(self, world: Path) -> None:
        self._world = world

    def state(self, pid: int) -> State:
        """See `DeviceCheckpoint`."""
        header = _header(pid)
        return State.NOT_CUDA if header is None else STATES[header[5]]

    def lock(self, pid: int, seconds: float) -> None:
        """See `DeviceCheckpoint`."""
        self._call("lock", pid, seconds)

    def checkpoint(self, pid: int) -> Placement:
        """See `DeviceCheckpoint`."""
        self._call("checkpoint", pid)
        return Placement.PROCESS

    def restore(self, pid: int, gpus: Mapping[str, str]) -> None:
        """See `DeviceCheckpoint`."""
        self._call("restore", pid, gpus=gpus)

    def unlock(self, pid: int) -> None:
        """See `DeviceCheckpoint`."""
        self._call("unlock", pid)

    def restore_thread(self, pid: int) -> int:
        """See `DeviceCheckpoint`."""
        header, fault = _header(pid), self._fault("restore-thread", pid)
        if header is None or fault is not None:
            raise device_error("restore-thread", pid, 1, _NAMES[1])
        return int(header[6])

    def _call(
        self, call: str, pid: int, seconds: float = 0.0, gpus: Mapping[str, str] | None = None
    ) -> None:
        fault = self._fault(call, pid)
        if fault is not None:
            time.sleep(fault.seconds)
            if fault.die:
                os._exit(9)
            if not fault.after and fault.code:
                raise device_error(call, pid, fault.code, _NAMES.get(fault.code, str(fault.code)))
        code = _ask(pid, OPERATIONS[call], seconds, gpus or {})
        if fault is not None and fault.after:
            code = fault.code
        if code:
            raise device_error(call, pid, code, _NAMES.get(code, str(code)))

    def _fault(self, call: str, pid: int) -> _Fault | None:
        for path in sorted((self._world / "faults").glob("*")):
            try:
                fault = _Fault(**json.loads(path.read_bytes()))
                if fault.call == call and fault.pid in (None, pid):
                    path.unlink()
                    return fault
            except FileNotFoundError:
                continue  # another call took it
        return None


_Header = tuple[bytes, int, int, int, int, int, int, int, int, int, bytes]


def _header(pid: int) -> _Header | None:
    """Return the target's page; None if the process is no target."""
    end = time.monotonic() + _PAGE_SECONDS
    while True:
        try:
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                data = os.pread(memory.fileno(), HEADER.size, CONTROL)
            break
        except OSError:
            # Restored lazily, it has its page once it has touched it itself: such a page cannot be
            # faulted in from outside.
            if not _has_page(pid) or time.monotonic() > end:
                return None
            time.sleep(_POLL_SECONDS)
    if len(data) < HEADER.size or not data.startswith(MAGIC):
        return None
    fields: _Header = HEADER.unpack(data)
    return fields


def _has_page(pid: int) -> bool:
    try:
        return any(mapping.start == CONTROL for mapping in procfs.read_maps(pid))
    except NotFound:
        return False


def _ask(pid: int, operation: int, seconds: float, gpus: Mapping[str, str]) -> int:
    """Post a request, wait for the answer and return the CUresult."""
    before = _header(pid)
    if before is None:
        return 1
    number = before[1] + 1
    pairs = b"".join(uuid_bytes(old) + uuid_bytes(new) for old, new in gpus.items())
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        os.pwrite(memory.fileno(), pairs, CONTROL + PAIRS_AT)
        os.pwrite(
            memory.fileno(),
            struct.pack("<II", int(seconds * 1000), len(gpus)),
            CONTROL + MILLISECONDS_AT,
        )
        os.pwrite(memory.fileno(), struct.pack("<I", operation), CONTROL + OPERATION_AT)
        os.pwrite(memory.fileno(), struct.pack("<Q", number), CONTROL + REQUEST_AT)
    end = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < end:
        now = _header(pid)
        if now is None:
            return 999
        if now[2] == number:
            return int(now[4])
        time.sleep(_POLL_SECONDS)
    return 999


def fake_inventory(world: Path, pids: Collection[int]) -> Inventory:
    """Return the world's inventory, and what those of ``pids`` that are targets use."""
    try:
        known = json.loads((world / "inventory.json").read_text())
    except FileNotFoundError:
        raise DriverMissing("the fake driver has no inventory", cure=EXTRA_CURE) from None
    gpus = tuple(Gpu(**gpu) for gpu in known["gpus"])
    contexts: dict[int, dict[str, int]] = {}
    for pid in pids:
        header = _header(pid)
        for gpu in gpus:
            if (
                header is not None
                and uuid_bytes(gpu.uuid) == header[10]
                and pid not in known.get("no_context", ())
            ):
                contexts[pid] = {gpu.uuid: header[9]}
    return Inventory(
        known["driver"], gpus, contexts, frozenset(known.get("mps", ())) & frozenset(pids)
    )
