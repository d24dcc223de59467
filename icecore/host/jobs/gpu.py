"""Settings with which a GPU job is started so that it can be snapshotted: namespaces and NCCL's
environment. Each change is reported with its cost.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec.structs import replace

from icecore.errors import UsageError
from icecore.host.cuda import nccl
from icecore.host.jobs.namespaces import Isolation

_PROBE_SECONDS = 20.0


class GpuRun(msgspec.Struct, frozen=True):
    """The settings with which a GPU job is started.

    Attributes:
        isolation: Its namespaces.
        added: Variables that are set for it.
        kept: ``NCCL_…`` variables that the caller has set otherwise, and that keep it from being
            snapshotted where ranks use them.
        notes: What else there is to say, in sentences.
        cost: What it costs.
    """

    isolation: Isolation
    added: Mapping[str, str]
    kept: Mapping[str, str]
    notes: list[str]
    cost: str


def gpu_run(
    wanted: Isolation,
    environment: Mapping[str, str],
    *,
    pid: Literal["", "host", "private"] = "",
    root: Literal["", "host", "private"] = "",
    resident: bool = False,
) -> GpuRun:
    """Return namespaces and variables for a GPU job.

    CUDA does not start in a pid namespace that sees another one's /proc (error 304). So a GPU job
    gets a private root with a /proc of its own; where that cannot be had, or is not wanted, it
    stays in the host's pid namespace, and its snapshots run once at a time.

    Args:
        wanted: The namespaces without that.
        environment: The job's.
        pid, root: What the caller asked for in so many words; "": nothing.
        resident: It runs under the preload, which parks what NCCL's ranks share.

    Raises:
        UsageError: What was asked for cannot work.
    """
    notes: list[str] = []
    if root == "host" and pid == "private":
        raise UsageError(
            "CUDA does not start in a pid namespace of its own without a /proc of its own (error 304)",
            cure="leave out --root host, or add --pid host",
        )
    if pid == "host":
        isolation, why = replace(wanted, pid=False, root=False), "as you asked"
    elif root == "host":
        isolation, why = replace(wanted, pid=False, root=False), "because its root is the host's"
    elif (lack := private_root_lack()) == "":
        isolation, why = replace(wanted, pid=True, root=True), ""
    elif root == "private":
        raise UsageError(
            f"a private root is not available: {lack}", cure="leave out --root private"
        )
    else:
        isolation, why = (
            replace(wanted, pid=False, root=False),
            f"because a private root is not available ({lack})",
        )
    if why:
        notes.append(
            f"it runs in the host's pid namespace, {why}: a snapshot of it can run once at a time on one host"
        )
    if not isolation.network:
        notes.append(
            "jobs whose ranks talk over TCP can be restored right after they were killed only with --network private"
        )
    settings, cost = (nccl.PARKED, nccl.PARKED_COST) if resident else (nccl.SNAPSHOTABLE, nccl.COST)
    asked = {**settings, **(nccl.LOOPBACK if isolation.network else {})}
    kept = {
        one: environment[one]
        for requirement in nccl.lacking({**asked, **environment}, parked=resident)
        for one in settings
        if one in requirement.cure and one in environment
    }
    return GpuRun(
        isolation,
        {key: value for key, value in asked.items() if key not in environment},
        kept,
        notes,
        cost,
    )


def private_root_lack() -> str:
    """Return why a job cannot have a private root with a /proc of its own here; "" if it can."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return "unshare(1) is missing: apt-get install util-linux"
    try:
        done = subprocess.run(
            [unshare, "--mount", "--pid", "--fork", "--mount-proc", "true"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=_PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "making one takes too long"
    return (
        ""
        if done.returncode == 0
        else (done.stderr.strip().splitlines() or ["unshare(1) fails"])[-1]
    )
