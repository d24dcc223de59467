"""Choose the back end for GPU memory: the NVIDIA driver, unless a test names another."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from icecore.errors import UsageError
from icecore.host.cuda.api import DeviceCheckpoint
from icecore.host.cuda.inventory import Inventory, read_inventory

if TYPE_CHECKING:
    from icecore.host.resident.memory import DeviceMemory

#: Names the back end where it is not the driver's: ``fake:DIRECTORY``, for tests
#: (`icecore.host.cuda.fake`).
VARIABLE = "ICECORE_CUDA"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Backend(msgspec.Struct, frozen=True):
    """A way to access GPU memory.

    Attributes:
        devices: Begin of the paths of its device files: "/dev/nvidia".
        world: Of the fake one: its directory.
    """

    devices: str
    world: Path | None = None

    @property
    def present(self) -> bool:
        """Return whether there is a driver; it need not work."""
        return os.path.exists(f"{self.devices}ctl")

    def connect(self) -> DeviceCheckpoint:
        """Return the calls for this process, which then has CUDA state of its own: only the helper
        calls this.

        Raises:
            DriverMissing: They cannot be had.
        """
        if self.world is not None:
            from icecore.host.cuda.fake import FakeDriver

            return FakeDriver(self.world)
        from icecore.host.cuda.driver import Driver

        return Driver()

    def memory(self, device: str) -> DeviceMemory:
        """Return the memory of a GPU for this process, which then has CUDA state of its own: only
        the worker calls this.

        Raises:
            DriverMissing, MemoryFailed: It cannot be had.
        """
        if self.world is not None:
            from icecore.host.resident.fake_memory import FakeMemory

            return FakeMemory(self.world, device)
        from icecore.host.resident.cuda_memory import Cuda, CudaMemory

        return CudaMemory(Cuda(), device)

    def inventory(self, pids: Collection[int] = ()) -> Inventory:
        """Return the GPUs, and which of them ``pids`` use.

        Raises:
            DriverMissing: It cannot be had.
        """
        if self.world is not None:
            from icecore.host.cuda.fake import fake_inventory

            return fake_inventory(self.world, pids)
        return read_inventory(pids)

    def kinds(self) -> tuple[str, ...]:
        """Return the kind (c: character device, b: block device) and major number of the driver's
        device files, such as "c195".
        """
        if self.world is not None:
            found = (os.stat(node) for node in (self.world / "dev").iterdir())
            nodes = {
                ("c" if stat.S_ISCHR(one.st_mode) else "b", os.major(one.st_rdev))
                for one in found
                if one.st_rdev
            }
            return tuple(f"{kind}{major}" for kind, major in sorted(nodes))
        with open("/proc/devices", encoding="ascii") as file:
            characters = file.read().partition("Block devices:")[0]
        return tuple(
            sorted(
                {f"c{major}" for major in re.findall(r"^ *(\d+) nvidia", characters, re.MULTILINE)}
            )
        )

    def is_device(self, path: str) -> bool:
        """Return whether a path is one of the driver's device files."""
        return path.startswith(self.devices)

    def minor(self, path: str) -> int | None:
        """Return N of a GPU's device file; None for the others ("nvidiactl", "nvidia-uvm")."""
        found = re.fullmatch(re.escape(self.devices) + r"(\d+)", path)
        return int(found[1]) if found else None


def see_gpus(words: Sequence[str]) -> None:
    """Make all GPUs, or only some of them, visible to CUDA in this process, whatever its parent
    sees. Must be called before CUDA is initialised.

    Args:
        words: Empty for all GPUs, or one word that lists UUIDs (`icecore.host.gpu.client.program`).
    """
    os.environ.pop(_VISIBLE, None)
    if words:
        os.environ[_VISIBLE] = words[0]


def find_backend() -> Backend:
    """Return the back end of this machine.

    Raises:
        UsageError: The variable names none.
    """
    named = os.environ.get(VARIABLE, "")
    if not named:
        return Backend("/dev/nvidia")
    kind, _, where = named.partition(":")
    if kind != "fake" or not where:
        raise UsageError(f"{VARIABLE}={named!r} names no back end", cure="unset it")
    return Backend(f"{where}/dev/nvidia", Path(where))
