"""What a snapshot requires, compared with this machine: every lack is named with its cure, and
nothing is changed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest

from icecore.errors import RestoreRefused
from icecore.host.criu.program import Criu
from icecore.host.kernel import limits
from icecore.restorer.options import RestoreOptions
from icecore.restorer.requirements.check import check_requirements
from icecore.store.format.cell import CELL, Records
from icecore.store.format.manifest import (
    NODE_REF,
    Manifest,
    Namespaces,
    Region,
    Requirements,
    Sizes,
    Space,
    SpaceKind,
)
from tests.restorer.places import empty_manifest

CRIU = Criu(Path("/usr/sbin/criu"), (4, 1, 1))
HERE = Requirements(os.uname().machine, os.uname().release, "4.1.1")


def manifest_with(requirements: Requirements = HERE, **changes: object) -> Manifest:
    return msgspec.structs.replace(empty_manifest(), requirements=requirements, **changes)


def failed(manifest: Manifest) -> dict[str, str]:
    found = check_requirements(manifest, RestoreOptions(), CRIU, "/dev/shm")
    if found.failed:
        with pytest.raises(RestoreRefused) as caught:
            found.require()
        for check in found.failed:
            assert check.message in str(caught.value) and check.cure
    else:
        found.require()
    return {check.name: check.message for check in found.failed}


def test_a_machine_that_has_everything() -> None:
    assert failed(manifest_with()) == {}


@pytest.mark.parametrize(
    ("name", "requirements"),
    [
        ("architecture", msgspec.structs.replace(HERE, architecture="sparc64")),
        ("architecture", msgspec.structs.replace(HERE, page_size=65536)),
        ("criu", msgspec.structs.replace(HERE, criu="4.2")),
        ("cpu", msgspec.structs.replace(HERE, cpu=["avx1024", "some_mitigation"])),
        ("pid", msgspec.structs.replace(HERE, pids=[1])),
        ("device", msgspec.structs.replace(HERE, devices=[{"kind": "gpu"}])),
    ],
)
def test_what_is_missing_is_named(name: str, requirements: Requirements) -> None:
    assert list(failed(manifest_with(requirements))) == [name]


def test_flags_that_are_no_instructions_do_not_matter() -> None:
    assert (
        failed(manifest_with(msgspec.structs.replace(HERE, cpu=["some_mitigation", "hypervisor9"])))
        == {}
    )


def test_an_older_kernel_is_a_warning() -> None:
    manifest = manifest_with(msgspec.structs.replace(HERE, kernel="99.1"))
    found = check_requirements(manifest, RestoreOptions(), CRIU, "/dev/shm")
    assert not found.failed and [check.name for check in found.warnings] == ["kernel"]
    assert "older" in found.warnings[0].message
    [same] = [
        check
        for check in check_requirements(manifest_with(), RestoreOptions(), CRIU, "/dev/shm").checks
        if check.name == "kernel"
    ]
    assert same.met and "older" not in same.message


def test_the_id_of_another_process_s_thread_is_in_use() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, args=(30,))
    thread.start()
    try:
        assert thread.native_id is not None
        assert list(
            failed(manifest_with(msgspec.structs.replace(HERE, pids=[thread.native_id])))
        ) == ["pid"]
    finally:
        end.set()
        thread.join()


def test_what_has_died_is_given_a_moment_to_go() -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    manifest = manifest_with(msgspec.structs.replace(HERE, pids=[dead.pid]))
    reaper = threading.Timer(0.3, dead.wait)
    reaper.start()
    assert failed(manifest) == {}
    reaper.join()


def test_pids_do_not_matter_in_a_namespace_of_their_own() -> None:
    requirements = msgspec.structs.replace(HERE, pids=[1])
    assert failed(manifest_with(requirements, namespaces=Namespaces(pid=True))) == {}


@pytest.mark.parametrize(
    ("family", "host", "shown"),
    [(socket.AF_INET, "127.0.0.1", "{}"), (socket.AF_INET6, "::1", "[{}]")],
)
def test_a_port_on_which_somebody_listens(family: int, host: str, shown: str) -> None:
    with socket.socket(family) as server:
        try:
            server.bind((host, 0))
        except OSError:
            pytest.skip(f"no {host} here")
        port = server.getsockname()[1]
        address = f"{shown.format(host)}:{port}"
        requirements = msgspec.structs.replace(HERE, ports=[address])
        server.listen()
        assert address in failed(manifest_with(requirements))["port"]
        assert failed(manifest_with(requirements, namespaces=Namespaces(network="external"))) == {}
    assert failed(manifest_with(requirements)) == {}


def test_memory_and_room() -> None:
    assert list(failed(manifest_with(sizes=Sizes(logical=1 << 60)))) == ["memory"]
    images = [Space("image", "x.img", 1 << 60, [])]
    assert set(failed(manifest_with(spaces=images))) == {"memory", "space"}


def space_with(kind: SpaceKind, pages: int, lazy: bool = False) -> tuple[Space, list[Records]]:
    """A space of 64 GiB with so many pages in each MiB of its first half, and zeros in one MiB
    more; and its map.
    """
    count = 32 << 10
    records = np.zeros(count + 1, CELL)
    records["cell"] = np.arange(count + 1)
    bits = np.arange(256) < pages
    records["data"][:count], records["zero"][count] = np.packbits(bits, bitorder="little"), 255
    nodes = np.zeros(count // 64 + 1, NODE_REF)
    nodes["group"], nodes["length"] = np.arange(len(nodes)), 100
    regions = [
        Region(4 << 20, 1 << 20, 4 << 20, lazy=True),
        Region(8 << 20, 64 << 30, 8 << 20, lazy=lazy),
    ]
    nodes["region"] = 1
    return Space(kind, "1", 0, regions, nodes.tobytes()), [records[:0], records]


@pytest.mark.parametrize(
    ("kind", "lazy", "there"),
    [
        ("shared", False, False),
        ("shared by an unprivileged restorer", False, True),
        ("process", False, True),
        ("process", True, False),
        ("file", False, False),
    ],
)
def test_pages_that_criu_copies_are_there_twice(
    kind: str, lazy: bool, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie in its page images, beside the tree that gets them; what comes later does not, nor
    does shared memory that can be filled.
    """
    if kind.endswith("unprivileged restorer"):
        kind = "shared"
        monkeypatch.setattr(limits, "capabilities", lambda: frozenset({"CAP_SYS_PTRACE"}))
    space, records = space_with(cast(SpaceKind, kind), 256, lazy)
    manifest = manifest_with(spaces=[space], sizes=Sizes(logical=32 << 30))
    for available, free, lacking in (
        (64 << 30, 32 << 30, set()),
        ((64 << 30) - 1, 32 << 30, {"memory"}),
        (64 << 30, (32 << 30) - 1, {"space"}),
        ((32 << 30) - 1, 0, {"memory", "space"}),
    ):
        monkeypatch.setattr(limits, "memory_available", lambda available=available: available)
        monkeypatch.setattr(limits, "free_space", lambda _, free=free: free)
        for maps in (None, lambda _: records):
            found = check_requirements(manifest, RestoreOptions(), CRIU, "/dev/shm", records=maps)
            expected = lacking if there else {"memory"} if available < 32 << 30 else set()
            assert {check.name for check in found.failed} == expected


