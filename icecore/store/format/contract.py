"""Records that a dump passes to the restore besides memory and files: those in a manifest's
``extra``, and the GPUs in its requirements. Pure.

Each record is JSON in one text of ``extra``:

- ``run`` (`Run`): how `icecore run` started the job;
- ``cuda`` (`Gpus`): the processes whose device memory the driver moved;
- ``resident`` (`Resident`): the device memory that stayed in place;
- ``imported`` (a path, not JSON): the directory that `icecore import` read; informative.

The dumper writes them with `encode_records` and `encode_device` (`icecore.dumper.phases.commit`,
`icecore.dumper.gpu`). Every reader uses `read_run`, `read_gpus`, `read_resident` and
`read_devices`, which raise `Damaged` for any record that breaks a rule below
(`icecore.store.format.contract_rules`). Later code does not check again.

They are JSON, not MessagePack: texts from the kernel may hold surrogate escapes (PEP 383), which
``json`` writes as ``\\udcXX``. Names and order of the fields are part of the format
(docs/reference/format.md). Readers skip unknown fields, except in ``run``, where an unknown
field may require isolation that this version cannot provide.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Annotated, Literal, TypeVar

import msgspec

from icecore.errors import Damaged
from icecore.store.format.contract_rules import gpu_faults, resident_faults, run_faults
from icecore.store.format.manifest import Few, Manifest
from icecore.store.format.manifest_rules import MAX_PROCESSES, MAX_REGIONS, MAX_WORDS

#: CRIU's id of a process in its image names, `Process.image_id`; in JSON, the decimal key of a map.
ImageId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
#: A number of 64 bits. `msgspec` knows no bound above 2^63-1; `contract_rules` checks the upper one.
Number64 = Annotated[int, msgspec.Meta(ge=0)]
#: Bytes, or an address in a process.
Bytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 56)]
Many = msgspec.Meta(max_length=MAX_REGIONS)
Words = msgspec.Meta(max_length=MAX_WORDS)
Processes = msgspec.Meta(max_length=MAX_PROCESSES)

RUN, CUDA, RESIDENT, IMPORTED = "run", "cuda", "resident", "imported"

_ROOT = 0
_Record = TypeVar("_Record")


# -- how the job was started


class RunIsolation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which namespaces of its own the job has (`icecore.host.jobs.namespaces.Isolation`). A private
    root (``root``) requires a pid namespace. ``tmp``: those of /tmp and /var/tmp that are
    among its data directories are private to it; left out if false.
    """

    pid: bool = True
    ipc: bool = True
    network: bool = False
    root: bool = False
    tmp: bool | msgspec.UnsetType = msgspec.UNSET


class RunFiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Absolute paths, as in CRIU's images, of the files of the instance that its processes have
    open.
    """

    stdout: str = msgspec.field(name="stdout.log")
    stderr: str = msgspec.field(name="stderr.log")
    status: str
    init: str = msgspec.field(name="icecore-init")


class Run(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How `icecore run` started the job. Absent for processes that it did not start.

    The dump writes it from the job's `icecore.host.jobs.namespaces.RunRecord`, a type of the host,
    which does not know the store. The restore makes the new instance from it
    (`icecore.restorer.phases.planning.run_record`), and `icecore diff` reads ``files.status`` to
    match the files of two instances. No text contains a NUL.

    Attributes:
        name: The job's name.
        command: Its command line.
        cwd: Absolute path of the directory in which it was started.
        isolation: Its namespaces.
        files: The files of the instance.
        binds: Absolute paths of the host's mount points in its private root, parents first.
        init: The init's program, at most 16 MiB; base64 in JSON. A restore runs the same bytes.
        files_to: Absolute path of the directory of the instance's own copies of files, each under
            its whole path. Left out, like ``copies``, if there are none.
        copies: Absolute paths of these files as the job sees them.
        user, user_name: The uid with which the job's command was started, and the user's name: the
            owner of the snapshot. Left out if it is root.
        data: Absolute paths of its data directories (`icecore.store.format.data`), as the job sees
            them. Left out if it has none.
        log_limit: Size limit of each log, in bytes. Left out if there is none.
        log_start: By stream, the offset before which output was removed from its log. A stream is
            left out if none was, and the field if it would be empty.
    """

    name: str
    command: Annotated[list[str], Words]
    cwd: str
    isolation: RunIsolation
    files: RunFiles
    binds: Annotated[list[str], Words]
    init: bytes
    files_to: str = ""
    copies: Annotated[list[str], Words] = []
    user: Annotated[int, msgspec.Meta(ge=0, lt=2**32 - 1)] = 0
    user_name: str = "root"
    data: Annotated[list[str], Few] = []
    log_limit: Bytes = 0
    log_start: dict[Literal["stdout", "stderr"], Bytes] = {}


