"""Threads that block the signal with which they are parked, or come to do so at the worst moment:
each is parked, and has its own mask afterwards.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from errno import EAGAIN
from pathlib import Path

import pytest

from icecore.host.kernel import ptrace
from icecore.host.resident import signals
from icecore.host.resident.client import ResidentFailed, State
from tests.fakes.machine import Machine, Target, until

PARK_SIGNAL = 33
ITS_BIT = 1 << (PARK_SIGNAL - 1)
ALL = (1 << 64) - 1
OF_THE_KERNEL = 1 << 8 | 1 << 18  # SIGKILL and SIGSTOP, which nobody blocks
ANOTHER = 40
TGKILL = {"x86_64": 234, "aarch64": 131}


def signal_set(target: Target, thread: int, line: str) -> int:
    """``SigBlk`` or ``SigPnd`` of a thread."""
    text = Path(f"/proc/{target.pid}/task/{thread}/status").read_text()
    return int(text.partition(f"\n{line}:\t")[2].split()[0], 16)


def is_parked_and_goes_on_with(target: Target, thread: int, mask: int) -> None:
    """It blocks just these signals when it has left the handler."""
    target.agent.go()
    # With all blocked it looks the same in the handler, where the second of two signals is pending.
    until(
        lambda: (
            signal_set(target, thread, "SigBlk") == mask & ~OF_THE_KERNEL
            and not signal_set(target, thread, "SigPnd") & ITS_BIT
        ),
        5.0,
    )
    target("_stop.set()")


@pytest.fixture
def resident(target: Target) -> Target:
    """With an agent."""
    assert target("alloc(2 * MIB)")[0] == 0
    return target


@pytest.mark.parametrize("mask", [ALL, ITS_BIT])
def test_a_thread_that_blocks_the_signal_is_parked(resident: Target, mask: int) -> None:
    thread = resident(f"masked({mask})")
    for _ in range(3):
        assert resident.agent.park() == 2
        resident.agent.go()
    is_parked_and_goes_on_with(resident, thread, mask)


def test_a_thread_that_blocks_the_signal_once_it_was_sent_is_parked(resident: Target) -> None:
    """It is pending for ever then, and the thread had been seen not to block it."""
    thread = resident("masked(0)")
    with ThreadPoolExecutor(1) as pool:
        with ptrace.standing(thread, 1.0) as stands:
            assert stands
            parked = pool.submit(resident.agent.park, 5.0)
            until(lambda: signal_set(resident, thread, "SigPnd") & ITS_BIT)
            assert ptrace.set_mask(thread, ALL)
        assert parked.result() == 2
    is_parked_and_goes_on_with(resident, thread, ALL)


def late(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> None:
    """The next time that threads are helped, something happens between the report and that."""
    real = signals.reach

    def reach(pid: int, threads: Iterable[int], number: int) -> list[int]:
        monkeypatch.setattr(signals, "reach", real)
        meanwhile()
        return real(pid, threads, number)

    monkeypatch.setattr(signals, "reach", reach)


def test_a_thread_that_is_helped_after_another_round_began_has_its_mask(
    resident: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = resident(f"masked({ALL})")

    def another_round() -> None:
        resident.agent.go()
        with suppress(ResidentFailed):  # for shorter than a thread is watched that blocks signals
            resident.agent.park(0.005)

    late(monkeypatch, another_round)
    assert resident.agent.park() == 2
    is_parked_and_goes_on_with(resident, thread, ALL)


def test_a_thread_that_is_helped_when_it_needs_no_help_any_more_has_its_mask(
    resident: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of one that the C library was just making another thread in."""
    thread = resident(f"masked({ALL}, 0.3)")
    late(monkeypatch, lambda: until(lambda: signal_set(resident, thread, "SigBlk") == 0))
    assert resident.agent.park() == 2
    is_parked_and_goes_on_with(resident, thread, 0)


