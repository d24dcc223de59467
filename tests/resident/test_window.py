"""Memory taken away and given back: under load, with the keeper or the client dying, and through a
kill.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import resource
import signal
import socket
import subprocess
import time
from contextlib import suppress
from errno import EAGAIN, EINVAL, EMFILE, ENOTCONN
from pathlib import Path

import pytest

from icecore.errors import IcecoreError
from icecore.host.cuda.api import LockTimeout
from icecore.host.resident.client import Agent, ResidentFailed, State
from icecore.host.resident.keeper import keeper_path
from icecore.host.resident.window import give_back, take_away
from tests.fakes.machine import MIB, Machine, Process, Target, gone, until

from .conftest import NewMachine


def take(process: Process, lease: float = 30.0) -> int:
    return take_away(process.agent, process.lock, process.unlock, lease=lease)


def digests(machine: Machine, token: bytes) -> dict[int, str]:
    """Of every allocation of a process, read through the keeper's descriptors."""
    found = {}
    for one, descriptor in machine.keeper.take(token):
        with mmap.mmap(descriptor, one.size, prot=mmap.PROT_READ) as memory:
            found[one.identity] = hashlib.sha256(memory).hexdigest()
        os.close(descriptor)
    return found


@pytest.fixture
def loaded(machine: Machine, target: Target) -> tuple[Target, int, str]:
    """A process with 8 MiB of known contents: its address and hash."""
    address = target("alloc(8 * MIB)")[1]
    assert not target.agent.report().counts.unheld
    return target, address, target(f"fill({address}, 8 * MIB, 7)")


def test_memory_is_unmapped_in_the_window_and_the_same_after_it(
    machine: Machine, loaded: tuple[Target, int, str]
) -> None:
    target, address, digest = loaded
    target("alloc(1 * MIB)")
    token = target.agent.report().token
    for _ in range(3):
        assert take(target) == 8 * MIB
        report = target.agent.report()
        assert (report.state, report.token) == (State.UNMAPPED, token)
        # No descriptor of the GPU and no connection is left that a checkpoint would meet.
        links = [
            os.readlink(f"/proc/{target.pid}/fd/{fd}")
            for fd in os.listdir(f"/proc/{target.pid}/fd")
        ]
        assert not [link for link in links if "gpu0" in link]
        assert sum("socket:" in link for link in links) == 1
        assert list(digests(machine, token).values()) == [digest]
        with pytest.raises(ResidentFailed) as caught:
            target.agent.go()
        assert caught.value.code == EINVAL
        give_back(target.agent)
        assert target(f"hashed({address}, 8 * MIB)") == digest
        until(lambda: target.agent.report().counts.unheld == 0)
    assert target(f"[free({address}), alloc(62 * MIB)[0]]") == [0, 0]


def test_local_memory_is_given_back_for_a_window(loaded: tuple[Target, int, str]) -> None:
    target, _, _ = loaded
    assert target("cuda.cuCtxSetLimit(0, ctypes.c_size_t(2048))") == 0
    for _ in range(2):
        take(target)
        give_back(target.agent)
        assert target("[stack_limit(), least_stack()]") == [2048, 0]
    # A limit that is small already is the application's own.
    assert target("cuda.cuCtxSetLimit(0, ctypes.c_size_t(96))") == 0
    take(target)
    give_back(target.agent)
    assert target("[stack_limit(), least_stack()]") == [96, 0]


def test_local_memory_comes_back_where_a_window_is_cancelled(
    loaded: tuple[Target, int, str],
) -> None:
    target, address, digest = loaded
    take(target, lease=0.5)
    # Nobody says anything: the lease ends, and the parked process answers.
    assert target("[stack_limit(), least_stack()]") == [1024, 0]
    assert target(f"hashed({address}, 8 * MIB)") == digest


