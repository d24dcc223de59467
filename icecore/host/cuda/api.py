"""Checkpoints of CUDA processes, independent of the back end: states, calls by pid, errors. Every
error names its cure.

The states and calls are those of CUDA's process checkpointing (CUDA driver API, "Checkpointing"):
RUNNING → lock → LOCKED → checkpoint → CHECKPOINTED → restore → LOCKED → unlock → RUNNING. All pids
are the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import ClassVar, Protocol

import msgspec

from icecore.errors import IcecoreError, MissingTool


class State(Enum):
    """The state of a process according to the driver; ``NOT_CUDA``: it has no CUDA state."""

    NOT_CUDA = "not-cuda"
    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"


class Placement(Enum):
    """Where a checkpoint has put the device memory.

    ``PROCESS``: into private anonymous memory of the process itself, which is then scanned and
    filled like all its memory. A back end for drivers that map it into the caller instead (615 and
    newer, custom storage) adds its own member here, and returns from ``checkpoint`` and ``restore``
    before the contents have moved; nobody else has to know.
    """

    PROCESS = "process"


class Checkpointed(msgspec.Struct, frozen=True):
    """A process whose device memory is on the host.

    Attributes:
        placement: Where.
        populated: Bytes of the mapping it is in that were made ahead
            (`icecore.host.cuda.populate`).
        huge: Of these, in huge pages.
        not_populated: Why none were; empty: nothing was wrong (but the mapping may be too small).
    """

    placement: Placement
    populated: int = 0
    huge: int = 0
    not_populated: str = ""


class DeviceCheckpoint(Protocol):
    """The calls, each for one process. Threads may call for different processes at the same time.

    All raise `DeviceError` for what the driver answers.
    """

    def state(self, pid: int) -> State:
        """Return the state of a process. Does not raise for one without CUDA."""

    def lock(self, pid: int, seconds: float) -> None:
        """Wait for submitted work and block further CUDA calls; after ``seconds`` the process runs
        as before (`LockTimeout`).
        """

    def checkpoint(self, pid: int) -> Placement:
        """Move the memory of a locked process to the host and release its GPUs."""

    def restore(self, pid: int, gpus: Mapping[str, str]) -> None:
        """Acquire GPUs for a checkpointed process and move its memory back.

        Args:
            gpus: UUID ("GPU-…") of each GPU that it had → of the one it gets. Empty: the same ones.
        """

    def unlock(self, pid: int) -> None:
        """Allow a locked process to make CUDA calls again."""

    def restore_thread(self, pid: int) -> int:
        """Return the thread of the process in which the driver restores it."""


class DeviceError(IcecoreError):
    """The driver refused a call.

    Attributes:
        call: ``lock``, ``checkpoint``, …
        pid: For which process.
        code: The CUresult.
    """

    cures: ClassVar[str] = (
        "look into the kernel's log for what the driver says (dmesg | grep -i nvrm)"
    )

    def __init__(self, call: str, pid: int, code: int, name: str) -> None:
        super().__init__(f"{call} of process {pid}: {name} ({code})", cure=self.cures)
        self.call = call
        self.pid = pid
        self.code = code
        self.name = name


class LockTimeout(DeviceError):
    """The process's work on the GPU did not end in time; it runs as before."""

    cures = "give it longer (--gpu-lock), or take the snapshot between its steps"


class NotSupported(DeviceError):
    """The driver cannot checkpoint, or not restore, what the process uses."""

    cures = (
        "the driver cannot do this with managed memory, memory shared between processes (NCCL's P2P and SHM transports, CUDA IPC), MIG or MPS: "
        "docs/how-to/gpu-jobs.md names the settings that avoid them, and 'icecore run --gpu' applies them; "
        "nor after a profiler (torch.profiler with CUDA activities, Nsight) has recorded GPU activity in the process, even if it has ended: "
        "run the job without one"
    )


class IllegalState(DeviceError):
    """The process is in another state than the call requires: another program checkpoints it too,
    or an earlier call failed.
    """

    cures = "let whoever else checkpoints it finish ('cuda-checkpoint --get-state --pid PID' shows its state)"


class NoNamespace(DeviceError):
    """CUDA finds no /proc that belongs to the pid namespace it is in."""

    cures = "start the job with 'icecore run --gpu', which gives it a /proc of its own"


class NoMemory(DeviceError):
    """The GPU lacks memory for the restore."""

    cures = "free memory on it, or name another GPU with --gpu-map"


class HelperLost(DeviceError):
    """The process that makes the driver's calls has ended; another one is started to make the job
    run again.
    """

    cures = "look why it was killed (out of memory?), and try again"


class DriverMissing(MissingTool):
    """No NVIDIA driver is available, or the package that calls it is not installed."""


_CLASSES: Mapping[int, type[DeviceError]] = {
    2: NoMemory,
    304: NoNamespace,
    401: IllegalState,
    600: LockTimeout,
    801: NotSupported,
}
_LOST = -1


def device_error(call: str, pid: int, code: int, name: str) -> DeviceError:
    """Return the exception for a CUresult that is not success; ``code`` -1: the helper was lost."""
    return (HelperLost if code == _LOST else _CLASSES.get(code, DeviceError))(call, pid, code, name)


def helper_lost(call: str, pid: int) -> DeviceError:
    """Return the exception for a call that gets no answer any more."""
    return device_error(call, pid, _LOST, "the helper process ended")
