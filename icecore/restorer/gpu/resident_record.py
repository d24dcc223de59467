"""Reads what a snapshot records of resident device memory. A record that makes no sense is refused
before anything is started.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from icecore.errors import Damaged
from icecore.sizes import CELL_BYTES
from icecore.store.format.manifest import Manifest
from icecore.store.format.manifest_rules import is_path


@dataclass(frozen=True)
class RecordedAllocation:
    """One allocation in the snapshot: see `icecore.host.resident.protocol.Allocation`."""

    identity: int
    address: int
    size: int
    requested: int
    device: str
    ordinal: int


@dataclass(frozen=True)
class RecordedProcess:
    """The resident memory of one process.

    Attributes:
        token: Names the process across checkpoint and restore.
        allocations: Its own.
        imports: Allocations that are the memory of others: its identity for each → (image id,
            identity there).
    """

    token: bytes
    allocations: list[RecordedAllocation]
    imports: dict[int, tuple[int, int]]


def read_record(manifest: Manifest) -> tuple[str, dict[int, RecordedProcess]]:
    """Return what a snapshot records of resident memory: the directory as the job sees it, and each
    process by image id.

    Raises:
        Damaged: It makes no sense.
    """
    text = manifest.extra.get("resident")
    if text is None:
        return "", {}
    try:
        known = json.loads(text)
        directory = str(known["directory"])
        processes = {
            int(image): RecordedProcess(
                bytes.fromhex(about["token"]),
                [
                    RecordedAllocation(*(of(one) for of, one in zip(_FIELDS, row, strict=True)))
                    for row in about["allocations"]
                ],
                {
                    _number(identity): (int(owner), _number(there))
                    for identity, owner, there in about.get("imports", [])
                },
            )
            for image, about in known["processes"].items()
        }
        if not is_path(directory):
            raise ValueError("its directory has no path")
        spaces = {int(space.key): space for space in manifest.spaces if space.kind == "device"}
        for image, process in processes.items():
            regions = [(region.start, region.length) for region in spaces[image].regions]
            if regions != [(one.address, one.size) for one in process.allocations]:
                raise ValueError(f"the allocations of process {image} are not its regions")
            if any(
                one.size % CELL_BYTES or one.address % CELL_BYTES for one in process.allocations
            ):
                raise ValueError("an allocation does not consist of whole cells")
        there = {
            (image, one.identity)
            for image, process in processes.items()
            for one in process.allocations
        }
        if not there.issuperset(
            owner for process in processes.values() for owner in process.imports.values()
        ):
            raise ValueError("a process has memory of another that is not there")
        return directory, processes
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(
            "manifest",
            manifest.snapshot,
            f"its record of resident memory: {type(error).__name__}: {error}",
        ) from error


def left_to_driver(manifest: Manifest) -> dict[str, int]:
    """Return what the preloads of its processes had left to the driver (docs/reference/format.md); empty if
    that is not recorded or makes no sense, because nothing depends on it.
    """
    total: Counter[str] = Counter()
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        for about in json.loads(manifest.extra["resident"])["processes"].values():
            total.update({str(name): _number(some) for name, some in about.get("left", {}).items()})
    return dict(total)


def outlives(manifest: Manifest) -> bool:
    """Return whether resident memory is to outlive a crash of the job; for a manifest that
    `read_record` accepts.
    """
    return bool(json.loads(manifest.extra.get("resident", "{}")).get("outlives"))


def resident_bytes(manifest: Manifest) -> int:
    """Return the bytes of resident memory: they go neither into host memory nor through page
    faults.
    """
    return sum(
        region.length
        for space in manifest.spaces
        if space.kind == "device"
        for region in space.regions
    )


def _number(value: object) -> int:
    """Return a number of 64 bits.

    Raises:
        ValueError: It is not one.
    """
    if not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise ValueError(f"{str(value)[:40]!r} is not a 64-bit number")
    return value


_FIELDS: tuple[Callable[[Any], Any], ...] = (_number, _number, _number, _number, str, _number)
