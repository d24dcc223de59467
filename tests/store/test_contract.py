"""What the dumper tells the restorer, in the manifest: the bytes of past versions, and hostile ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from icecore.errors import Damaged
from icecore.store.format.contract import (
    CUDA,
    RESIDENT,
    RUN,
    Device,
    ResidentImport,
    encode_device,
    encode_records,
    left_to_driver,
    read_devices,
    read_gpus,
    read_resident,
    read_run,
)
from icecore.store.format.manifest import (
    Manifest,
    Region,
    Space,
    decode_manifest,
    encode_manifest,
)
from tests.recorded import manifest_with

_MIB = 1 << 20
#: Records as they were written before they had types: of real dumps, but for paths, and of jobs with
#: odd names.
_PAST: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "records-v1.json").read_text()
)
_GPU_JOB, _RANKS, _NO_UTF8, _COPIES, _ = _PAST


def past(title: str) -> Manifest:
    case = _PAST[title]
    spaces = [
        Space(
            kind,
            key,
            0,
            [Region(start, size, start, kind="device", name=name) for start, size, name in regions],
        )
        for kind, key, regions in case["spaces"]
    ]
    return manifest_with(case["extra"], devices=case["devices"], spaces=spaces)


@pytest.mark.parametrize("title", _PAST)
def test_records_of_past_versions(title: str) -> None:
    """They are read, and would be written with the same bytes today."""
    manifest = past(title)
    key = bytes(32)
    manifest = decode_manifest(encode_manifest(manifest, key).data, key, name="snapshots/x")
    run, gpus, resident = read_run(manifest), read_gpus(manifest), read_resident(manifest)
    assert encode_records(run=run, gpus=gpus, resident=resident) == _PAST[title]["extra"]
    assert [encode_device(one) for one in read_devices(manifest)] == _PAST[title]["devices"]


def test_what_past_records_say() -> None:
    job = past(_GPU_JOB)
    run, gpus, resident = read_run(job), read_gpus(job), read_resident(job)
    assert run is not None and gpus is not None and resident is not None
    assert (run.name, run.isolation.root, run.files.status) == (
        "gpu",
        True,
        "/run/icecore/job/status",
    )
    assert run.init.startswith(b"\x7fELF") and run.copies == []
    assert gpus.processes[2].temporary == [(122754460286976, 122754460811264)]
    assert resident.outlives and resident.directory == "/run/icecore/job/resident"
    process = resident.processes[2]
    assert process.token_bytes.hex() == process.token
    assert [one.size for one in process.allocations] == [4 * _MIB, 4 * _MIB]
    [device] = read_devices(job)
    assert device == Device(
        process.allocations[0].device, "Fake H200", 96 * _MIB, True, gpus.driver
    )
    ranks = read_resident(past(_RANKS))
    assert ranks is not None and not ranks.outlives
    (first, one), (second, two) = ranks.processes.items()
    assert [*one.imports, *two.imports] == [
        ResidentImport(2, second, 1),
        ResidentImport(2, first, 1),
    ]
    assert left_to_driver(past(_RANKS)) == {"small_bytes": _MIB}
    odd, copies = read_run(past(_NO_UTF8)), read_run(past(_COPIES))
    assert odd is not None and odd.command == ["a", "b\udcff", "\x1b"]
    assert copies is not None and (copies.files_to, copies.copies) == ("/srv/own", ["/data/out"])


def test_fields_that_old_records_lack_and_new_ones_may_have() -> None:
    job = past(_GPU_JOB)
    gpus, resident = json.loads(job.extra[CUDA]), json.loads(job.extra[RESIDENT])
    del gpus["processes"]["2"]["temporary"], resident["outlives"]
    del resident["processes"]["2"]["imports"], resident["processes"]["2"]["left"]
    gpus["new"] = resident["new"] = gpus["processes"]["2"]["new"] = [{}]
    job.extra.update({CUDA: json.dumps(gpus), RESIDENT: json.dumps(resident)})
    some, other = read_gpus(job), read_resident(job)
    assert some is not None and some.processes[2].temporary == []
    assert other is not None and not other.outlives and other.processes[2].imports == []
    none = manifest_with({})
    assert read_run(none) is None and read_gpus(none) is None and read_resident(none) is None
    assert read_devices(none) == []


def _at(*path: str | int, value: object) -> Callable[[Any], Any]:
    """Return a change of one place; of a missing key, an addition; `...`: a removal."""

    def change(tree: Any) -> Any:
        *way, last = path
        place = tree
        for step in way:
            place = place[step]
        if value is ...:
            del place[last]
        else:
            place[last] = value
        return tree

    return change


_TWO, _FIRST = ("processes", "2"), ("processes", "2", "allocations", 0)
#: Records that no dumper writes: which, and what of the real one is changed, or a whole text.
_HOSTILE: dict[str, tuple[str, Callable[[Any], Any] | str]] = {
    **{
        f"{name}: {text[:20]!r}": (name, text)
        for name in (RUN, CUDA, RESIDENT)
        for text in ("", "[]", "{}", "1", "null", "{", '{"processes": []}', "[" * 200_000)
    },
    "an integer without end": (CUDA, f'{{"driver": "1", "processes": {{"1": {"9" * 5000}}}}}'),
    "a driver that is a number": (CUDA, _at("driver", value=580)),
    "a process that is no number": (
        CUDA,
        _at("processes", "x", value={"gpus": [], "contexts": {}}),
    ),
    "a process below zero": (CUDA, _at("processes", "-1", value={"gpus": [], "contexts": {}})),
    "GPUs that are a text": (CUDA, _at(*_TWO, "gpus", value="GPU-1")),
    "no contexts": (CUDA, _at(*_TWO, "contexts", value=...)),
    "a context of 2^56 bytes": (CUDA, _at(*_TWO, "contexts", "GPU-1", value=1 << 56)),
    "a context of less than nothing": (CUDA, _at(*_TWO, "contexts", "GPU-1", value=-1)),
    "a context of true": (CUDA, _at(*_TWO, "contexts", "GPU-1", value=True)),
    "a range of one end": (CUDA, _at(*_TWO, "temporary", value=[[4096]])),
    "a range that ends before it begins": (CUDA, _at(*_TWO, "temporary", value=[[8192, 4096]])),
    "ranges out of order": (CUDA, _at(*_TWO, "temporary", value=[[8192, 9000], [0, 4096]])),
    "GPUs without number": (CUDA, _at(*_TWO, "gpus", value=["GPU-1"] * 5000)),
    "no directory": (RESIDENT, _at("directory", value=...)),
    "a directory that goes up": (RESIDENT, _at("directory", value="/run/../etc")),
    "a directory that is a number": (RESIDENT, _at("directory", value=5)),
    "a process without a space": (
        RESIDENT,
        _at("processes", "3", value={"token": "0" * 32, "allocations": [[1, 0, _MIB, 1, "", 0]]}),
    ),
    "a token that is short": (RESIDENT, _at(*_TWO, "token", value="00")),
    "a token that is none": (RESIDENT, _at(*_TWO, "token", value="x" * 32)),
    "an allocation less": (RESIDENT, _at(*_FIRST, value=...)),
    "an allocation without an ordinal": (RESIDENT, _at(*_FIRST, 5, value=...)),
    "an allocation elsewhere": (RESIDENT, _at(*_FIRST, 1, value=0)),
    "an allocation of half a cell": (RESIDENT, _at(*_FIRST, 2, value=_MIB // 2)),
    "an identity of 65 bits": (RESIDENT, _at(*_FIRST, 0, value=1 << 64)),
    "an ordinal below zero": (RESIDENT, _at(*_FIRST, 5, value=-1)),
    "a GPU that is a number": (RESIDENT, _at(*_FIRST, 4, value=1)),
    "memory of a process that is not there": (RESIDENT, _at(*_TWO, "imports", value=[[9, 99, 1]])),
    "memory that is not there": (RESIDENT, _at(*_TWO, "imports", value=[[9, 2, 77]])),
    "imports of two fields": (RESIDENT, _at(*_TWO, "imports", value=[[9, 2]])),
    "what is left is a text": (RESIDENT, _at(*_TWO, "left", value={"pool_bytes": "all"})),
    "what is left has no number": (
        RESIDENT,
        _at(*_TWO, "left", value={str(number): 1 for number in range(5000)}),
    ),
    "it outlives by a text": (RESIDENT, _at("outlives", value="no")),
    "a field of the future": (RUN, _at("surplus", value=1)),
    "isolation of the future": (RUN, _at("isolation", "user", value=True)),
    "a root without pids": (RUN, _at("isolation", "pid", value=False)),
    "no status file": (RUN, _at("files", "status", value=...)),
    "a file of the future": (RUN, _at("files", "other", value="/x")),
    "a relative file": (RUN, _at("files", "status", value="status")),
    "a file that goes up": (RUN, _at("files", "status", value="/a/../status")),
    "a directory with a NUL": (RUN, _at("cwd", value="/a\0b")),
    "an argument with a NUL": (RUN, _at("command", value=["a\0b"])),
    "an argument that no kernel has": (RUN, _at("command", value=["\ud800"])),
    "arguments without number": (RUN, _at("command", value=[""] * ((1 << 20) + 1))),
    "a relative mount": (RUN, _at("binds", value=["sys"])),
    "an init that is not base64": (RUN, _at("init", value="!")),
    "an init of 16 MiB": (RUN, _at("init", value="A" * (24 << 20))),
    "a copy in the longer form": (RUN, _at("copies", value=["/a//b"])),
    "copies in a relative directory": (RUN, _at("files_to", value="own")),
}


@pytest.mark.parametrize("title", _HOSTILE)
def test_what_no_dumper_writes(title: str) -> None:
    name, change = _HOSTILE[title]
    job = past(_GPU_JOB)
    text = change if isinstance(change, str) else json.dumps(change(json.loads(job.extra[name])))
    job.extra[name] = text
    with pytest.raises(Damaged, match="its record of"):
        {RUN: read_run, CUDA: read_gpus, RESIDENT: read_resident}[name](job)
    assert left_to_driver(job) == ({} if name == RESIDENT else {"small_bytes": _MIB // 2})


@pytest.mark.parametrize(
    "device",
    [
        {"memory": "all"},
        {"memory": "-1"},
        {"memory": str(1 << 56)},
        {"memory": "9" * 5000},
        {"memory": ""},
        {"memory": "1.5"},
        {"used": None},
        {"memory": None},
    ],
)
def test_gpus_that_no_dumper_writes(device: dict[str, str | None]) -> None:
    whole = {**_PAST[_GPU_JOB]["devices"][0], **device}
    with pytest.raises(Damaged, match="its record of GPUs"):
        read_devices(manifest_with({}, devices=[{k: v for k, v in whole.items() if v is not None}]))
