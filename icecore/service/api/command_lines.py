"""Convert requests to command lines of icecore, for the processes of operations.

Only the fields that are listed here and in `options` reach a command line that runs as root: no
hooks, directories or configuration of the caller. Each value is part of its option's word (``--option=value``), so it
cannot act as an option.
"""

from __future__ import annotations

from typing import Any

import msgspec

from icecore.service.api import options, requests

Words = list[str]


def of_run(wanted: requests.RunRequest) -> Words:
    """Return the command line of ``run``, without the job's command."""
    words = ["run", f"--cwd={wanted.cwd}"]
    words += _options(wanted, "name", *options.RUN)
    words += [f"--data={path}" for path in wanted.data]
    words += ["--gpu"] if wanted.gpu else []
    if wanted.supervise is None:
        return [*words, "--detach"]
    own = wanted.supervise
    for flag in ("resume", "or_start"):
        words += [f"--{_dashed(flag)}"] if getattr(own, flag) else []
    words += _options(own, *options.SUPERVISE)
    words.append(f"--fall-back={own.fall_back}")
    if own.restarts:
        words.append("--restart=on-failure" + ("" if own.restarts < 0 else f":{own.restarts}"))
    if own.keep is not None:
        words += of_retention(own.keep)
    return words


def of_retention(keep: requests.Retention) -> Words:
    """Return a retention policy as options: all of them, so that no configured option applies."""
    return [
        f"--{_dashed(name)}={'all' if value == -1 else value}"
        for name, value in msgspec.structs.asdict(keep).items()
    ]


def of_dump(wanted: requests.DumpRequest, instance: str) -> Words:
    """Return the command line of ``dump``."""
    words = ["dump"]
    words += ["--stop"] if wanted.stop else []
    words += ["--keep-resident"] if wanted.keep_resident else []
    words += ["--pin"] if wanted.pinned else []
    words += [f"--tag={tag}" for tag in wanted.tags]
    words += _options(wanted, *options.DUMP)
    return [*words, instance]


def of_restore(wanted: requests.RestoreRequest, snapshot: str) -> Words:
    """Return the command line of ``restore``."""
    words = ["restore"]
    words += ["--dry-run"] if wanted.dry_run else []
    words += ["--from-resident"] if wanted.from_resident else []
    words += _options(wanted, "name", *options.RESTORE)
    words += [f"--gpu-map={old}={new}" for old, new in wanted.gpu_map.items()]
    return [*words, snapshot]


def of_show(wanted: requests.ShowRequest, snapshot: str) -> Words:
    """Return the command line of ``show``."""
    return ["show", *(["--all"] if wanted.all else []), snapshot]


def of_diff(wanted: requests.DiffRequest, snapshot: str) -> Words:
    """Return the command line of ``diff``."""
    words = ["diff", *(["--all"] if wanted.all else [])]
    return [*words, wanted.older, snapshot] if wanted.older else [*words, snapshot]


def of_mark(wanted: requests.MarkRequest, snapshot: str) -> Words:
    """Return the command line of ``mark``."""
    words = ["mark"]
    if wanted.pin is not None:
        words.append("--pin" if wanted.pin else "--no-pin")
    words += [f"--tag={tag}" for tag in wanted.add_tags]
    words += [f"--untag={tag}" for tag in wanted.remove_tags]
    return [*words, snapshot]


def of_forget(wanted: requests.ForgetRequest) -> Words:
    """Return the command line of ``forget``."""
    words = ["forget", *(["--dry-run"] if wanted.dry_run else [])]
    if wanted.snapshots:
        return [*words, *wanted.snapshots]
    words += of_retention(wanted.keep or requests.Retention())
    words += [f"--keep-tag={tag}" for tag in wanted.keep_tags]
    return [*words, f"--job={wanted.job}"]


def of_gc(wanted: requests.GcRequest) -> Words:
    """Return the command line of ``gc``."""
    return ["gc", *(["--dry-run"] if wanted.dry_run else []), *_options(wanted, "fence")]


def of_check(wanted: requests.CheckRequest) -> Words:
    """Return the command line of ``check``."""
    share = wanted.read_data * 100
    return ["check", *([f"--read-data={share}"] if share else [])]


def _options(wanted: msgspec.Struct, *names: str) -> Words:
    """Return the options of the fields that are set."""
    words = []
    for name in names:
        value: Any = getattr(wanted, name)
        option = f"--{_dashed(name)}"
        if value is None or value == "":
            continue
        if value is True or value is False:
            words.append(option if value else f"--no-{_dashed(name)}")
        else:
            words.append(f"{option}={value}")
    return words


def _dashed(name: str) -> str:
    return name.replace("_", "-")
