"""Preflight: each refusal and each warning with a real case. What is refused stays as it was, and
what is not refused can be dumped.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from icecore.dumper.freeze.guard import DumpGuard
from icecore.dumper.observe import unaccepted
from icecore.dumper.observe.files import tree_pids
from icecore.dumper.observe.gpus import GpuInspection, GpuProcess
from icecore.dumper.observe.inspection import inspect_tree
from icecore.dumper.options import DumpOptions
from icecore.dumper.preflight import checks, checks_descriptors
from icecore.dumper.preflight.checks_descriptors import kernel_refuses_options
from icecore.dumper.preflight.judge import refuse, warn
from icecore.dumper.target import Target
from icecore.errors import DumpFailed, NotFound, PreflightRefused
from icecore.host.criu.hidden import hides
from icecore.host.criu.program import find_criu
from icecore.host.gpu.backend import Backend
from icecore.host.kernel import limits, procfs
from icecore.restorer.guard.client import RestoreGuard
from tests.host.target import eventually
from tests.programs import driving

from .conftest import Start
from .failing import Dumper, Job
from .puppet import Puppet
from .world import Events, Store, leftovers, standing

pytestmark = pytest.mark.criu

_PREAMBLE = """
import ctypes, fcntl, mmap, os, select, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(number, *arguments)
    if result < 0:
        print(os.strerror(ctypes.get_errno()), flush=True)
        sys.exit(1)
    return result
"""
_PERF_EVENT_OPEN, _IO_URING_SETUP, _SCHED_SETATTR, _USERFAULTFD = 298, 425, 314, 323

Has = Callable[..., int]


@pytest.fixture
def has(tmp_path: Path) -> Iterator[Has]:
    """Start a Python process that runs some code and then sleeps, and return its pid. Skip the test
    if the kernel lacks what the code needs.
    """
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str, **how: object) -> int:
        how = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.DEVNULL,
            **how,
        }
        ready = tmp_path / f"ready{len(started)}"
        script = f"{_PREAMBLE}\n{code}\nopen({str(ready)!r}, 'w').close()\ntime.sleep(1000)"
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", script], cwd=tmp_path, start_new_session=True, **how
        )
        started.append(process)
        end = time.monotonic() + 20
        while not ready.exists():
            if process.poll() is not None:
                pytest.skip("this kernel does not have it")
            assert time.monotonic() < end
            time.sleep(0.005)
        time.sleep(0.02)  # until it has closed that and sleeps
        return process.pid

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in reversed(started):  # a tracer before its tracee
        process.wait(20)


def refusals(
    pid: int, options: DumpOptions | None = None, workdir: str | Path = "/dev/shm"
) -> dict[str, str]:
    """Map the names of a tree's refusals to their messages, with the CRIU in use."""
    found = refuse(inspect_tree(pid, find_criu(), str(workdir), options or DumpOptions()))
    assert all(r.cure for r in found)
    return {r.name: r.message for r in found}


def refused(
    store: Store, target: Target | int, options: DumpOptions | None = None
) -> dict[str, str]:
    """Check that a dump is refused and touches nothing; map the refusals' names to their messages."""
    before = store.snapshots()
    events = Events()
    with pytest.raises(PreflightRefused) as caught:
        store.dump(target, options, events=events)
    assert events.names() == {"dump.preflight"}
    assert store.snapshots() == before and not leftovers(store.workdir)
    assert all(cure for _, _, cure in caught.value.reasons)
    return {name: message for name, message, _ in caught.value.reasons}


# -- the process named


@pytest.mark.parametrize("pid", [0, -1, 1 << 22])
def test_no_such_process(pid: int, store: Store) -> None:
    with pytest.raises(NotFound, match="there is no process"):
        store.dump(Target(pid, "job"))


def test_a_thread_of_the_kernel(store: Store) -> None:
    assert list(refused(store, Target(2, "job"))) == ["kernel-thread"]


def test_a_descriptor_that_changes_while_it_is_looked_at(puppet: Puppet) -> None:
    """A device is judged by what was read of it at once, not by what has its number a moment later."""
    puppet.do(
        "def change():\n"
        "    null, other = os.open('/dev/null', os.O_RDONLY), os.pipe()[0]\n"
        "    while True: os.dup2(null, 99); os.dup2(other, 99)\n"
        "import threading; threading.Thread(target=change, daemon=True).start()"
    )
    criu, seen, until = find_criu(), set[str](), time.monotonic() + 1.0
    while time.monotonic() < until:
        found = inspect_tree(puppet.pid, criu, "/dev/shm", DumpOptions())
        assert not checks_descriptors.devices(found)
        (process,) = found.processes
        seen |= {one.target[:5] for one in process.descriptors if one.number == 99}
    assert seen == {"/dev/", "pipe:"}