def scattered(machine: Machine, soft: int, hard: int) -> tuple[Target, list[int], list[str]]:
    """A process with 120 allocations, and a limit of descriptors; their addresses and hashes."""
    target = machine.target()
    resource.prlimit(target.pid, resource.RLIMIT_NOFILE, (soft, hard))
    target("start()")
    addresses = target("[alloc(2 * MIB)[1] for _ in range(120)]")
    return target, addresses, target(f"[fill(at, 4096, at) for at in {addresses}]")


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("hard", [1000, 330])
def test_more_allocations_than_free_descriptors(
    new_machine: NewMachine, given: bool, hard: int
) -> None:
    """Each comes back as a descriptor, beyond the application's own limit; of its own it can have
    as many as before.
    """
    machine = new_machine(memory=256 * MIB)
    target, addresses, contents = scattered(machine, 200, hard)
    opened = "(lambda files: [[f.fileno() for f in files], [f.close() for f in files]])([open('/dev/null') for _ in range(50)])[0]"
    for _ in range(2):
        take(target)
        held = (
            {one.identity: fd for one, fd in machine.keeper.take(target.agent.report().token)}
            if given
            else {}
        )
        give_back(target.agent, held)
        for descriptor in held.values():
            os.close(descriptor)
        assert target(f"[hashed(at, 4096) for at in {addresses}]") == contents
        soft, _ = resource.prlimit(target.pid, resource.RLIMIT_NOFILE)
        assert max(target(opened)) < soft
        assert soft == 200 or hard == 330  # where there is no room above its own, it is given more
        until(lambda: target.agent.report().counts.unheld == 0)
    machine.kill_keeper()
    machine.start_keeper()  # it gets the descriptors, of which the driver makes no others
    until(lambda: target.agent.report().counts.unheld == 0)


def test_more_allocations_than_a_process_may_have_descriptors(new_machine: NewMachine) -> None:
    """That is known before anything is released."""
    target, addresses, contents = scattered(new_machine(memory=256 * MIB), 220, 220)
    with pytest.raises(ResidentFailed, match=r"120 allocations.* 220 ") as caught:
        take(target)
    assert caught.value.code == EMFILE
    report = target.agent.report()
    assert (report.state, report.counts.cancelled, report.counts.windows) == (State.RUNNING, 1, 0)
    assert target(f"[hashed(at, 4096) for at in {addresses}]") == contents
    assert target(f"[free(at) for at in {addresses[60:]}]") == [0] * 60
    take(target)
    give_back(target.agent)
    assert target(f"[hashed(at, 4096) for at in {addresses[:60]}]") == contents[:60]


def test_where_no_descriptors_are_left_those_that_were_taken_are_closed(
    new_machine: NewMachine,
) -> None:
    """Whatever the limit was when its memory was taken away; with a better one it comes back."""
    target, addresses, contents = scattered(new_machine(memory=256 * MIB), 200, 1000)
    take(target)
    there = len(os.listdir(f"/proc/{target.pid}/fd"))
    limits = resource.prlimit(target.pid, resource.RLIMIT_NOFILE, (100, 1000))
    for _ in range(2):
        with pytest.raises(ResidentFailed) as caught:
            target.agent.map()
        assert caught.value.code == EMFILE
        assert len(os.listdir(f"/proc/{target.pid}/fd")) == there
    resource.prlimit(target.pid, resource.RLIMIT_NOFILE, limits)
    give_back(target.agent)
    assert target(f"[hashed(at, 4096) for at in {addresses}]") == contents


def blocked(process: Process) -> set[int]:
    """The threads that block the signal with which they are parked, and not just for a moment."""
    found: list[set[int]] = []
    for _ in range(20):
        now = set()
        for name in os.listdir(f"/proc/{process.pid}/task"):
            with suppress(OSError):
                text = Path(f"/proc/{process.pid}/task/{name}/status").read_text()
                if int(text.partition("SigBlk:\t")[2].split()[0], 16) >> 32 & 1:
                    now.add(int(name))
        found.append(now)
        time.sleep(0.01)
    return set.intersection(*found)


@pytest.mark.parametrize(
    ("gpus", "windows"),
    [(2, 6), *(pytest.param(gpus, 200, marks=pytest.mark.torture) for gpus in (1, 2))],
)
def test_many_windows_under_load(new_machine: NewMachine, gpus: int, windows: int) -> None:
    """Threads that are born, die, fork, sleep, block every signal, stand in the driver or wait for
    its lock.
    """
    machine = new_machine(gpus=gpus, memory=96 * MIB)
    process = machine.stress(4, 3, 4, gpus)
    token = process.agent.report().token
    until(lambda: len(blocked(process)) == 1)
    blocking = blocked(process)
    for number in range(windows):
        take(process)
        before = digests(machine, token)
        if number % 10 == 0:
            time.sleep(0.02)
        assert digests(machine, token) == before
        assert len(before) >= 4 * 2 + 1
        give_back(process.agent)
    until(
        lambda: blocked(process) == blocking
    )  # nobody has another mask than before, once all have left the handler
    process.say("")
    rounds, births, forks = (int(word) for word in process.line().split())
    assert min(rounds, births, forks) > 0
    assert process.agent.report().counts.windows >= windows
    assert process.finish() == 0, process.log.read_text()
    assert process.line().startswith("done")
    until(lambda: machine.used() == 0)