def test_shared_memory_with_few_pages_needs_little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest only says where there is something; the map, which is read in doubt alone, how
    much.
    """
    monkeypatch.setattr(limits, "capabilities", lambda: frozenset({"CAP_SYS_PTRACE"}))
    space, records = space_with("shared", 8)
    manifest = manifest_with(spaces=[space], sizes=Sizes(logical=40 << 30))
    monkeypatch.setattr(limits, "memory_available", lambda: 41 << 30)
    read: list[str] = []

    def maps(space: Space) -> list[Records]:
        read.append(space.kind)
        return records

    for free, lacking, reads in (
        (33 << 30, [], 1),
        (1 << 30, [], 2),
        ((1 << 30) - 1, ["space"], 3),
    ):
        monkeypatch.setattr(limits, "free_space", lambda _, free=free: free)
        found = check_requirements(manifest, RestoreOptions(), CRIU, "/dev/shm", records=maps)
        assert ([check.name for check in found.failed], len(read)) == (lacking, reads)
    monkeypatch.setattr(limits, "memory_available", lambda: 80 << 30)
    monkeypatch.setattr(limits, "free_space", lambda _: 33 << 30)
    assert not check_requirements(manifest, RestoreOptions(), CRIU, "/dev/shm", records=maps).failed
    assert len(read) == 3