def test_a_zombie(store: Store) -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert list(refused(store, Target(child.pid, "job"))) == ["zombie"]
    child.wait(10)


def test_a_thread(store: Store) -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    assert thread.native_id is not None
    message = refused(store, Target(thread.native_id, "job"))["thread"]
    done.set()
    thread.join(10)
    assert str(os.getpid()) in message


def test_oneself_and_ones_ancestors(store: Store) -> None:
    for pid in (os.getpid(), os.getppid()):
        assert list(refused(store, Target(pid, "job"))) == ["self"]


def test_the_init_of_the_machine(store: Store) -> None:
    assert list(refused(store, Target.of_process(1))) == ["init"]


def test_targets_that_end_or_never_ran_are_named_for_preflight_to_judge(store: Store) -> None:
    """The name of a target is guessed from its program, which some processes lack and some do not
    show.
    """
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert list(refused(store, Target.of_process(child.pid))) == ["zombie"]
    child.wait(10)
    assert list(refused(store, Target.of_process(2))) == ["kernel-thread"]
    with pytest.raises(NotFound, match="there is no process"):
        store.dump(Target.of_process(child.pid))


def test_a_process_that_icecore_may_not_look_at(job: Job, store: Store) -> None:
    """In a user namespace of its own a process has all capabilities, but none over processes
    outside it.
    """
    dumper = Dumper(store, job, wrapped=["unshare", "--user", "--map-root-user", "--"])
    said = dumper.until("error")
    assert dumper.process.wait(20) == 4
    assert said[1] == "PreflightRefused" and f"may not inspect process {job.pid}" in said[2]
    assert not standing(job.pid)


def test_a_tree_with_a_part_of_icecore_in_it(tmp_path: Path, store: Store, has: Has) -> None:
    guard = DumpGuard(str(tmp_path))
    try:
        assert list(refused(store, guard.pid)) == ["icecore"]
    finally:
        guard.release()
    folder = tmp_path / "restore"
    folder.mkdir()
    restoring = RestoreGuard(str(folder), str(folder))
    try:
        assert restoring.receive(20) is not None
        assert list(refused(store, restoring.pid)) == ["icecore"]
    finally:
        restoring.end(20)
    assert "icecore" not in refusals(has("pass  # -m icecore.dumper.freeze.guard_process"))


def test_without_capabilities(job: Job, store: Store) -> None:
    dumper = Dumper(store, job, powerless=True)
    said = dumper.until("error")
    assert dumper.process.wait(20) == 4
    assert said[1] == "PreflightRefused" and "CAP_SYS_PTRACE" in said[2]
    assert not standing(job.pid)


# -- processes


def test_a_traced_process(has: Has, store: Store) -> None:
    pid = has("")
    tracer = has(
        f"assert libc.ptrace(0x4206, {pid}, 0, 0) == 0"  # PTRACE_SEIZE
    )
    assert f"by process {tracer}" in refused(store, pid)["traced"]


def test_a_deadline_scheduled_process(has: Has, store: Store) -> None:
    policy = "struct.pack('IIQiIQQQ', 48, 6, 0, 0, 0, 10**6, 10**7, 10**7)"
    pid = has(
        f"call({_SCHED_SETATTR}, 0, (ctypes.c_char * 48).from_buffer(bytearray({policy})), 0)"
    )
    assert list(refused(store, pid)) == ["scheduling"]


#: A function that ends the main thread of its process while another thread runs for some seconds.
_OUTLIVED = """
import threading
def outlived(seconds):
    threading.Thread(target=lambda: (time.sleep(seconds), os._exit(0))).start()
    libc.syscall(60, 0)
"""


def test_a_process_whose_main_thread_has_ended(has: Has, store: Store) -> None:
    child = "r, w = os.pipe()\nchild = os.fork()\nif not child: outlived(1000)"
    pid = has(f"{_OUTLIVED}{child}\nopen('child', 'w').write(str(child))\ntime.sleep(0.1)")
    (other,) = procfs.children(pid)
    assert f"main thread of process {other} has ended" in refused(store, pid)["main-thread"]
    root = has(f"{_OUTLIVED}signal.signal(signal.SIGUSR1, lambda *_: outlived(1000))")
    os.kill(root, signal.SIGUSR1)
    assert eventually(lambda: procfs.is_zombie(root))
    assert f"main thread of process {root} has ended" in refused(store, root)["main-thread"]


