"""The packets between preload, keeper and their clients (``protocol.h``). A packet that is not
understood raises; none is skipped.
"""

from __future__ import annotations

import array
import socket
import struct
import uuid
from enum import IntEnum

import msgspec

VERSION = 2
#: What older processes speak (out of older snapshots), and their keepers: they know nothing of
#: shared memory, else it is the same.
OLDEST_VERSION = 1
#: In the environment of a process: the directory in which ``keeper`` is the keeper's socket and
#: ``agent-PID`` a process's own.
VARIABLE = "ICECORE_RESIDENT"

_LAYOUT = struct.Struct("<IIiIQQQQQQ16s16siiII400s")
_COUNTS = 29
_CUDA_ERROR = 10000
_IMPORTED, _EXPORTED = 16, 32
_LEFT = ("pool_bytes", "small_bytes", "managed_bytes", "foreign_bytes", "captured", "ipc_exports")


class Operation(IntEnum):
    """The operation of a packet; ``KEEPER_…`` for the keeper, ``AGENT_…`` for a process."""

    KEEPER_HELLO = 1
    KEEPER_HOLD = 2
    KEEPER_FREE = 3
    KEEPER_CONFIRM = 4
    KEEPER_RESYNC = 5
    KEEPER_RESYNCED = 6
    KEEPER_PARKED = 7
    KEEPER_PROCESSES = 16
    KEEPER_LIST = 17
    KEEPER_TAKE = 18
    KEEPER_PUT = 19
    KEEPER_RETAIN = 20
    KEEPER_FORGET = 21
    KEEPER_FETCH = 22
    KEEPER_KEEP = 23
    KEEPER_YIELD = 24
    KEEPER_DROP = 25
    KEEPER_END = 31
    AGENT_STATUS = 64
    AGENT_LIST = 65
    AGENT_PARK = 66
    AGENT_UNMAP = 67
    AGENT_MAP = 68
    AGENT_GO = 69
    AGENT_LEASE = 70
    AGENT_REFRESH = 71
    AGENT_LOOK = 72
    AGENT_END = 95


class Message(msgspec.Struct, frozen=True):
    """One packet; its operation decides which fields count (docs/explanation/resident-memory.md).

    Attributes:
        result: 0, an errno, or 10000 + a CUresult.
        nanoseconds, lease: Time limits in nanoseconds.
        device: UUID of a GPU, 16 bytes.
        token: Names a process, through checkpoint and restore, 16 bytes.
    """

    operation: int
    result: int = 0
    count: int = 0
    identity: int = 0
    address: int = 0
    size: int = 0
    requested: int = 0
    nanoseconds: int = 0
    lease: int = 0
    device: bytes = bytes(16)
    token: bytes = bytes(16)
    pid: int = 0
    ordinal: int = 0
    flags: int = 0
    state: int = 0
    text: bytes = b""

    def pack(self, version: int = VERSION) -> bytes:
        """As bytes."""
        return _LAYOUT.pack(version, *msgspec.structs.astuple(self))

    @classmethod
    def unpack(cls, data: bytes) -> Message:
        """From bytes.

        Raises:
            ValueError: They are no packet of a known version.
        """
        if len(data) != _LAYOUT.size:
            raise ValueError(f"a packet of {len(data)} bytes, not {_LAYOUT.size}")
        version, *values = _LAYOUT.unpack(data)
        if not OLDEST_VERSION <= version <= VERSION:
            raise ValueError(f"a packet of version {version}, not {VERSION}")
        return cls(*values)


def send(to: socket.socket, message: Message, descriptor: int = -1, version: int = VERSION) -> None:
    """Send a packet, with a descriptor unless it is negative."""
    rights = (
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        if descriptor >= 0
        else []
    )
    to.sendmsg([message.pack(version)], rights)


def receive(source: socket.socket) -> tuple[Message, int]:
    """Return the next packet and its descriptor (which the caller closes), or -1.

    Raises:
        EOFError: The other side hung up.
        ValueError: It sent something else.
        TimeoutError: Nothing came in time.
    """
    data, ancillary, _, _ = source.recvmsg(
        _LAYOUT.size + 1, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC
    )
    descriptors = array.array("i")
    for level, kind, found in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(found[: len(found) - len(found) % 4])
    if not data:
        raise EOFError
    return Message.unpack(data), descriptors[0] if descriptors else -1


