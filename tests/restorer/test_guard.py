"""The guard by itself: what it starts, and with which limits."""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import resource
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from icecore.errors import RestoreFailed
from icecore.host.kernel.limits import raise_descriptor_limit
from icecore.restorer.fill.daemon import Daemon
from icecore.restorer.guard import guard_process
from icecore.restorer.guard.client import Message, RestoreGuard
from tests.host.test_rpc import without_descriptors


@pytest.fixture
def soft_limit() -> Iterator[int]:
    """A shell's ordinary limit on descriptors, far below the hard one."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 4096:
        pytest.skip("needs a hard limit of 4096 descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    yield 1024
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def run(
    folder: Path, argv: list[str], descriptors: list[int], *, raised_before: bool = False
) -> dict[str, object]:
    """What the guard says when the program has ended."""
    folder.mkdir()
    if raised_before:
        raise_descriptor_limit()
    guard = RestoreGuard(str(folder), str(folder))
    try:
        raise_descriptor_limit()
        guard.run(argv, descriptors)
        while True:
            message = guard.receive(20)
            assert message is not None
            if message.say == "ended":
                return message.about
    finally:
        guard.end(20)


@pytest.mark.parametrize("raised_before", [False, True])
def test_a_descriptor_above_the_shells_limit_is_inherited(
    tmp_path: Path, soft_limit: int, raised_before: bool
) -> None:
    raise_descriptor_limit()
    with open(tmp_path / "inherited", "w") as file:
        high = fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, 3000)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard))
    try:
        script = f"readlink /proc/self/fd/{high} > {tmp_path}/said"
        assert (
            run(tmp_path / "work", ["/bin/sh", "-c", script], [high], raised_before=raised_before)[
                "status"
            ]
            == 0
        )
    finally:
        os.close(high)
    assert (tmp_path / "said").read_text().strip() == str(tmp_path / "inherited")


def test_what_it_starts_has_the_limit_that_it_was_given(tmp_path: Path, soft_limit: int) -> None:
    """What CRIU leaves as it is reaches the job; the guard's own descriptors are nobody else's
    affair.
    """
    script = f"ulimit -Sn > {tmp_path}/said; ulimit -Hn >> {tmp_path}/said"
    assert run(tmp_path / "work", ["/bin/sh", "-c", script], [])["status"] == 0
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert (tmp_path / "said").read_text().split() == [str(soft_limit), str(hard)]


def test_what_cannot_be_started_is_said_and_ends_nobody(tmp_path: Path, soft_limit: int) -> None:
    said = run(tmp_path / "work", ["/no/such/program"], [])
    assert (said["status"], "No such file" in str(said["why"])) == (127, True)


def test_a_descriptor_that_the_restorer_has_no_room_for_is_an_error_with_a_name() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    guard = RestoreGuard.__new__(RestoreGuard)
    guard._socket = ours
    with ours, theirs:
        about = {"say": "events", "keep": 1, "children": [2]}
        socket.send_fds(theirs, [json.dumps(about).encode() + b"\0" + bytes(32)], [0])
        with (
            without_descriptors(),
            pytest.raises(RestoreFailed, match=r"too many open files.*ulimit"),
        ):
            guard._receive(5)


def test_a_userfaultfd_that_the_guard_has_no_room_for_is_an_error_with_a_name() -> None:
    """Of a process without it the memory would never come."""
    criu, connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    heard, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    guard = guard_process.GuardProcess.__new__(guard_process.GuardProcess)
    guard.criu_connection, guard.control, guard.kept, guard.next_kept = connection, control, {}, 0
    with criu, connection, heard, control:
        criu.sendall(struct.pack("<i", 77))
        socket.send_fds(criu, [b"\0"], [0])
        with without_descriptors():
            guard.hear_criu()
        heard.settimeout(5)
        about = json.loads(heard.recv(1 << 16))
        assert (about["say"], about["process"]) == ("task", 77)
        with pytest.raises(RestoreFailed, match=r"process 77: Too many open files.*ulimit"):
            Daemon._add_task(Daemon.__new__(Daemon), Message("task", about, b"", []))


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[tuple[RestoreGuard, Path]]:
    """A guard that hears of shared memory at a socket."""
    folder, place = tmp_path / "guard", tmp_path / "shared.socket"
    folder.mkdir()
    guard = RestoreGuard(str(folder), str(folder))
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(place))
            listener.listen()
            guard.share(listener)
        yield guard, place
    finally:
        guard.end(20)


def told(listening: tuple[RestoreGuard, Path], request: bytes) -> tuple[Message, bytes]:
    """What the guard says when this process tells of shared memory, and what it answers."""
    guard, place = listening
    with socket.socket(socket.AF_UNIX) as criu:
        criu.settimeout(20)
        criu.connect(str(place))
        criu.sendall(request)
        criu.shutdown(socket.SHUT_WR)
        answer = criu.recv(1)
    while (message := guard.receive(20)) is None or message.say == "ready":
        pass
    assert message.say == "shared"
    return message, answer


def test_it_opens_shared_memory_as_soon_as_it_is_made(
    listening: tuple[RestoreGuard, Path],
) -> None:
    with mmap.mmap(-1, 1 << 20) as memory:
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        message, answer = told(listening, struct.pack("<QQ", 7, start))
        assert answer == b"y" and message.about["number"] == 7
        assert message.about["pid"] == os.getpid()
        (descriptor,) = message.descriptors
        os.pwrite(descriptor, b"filled", 4096)
        os.close(descriptor)
        assert memory[4096:4102] == b"filled"


@pytest.mark.parametrize("what", ["nothing", "a file", "private", "too little"])
def test_it_opens_nothing_else(
    what: str, listening: tuple[RestoreGuard, Path], tmp_path: Path
) -> None:
    """Forged images could lead CRIU to say anything."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    with open(path, "r+b") as file:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, 4096, flags) if what == "private" else mmap.mmap(file.fileno(), 4096)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        request = struct.pack("<QQ", 7, start + (4096 * 1024 if what == "nothing" else 0))
        message, answer = told(listening, request[:9] if what == "too little" else request)
    assert answer == b"" and message.descriptors == [] and message.about["error"]
