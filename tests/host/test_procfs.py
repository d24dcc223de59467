"""/proc as it is read: real processes, their mappings, trees and descriptors."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
import time
from contextlib import suppress

import msgspec
import pytest

from icecore.errors import NotFound
from icecore.host.kernel import procfs
from tests.host.target import dead_pid, eventually, target


def test_maps_give_what_was_mapped(tmp_path):
    file = tmp_path / "a file\nwith a newline"
    file.write_bytes(b"x" * 8192)
    code = """
    a = anonymous(1 << 20)
    b = anonymous(1 << 16, 0)
    s = anonymous(1 << 16, 3, 0x21)
    fd = os.open(sys.argv[1], os.O_RDONLY)
    f = libc.mmap(None, 4096, 1, 2, fd, 4096)
    say(a, b, s, f); hear()
    """
    with target(code, file) as it:
        a, b, s, f = map(int, it.hear())
        maps = procfs.read_maps(it.pid)
        reader = procfs.MapsReader()
        assert reader.read(it.pid) == maps and reader.read(it.pid) == maps
        assert [m.start for m in maps] == sorted(m.start for m in maps)

        def at(address):
            return next(m for m in maps if m.start <= address < m.end)

        assert (
            at(a).protection == procfs.PROT_READ | procfs.PROT_WRITE
            and at(a).private
            and at(a).inode == 0
        )
        assert at(b).protection == 0
        assert not at(s).private and at(s).path.startswith("/dev/zero")
        here = os.stat(file)
        assert at(f).path == str(file) and at(f).inode == here.st_ino and at(f).offset == 4096
        assert os.makedev(*at(f).device) == here.st_dev
        assert at(f).length == 4096
        assert "[stack]" in {m.path for m in maps} and "[vsyscall]" not in {m.path for m in maps}

        detailed = procfs.read_maps(it.pid, vm_flags=True)
        assert [(m.start, m.end, m.path) for m in detailed] == [
            (m.start, m.end, m.path) for m in maps
        ]
        assert all(m.vm_flags for m in detailed)
        assert "gd" in next(m.vm_flags for m in detailed if m.path == "[stack]")
        assert "wr" in next(m.vm_flags for m in detailed if m.start <= a < m.end)
        assert "wr" not in next(m.vm_flags for m in detailed if m.start == b)


def test_tree_has_children_of_all_threads_root_first():
    code = """
    import threading
    def child():
        pid = os.fork()
        if pid == 0:
            grand = os.fork()
            hear()
        say(pid)
        threading.Event().wait()
    threading.Thread(target=child, daemon=True).start()
    pid = os.fork()
    if pid == 0: hear()
    say(pid)
    hear()
    """
    with target(code) as it:
        mine = {int(it.hear()[0]), int(it.hear()[0])}
        assert eventually(lambda: len(procfs.tree(it.pid)) == 4)
        tree = procfs.tree(it.pid)
        assert tree[0] == it.pid and mine < set(tree)
        assert all(procfs.status(p).parent in tree[:i] for i, p in enumerate(tree) if i)
        assert sorted(procfs.children(it.pid)) == sorted(mine)


def test_tree_settles_while_processes_come_and_go():
    code = """
    import time
    if os.fork() == 0:
        while True:
            pid = os.fork()
            if pid == 0: os._exit(0)
            os.waitpid(pid, 0)
            time.sleep(0.02)
    say("ready"); hear()
    """
    with target(code) as it:
        it.hear()
        for _ in range(20):
            tree = procfs.tree(it.pid)
            assert tree[0] == it.pid and len(tree) in (2, 3)
        for pid in tree[1:]:
            with suppress(ProcessLookupError):  # the child's child lives for a moment
                os.kill(pid, 9)


def test_descriptors(tmp_path):
    log = tmp_path / "log"
    code = """
    fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, b"x" * 100)
    gone = os.open(sys.argv[1] + ".gone", os.O_RDWR | os.O_CREAT)
    os.unlink(sys.argv[1] + ".gone")
    say(fd, gone); hear()
    """
    with target(code, log) as it:
        fd, gone = map(int, it.hear())
        found = {d.number: d for d in procfs.descriptors(it.pid)}
        assert found[fd].target == str(log) and found[fd].position == 100 and found[fd].size == 100
        assert found[fd].writable and found[fd].flags & os.O_APPEND
        assert (
            found[fd].inode == log.stat().st_ino
            and stat.S_ISREG(found[fd].mode)
            and found[fd].links == 1
        )
        assert found[gone].links == 0 and found[gone].target.endswith(" (deleted)")
        assert found[0].target.startswith("pipe:") and not found[0].writable


def test_a_process_whose_first_thread_has_ended_is_not_over():
    lines = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); ctypes.CDLL(None).pthread_exit(0)"
    running = subprocess.Popen([sys.executable, "-c", lines])
    try:
        assert eventually(lambda: procfs.is_zombie(running.pid))
        assert not procfs.is_over(running.pid)
    finally:
        running.kill()
    assert eventually(lambda: procfs.is_over(running.pid))
    running.wait(10)
    assert procfs.is_over(running.pid)


def test_status_of_odd_names_zombies_and_kernel_threads():
    code = """
    libc.prctl(15, b") R 1 (x y", 0, 0, 0)
    pid = os.fork()
    if pid == 0: os._exit(0)
    say(pid); hear()
    """
    with target(code) as it:
        zombie = int(it.hear()[0])
        assert eventually(lambda: procfs.status(it.pid).state == "S")
        told = procfs.status(it.pid)
        assert told.name == ") R 1 (x y" and told.parent == os.getpid() and told.session == it.pid
        assert (
            told.state == "S"
            and told.threads == 1
            and told.user == os.geteuid()
            and told.own_pid == it.pid
        )
        assert (
            told.resident > 1 << 20
            and not told.kernel_thread
            and not told.zombie
            and told.tracer == 0
        )
        assert told.start_time == procfs.start_time(it.pid) > procfs.start_time(1)
        assert eventually(lambda: procfs.is_zombie(zombie))
        assert (
            procfs.status(zombie).zombie
            and procfs.status(zombie).resident == 0
            and procfs.read_maps(zombie) == []
        )
        assert procfs.command_line(zombie) == [] and procfs.executable(zombie) == ""
        assert not procfs.is_zombie(it.pid)
        assert procfs.is_over(zombie) and not procfs.is_over(it.pid)
        assert procfs.command_line(it.pid)[1:3] == ["-S", "-c"] and "python" in procfs.executable(
            it.pid
        )
    assert procfs.is_kernel_thread(2) and not procfs.is_kernel_thread(1)


def test_namespaces_are_compared_by_number():
    with target("say(1); hear()") as it:
        it.hear()
        assert procfs.namespaces(it.pid) == procfs.namespaces(os.getpid())
        assert {"net", "pid", "mnt", "ipc"} <= set(procfs.namespaces(it.pid))


def test_a_process_that_is_gone_is_not_found():
    gone = dead_pid()
    assert not procfs.exists(gone)
    for ask in (
        procfs.read_maps,
        procfs.MapsReader().read,
        procfs.status,
        procfs.tree,
        procfs.descriptors,
        procfs.start_time,
        procfs.namespaces,
        procfs.threads,
        procfs.executable,
        procfs.command_line,
    ):
        with pytest.raises(NotFound):
            ask(gone)


def test_what_appeared():
    """Against page by page, for mappings of all kinds and overlaps; and of many, within a window."""

    def mapping(
        first: int, last: int, *, path: str = "", protection: int = procfs.PROT_READ
    ) -> procfs.Mapping:
        return msgspec.structs.replace(
            some, start=first, end=last, path=path, protection=protection
        )

    some = procfs.read_maps(os.getpid())[0]
    some = msgspec.structs.replace(some, inode=0, flags=some.flags & ~procfs.MAP_SHARED)
    assert some.private
    rng = random.Random(5)

    def layout() -> list[procfs.Mapping]:
        ends = sorted(rng.sample(range(200), 2 * rng.randrange(1, 30)))
        kinds = ("", "", "", "[anon:a]", "[heap]")
        return [
            mapping(first, last, path=rng.choice(kinds), protection=rng.choice((0, 1, 1, 3)))
            for first, last in zip(ends[::2], ends[1::2], strict=True)
        ]

    def pages(mappings: list[procfs.Mapping]) -> set[int]:
        return {
            n
            for m in mappings
            if m.path != "[heap]" and m.protection & 1
            for n in range(m.start, m.end)
        }

    for _ in range(200):
        before, after = layout(), layout()
        found = procfs.appeared(before, after)
        assert {n for first, last in found for n in range(first, last)} == pages(after) - pages(
            before
        )
        assert all(first < last for first, last in found) and found == sorted(found)
    many = [mapping(3 * n, 3 * n + 2) for n in range(20_000)]
    began = time.process_time()
    assert procfs.appeared(many[::2], many) == [(m.start, m.end) for m in many[1::2]]
    assert time.process_time() - began < 2  # each with each took 24 s


def test_a_process_that_ends_while_it_is_looked_at_is_not_found():
    """The kernel refuses a link of /proc with EACCES if the process ends while it is followed."""
    code = """
    import signal, time
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    say(1)
    while True:
        if os.fork() == 0:
            os._exit(0)
        time.sleep(0.001)
    """
    with target(code) as it:
        it.hear()
        ended, until = 0, time.monotonic() + 1.5
        while time.monotonic() < until:
            for child in procfs.children(it.pid):
                with suppress(NotFound):
                    while True:
                        procfs.namespaces(child)
                ended += 1
        assert ended > 20