@pytest.mark.parametrize("windows", [1, pytest.param(10, marks=pytest.mark.torture)])
def test_a_lock_that_is_never_had_under_load_is_had_of_parked_threads(
    new_machine: NewMachine, windows: int
) -> None:
    """There is always somebody in one of the driver's calls, but nobody is always."""
    machine = new_machine(unfair=True)
    target = machine.target(FAKE_CUDA_SLOW="30000")
    target("start()")
    addresses = [target("alloc(2 * MIB)")[1] for _ in range(12)]
    busy = "lambda at: [cuda.cuMemsetD8_v2(ctypes.c_ulonglong(at), 1, ctypes.c_size_t(4096)) for _ in iter(_stop.is_set, True)]"
    for at in addresses:
        target(f"threading.Thread(target={busy}, args=({at},)).start()")
    for _ in range(60):  # seldom all are out at once, and it is had
        try:
            target.lock(0.5)
        except LockTimeout:
            break
        target.unlock()
    else:
        pytest.fail("the lock is always had")
    for _ in range(windows):
        assert take_away(target.agent, target.lock, target.unlock, seconds=90.0) == 24 * MIB
        give_back(target.agent)
    target("_stop.set()")


def test_a_window_waits_for_the_end_of_a_stream_capture(loaded: tuple[Target, int, str]) -> None:
    """It would make it fail."""
    target, address, digest = loaded
    target("globals().update(stream=ctypes.c_void_p(77))")
    assert target("cuda.cuStreamBeginCapture_v2(stream, 0)") == 0
    with pytest.raises(ResidentFailed) as caught:
        take_away(target.agent, target.lock, target.unlock, seconds=0.5)
    assert caught.value.code == EAGAIN
    assert target("cuda.cuStreamEndCapture(stream, ctypes.byref(ctypes.c_void_p()))") == 0
    take(target)
    give_back(target.agent)
    assert target(f"hashed({address}, 8 * MIB)") == digest


def test_a_new_keeper_gets_everything(machine: Machine, loaded: tuple[Target, int, str]) -> None:
    """Also what was mapped again after a window, which the driver cannot export a second time."""
    target, address, digest = loaded
    for _ in range(2):
        token = target.agent.report().token
        machine.kill_keeper()
        assert target("alloc(2 * MIB)")[0] == 0
        machine.start_keeper()
        until(lambda: target.agent.report().counts.unheld == 0)
        assert digests(machine, token)[1] == digest
        take(target)
        give_back(target.agent)
    assert target(f"hashed({address}, 8 * MIB)") == digest


def test_without_a_keeper_nothing_is_taken_away(
    machine: Machine, loaded: tuple[Target, int, str]
) -> None:
    target, address, digest = loaded
    machine.kill_keeper()
    with pytest.raises(ResidentFailed) as caught:
        take(target)
    assert caught.value.code == ENOTCONN
    assert target(f"hashed({address}, 8 * MIB)") == digest
    assert target.agent.report().state == State.RUNNING


def test_the_keeper_dies_in_the_window(machine: Machine, loaded: tuple[Target, int, str]) -> None:
    """Whoever dumps holds the descriptors, too."""
    target, address, digest = loaded
    take(target)
    descriptors = {one.identity: fd for one, fd in machine.keeper.take(target.agent.report().token)}
    machine.kill_keeper()
    with pytest.raises(ResidentFailed):
        target.agent.map()
    assert target.agent.report().state == State.UNMAPPED
    give_back(target.agent, descriptors)
    for fd in descriptors.values():
        os.close(fd)
    assert target(f"hashed({address}, 8 * MIB)") == digest
    machine.start_keeper()
    until(lambda: target.agent.report().counts.unheld == 0)


