"""How NCCL must be configured for a job to be snapshotable, and how a process has configured it. A
job that can be checkpointed but not restored is lost, so doubtful settings are refused.

Measured with two ranks on driver 580 (docs/how-to/gpu-jobs.md): device memory or pinned host memory that ranks
share lets the driver's checkpoint succeed and its restore fail. Under the preload
(docs/explanation/resident-memory.md) what ranks share through cuMem is taken away before, and P2P
may stay on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec

from icecore.errors import NotFound
from icecore.host.kernel.trusted import open_file

#: What `icecore run --gpu` sets: transports through /dev/shm and sockets instead of peer access,
#: nothing that ranks share on a GPU.
SNAPSHOTABLE: Mapping[str, str] = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
}
#: The same under the preload: peer access over NVLink or PCIe, in memory that windows take away.
PARKED: Mapping[str, str] = {
    "NCCL_CUMEM_ENABLE": "1",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
}
#: Where the job has a network of its own, which has loopback only.
LOOPBACK: Mapping[str, str] = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
_LONGEST_FILE = 1 << 20
COST = "NCCL moves data between GPUs through host memory instead of NVLink or PCIe peer access: collectives are slower"
#: The version that a preload speaks which parks it (`icecore.host.resident.client.Report`).
PARKED_SINCE = 2
PARKED_COST = "NCCL keeps peer access (NVLink), but not multicast (NVLS), with which large collectives are faster on machines that have it"
_LIBRARY = "libnccl.so"
#: The abstract socket of a communicator through which descriptors of cuMem memory pass.
_SOCKET = re.compile(
    rb"[0-9a-f]+: (?:[0-9A-F]{8} ){3}[0-9A-F]{4} [0-9A-F]{2} +([0-9]+) @/tmp/nccl-socket-"
)


class Requirement(msgspec.Struct, frozen=True):
    """One feature that must be off: what it is, the setting that turns it off, and how to see
    whether it is off.
    """

    what: str
    cure: str
    met: Callable[[Mapping[str, str]], bool]


def without_peers(own: Mapping[str, str]) -> bool:
    """Return whether settings keep ranks from accessing each other's GPU memory."""
    return own.get("NCCL_P2P_DISABLE") == "1" or own.get("NCCL_P2P_LEVEL", "").upper() in (
        "LOC",
        "0",
    )


_NO_PEERS = Requirement("P2P transport", "NCCL_P2P_DISABLE=1", without_peers)
_PEERS_BY_CUMEM = Requirement(
    "P2P transport that may be CUDA IPC",
    "NCCL_CUMEM_ENABLE=1 or NCCL_P2P_DISABLE=1",
    lambda own: own.get("NCCL_CUMEM_ENABLE") == "1" or without_peers(own),
)
REQUIREMENTS = (
    Requirement(
        "SHM transport over the driver's shared host memory",
        "NCCL_CUMEM_HOST_ENABLE=0 (SHM over /dev/shm) or NCCL_SHM_DISABLE=1 (sockets)",
        lambda own: own.get("NCCL_CUMEM_HOST_ENABLE") == "0" or own.get("NCCL_SHM_DISABLE") == "1",
    ),
    Requirement(
        "NVLink multicast (NVLS)",
        "NCCL_NVLS_ENABLE=0",
        lambda own: own.get("NCCL_NVLS_ENABLE") == "0",
    ),
    Requirement(
        "RAS listener, which ranks share",
        "NCCL_RAS_ENABLE=0",
        lambda own: own.get("NCCL_RAS_ENABLE") == "0",
    ),
)


def lacking(settings: Mapping[str, str], *, parked: bool = False) -> list[Requirement]:
    """Return the requirements that a process's settings do not meet. ``parked``: windows take away
    what ranks share through cuMem.
    """
    return [
        one
        for one in (_PEERS_BY_CUMEM if parked else _NO_PEERS, *REQUIREMENTS)
        if not one.met(settings)
    ]


def passes_descriptors(pid: int, sockets: Collection[int]) -> bool:
    """Return whether a process has a communicator whose ranks pass each other descriptors of GPU
    memory.

    Args:
        sockets: Inodes of its unix sockets.
    """
    try:
        lines = Path(f"/proc/{pid}/net/unix").read_bytes().split(b"\n")
    except OSError:
        return False
    return any(int(found[1]) in sockets for found in map(_SOCKET.match, lines) if found)


def is_library(path: str) -> bool:
    """Return whether a mapped file is NCCL."""
    return path.rsplit("/", 1)[-1].startswith(_LIBRARY)


def settings_of(pid: int) -> dict[str, str]:
    """Return the ``NCCL_…`` settings that a process was started with: from its environment, else
    from its configuration files (nccl.conf), as NCCL reads them.

    What a program sets in its own environment after its start cannot be seen from outside, and does
    not count.

    Raises:
        NotFound: The process is gone.
    """
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NotFound(f"there is no process {pid}") from error
    environment = dict(os.fsdecode(word).split("=", 1) for word in words if b"=" in word)
    files = ["/etc/nccl.conf"]
    if environment.get("HOME"):
        files.append(f"{environment['HOME']}/.nccl.conf")
    if environment.get("NCCL_CONF_FILE"):
        files[1:] = [environment["NCCL_CONF_FILE"]]
    found: dict[str, str] = {}
    for name in files:
        try:
            with open(
                open_file(pid, name), encoding="utf-8", errors="replace"
            ) as file:  # the process may have named anything
                text = file.read(_LONGEST_FILE)
        except OSError:
            continue
        for line in text.splitlines():
            key, separator, value = line.partition("=")
            if separator and key.strip().startswith("NCCL_"):
                found[key.strip()] = value.strip()
    return found | {key: value for key, value in environment.items() if key.startswith("NCCL_")}
