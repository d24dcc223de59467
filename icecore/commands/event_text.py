"""Events and errors as lines for people. Names in them are escaped by `icecore.commands.output`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from icecore import units
from icecore.errors import IcecoreError, PreflightRefused
from icecore.events import Event

#: Titles of phases that are shown to people.
TITLES: Mapping[str, str] = {
    "check": "checking",
    "dump.criu": "starting CRIU",
    "dump.gpu.checkpoint": "device memory to host",
    "dump.resident.unmap": "unmapping resident memory",
    "dump.resident.fingerprint": "comparing resident memory",
    "dump.resident.copy": "copying changed memory",
    "dump.resident.map": "mapping resident memory",
    "dump.gpu.lock": "waiting for GPUs",
    "dump.gpu.restore": "device memory to GPUs",
    "dump.precopy": "scanning while it runs",
    "dump.preflight": "preflight",
    "dump.store": "storing",
    "dump.window": "window",
    "export.write": "exporting",
    "gc.compact": "rewriting objects",
    "gc.delete": "deleting",
    "gc.survey": "listing objects",
    "hook": "hook",
    "import.store": "importing",
    "repair": "repairing",
    "restore.criu": "building the tree",
    "restore.resident.memory": "filling resident memory",
    "restore.resident.map": "mapping resident memory",
    "restore.gpu.memory": "filling device memory",
    "restore.gpu.restore": "device memory to GPUs",
    "restore.images": "writing images",
    "restore.memory": "filling memory",
    "restore.shared": "filling shared memory",
    "stats": "counting",
    "store.commit": "committing",
}

#: Kinds of device memory that the preload leaves to the driver, by the names of its counters.
_LEFT: Mapping[str, str] = {
    "pool": "in pools",
    "small": "in small allocations",
    "managed": "of managed memory",
    "foreign": "of other kinds",
}


def explain(error: IcecoreError) -> list[str]:
    """Return an error as lines for people."""
    if isinstance(error, PreflightRefused) and error.reasons:
        lines = ["icecore: refused; nothing was stopped:"]
        for name, message, cure in error.reasons:
            lines += _lines(f"  {name}: ", message)
            if cure:
                lines += _lines("    cure: ", cure)
        return lines
    lines = _lines("icecore: ", error.message)
    if error.cure:
        lines += _lines("  cure: ", error.cure)
    return lines


def _lines(start: str, text: str) -> list[str]:
    """Return a text as lines. All lines but the first are marked, so that foreign text, such as a
    hook's output, cannot imitate icecore's own.
    """
    first, *others = text.split("\n")
    return [f"{start}{first}", *(f"  | {line}" for line in others)]


def describe(event: Event) -> list[str]:
    """Return an event as lines for people; none for events that people need not see."""
    fields = event.fields
    state = fields.get("state")
    if state == "begin":
        return []
    title = TITLES.get(event.name, event.name)
    if state in ("end", "failed"):
        if event.name not in TITLES:
            return []
        words = [title, units.seconds(_number(fields, "seconds"))]
        if "bytes" in fields:
            words.append(units.size(_number(fields, "bytes")))
        if "gb_per_s" in fields:
            words.append(f"{_number(fields, 'gb_per_s'):.2f} GB/s")
        if state == "failed":
            words.append("failed")  # the error follows once, at the end
        if "moved_bytes" in fields:
            first, *others = _window_words(fields)
            return ["  ".join([*words, first]), *others]
        return ["  ".join(words)]
    if event.name == "dump.predicted":
        return [_predicted_words(fields)]
    if event.name == "run.gpu":
        return _gpu_words(fields)
    if event.name == "run.withheld":
        return [_withheld_words(fields)]
    if event.name == "run.io_uring":
        return [f"warning: the job can use io_uring, which CRIU cannot dump ({fields['why']})"]
    if event.name == "job.trim_failed":
        return [f"warning: cannot trim the logs of job {fields['job']}: {fields['error']}"]
    if event.name == "run.untrimmed":
        return [
            f"warning: only dumps trim the logs of job {fields['job']} (--log-limit) until"
            " 'icecore serve' runs on this node"
        ]
    if event.name in ("run.limits", "restore.limits"):
        return [_limits_words(fields)]
    if event.name == "workdir.swept":
        return [f"note: removed {fields['directory']}, left by a killed dump or restore"]
    if event.name == "state.tightened":
        return [
            f"note: others had access to the directory {fields['directory']} (mode {fields['before']}); now only its owner has"
        ]
    if event.name in ("restore.warning", "export.warning", "copy.warning", "sync.warning"):
        return _lines("warning: ", str(fields.get("message")))
    if event.name == "restore.recovered":
        what = f"a killed restore of snapshot {fields['snapshot']} had changed files; its changes were {fields['how']}"
        left = fields["left"]
        return [
            what,
            *(f"warning: {sentence}" for sentence in (left if isinstance(left, list) else [])),
        ]
    if "error" in fields and event.name != "restore.failed":
        return _lines(f"warning: {event.name}: ", str(fields["error"]))
    return []


def _withheld_words(fields: Mapping[str, Any]) -> str:
    return f"note: the job does not get {', '.join(fields['names'])}; '--env NAME' passes one on"


def _limits_words(fields: Mapping[str, Any]) -> str:
    return f"warning: limits of the job are lower than wanted: {', '.join(fields['short'])}"


def _window_words(fields: Mapping[str, Any]) -> list[str]:
    """Return what preflight predicts for a GPU job."""
    seconds, least, most = (
        units.seconds(_number(fields, f"window_{which}")) for which in ("seconds", "least", "most")
    )
    window = f"  a window of about {seconds} ({least} to {most})"
    moved = f"{units.size(_number(fields, 'moved_bytes'))} will be moved"
    if "resident_bytes" not in fields:
        return [f"device memory: {moved}", window]
    without = _number(fields, "no_room")
    why = f"; {units.size(without)} have no room for a copy on the GPU" if without else ""
    stays = f"device memory: {units.size(_number(fields, 'resident_bytes'))} stay on GPUs, {moved}"
    left = left_words(fields.get("left", {}))
    return [
        stays,
        f"{window}, if all resident memory has changed{why}",
        *([f"  {left}"] if left else []),
    ]


def _predicted_words(fields: Mapping[str, Any]) -> str:
    """Return the prediction that follows the comparison of resident memory."""
    seconds, least, most = (
        units.seconds(_number(fields, f"window_{which}")) for which in ("seconds", "least", "most")
    )
    without = _number(fields, "no_room")
    why = f"; {units.size(without)} have no room for a copy on the GPU" if without else ""
    return f"a window of about {seconds} ({least} to {most}), by what changed in device memory so far{why}"


def left_words(left: Mapping[str, int]) -> str:
    """Return the device memory that the preload has left to the driver (docs/reference/format.md), as text;
    empty if there is none.
    """
    sizes = {kind: left.get(f"{name}_bytes", 0) for name, kind in _LEFT.items()}
    parts = ", ".join(f"{units.size(size)} {kind}" for kind, size in sizes.items() if size)
    words = [f"{units.size(sum(sizes.values()))} with the driver: {parts}"] if parts else []
    if left.get("captured"):
        words.append(f"{left['captured']} allocated in stream captures")
    if left.get("ipc_exports"):
        words.append(f"{left['ipc_exports']} shared by CUDA IPC")
    return "; ".join(words)


def _gpu_words(fields: Mapping[str, Any]) -> list[str]:
    """Return what ``run --gpu`` did."""
    lines = [
        f"--gpu set {' '.join(f'{key}={value}' for key, value in fields['added'].items()) or 'nothing'}: {fields['cost']}"
    ]
    if fields["kept"]:
        own = " ".join(f"{key}={value}" for key, value in fields["kept"].items())
        lines.append(f"warning: you set {own}: a job whose ranks use this cannot be snapshotted")
    if fields["resident"] and fields["driver"]:
        lines.append(
            "device memory is resident: it stays on its GPUs in windows; allocations take slightly longer"
        )
    return [*lines, *(f"note: {note}" for note in fields["notes"])]


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0