@pytest.mark.parametrize("parked_only", [True, False])
def test_a_client_that_says_nothing_more_is_not_waited_for(
    loaded: tuple[Target, int, str], parked_only: bool
) -> None:
    target, address, digest = loaded
    if parked_only:
        target.lock()
        target.agent.park(lease=0.5)
        target.unlock()
    else:
        take(target, lease=0.5)
    assert target(f"hashed({address}, 8 * MIB)") == digest  # answered only once it runs again
    until(lambda: target.agent.report().state == State.RUNNING)


def test_a_lease_does_not_run_while_the_process_is_frozen(loaded: tuple[Target, int, str]) -> None:
    target, _, _ = loaded
    take(target, lease=2.0)
    os.kill(target.pid, signal.SIGSTOP)
    time.sleep(2.5)
    os.kill(target.pid, signal.SIGCONT)
    time.sleep(0.3)
    assert target.agent.report().state == State.UNMAPPED
    give_back(target.agent)


def test_what_fails_half_way_is_undone(machine: Machine, target: Target) -> None:
    addresses = [target("alloc(2 * MIB)")[1] for _ in range(5)]
    contents = [target(f"fill({at}, 2 * MIB, {at})") for at in addresses]
    (machine.cuda / "fail-unmap").touch()
    with pytest.raises(ResidentFailed, match="CUDA error 999"):
        take(target)
    assert [target(f"hashed({at}, 2 * MIB)") for at in addresses] == contents
    (machine.cuda / "fail-unmap").unlink()
    counts = target.agent.report().counts
    assert (counts.windows, counts.cancelled) == (0, 1)
    take(target)
    give_back(target.agent)
    assert [target(f"hashed({at}, 2 * MIB)") for at in addresses] == contents


def test_memory_of_a_context_that_ended_unseen(
    machine: Machine, loaded: tuple[Target, int, str]
) -> None:
    """Its end cannot be waited for: no window, but nothing was taken away either."""
    target, address, digest = loaded
    context = target("start()")
    other = target("alloc(2 * MIB)")[1]
    content = target(f"fill({other}, 2 * MIB, 3)")
    assert target(f"cuda.cuGreenCtxDestroy(ctypes.c_void_p({context}))") == 0
    for _ in range(2):
        with pytest.raises(ResidentFailed, match="CUDA error 201"):
            take(target, lease=1.0)
        assert target.agent.report().state == State.RUNNING
    assert target(f"[hashed({address}, 8 * MIB), hashed({other}, 2 * MIB)]") == [digest, content]
    assert target(f"free({other})") == 201
    take(target)
    give_back(target.agent)
    assert target(f"hashed({address}, 8 * MIB)") == digest


def test_a_context_that_cannot_be_made_current_after_the_window(
    machine: Machine, loaded: tuple[Target, int, str]
) -> None:
    """Importing and mapping is tried all the same: nothing else brings the process back."""
    target, address, digest = loaded
    take(target)
    (machine.cuda / "fail-current").touch()
    give_back(target.agent)
    (machine.cuda / "fail-current").unlink()
    assert target(f"hashed({address}, 8 * MIB)") == digest


@pytest.mark.parametrize("name", ["cuda00001400006", "cuda-train", "train"])
def test_a_program_is_parked_whatever_its_name(loaded: tuple[Target, int, str], name: str) -> None:
    """The driver's own threads, which must not be, are known by theirs."""
    target, _, _ = loaded
    target(f"open('/proc/self/comm', 'w').write({name!r})")
    target(
        f"threading.Thread(target=lambda: [open(f'/proc/self/task/{{threading.get_native_id()}}/comm', 'w').write({name!r})] and _stop.wait(60)).start()"
    )
    target.lock()
    assert target.agent.park() == 2
    target.unlock()
    target.agent.go()
    target("_stop.set()")