def test_other_signals_reach_a_thread_that_is_helped(machine: Machine, resident: Target) -> None:
    """Not one of them is lost, and none of their handlers returns to another mask than before."""
    thread = resident(f"masked({ITS_BIT})")
    (machine.root / "arrived").touch()
    resident(
        f"[globals().update(signal=__import__('signal'), arrived=os.open({str(machine.root / 'arrived')!r}, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)),"
        f" signal.signal({ANOTHER}, lambda *_: None), signal.set_wakeup_fd(arrived)] and 0"
    )
    sent, done = [0], threading.Event()

    def send() -> None:
        tgkill = ctypes.CDLL(None).syscall
        while not done.is_set():
            sent[0] += tgkill(TGKILL[os.uname().machine], resident.pid, thread, ANOTHER) == 0
            done.wait(0.0001)

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        for _ in range(500):
            assert signals.reach(resident.pid, [thread], PARK_SIGNAL) == []
        done.set()
        sending.result()
    assert sent[0] > 100
    until(lambda: (machine.root / "arrived").stat().st_size == sent[0], 5.0)
    assert resident.agent.park() == 2
    is_parked_and_goes_on_with(resident, thread, ITS_BIT)


def test_a_thread_that_cannot_be_stopped_is_let_go(
    machine: Machine, resident: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts a program, and waits in the kernel, with all signals blocked, until that has begun."""
    monkeypatch.setattr(signals, "_STOP_SECONDS", 0.2)
    fifo = machine.root / "fifo"
    os.mkfifo(fifo)
    resident.say(
        f"os.posix_spawn('/bin/true', ['true'], {{}}, file_actions=[(os.POSIX_SPAWN_OPEN, 9, {str(fifo)!r}, os.O_RDONLY, 0)]) > 0"
    )
    until(lambda: signal_set(resident, resident.pid, "SigBlk") & ITS_BIT)
    with pytest.raises(ResidentFailed, match=str(resident.pid)) as caught:
        resident.agent.park()
    assert caught.value.code == EAGAIN
    assert resident.agent.report().state == State.RUNNING
    os.close(os.open(fifo, os.O_WRONLY))
    assert resident.read() is True
    assert resident.agent.park() == 1
    resident.agent.go()


def test_a_process_whose_first_thread_has_ended_is_parked(resident: Target) -> None:
    """It stays in the list of threads."""
    leave = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
    resident(f"[threading.Thread(target=main).start(), ctypes.CDLL(None).syscall({leave}, 0)]")
    until(lambda: "zombie" in Path(f"/proc/{resident.pid}/status").read_text())
    assert resident.agent.park() == 1
    resident.agent.go()
    assert resident("1 + 1") == 2


SLEEPER = """
#include <poll.h>
#include <time.h>
static volatile int here;
static double now(void)
{
	struct timespec at;
	clock_gettime(CLOCK_MONOTONIC, &at);
	return at.tv_sec + at.tv_nsec / 1e9;
}
static __attribute__((noinline)) void deeper(int milliseconds)
{
	volatile char room[256];
	room[here] = 0;
	poll(0, 0, milliseconds);
	here = room[here];
}
void sleep_below(void *old, int moves, double seconds)
{
	void *volatile words[8];
	for (int i = 0; i < 8; i++)
		words[i] = old;
	for (double end = now() + seconds; now() < end;) {
		poll(0, 0, moves ? 1 : 60000); /* also ends for a signal */
		if (moves)
			deeper(1);
	}
	words[0] = words[1];
}
"""


@pytest.mark.parametrize("moving", [[False], [True], [False, True], [True, False]])
def test_only_threads_that_move_are_waited_for_to_leave_the_driver(
    machine: Machine, resident: Target, moving: list[bool]
) -> None:
    """A thread that sleeps with an old driver address on its stack seems to be inside for ever."""
    source, library = machine.root / "sleeper.c", machine.root / "sleeper.so"
    source.write_text(SLEEPER)
    subprocess.run(
        ["gcc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60
    )
    for moves in moving:
        words = (
            f"ctypes.cast(cuda.cuMemsetD8_v2, ctypes.c_void_p), {int(moves)}, ctypes.c_double(30)"
        )
        resident(
            f"threading.Thread(target=lambda: ctypes.CDLL({str(library)!r}).sleep_below({words}), daemon=True).start()"
        )
    time.sleep(0.1)
    taken = []
    for _ in range(5):  # on a busy machine it may not run for a while
        began = time.monotonic()
        assert resident.agent.park(10.0, patience=0.3) == 1
        taken.append(time.monotonic() - began)
        assert resident.agent.park(10.0) == 1 + len(moving)
        resident.agent.go()
    if any(moving):
        assert sorted(taken)[2] >= 0.3, taken
    else:
        assert min(taken) < 0.1, taken
