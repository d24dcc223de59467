"""The allocations that a restore fills or finds still held, each with its GPU and its descriptor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress

import msgspec

from icecore.errors import RestoreRefused
from icecore.host.resident.client import Keeper, ResidentFailed
from icecore.host.resident.protocol import Allocation
from icecore.host.resident.sharing import repeated
from icecore.restorer.gpu.gpus import GpuPlan
from icecore.store.format.contract import ResidentAllocation, ResidentProcess


class TargetAllocation(msgspec.Struct):
    """One allocation that is filled or still holds its memory.

    Attributes:
        process: The image id of its process.
        about: What the snapshot records of it.
        device: The GPU that it is on now.
        handle: The worker's number for it.
        descriptor: A descriptor of it; -1: there is none yet.
        held: A keeper held it.
    """

    process: int
    about: ResidentAllocation
    device: str
    handle: int
    descriptor: int = -1
    held: bool = False


class Targets:
    """The allocations of all processes. To be closed.

    Args:
        processes: The processes of the snapshot, by image id.
        gpus: Which GPU each of them gets.

    Attributes:
        all: The allocations; the index of each is its ``handle``.
        processes: The argument.
    """

    def __init__(self, processes: Mapping[int, ResidentProcess], gpus: GpuPlan) -> None:
        self.processes = processes
        self.all: list[TargetAllocation] = []
        for image, process in processes.items():
            pairs = gpus.processes.get(image, {})
            for one in process.allocations:
                device = pairs.get(one.device, one.device)
                self.all.append(TargetAllocation(image, one, device, len(self.all)))

    def close(self) -> None:
        """Close the descriptors. May be called twice."""
        for target in self.all:
            if target.descriptor >= 0:
                os.close(target.descriptor)
            target.descriptor, target.held = -1, False

    def descriptors(self, image: int) -> dict[int, int]:
        """Return what a process maps, by its identities. Processes that share memory get duplicates
        of one descriptor, as before.
        """
        found = {(target.process, target.about.identity): target.descriptor for target in self.all}
        own = {
            identity: descriptor
            for (process, identity), descriptor in found.items()
            if process == image
        }
        return own | {
            one.identity: found[one.owner, one.there] for one in self.processes[image].imports
        }

    def by_device(self) -> dict[str, list[TargetAllocation]]:
        """Return the allocations of each GPU."""
        found: dict[str, list[TargetAllocation]] = {}
        for target in self.all:
            found.setdefault(target.device, []).append(target)
        return found

    def take(self, keeper: Keeper) -> None:
        """Take descriptors of what the keeper holds; have it let go of everything else that it
        holds of processes that have ended.

        Raises:
            RestoreRefused: It holds memory on another GPU.
        """
        found: list[tuple[TargetAllocation, Allocation]] = []
        spare: dict[bytes, list[int]] = {}
        with ExitStack() as stack:
            stack.callback(self.close)
            for image, process in self.processes.items():
                own = {
                    target.about.identity: target for target in self.all if target.process == image
                }
                for one, descriptor in keeper.take(process.token_bytes):
                    target = own.get(one.identity)
                    if target is None or (one.address, one.size) != (
                        target.about.address,
                        target.about.size,
                    ):
                        os.close(descriptor)
                        spare.setdefault(process.token_bytes, []).append(one.identity)
                        continue
                    target.descriptor, target.held = descriptor, True
                    found.append((target, one))
            for target, one in found:
                if one.device != target.device:
                    message = f"memory of process {target.process} is held on {one.device}, not on {target.device}"
                    raise RestoreRefused(
                        message, cure="restore without --from-resident: all is fetched then"
                    )
            # Since the snapshot a process may have begun to share the memory of another.
            for number in repeated([(one, target.descriptor) for target, one in found]):
                target = found[number][0]
                os.close(target.descriptor)
                target.descriptor, target.held = -1, False
            stack.pop_all()
        with suppress(ResidentFailed):  # an older keeper: it lets go once the processes are back
            for token, identities in spare.items():
                keeper.drop(token, identities)
        tokens = {process.token_bytes for process in self.processes.values()}
        for known in keeper.processes():
            if known.token not in tokens and not known.alive:
                keeper.forget(known.token)