@pytest.mark.parametrize(
    ("name", "parked"),
    [
        *(
            (name, True)
            for name in (
                "cuda-worker",
                "cuda-EvtHandl",
                "cuda0",
                "cuda0-copies",
                "cuda0000140000",
                "cuda0000140000g",
                "cudaworker",
            )
        ),
        *((name, False) for name in ("cuda-EvtHandlr", "cuda00001400006", "cuda0000e00004a")),
    ],
)
def test_a_thread_is_parked_unless_it_has_one_of_the_drivers_names(
    loaded: tuple[Target, int, str], name: str, parked: bool
) -> None:
    target, _, _ = loaded

    def called_so() -> int:
        return [
            (task / "comm").read_text() for task in Path(f"/proc/{target.pid}/task").iterdir()
        ].count(name + "\n")

    before = called_so()
    target(
        f"threading.Thread(target=lambda: [open(f'/proc/self/task/{{threading.get_native_id()}}/comm', 'w').write({name!r})] and _stop.wait(60)).start()"
    )
    until(lambda: called_so() > before)
    assert target.agent.park() == 1 + parked
    target.agent.go()
    target("_stop.set()")


def test_while_a_thread_holds_the_loaders_lock_nothing_is_taken_away(
    machine: Machine, loaded: tuple[Target, int, str]
) -> None:
    """The driver would wait for it for ever: another moment is found."""
    target, address, digest = loaded
    source, library = machine.root / "slow.c", machine.root / "slow.so"
    source.write_text(
        "#include <unistd.h>\n__attribute__((constructor)) static void slow(void) { for (int i = 0; i < 12; i++) usleep(100000); }\n"
    )
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60
    )
    target(
        f"threading.Thread(target=lambda: ctypes.CDLL(None).dlopen({os.fsencode(library)!r}, 2)).start()"
    )
    until(lambda: str(library) in Path(f"/proc/{target.pid}/maps").read_text())
    take(target)
    give_back(target.agent)
    counts = target.agent.report().counts
    assert counts.windows == 1
    assert counts.cancelled >= 1
    assert target(f"hashed({address}, 8 * MIB)") == digest


def test_the_c_librarys_use_of_the_signal_goes_on(loaded: tuple[Target, int, str]) -> None:
    """It makes every thread change its ids with it, ours too."""
    target, _, _ = loaded
    target("[threading.Thread(target=_stop.wait, args=(60,)).start() for _ in range(3)]")
    take(target)
    give_back(target.agent)
    target("os.setresgid(0, 12345, 0)")
    found = "sorted({open(f'/proc/self/task/{t}/status').read().split('Gid:')[1].split()[1] for t in os.listdir('/proc/self/task')})"
    assert target(found) == ["12345"]
    target("os.setresgid(0, 0, 0)")
    target("_stop.set()")


def test_memory_outlives_a_process_only_where_it_was_taken_away(
    machine: Machine, loaded: tuple[Target, int, str]
) -> None:
    target, _, digest = loaded
    token = target.agent.report().token
    take(target)
    give_back(target.agent)
    until(lambda: [one.retained for one in machine.keeper.processes()] == [False])
    take(target)
    target.end()
    until(lambda: [one.alive for one in machine.keeper.processes()] == [False])
    assert list(digests(machine, token).values()) == [digest]
    assert machine.used() == 8 * MIB
    machine.keeper.forget(token)
    assert (machine.used(), machine.keeper.processes()) == (0, [])


def test_what_is_freed_can_be_had_again_although_a_child_was_forked(
    machine: Machine, target: Target
) -> None:
    """After a window the process has descriptors of its memory: a child inherits them, and closes
    them once it has come to run.
    """
    source, library = machine.root / "slow.c", machine.root / "slow.so"
    source.write_text(
        "#include <pthread.h>\n#include <unistd.h>\nstatic void slow(void) { usleep(10000); }\n"
        "__attribute__((constructor)) static void load(void) { pthread_atfork(NULL, NULL, slow); }\n"
    )
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60
    )
    target(f"[ctypes.CDLL({str(library)!r})] and 0")
    address = target("alloc(40 * MIB)")[1]
    take(target)
    give_back(target.agent)
    child = target("(lambda child: child or __import__('signal').pause())(os.fork())")
    try:
        assert target(f"[free({address}), alloc(50 * MIB)[0]]") == [0, 0]
    finally:
        os.kill(child, signal.SIGKILL)
        target(f"os.waitpid({child}, 0)[0]")


def test_a_running_process_that_dies_frees_its_memory(
    machine: Machine, loaded: tuple[Target, int, str]
) -> None:
    loaded[0].end()
    until(lambda: machine.used() == 0)
    assert machine.keeper.processes() == []