def test_a_process_that_ends_soon_after_its_main_thread(has: Has) -> None:
    pid = has(f"{_OUTLIVED}if os.fork() == 0: outlived(0.3)\ntime.sleep(0.1)")
    assert "main-thread" not in refusals(pid)


def test_a_main_thread_that_ends_after_preflight(puppet: Puppet, store: Store) -> None:
    """The dump waits for the end of the process before its window."""
    puppet.do(_OUTLIVED)
    end = "if os.fork() == 0: outlived(0.3)\ntime.sleep(0.1)"
    events = Events({("dump.preflight", "end"): lambda _: puppet.do(end)})
    store.dump(puppet.pid, events=events)
    assert not events.named("dump.retry")


def test_a_main_thread_that_ends_in_the_window(puppet: Puppet, store: Store) -> None:
    """CRIU fails, and the dump repeats the window."""
    puppet.do(_OUTLIVED)
    end = iter(["if os.fork() == 0: outlived(0.3)\ntime.sleep(0.1)"])
    events = Events({("dump.window", "begin"): lambda _: [puppet.do(code) for code in end]})
    store.dump(puppet.pid, events=events)
    (retry,) = events.named("dump.retry")
    assert "the main thread" in str(retry.fields["error"])


NAMESPACES = {
    "mount": 0x20000,
    "uts": 0x4000000,
    "ipc": 0x8000000,
    "user": 0x10000000,
    "net": 0x40000000,
}


@pytest.mark.parametrize("kind", NAMESPACES)
def test_a_member_with_other_namespaces(kind: str, has: Has, store: Store) -> None:
    pid = has(
        "r, w = os.pipe()\n"
        f"if os.fork() == 0:\n    libc.unshare({NAMESPACES[kind]})\n    os.write(w, b'r')\n    time.sleep(1000)\nos.read(r, 1)"
    )
    assert "namespaces" in refused(store, pid)


def test_a_time_namespace_made_for_children(has: Has, store: Store) -> None:
    assert "namespaces" in refused(store, has("assert libc.unshare(0x80) == 0"))


def test_a_user_namespace_of_its_own(has: Has, store: Store) -> None:
    assert "namespaces" in refused(store, has("assert libc.unshare(0x10000000) == 0"))


# -- memory


def test_too_few_descriptors(job: Job, store: Store) -> None:
    """CRIU would need more descriptors than allowed and could not raise the limit."""
    if "CAP_SYS_RESOURCE" in limits.capabilities():
        pytest.skip("CRIU may raise its limit on this machine")
    dumper = Dumper(store, job, descriptors=80)
    said = dumper.until("error")
    assert said[1] == "PreflightRefused" and "pipes: " in said[2] and "the limit is 80" in said[2]
    assert dumper.process.wait(20) == 4
    assert not standing(job.pid) and not leftovers(store.workdir)


@pytest.mark.parametrize("hidden", [True, False])
def test_too_small_pipes(
    job: Job, store: Store, monkeypatch: pytest.MonkeyPatch, hidden: bool
) -> None:
    """The same as on a machine where pipes may not grow, without changing this machine; if CRIU
    sees all memory, for large mappings too.
    """
    monkeypatch.setattr(limits, "pipe_max_size", lambda: 4096)
    monkeypatch.setattr(limits, "descriptor_limit", lambda: 2500)
    monkeypatch.setattr(checks, "hides", lambda criu: hidden)
    monkeypatch.setattr(
        limits, "capabilities", lambda pid=None: frozenset({"CAP_SYS_ADMIN", "CAP_SYS_PTRACE"})
    )
    found = inspect_tree(job.pid, find_criu(), str(store.workdir), DumpOptions())
    refusals = checks.pipes(found)
    assert bool(refusals) is not hidden
    monkeypatch.setattr(limits, "descriptor_limit", lambda: 100)
    assert "the limit is 100" in refused(store, job.pid)["pipes"]
    assert not standing(job.pid)


def test_system_v_shared_memory_of_the_host(start: Start, store: Store) -> None:
    running = start("tree-system-v")

    def mapped() -> bool:
        return any(
            "/SYSV" in Path(f"/proc/{pid}/maps").read_text() for pid in tree_pids(running.pid)
        )

    assert eventually(mapped)
    assert set(refused(store, running.pid)) >= {"system-v"}
    assert not standing(running.pid)
    driving.ask_finish(running.program, running.state_dir)  # it brings its own
    assert driving.wait_finished(running.program, running.state_dir).passed


# -- descriptors

