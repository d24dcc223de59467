"""System calls that are made for us in another process: they take effect, and no thread there notices, whatever it was doing."""

from __future__ import annotations

import os
import platform
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from icecore.host import injection, procfs, ptrace
from icecore.host.cuda import huge

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="on x86-64 only"),
]

SIZE = 128 << 20
MADVISE, HUGEPAGE, NOHUGEPAGE = 28, 14, 15
THREADS = ("calls", "sleeping", "waiting", "reading", "watching", "polling", "asking", "computing")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/host/calls.c, compiled."""
    made = tmp_path_factory.mktemp("programs") / "calls"
    flags = ["-std=gnu11", "-O2", "-mno-red-zone", "-Wall", "-Wextra", "-Werror", "-o", str(made)]
    subprocess.run(["gcc", *flags, str(Path(__file__).with_name("calls.c")), "-lpthread"], check=True, timeout=60)
    return made


class Calls:
    """That program, running."""

    def __init__(self, command: list[str], names: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.pid = self._process.pid
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], 20)[0]
        self.address = int(self._process.stdout.readline().split()[1], 16)
        end = time.monotonic() + 20
        while set(self.threads()) != set(names):
            assert time.monotonic() < end
            time.sleep(0.001)

    def threads(self) -> dict[str, int]:
        """By name."""
        return {procfs.status(thread).name: thread for thread in procfs.threads(self.pid)}

    def flags(self) -> frozenset[str]:
        """VmFlags of its memory."""
        maps = procfs.read_maps(self.pid, vm_flags=True)
        return next(mapping.vm_flags for mapping in maps if mapping.start <= self.address < mapping.end)

    def ends_well(self) -> dict[str, int]:
        """It ends, and none of its threads has seen anything wrong; rounds of each."""
        out, errors = self._process.communicate(timeout=20)
        assert self._process.returncode == 0, errors.decode()
        return {name: int(rounds) for rounds, name in (line.split() for line in out.decode().splitlines())}

    def kill(self) -> None:
        """Whatever it does."""
        self._process.kill()
        self._process.communicate(timeout=20)


Start = Callable[..., Calls]


@pytest.fixture
def start(program: Path) -> Iterator[Start]:
    """Starts it."""
    started: list[Calls] = []

    def one(*before: str, only: str = "") -> Calls:
        names = (THREADS[0], only) if only else THREADS
        started.append(Calls([*before, str(program), str(SIZE), *names[1 if only else len(names) :]], names))
        return started[-1]

    yield one
    for calls in started:
        calls.kill()


def advise(calls: Calls, advice: int, only: str = "") -> int:
    arguments = (calls.address, SIZE, advice)
    return injection.execute(calls.pid, MADVISE, arguments, lambda thread: bool(only) and thread.name != only)


def test_no_thread_notices_that_it_made_calls(start: Start) -> None:
    calls = start()
    for number in range(50):
        for name in THREADS:
            advice = HUGEPAGE if number % 2 else NOHUGEPAGE
            assert advise(calls, advice, name) == 0
        if number % 10 < 2:
            assert ("hg" in calls.flags()) == (number % 2 == 1)
        time.sleep(0.002)  # so that all of them come to each place
    assert advise(calls, 9999) == -22  # EINVAL
    rounds = calls.ends_well()
    assert set(rounds) == set(THREADS[1:]) and all(rounds.values())


def test_signals_meanwhile_are_neither_lost_nor_early(start: Start) -> None:
    """SIGUSR2 is blocked by all threads but the main one; SIGSTOP cannot be, and SIGCONT ends what it began."""
    calls = start()
    sender = subprocess.Popen(
        [sys.executable, "-c", f"""
import os, signal, time
for _ in range(200):
    os.kill({calls.pid}, signal.SIGSTOP)
    time.sleep(0.001)
    os.kill({calls.pid}, signal.SIGCONT)
    time.sleep(0.001)
"""]
    )  # fmt: skip
    made = 0
    while sender.poll() is None:
        with suppress(injection.NotMade):
            made += advise(calls, HUGEPAGE) == 0
    assert made > 20
    assert not procfs.status(calls.pid).stopped
    calls.ends_well()


def test_a_process_that_is_stopped_stays_so(start: Start) -> None:
    calls = start()
    os.kill(calls.pid, signal.SIGSTOP)
    while not all(procfs.status(thread).state == "T" for thread in procfs.threads(calls.pid)):
        time.sleep(0.001)
    with pytest.raises(injection.NotMade, match="8 × stopped"):
        advise(calls, HUGEPAGE)
    assert all(procfs.status(thread).state == "T" for thread in procfs.threads(calls.pid))
    os.kill(calls.pid, signal.SIGCONT)
    calls.ends_well()


def test_threads_with_a_tracer_are_left_to_it(start: Start) -> None:
    calls = start()
    threads = calls.threads()

    def traced() -> None:
        with ptrace.standing(threads["sleeping"], 1.0) as stands:
            assert stands
            with pytest.raises(injection.NotMade, match="1 × traced"):
                advise(calls, HUGEPAGE, "sleeping")
            assert advise(calls, HUGEPAGE) == 0  # another one does it

    ptrace.apart(traced)
    calls.ends_well()


def test_a_thread_in_a_restartable_sequence_is_passed_over(start: Start) -> None:
    calls = start(only="section")
    refused = 0
    for _ in range(30):
        try:
            advise(calls, HUGEPAGE, "section")
        except injection.NotMade as error:
            assert "1 × restartable sequence" in str(error)
            refused += 1
    assert refused > 15
    assert advise(calls, HUGEPAGE) == 0
    calls.ends_well()


def test_a_filtered_process_is_left_alone(start: Start, tmp_path: Path) -> None:
    """Its filter might kill it for a call that it does not know."""
    filtered = f"""
import ctypes, os, sys
libc = ctypes.CDLL(None)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
code = (ctypes.c_uint64 * 6)(
    0x0000000000000020,                 # load the number
    {MADVISE} << 32 | 0x03000015,       # madvise? else allow
    32 << 32 | 0x20,                    # load its third argument
    {HUGEPAGE} << 32 | 0x01000015,      # else allow
    0x80000000 << 32 | 0x06,            # kill the process
    0x7fff0000 << 32 | 0x06,            # allow
)
program = Program(6, ctypes.addressof(code))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(program)) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""
    calls = start(sys.executable, "-c", filtered)
    with pytest.raises(injection.NotMade, match="8 × seccomp"):
        huge.advise(calls.pid, calls.address, SIZE)
    assert "hg" not in calls.flags()
    calls.ends_well()