def test_a_keeper_ends_once_it_is_of_no_use(
    machine: Machine, loaded: tuple[Target, int, str]
) -> None:
    pid = machine.keeper_pid()
    (machine.directory / "keeper").unlink()
    time.sleep(2.2)  # it looks every two seconds
    assert not gone(pid)  # it holds something
    loaded[0].end()
    until(lambda: gone(pid))


def test_an_idle_keeper_leaves_another_where_it_was(machine: Machine) -> None:
    """Nobody has come to it for five minutes but one that says nothing, and its path is a newer
    one's.
    """
    machine.kill_keeper()
    source, library, later = (
        machine.root / "clock.c",
        machine.root / "clock.so",
        machine.root / "later",
    )
    source.write_text(
        "#define _GNU_SOURCE\n#include <stdlib.h>\n#include <sys/syscall.h>\n#include <time.h>\n#include <unistd.h>\n"
        "int clock_gettime(clockid_t id, struct timespec *out) { int result = (int)syscall(SYS_clock_gettime, id, out);"
        ' if (!access(getenv("LATER"), F_OK)) out->tv_sec += 301; return result; }\n'
    )
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60
    )
    path = machine.directory / "keeper"
    older = subprocess.Popen(
        [str(keeper_path()), str(path)],
        env={**os.environ, "LD_PRELOAD": str(library), "LATER": str(later)},
        stdout=subprocess.PIPE,
    )
    try:
        assert older.stdout is not None
        assert older.stdout.readline() == b"ready\n"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
            silent.connect(str(path))
            path.unlink()
            machine.start_keeper()
            later.touch()
            assert older.wait(20) == 0
        assert machine.keeper.processes() == []
    finally:
        older.kill()
        older.wait(10)
        older.stdout.close()  # type: ignore[union-attr]


def test_an_application_that_closes_all_descriptors(
    machine: Machine, loaded: tuple[Target, int, str]
) -> None:
    """Ours are among them, and their numbers become the application's."""
    target, address, digest = loaded
    _, hard = resource.prlimit(target.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(target.pid, resource.RLIMIT_NOFILE, (1024, hard))  # what is kept lies above
    take(target)
    give_back(target.agent)
    target("os.closerange(3, 4096)")
    target(
        "globals().update(files=[open('/dev/shm/' + str(os.getpid()), 'w+') for _ in range(700)])"
    )
    other = target("alloc(2 * MIB)")
    assert other[0] == 0
    until(lambda: _reported(target.agent))
    assert target("[os.fstat(f.fileno()).st_size for f in files] == [0] * 700")
    target("os.unlink('/dev/shm/' + str(os.getpid()))")
    assert target(f"hashed({address}, 8 * MIB)") == digest


def test_memory_that_is_released_after_all_descriptors_were_closed(
    machine: Machine, loaded: tuple[Target, int, str]
) -> None:
    """The keeper learns that it is released, although nothing new is allocated."""
    target, address, _ = loaded
    target("os.closerange(3, 4096)")
    until(lambda: _reported(target.agent))
    assert target(f"free({address})") == 0
    until(lambda: machine.used() == 0)


def test_memory_that_is_released_between_two_connections(
    machine: Machine, loaded: tuple[Target, int, str]
) -> None:
    """The allocation connects again, and the keeper learns what was released before."""
    target, address, _ = loaded
    assert target(f"[os.closerange(3, 4096), free({address}), alloc(2 * MIB)[0]][1:]") == [0, 0]
    until(lambda: machine.used() == 2 * MIB)


def test_a_child_that_is_forked_during_an_export_keeps_no_memory(
    machine: Machine, target: Target
) -> None:
    with machine.pausing("cuMemExportToShareableHandle") as somebody_waits:
        address = target("alloc(40 * MIB)")[1]
        somebody_waits()  # the agent, half a second later
        child = target("(lambda child: child or __import__('signal').pause())(os.fork())")
    try:
        assert not target.agent.report().counts.unheld
        assert target(f"free({address})") == 0
        until(lambda: machine.used() == 0)
    finally:
        os.kill(child, signal.SIGKILL)
        target(f"os.waitpid({child}, 0)[0]")


def _reported(agent: Agent) -> bool:
    try:
        return agent.report().state == State.RUNNING
    except IcecoreError:  # its socket is being made anew
        return False