# -- device memory that the driver moved


class Device(msgspec.Struct, frozen=True):
    """A GPU that a process of the job had open: one map of texts in ``requirements.devices``.

    The dump writes it from the machine's inventory; the restore chooses a GPU of this machine for
    it (`icecore.restorer.gpu.gpus`).

    Attributes:
        uuid: ``GPU-…``.
        name: The model. Only a GPU of the same model replaces it.
        memory: Bytes; decimal text in the map. A replacement has at least as many.
        used: A process had a context on it; "yes" or "no" in the map.
        driver: The version of the driver; informative.
    """

    uuid: str
    name: str
    memory: int
    used: bool
    driver: str = ""


class GpuProcess(msgspec.Struct, frozen=True):
    """A process with CUDA state.

    Attributes:
        gpus: UUIDs of the GPUs that it had open. The driver must be given a GPU for each of them.
        contexts: Bytes that it used, by UUID of the GPU.
        temporary: Where the driver placed device memory in the process that it removes again at its
            restore: (start, end), addresses in the process, ascending and disjoint. The restore
            fills these ranges through a file. May be absent: then they are filled like all others.
    """

    gpus: Annotated[list[str], Few]
    contexts: Annotated[dict[str, Bytes], Few]
    temporary: Annotated[list[tuple[Bytes, Bytes]], Many] = []


class Gpus(msgspec.Struct, frozen=True):
    """The processes that the driver restores. Absent if no process had CUDA state.

    The dump writes it from `icecore.dumper.gpu.devices`; `icecore.restorer.requirements` and
    `icecore.restorer.gpu.gpus` read it.

    Attributes:
        driver: The version of the driver; the restore requires the same one.
        processes: By image id.
    """

    driver: str
    processes: Annotated[dict[ImageId, GpuProcess], Processes]


# -- device memory that stayed in place


class ResidentAllocation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One allocation of a process. Its cells are a region of the space ``device`` of the process.

    Attributes:
        identity: Identifies it within the process.
        address: Its device address; 2^60 or more: not an address but the handle of memory that the
            application manages itself. A multiple of 1 MiB.
        size: Bytes that are mapped; a multiple of 1 MiB.
        requested: Bytes that the application asked for.
        device: UUID of its GPU.
        ordinal: Its GPU as the process counts them.
    """

    identity: Number64
    address: Number64
    size: Number64
    requested: Number64
    device: str
    ordinal: Number64


class ResidentImport(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Memory of another process that a process has imported, or its own memory that it has mapped a
    second time. It is stored once, with its owner.

    Attributes:
        identity: Identifies it within the importing process.
        owner: Image id of the owner.
        there: Its identity in that process, which has such an allocation.
    """

    identity: Number64
    owner: ImageId
    there: Number64


class ResidentProcess(msgspec.Struct, frozen=True):
    """The resident memory of one process.

    Attributes:
        token: Identifies the process to keepers, across checkpoint and restore: 16 bytes, in
            hexadecimal.
        allocations: Its own, in the order of the regions of its space.
        imports: Memory that it has imported. May be absent.
        left: What the preload had left to the driver when the dump began, without zeros: bytes
            (``pool_bytes``, ``small_bytes``, ``managed_bytes``, ``foreign_bytes``), and how often
            memory was allocated in a stream capture (``captured``) or shared by CUDA's legacy IPC
            (``ipc_exports``). For people (`icecore show`). May be absent.
    """

    token: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]
    allocations: Annotated[list[ResidentAllocation], Many]
    imports: Annotated[list[ResidentImport], Many] = []
    left: Annotated[dict[str, Number64], Few] = {}

    @property
    def token_bytes(self) -> bytes:
        """The token as keepers and agents know it."""
        return bytes.fromhex(self.token)


class Resident(msgspec.Struct, frozen=True, omit_defaults=True):
    """Device memory that stays on its GPU during a window. Absent if there is none; a snapshot with
    a space of kind ``device`` and without this record is refused.

    The dump writes it from `icecore.dumper.gpu.resident`; `icecore.restorer.phases.resources` and
    `icecore.restorer.gpu.resident` read it.

    Attributes:
        directory: Absolute path, as the job sees it, of the directory with the sockets of its
            keeper and agents.
        processes: By image id. Each has a space ``device`` whose regions are its allocations.
        outlives: The memory of a restored instance, too, is kept after a crash. Left out if not.
    """

    directory: str
    processes: Annotated[dict[ImageId, ResidentProcess], Processes]
    outlives: bool = False