class Counts(msgspec.Struct, frozen=True):
    """A process's GPU memory, by who has it. The ``…_bytes`` count live memory.

    Attributes:
        resident: Allocations with a descriptor: a window does not move them.
        small, pool, managed, foreign: Allocations left to the driver: under 2 MiB; stream-ordered;
            managed; others.
        deferred: Freed in a stream capture, to be released after it.
        allocations, frees, out_of_memory, ipc_refused: How often since the process began.
        unheld: Resident ones that the keeper does not hold now.
        windows, cancelled: How often the memory was taken away; how often that was given up.
        captured: Allocations left to the driver because a stream was being captured.
        handles, imported: What the application manages itself: made by cuMemCreate (also among the
            resident), imported from another process; live ones.
        exports: How often it was exported.
        unparkable: What was shared with other processes in a way that no window can take away; what
            was once stays counted.
        multicast: Multicast objects, which no window can take away either; likewise.
        ipc_exports: How often memory that stayed with the driver was exported or opened by CUDA's
            legacy IPC; of resident memory that is among `exports`.
        spare: Released by the application, and kept for the next that it allocates. A window gives
            them back.
        recycled: Allocations that got such a one.
    """

    resident: int = 0
    resident_bytes: int = 0
    small: int = 0
    small_bytes: int = 0
    pool: int = 0
    pool_bytes: int = 0
    managed: int = 0
    managed_bytes: int = 0
    foreign: int = 0
    foreign_bytes: int = 0
    deferred: int = 0
    deferred_bytes: int = 0
    allocations: int = 0
    frees: int = 0
    out_of_memory: int = 0
    ipc_refused: int = 0
    unheld: int = 0
    windows: int = 0
    cancelled: int = 0
    captured: int = 0
    handles: int = 0
    imported: int = 0
    exports: int = 0
    unparkable: int = 0
    multicast: int = 0
    ipc_exports: int = 0
    spare: int = 0
    spare_bytes: int = 0
    recycled: int = 0

    @classmethod
    def unpack(cls, text: bytes) -> Counts:
        """From the text of an answer."""
        return cls(*struct.unpack_from(f"<{_COUNTS}Q", text))

    @property
    def left(self) -> dict[str, int]:
        """What stayed with the driver, by these names: bytes that are live, and how often it was
        for other reasons; without zeros.
        """
        return {name: some for name in _LEFT if (some := int(getattr(self, name)))}


class Allocation(msgspec.Struct, frozen=True):
    """One resident allocation.

    Attributes:
        identity: Names it within its process.
        address: The device address that it keeps; of what the application manages itself, the
            handle as it knows it (no address: above 2^60).
        size: Bytes that are mapped; a multiple of the granularity.
        requested: Bytes that the application asked for.
        device: The UUID of its GPU, ``GPU-…``.
        ordinal: Its GPU as the process counts them.
        token: Its process's.
        imported: Its process has it from another one, which allocated it: both descriptors are one
            open file. ``size`` is what is mapped of it.
        exported: Others may have it from this one.
    """

    identity: int
    address: int
    size: int
    requested: int
    device: str
    ordinal: int
    token: bytes
    imported: bool = False
    exported: bool = False

    def __repr__(self) -> str:
        """Leave out the token."""
        return f"Allocation({self.identity}, {self.address:#x}, {self.size}, {self.device})"

    @property
    def flags(self) -> int:
        """As a packet has them."""
        return _IMPORTED * self.imported | _EXPORTED * self.exported

    @classmethod
    def of(cls, message: Message) -> Allocation:
        """As a packet has it."""
        return cls(
            message.identity,
            message.address,
            message.size,
            message.requested,
            f"GPU-{uuid.UUID(bytes=message.device)}",
            message.ordinal,
            message.token,
            bool(message.flags & _IMPORTED),
            bool(message.flags & _EXPORTED),
        )


def explain(result: int) -> str:
    """Explain a result other than 0."""
    import os

    return f"CUDA error {result - _CUDA_ERROR}" if result > _CUDA_ERROR else os.strerror(result)
