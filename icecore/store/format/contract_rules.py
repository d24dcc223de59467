"""Check the rules for the records of a manifest that go beyond their types
(`icecore.store.format.contract` describes them). Each function yields every broken rule as a
message. Pure.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from icecore.sizes import CELL_BYTES
from icecore.store.format.manifest_rules import is_path

if TYPE_CHECKING:
    from icecore.store.format.contract import Gpus, Resident, ResidentProcess, Run
    from icecore.store.format.manifest import Manifest

#: Most bytes of an init's program; icecore's has 20 KiB.
_MOST_INIT = 16 << 20


def run_faults(run: Run) -> Iterator[str]:
    """Check how the job was started.

    Raises:
        UnicodeEncodeError: A text is not one that the kernel can return.
    """
    if run.isolation.root and not run.isolation.pid:
        yield "a private root needs its own pid namespace"
    files = (run.files.stdout, run.files.stderr, run.files.status, run.files.init)
    copies = [run.files_to or "/", *run.copies, *run.data]
    texts = [run.name, *run.command, run.cwd, *run.binds, *files, *copies, run.user_name]
    if any(b"\0" in text.encode("utf-8", "surrogateescape") for text in texts):
        yield "a text contains a NUL"
    if len(run.init) > _MOST_INIT:
        yield "its init is too long"
    if not all(path == "/" or is_path(path) for path in (run.cwd, *run.binds, *files)):
        yield "a path is not absolute, or goes up"
    if not all(
        path == "/" or (is_path(path) and posixpath.normpath(path) == path) for path in copies
    ):
        yield "the paths of its copies or data are not absolute"
    if any(path == "/" for path in run.data):
        yield "its data is the whole file system"


def gpu_faults(gpus: Gpus) -> Iterator[str]:
    """Check the processes that the driver restores."""
    for image, process in gpus.processes.items():
        bounds = [bound for both in process.temporary for bound in both]
        if any(after < before for before, after in pairwise(bounds)):
            yield f"the temporary ranges of process {image} overlap or are out of order"


def resident_faults(resident: Resident, manifest: Manifest) -> Iterator[str]:
    """Check resident memory against the spaces of its manifest."""
    if not is_path(resident.directory):
        yield "its directory has no path"
    spaces = {int(space.key): space for space in manifest.spaces if space.kind == "device"}
    there = {
        (image, one.identity)
        for image, process in resident.processes.items()
        for one in process.allocations
    }
    for image, process in resident.processes.items():
        if any(number >> 64 for number in _numbers(process)):
            yield f"process {image} has a number of more than 64 bits"
        space = spaces.get(image)
        if space is None or [(region.start, region.length) for region in space.regions] != [
            (one.address, one.size) for one in process.allocations
        ]:
            yield f"the allocations of process {image} are not its regions"
        if any(one.size % CELL_BYTES or one.address % CELL_BYTES for one in process.allocations):
            yield f"an allocation of process {image} does not consist of whole cells"
        if not there.issuperset((one.owner, one.there) for one in process.imports):
            yield f"process {image} has memory of another that is not there"


def _numbers(process: ResidentProcess) -> Iterator[int]:
    for one in process.allocations:
        yield from (one.identity, one.address, one.size, one.requested, one.ordinal)
    for other in process.imports:
        yield from (other.identity, other.there)
    yield from process.left.values()