CASES = {
    "io_uring": ("io_uring", f"f = call({_IO_URING_SETUP}, 4, (ctypes.c_char * 120)())"),
    "io_uring mapped": (
        "io_uring",
        f"f = call({_IO_URING_SETUP}, 4, (ctypes.c_char * 120)()); m = mmap.mmap(f, 4096); os.close(f)",
    ),
    "perf event": (
        "descriptor",
        f"a = bytearray(112); struct.pack_into('IIQ', a, 0, 1, 112, 0)\n"
        f"f = call({_PERF_EVENT_OPEN}, (ctypes.c_char * 112).from_buffer(a), 0, -1, -1, 0)",
    ),
    "userfaultfd": ("descriptor", f"f = call({_USERFAULTFD}, 0)"),
    "misc device": (
        "device",
        "f = os.open('/dev/fuse', os.O_RDWR) if os.path.exists('/dev/fuse') else sys.exit(1)",
    ),
    "tunnel": (
        "device",
        "f = os.open('/dev/net/tun', os.O_RDWR) if os.path.exists('/dev/net/tun') else sys.exit(1)",
    ),
    "pidfd of another": ("pidfd", "f = os.pidfd_open(1)"),
    "message queue": (
        "message-queue",
        "f = libc.mq_open(b'/icecore-test', 0o102, 0o600, None); libc.mq_unlink(b'/icecore-test')",
    ),
    "vsock": ("socket", "s = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)"),
    "mptcp": ("socket", "s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)"),
}