# -- writing


def encode_records(
    *, run: Run | None = None, gpus: Gpus | None = None, resident: Resident | None = None
) -> dict[str, str]:
    """Return the records as the ``extra`` of a manifest; None: the job has none of that kind."""
    if run is not None and not run.copies:  # as before there were any, for versions without them
        run = msgspec.structs.replace(run, files_to="")
    if run is not None and not run.user:
        run = msgspec.structs.replace(run, user_name="root")
    records = {RUN: run, CUDA: gpus, RESIDENT: resident}
    return {
        name: json.dumps(msgspec.to_builtins(record))
        for name, record in records.items()
        if record is not None
    }


def encode_device(device: Device) -> dict[str, str]:
    """Return a GPU as a map of texts, for the requirements of a manifest."""
    return {
        "kind": CUDA,
        "uuid": device.uuid,
        "name": device.name,
        "memory": str(device.memory),
        "used": "yes" if device.used else "no",
        "driver": device.driver,
    }


# -- reading


def read_run(manifest: Manifest) -> Run | None:
    """Return how the job was started, if `icecore run` started it.

    Raises:
        Damaged: The record makes no sense.
    """
    return _read(manifest, RUN, Run, "of a run", run_faults)


def snapshot_owner(manifest: Manifest) -> int:
    """Return the uid whose snapshot it is: the user of the job, or, if `icecore run` did not start
    it, `processes_owner`.

    Raises:
        Damaged: The record of its job makes no sense.
    """
    run = read_run(manifest)
    return processes_owner(manifest) if run is None else run.user


def processes_owner(manifest: Manifest) -> int:
    """Return the user of a snapshot's processes; root if they have several, or there are none."""
    users = {process.user for process in manifest.processes}
    return users.pop() if len(users) == 1 else _ROOT


def recorded_owner(manifest: Manifest) -> int | None:
    """Return the owner for the snapshot's record (`snapshot_owner`); None: it cannot be told."""
    with suppress(Damaged):
        return snapshot_owner(manifest)
    return None


def read_gpus(manifest: Manifest) -> Gpus | None:
    """Return the processes that the driver restores, if any.

    Raises:
        Damaged: The record makes no sense.
    """
    return _read(manifest, CUDA, Gpus, "of GPUs", gpu_faults)


def read_resident(manifest: Manifest) -> Resident | None:
    """Return the job's resident memory, if any.

    Raises:
        Damaged: The record is invalid, or does not match the manifest's spaces.
    """
    return _read(
        manifest,
        RESIDENT,
        Resident,
        "of resident memory",
        lambda record: resident_faults(record, manifest),
    )


def left_to_driver(manifest: Manifest) -> dict[str, int]:
    """Return the sum of `ResidentProcess.left`; empty if it is not recorded or
    the record is invalid, because nothing depends on it.
    """
    total: Counter[str] = Counter()
    with suppress(Damaged):
        resident = read_resident(manifest)
        for process in resident.processes.values() if resident is not None else ():
            total.update(process.left)
    return dict(total)


def resident_bytes(manifest: Manifest) -> int:
    """Return the bytes of resident memory, according to its spaces."""
    return sum(
        region.length
        for space in manifest.spaces
        if space.kind == "device"
        for region in space.regions
    )


def read_devices(manifest: Manifest) -> list[Device]:
    """Return the GPUs that the job had open.

    Raises:
        Damaged: One makes no sense.
    """
    try:
        return [
            Device(
                one["uuid"],
                one["name"],
                msgspec.convert(one["memory"], Bytes, strict=False),
                one["used"] == "yes",
                one.get("driver", ""),
            )
            for one in manifest.requirements.devices
            if one.get("kind") == CUDA
        ]
    except (KeyError, msgspec.ValidationError) as error:
        raise Damaged(
            "manifest", manifest.snapshot, f"its record of GPUs: {type(error).__name__}: {error}"
        ) from error


def _read(
    manifest: Manifest,
    name: str,
    kind: type[_Record],
    what: str,
    faults: Callable[[_Record], Iterator[str]],
) -> _Record | None:
    text = manifest.extra.get(name)
    if text is None:
        return None
    try:
        record = msgspec.convert(json.loads(text), kind, str_keys=True)
        why = next(faults(record), "")
    except (ValueError, RecursionError) as error:  # msgspec.ValidationError is a ValueError
        why = f"{type(error).__name__}: {error}"
    if why:
        raise Damaged("manifest", manifest.snapshot, f"its record {what}: {why}")
    return record