def test_a_gpu_that_was_opened_in_a_root_which_is_gone(
    has: Has, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its path does not begin with /dev, like that of resident memory that another instance left;
    its number tells what it is.
    """
    pid = has(
        """
os.mkdir('dev')
if libc.unshare(0x20000) or libc.mount(None, b'/', None, 0x44000, None) or libc.mount(b'/dev', b'dev', None, 0x1000, None):  # private; bind
    sys.exit(1)
f = os.open('dev/fuse', os.O_RDWR)
if libc.umount2(b'dev', 2):
    sys.exit(1)
"""
    )
    assert "is the device /fuse, which" in refusals(pid)["device"]
    # Test machines have no NVIDIA GPU: another device that the process has open stands in for it.
    monkeypatch.setattr(checks_descriptors, "_NVIDIA_MAJOR", 10)
    assert "device" in refusals(pid), "nobody else would say so of a process that uses no GPU"
    found = inspect_tree(pid, find_criu(), "/dev/shm", DumpOptions())
    gpus = GpuInspection(Backend("/dev/nvidia"), [GpuProcess(pid)])
    assert not checks_descriptors.devices(msgspec.structs.replace(found, gpus=gpus))


@pytest.mark.parametrize("case", CASES)
def test_what_criu_cannot_dump(case: str, has: Has, store: Store) -> None:
    name, code = CASES[case]
    assert list(refused(store, has(code))) == [name]


def test_a_unix_connection_that_leads_outside(
    has: Has, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
        with ours, theirs:
            pid = has("", pass_fds=(theirs.fileno(),))
            events = Events()
            store.dump(pid, events=events)
            (message,) = (
                str(event.fields["message"])
                for event in events.named("dump.warning")
                if event.fields["name"] == "unix-peer"
            )
            assert f"connected to {os.getpid()} (" in message and "is closed" in message
            with monkeypatch.context() as without:
                without.setattr(checks_descriptors, "SOCKETS_PLUGIN", Path("/nowhere"))
                message = refused(store, pid)["unix-peer"]
                assert f"connected to {os.getpid()} (" in message and "was not built" in message


#: Connections that wait for accept(2), and words of their refusal.
UNACCEPTED = {
    "unix": (
        "s = socket.socket(socket.AF_UNIX); s.bind('s'); s.listen()\n"
        "c = socket.socket(socket.AF_UNIX); c.connect('s'); c.send(b'x')",
        "has sent data",
    ),
    "tcp": (
        "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); c = socket.create_connection(s.getsockname())",
        "listens on TCP port",
    ),
}
#: CRIU dumps a server without this connection.
CLOSED = {"closed": (f"{UNACCEPTED['unix'][0]}; c.close()", "")}


@pytest.mark.parametrize("case", UNACCEPTED)
def test_a_connection_that_is_never_accepted(
    case: str, has: Has, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unaccepted, "_SECONDS", 0.1)
    code, what = UNACCEPTED[case]
    pid = has(code)
    found = refused(store, pid)
    assert list(found) == ["unaccepted"]
    assert f"of process {pid} " in found["unaccepted"] and what in found["unaccepted"]
    if case == "tcp":
        store.dump(pid, DumpOptions(connections="close"))


@pytest.mark.parametrize("case", UNACCEPTED | CLOSED)
def test_a_connection_that_is_accepted_soon(case: str, puppet: Puppet, store: Store) -> None:
    """Preflight waits until it is accepted, and so does the dump before its window."""
    code, _ = (UNACCEPTED | CLOSED)[case]
    accept = (
        "import threading; threading.Timer(0.3, lambda: globals().update(p=s.accept())).start()"
    )
    events = Events({("dump.preflight", "end"): lambda _: puppet.do(f"{code}\n{accept}")})
    store.dump(puppet.pid, events=events)
    assert not events.named("dump.retry")
    puppet.do("p[0].close(); c.close(); s.close(); os.path.exists('s') and os.unlink('s')")
    puppet.do(f"{code}\n{accept}")
    store.dump(puppet.pid)


@pytest.mark.parametrize("case", UNACCEPTED)
def test_a_connection_that_begins_in_the_window(case: str, puppet: Puppet, store: Store) -> None:
    """The dump starts over, and the error names the process."""
    code, _ = UNACCEPTED[case]
    begin = iter([code])
    events = Events(
        {
            ("dump.window", "begin"): lambda _: [puppet.do(code) for code in begin],
            ("dump.retry", ""): lambda _: puppet.do("p = s.accept()"),
        }
    )
    store.dump(puppet.pid, events=events)
    (retry,) = events.named("dump.retry")
    assert f"a socket of process {puppet.pid} (" in str(retry.fields["error"])


def test_internet_sockets_and_an_old_criu(has: Has, store: Store) -> None:
    if not kernel_refuses_options():
        pytest.skip("this kernel refuses nothing")
    pid = has("s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()")
    for version, names in (((4, 1, 1), ["internet-sockets"]), ((4, 2, 1), [])):
        found = inspect_tree(
            pid, msgspec.structs.replace(find_criu(), version=version), "/dev/shm", DumpOptions()
        )
        assert [r.name for r in refuse(found)] == names


# -- files


def test_a_deleted_file_over_the_limit(has: Has, store: Store) -> None:
    pid = has("f = open('gone', 'wb'); f.write(bytes(3 << 20)); f.flush(); os.unlink('gone')")
    message = refused(store, pid, DumpOptions(ghost_limit=2 << 20))["deleted-file"]
    assert "gone" in message and "3 MiB" in message
    store.dump(pid, DumpOptions(ghost_limit=3 << 20))


def test_files_over_the_budget(has: Has, store: Store) -> None:
    pid = has("f = open('big', 'wb'); f.write(bytes(3 << 20)); f.flush()")
    budget = DumpOptions(file_budget=2 << 20, pre_copy="off")
    assert "big" in refused(store, pid, budget)["file-budget"]
    store.dump(pid, DumpOptions(file_budget=2 << 20, files="check"))


@pytest.fixture
def huge_pages() -> Iterator[None]:
    setting = Path("/proc/sys/vm/nr_hugepages")
    before = setting.read_text()
    try:
        setting.write_text(str(int(before) + 4))
        if int(setting.read_text()) < int(before) + 2:
            pytest.skip("this machine has no room for huge pages")
        yield
    finally:
        setting.write_text(before)


def test_files_on_huge_pages(has: Has, store: Store, huge_pages: None, tmp_path: Path) -> None:
    """Huge pages without a file are accepted."""
    anonymous = has("memory = mmap.mmap(-1, 2 << 20, flags=0x40021); memory[0] = 1")
    assert "huge-file" not in refusals(anonymous)
    # Where administrators mount it.
    with tempfile.TemporaryDirectory(prefix="icecore-test-", dir="/dev") as top:
        subprocess.run(["mount", "-t", "hugetlbfs", "x", top], timeout=60, check=True)
        try:
            code = f"""
file = os.open("{top}/file", os.O_RDWR | os.O_CREAT); os.ftruncate(file, 2 << 20)
memory = mmap.mmap(file, 2 << 20); memory[0] = 1; os.close(file)"""
            message = refused(store, has(code))["huge-file"]
            assert f"{top}/file" in message
            deleted = has(f"{code}; os.unlink('{top}/file')")
            assert f"{top}/file" in refusals(deleted)["huge-file"]
        finally:
            subprocess.run(["umount", "--lazy", top], timeout=60, check=True)


def test_a_working_directory_that_is_too_small(has: Has, store: Store, tmp_path: Path) -> None:
    shared = has("m = mmap.mmap(-1, 100 << 20); m[::4096] = bytes(100 << 8)\nos.fork()")
    small_ones = has(
        "keep = [mmap.mmap(-1, 512 << 10) for _ in range(200)]\n"
        "for m in keep: m[::4096] = bytes(128)\nos.fork()"
    )
    locked = has("m = mmap.mmap(-1, 100 << 20, flags=0x22); assert libc.mlockall(3) == 0")
    place = tmp_path / "work"
    place.mkdir()
    with mounted(place, "120m"):
        small = replace(store, workdir=place)
        for pid in (small_ones, locked):
            assert "120 MiB are free" in refused(small, pid)["workdir"]
        # What icecore reads in place, CRIU does not write, except in a streamed dump.
        streamed = DumpOptions(memory="streamed")
        assert "120 MiB are free" in refused(small, shared, streamed)["workdir"]
        if hides(find_criu()):
            small.dump(shared)
        subprocess.run(["mount", "-o", "remount,size=200m", place], check=True, timeout=20)
        # Two processes map the shared memory, but it counts once.
        assert not refusals(small_ones, workdir=place)


@contextmanager
def mounted(place: Path, size: str) -> Iterator[None]:
    """Mount a small tmpfs."""
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], check=True, timeout=20
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True, timeout=20)


# -- what is not refused

FINE = {
    "stopped child": "if os.fork() == 0: os.kill(os.getpid(), signal.SIGSTOP); time.sleep(1000)",
    "zombie child": "if os.fork() == 0: os._exit(3)\ntime.sleep(0.1)",
    "kernel objects": "f = [os.eventfd(1), select.epoll(), libc.inotify_init(), os.pidfd_open(os.getpid())]",
    "dead pidfd": "p = os.fork()\nif p == 0: os._exit(0)\nf = os.pidfd_open(p); os.waitpid(p, 0)",
    "pid namespace to come": "assert libc.unshare(0x20000000) == 0",
    "pseudo-terminal": "f = os.openpty()",
    "devices": "f = [open(f'/dev/{n}', 'rb') for n in ('null', 'zero', 'full', 'urandom')]",
    "netlink": "s = [socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, n) for n in (0, 4, 9, 15, 16)]; s[0].bind((0, 0))",
    "unix sockets": "s = socket.socketpair(); t = socket.socket(socket.AF_UNIX); t.bind('\\0icecore-test'); t.listen()",
    "descriptor in flight": "a, b = socket.socketpair(); f = open('x', 'w'); socket.send_fds(a, [b'x'], [f.fileno()])",
    "descriptor in flight for reading": "a, b = socket.socketpair(); f = open('/etc/hostname'); socket.send_fds(a, [b'x'], [f.fileno()]); f.close()",
    "lost name in flight": "a, b = socket.socketpair(); f = open('x', 'w'); os.link('x', 'y'); os.unlink('x'); socket.send_fds(a, [b'x'], [f.fileno()])",
    "pipe in flight": "a, b = socket.socketpair(); r, w = os.pipe(); socket.send_fds(a, [b'x'], [r, w]); os.close(r); os.close(w)",
    "deleted file in flight": "a, b = socket.socketpair(); f = open('x', 'w'); os.unlink('x'); socket.send_fds(a, [b'x'], [f.fileno()]); f.close()",
    "memfd": "f = os.memfd_create('x'); os.write(f, b'hello')",
    "locks": "f = open('x', 'w'); fcntl.flock(f, 2); fcntl.fcntl(f, 37, struct.pack('hhqqi4x', 1, 0, 0, 0, 0))",
    "deleted folder": "os.mkdir('d'); os.chdir('d'); f = open('f', 'w'); os.unlink('f'); os.rmdir('../d')",
    "another hard link": "f = open('a', 'w'); f.write('x'); f.flush(); os.link('a', 'b'); os.unlink('a')",
    "name like a deleted one": "f = open('x (deleted)', 'w'); f.write('hello'); f.flush()",
    "path only": "f = [os.open('.', os.O_PATH), os.open('/proc/self/exe', os.O_PATH | os.O_NOFOLLOW)]",
    "fifo": "os.mkfifo('fifo'); f = os.open('fifo', os.O_RDWR)",
    "unix connection that is not accepted": "s = socket.socket(socket.AF_UNIX); s.bind('s'); s.listen(); c = socket.socket(socket.AF_UNIX); c.connect('s')",
    "pending message": "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET); a.send(b'x')",
}


@pytest.mark.parametrize("case", FINE)
def test_what_is_not_refused_can_be_dumped(case: str, has: Has, store: Store) -> None:
    pid = has(FINE[case])
    events = Events()
    result = store.dump(pid, events=events)
    assert not events.named("dump.warning")
    assert not standing(pid)
    names = {
        Path(file.path).name for file in store.read(result.snapshot).manifest.files if file.writable
    }
    if case == "name like a deleted one":
        assert "x (deleted)" in names


# -- threads

#: A thread that does something and stays.
_THREAD = """
import threading
ready = threading.Event()
def run():
    {}
    ready.set()
    time.sleep(1000)
threading.Thread(target=run, daemon=True).start(); assert ready.wait(20)
"""


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("assert libc.unshare(0x400) == 0; global f; f = open('log', 'w')", "descriptors"),
        ("assert libc.unshare(0x200) == 0; os.mkdir('d'); os.chdir('d')", "a working directory"),
        ("assert libc.unshare(0x20000) == 0", "a working directory"),  # a mount namespace
        ("assert libc.unshare(0x4000000) == 0", r"namespaces \(uts\)"),
    ],
)
def test_a_thread_that_does_not_share(code: str, what: str, has: Has, store: Store) -> None:
    message = refused(store, has(_THREAD.format(code)))["threads"]
    assert re.search(f"thread [0-9]+ of process [0-9]+ has {what} of its own", message)


def test_a_process_whose_first_thread_has_ended_meanwhile(has: Has) -> None:
    """The kernel ends the threads of a process one after another, each with its descriptors."""
    pid = has(
        _THREAD.format("pass") + "signal.signal(signal.SIGUSR1, lambda *_: libc.syscall(60, 0))"
    )
    found = inspect_tree(pid, find_criu(), "/dev/shm", DumpOptions())
    assert len(procfs.threads(pid)) == 2 and not checks.threads(found)
    os.kill(pid, signal.SIGUSR1)
    assert eventually(lambda: procfs.is_zombie(pid))
    assert len(procfs.threads(pid)) == 2 and not checks.threads(found)


def test_threads_that_come_and_go_share_everything(has: Has) -> None:
    restless = """ready.set()
    while True:
        thread = threading.Thread(target=int); thread.start(); thread.join()"""
    pid = has("\n".join([*[_THREAD.format("pass")] * 20, _THREAD.format(restless)]))
    for _ in range(20):
        assert "threads" not in refusals(pid)


# -- asynchronous I/O

_RING = "c = ctypes.c_ulong(0); call(206, 8, ctypes.byref(c))"
_DIRECT = "f = os.open('direct', os.O_RDWR | os.O_CREAT | os.O_DIRECT)"


@pytest.mark.parametrize("descriptor", ["open", "shared with a child"])
def test_asynchronous_requests_with_direct_io(descriptor: str, has: Has, store: Store) -> None:
    child = "" if descriptor == "open" else "if os.fork(): time.sleep(1000)"
    message = refused(store, has(f"{_DIRECT}\n{child}\n{_RING}"))["asynchronous-io"]
    assert message.count("/direct") == 1


@pytest.mark.parametrize(
    "code", [_DIRECT, f"{_DIRECT}\nif os.fork() == 0: os.close(f); {_RING}; time.sleep(1000)"]
)
def test_direct_io_without_asynchronous_requests(code: str, has: Has, store: Store) -> None:
    pid = has(code)
    time.sleep(0.2)
    store.dump(pid)


def test_asynchronous_requests_without_direct_io(has: Has, store: Store) -> None:
    pid = has(_RING)
    events = Events()
    result = store.dump(pid, events=events)
    (warning,) = events.named("dump.warning")
    assert warning.fields["name"] == "asynchronous-io"
    files = store.read(result.snapshot).manifest.files
    assert not any("[aio]" in file.path for file in files)


def test_asynchronous_requests_that_begin_after_the_inspection(
    puppet: Puppet, store: Store
) -> None:
    code = f"{_DIRECT}; c = ctypes.c_ulong(0); assert libc.syscall(206, 8, ctypes.byref(c)) == 0"
    events = Events({("dump.preflight", "end"): lambda _: puppet.do(code)})
    with pytest.raises(DumpFailed, match="open for direct I/O"):
        store.dump(puppet.pid, events=events)
    assert not store.snapshots()
    puppet.do("pass")


# -- leases


@pytest.mark.parametrize(("flags", "kind"), [("w", "F_WRLCK"), ("r", "F_RDLCK")])
def test_a_job_that_holds_a_lease(flags: str, kind: str, has: Has, store: Store) -> None:
    """No dump opens the file of a write lease: that breaks the lease, and SIGIO ends the job."""
    code = f"open('leased', 'w').close(); f = open('leased', '{flags}')"
    code += f"\nfcntl.fcntl(f, fcntl.F_SETLEASE, fcntl.{kind})"
    pid = has(code)
    if kind == "F_WRLCK":
        assert "/leased" in refused(store, pid)["lease"]
    else:
        store.dump(pid)
    time.sleep(0.1)
    assert not procfs.is_zombie(pid)


# -- what only CRIU's images show


_SEND_FILE = (
    "a, b = socket.socketpair(); f = open('state', 'w+b', buffering=0); f.write(b'1')\n"
    "a.send(bytes(70_000)); socket.send_fds(a, [b'x'], [f.fileno()]); f.close()"
)


def test_a_file_that_is_only_in_the_queue_of_a_socket(
    puppet: Puppet, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No snapshot would contain its content, and a restore would give the job whatever file is
    there.
    """
    monkeypatch.setattr("icecore.dumper.dump._REPEAT_PAUSE", 0.01)
    puppet.do(_SEND_FILE)
    with pytest.raises(DumpFailed, match=r"state is in the queue of a socket") as caught:
        store.dump(puppet.pid)
    assert "again" in caught.value.cure and not store.snapshots()
    store.dump(puppet.pid, DumpOptions(files="check"))
    puppet.do("got = b.recv(70_000)\n_, (f,), *_ = socket.recv_fds(b, 100, 1)")
    recorded = store.read(store.dump(puppet.pid).snapshot)
    assert recorded.content("file", str(puppet.folder / "state")) == b"1"


def test_a_file_that_is_received_between_two_tries(puppet: Puppet, store: Store) -> None:
    puppet.do(_SEND_FILE)
    receive = "got = b.recv(70_000)\n_, (f,), *_ = socket.recv_fds(b, 100, 1)"
    events = Events({("dump.retry", ""): lambda _: puppet.do(receive)})
    recorded = store.read(store.dump(puppet.pid, events=events).snapshot)
    assert recorded.content("file", str(puppet.folder / "state")) == b"1"
    (retry,) = events.named("dump.retry")
    assert "state is in the queue of a socket" in str(retry.fields["error"])


# -- warnings


@pytest.mark.parametrize(
    ("how", "words"),
    [({"stdin": subprocess.PIPE}, "end of file"), ({"stdout": subprocess.PIPE}, "SIGPIPE")],
    ids=["input", "output"],
)
def test_a_pipe_that_leads_outside(how: dict[str, int], words: str, has: Has, store: Store) -> None:
    pid = has("", **how)
    events = Events()
    store.dump(pid, events=events)
    (warning,) = events.named("dump.warning")
    assert warning.fields["name"] == "pipe" and words in str(warning.fields["message"])


def test_a_pipe_within_the_tree(has: Has) -> None:
    pid = has("r, w = os.pipe()\nif os.fork() == 0: os.close(w); time.sleep(1000)\nos.close(r)")
    assert warn(inspect_tree(pid, find_criu(), "/dev/shm", DumpOptions())) == []


def test_more_mappings_than_a_snapshot_records(has: Has, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = has("held = [mmap.mmap(-1, 4096, prot=mmap.PROT_READ << (n % 2)) for n in range(400)]")
    assert refuse(inspect_tree(pid, find_criu(), "/dev/shm", DumpOptions())) == []
    monkeypatch.setattr(checks, "MAX_REGIONS", 300)
    (refusal,) = refuse(inspect_tree(pid, find_criu(), "/dev/shm", DumpOptions()))
    assert refusal.name == "mappings" and "at most 300" in refusal.message and refusal.cure


def test_a_system_v_message_queue_of_the_host(has: Has, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = has(
        "q = libc.msgget(0, 0o1600); libc.msgsnd(q, struct.pack('l8s', 1, b'hello'), 8, 0)\n"
        "open('queue', 'w').write(str(q))"
    )
    queue = int(Path(f"/proc/{pid}/cwd/queue").read_text())
    try:
        (warning,) = warn(inspect_tree(pid, find_criu(), "/dev/shm", DumpOptions()))
        assert warning.name == "message-queue"
        monkeypatch.setattr(procfs, "began", lambda pid: time.time() + 60)
        assert (
            warn(inspect_tree(pid, find_criu(), "/dev/shm", DumpOptions())) == []
        )  # it has the pid of a process that has ended
    finally:
        ctypes.CDLL(None).msgctl(queue, 0, None)
