"""Memory that is released and asked for again and again costs next to nothing, and nobody can tell
that it stayed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from icecore.host.resident.window import give_back
from tests.fakes.machine import MIB, Machine, Target, until

from .conftest import NewMachine
from .test_window import digests, take

OUT_OF_MEMORY, INVALID = 2, 1
MOST = 64 * MIB
SIZE = 4 * MIB


@pytest.fixture
def address(target: Target) -> int:
    """Where memory lies that was released and stayed."""
    [address] = target(f"loop({SIZE}, 3)")
    assert spare(target) == (1, SIZE)
    return int(address)


def spare(target: Target) -> tuple[int, int]:
    """What stayed: how many allocations, bytes."""
    counts = target.agent.report().counts
    return counts.spare, counts.spare_bytes


def calls(target: Target, expression: str) -> dict[str, int]:
    """What the driver is asked meanwhile."""
    before, _, after = target(f"[calls(), {expression}, calls()]")
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("some", [1, 5])
def test_a_loop_asks_neither_driver_nor_keeper(machine: Machine, target: Target, some: int) -> None:
    """But for the context, which is waited for at each release, as the driver does."""
    first = target(f"loop({SIZE}, 3, {some})")
    with stopped(machine.keeper_pid()):
        asked = calls(target, f"loop({SIZE}, 200, {some})")
    rounds = 200 * some
    assert asked == {
        "cuCtxSynchronize": rounds,
        "all": 5 * rounds,
    }  # and which context and device it is
    assert sorted(target(f"loop({SIZE}, 1, {some})")) == sorted(first)
    counts = target.agent.report().counts
    assert (counts.resident, counts.spare, counts.spare_bytes, counts.unheld) == (
        0,
        some,
        some * SIZE,
        0,
    )
    assert counts.allocations == counts.frees == 204 * some
    assert counts.recycled == 202 * some
    assert target.agent.allocations() == []
    until(lambda: machine.used() == 0)  # it is given back although nobody allocates any more
    assert spare(target) == (0, 0)
    assert machine.keeper.allocations(target.agent.report().token) == []
    assert target(f"[loop({SIZE}, 3), 0][1]") == 0


def test_what_is_not_asked_for_again_is_given_back_at_once(
    machine: Machine, target: Target
) -> None:
    """As by a program that makes room, or ends a phase."""
    target(f"loop({SIZE}, 1, 9)")
    target("[loop(size * MIB, 1) for size in (2, 6, 8, 10)]")
    assert (machine.used(), spare(target)) == (0, (0, 0))


@pytest.mark.parametrize(("mib", "some", "stay"), [(2, 48, 32), (16, 9, 4), (64, 2, 1), (66, 2, 0)])
def test_how_much_stays(new_machine: NewMachine, mib: int, some: int, stay: int) -> None:
    machine = new_machine(gpus=2, memory=160 * MIB)
    target = machine.target()
    target("[globals().update(one=start(0), two=start(1)), current(one)]")
    target(f"loop({mib} * MIB, 4, {some})")
    assert spare(target) == (stay, stay * mib * MIB)
    assert machine.used() == stay * mib * MIB <= MOST
    target("current(two)")
    target("loop(2 * MIB, 4, 2)")  # each device has a share of its own, the number is of all
    more = min(2, 32 - stay)
    assert spare(target) == (stay + more, (stay * mib + 2 * more) * MIB)
    assert target("[current(one), alloc(160 * MIB)[0]]") == [0, 0]


ASKED = {
    "cuMemAlloc": "alloc(62 * MIB)",
    "small ones": "[alloc(MIB) for _ in range(62)][-1]",
    "pitch": "pitched(MIB, 62)",
    "pitch, small": "[pitched(MIB, 1) for _ in range(62)][-1]",
    "a pool": "alloc(62 * MIB, lambda out, size: cuda.cuMemAllocAsync(out, size, None))",
    "managed": "alloc(62 * MIB, lambda out, size: cuda.cuMemAllocManaged(out, size, 1))",
    "cuMemCreate": "create(62 * MIB)",
    "in a capture": "[cuda.cuStreamBeginCapture_v2(ctypes.c_void_p(77), 2), alloc(62 * MIB)[0]]",
}


@pytest.mark.parametrize("how", ASKED)
def test_before_anybody_goes_without_it_is_given_back(
    machine: Machine, target: Target, how: str
) -> None:
    target("loop(20 * MIB, 3, 2)")
    assert spare(target) == (2, 40 * MIB)
    assert target(ASKED[how])[0] == 0
    assert spare(target) == (0, 0)
    assert target("[alloc(4 * MIB)[0], create(4 * MIB)[0]]") == [OUT_OF_MEMORY] * 2
    assert target("info()[0]") == 2 * MIB or how == "pitch, small"


def test_as_much_can_be_had_as_without(machine: Machine) -> None:
    answers = []
    for resident in (True, False):
        target = machine.target(resident)
        target("start()")
        target("loop(20 * MIB, 3, 2)")
        answers.append(target("[alloc(2 * MIB)[0] for _ in range(40)]"))
        target.end()
        until(lambda: machine.used() == 0)
    assert answers[0] == answers[1]


def test_what_was_released_is_not_known_any_more(machine: Machine) -> None:
    ways = (
        "free(at)",
        "free(at + 4096)",
        "free(at, lambda a: cuda.cuMemFreeAsync(a, None))",
        "told(at)",
        "told(at + 2 * MIB + 512)",
        "vm('cuMemUnmap', at, 4 * MIB)",
        "access(at, 4 * MIB)",
        "vm('cuMemGetHandleForAddressRange', ctypes.byref(ctypes.c_int()), at, 4 * MIB, 1, 0)",
        "ipc_close(at)",
        "[current(None), free(at), told(at), current(context)]",
    )
    answers = []
    for resident in (True, False):
        target = machine.target(resident)
        target("globals().update(context=start())")
        live = target(f"alloc({SIZE})")[1]
        assert target(f"told({live})")[:4] == [0, 0, 2, 0]
        target(f"globals().update(at=loop({SIZE}, 3)[0])")
        answers.append([target(way) for way in ways])
        if resident:
            assert spare(target) == (1, SIZE)  # unharmed
            assert calls(target, f"[loop({SIZE}, 3) == [at]]").get("cuMemCreate") is None
            at = target(f"globals().update(at=alloc({SIZE})[1]) or at")
            assert target("told(at)")[:4] == [0, 0, 2, 0]
            assert target("[free(at), free(at)]") == [0, INVALID]
            assert at != live
        target.end()
        until(lambda: machine.used() == 0)
    assert answers[0] == answers[1]


def test_the_size_is_the_one_that_was_asked_for(
    machine: Machine, target: Target, address: int
) -> None:
    token = target.agent.report().token
    for requested in (SIZE - 5, SIZE, 2 * MIB + 1):
        assert target(f"alloc({requested})") == [0, address]
        [found] = target.agent.allocations()
        assert (found.requested, found.size) == (requested, SIZE)
        until(lambda found=found: machine.keeper.allocations(token) == [found])
        assert target(f"free({address})") == 0
    assert target("alloc(2 * MIB)")[1] != address


def test_a_handle_of_memory_that_was_released_opens_no_other(
    machine: Machine, target: Target, address: int
) -> None:
    other = machine.target()
    other("start()")
    assert target(f"alloc({SIZE})") == [0, address]
    code, handle = target(f"ipc_handle({address})")
    code, there = other(f"ipc_open({handle!r})")
    assert code == 0
    assert target(f"free({address})") == 0
    assert spare(target) == (0, 0)
    fresh = target(f"alloc({SIZE})")[1]
    digests = [other(f"fill({there}, {SIZE}, 1)"), target(f"fill({fresh}, {SIZE}, 2)")]
    assert [other(f"hashed({there}, {SIZE})"), target(f"hashed({fresh}, {SIZE})")] == digests
    assert other(f"[ipc_close({there}), ipc_open({handle!r})]") == [0, [400, 0]]
    assert target(f"ipc_handle({fresh})")[1] != handle
    assert target(f"free({fresh})") == 0


@pytest.mark.parametrize(
    "call",
    [
        "cuda.cuPointerSetAttribute(ctypes.byref(ctypes.c_int(1)), 6, ctypes.c_ulonglong({} + 512))",
        "vm('cuMemGetHandleForAddressRange', ctypes.byref(ctypes.c_int()), {}, 4 * MIB, 1, 0)",
    ],
)
def test_memory_that_is_unlike_a_fresh_one_does_not_stay(
    target: Target, address: int, call: str
) -> None:
    assert target(f"alloc({SIZE})") == [0, address]
    assert target(call.format(address)) == 0
    assert target(f"free({address})") == 0
    assert spare(target) == (0, 0)
    assert target(f"loop({SIZE}, 2)")
    assert spare(target) == (1, SIZE)


def test_only_what_the_whole_context_has_been_waited_for_stays(
    machine: Machine, target: Target, address: int
) -> None:
    assert target(f"alloc({SIZE})") == [0, address]
    assert target(f"free({address}, lambda at: cuda.cuMemFreeAsync(at, None))") == 0
    assert (machine.used(), spare(target)) == (0, (0, 0))


def test_a_window_leaves_nothing_of_it(machine: Machine, target: Target, address: int) -> None:
    """Its contents are nobody's. What lives has been through windows itself in the second round,
    and its descriptor is kept.
    """
    token = target.agent.report().token
    live = target(f"alloc({2 * SIZE})")[1]
    for number in range(3):
        digest = target(f"fill({live}, {2 * SIZE}, {number})")
        assert take(target) == 2 * SIZE
        assert list(digests(machine, token).values()) == [digest]
        assert machine.used() == 2 * SIZE
        give_back(target.agent)
        assert target(f"hashed({live}, {2 * SIZE})") == digest
        assert spare(target) == (0, 0)
        assert target(f"free({live})") == 0
        live = target(f"[alloc({2 * SIZE}), loop({SIZE}, 3)][0][1]")
        if number:  # the size has been asked for again
            assert spare(target) == (1, SIZE)
        until(lambda: target.agent.report().counts.unheld == 0)


def test_memory_that_has_been_through_a_window_is_recycled(
    machine: Machine, target: Target, address: int
) -> None:
    assert target(f"alloc({SIZE})") == [0, address]
    take(target)
    give_back(target.agent)
    assert target(f"free({address})") == 0
    assert spare(target) == (1, SIZE)
    assert target(f"alloc({SIZE})") == [0, address]
    digest = target(f"fill({address}, {SIZE}, 5)")
    machine.kill_keeper()
    machine.start_keeper()
    until(lambda: target.agent.report().counts.unheld == 0)
    take(target)
    assert list(digests(machine, target.agent.report().token).values()) == [digest]
    give_back(target.agent)
    assert target(f"[hashed({address}, {SIZE}), free({address})]") == [digest, 0]


@pytest.mark.parametrize("dies", [False, True])
def test_a_loop_goes_on_without_a_keeper(
    machine: Machine, target: Target, address: int, dies: bool
) -> None:
    """The next one gets everything, what stayed too."""
    if dies:
        machine.kill_keeper()
    assert target(f"loop({SIZE}, 20)") == [address]
    if dies:
        machine.start_keeper()
        until(lambda: target.agent.report().counts.unheld == 0)
    assert target(f"loop({SIZE}, 20)") == [address]
    digest = target(f"[alloc({SIZE}), fill({address}, {SIZE}, 1)][1]")
    take(target)
    assert list(digests(machine, target.agent.report().token).values()) == [digest]
    give_back(target.agent)
    assert target(f"[hashed({address}, {SIZE}), free({address})]") == [digest, 0]


@pytest.mark.parametrize(
    "end",
    [
        "cuda.cuCtxDestroy_v2(ctypes.c_void_p(context))",
        "cuda.cuDevicePrimaryCtxReset_v2(0)",
        "cuda.cuDevicePrimaryCtxRelease_v2(0)",
    ],
)
def test_it_ends_with_its_context(machine: Machine, target: Target, end: str) -> None:
    if "Primary" in end:
        make = "cuda.cuDevicePrimaryCtxRetain(ctypes.byref(made), 0)"
    else:
        make = "cuda.cuCtxCreate_v2(ctypes.byref(made), 0, 0)"
    target(f"globals().update(made=ctypes.c_void_p()) or {make} or current(made.value)")
    target("globals().update(context=made.value)")
    target(f"loop({SIZE}, 3)")
    assert machine.used() == SIZE
    assert target(end) == 0
    assert (machine.used(), spare(target)) == (0, (0, 0))


def test_it_is_its_contexts_alone(machine: Machine, target: Target) -> None:
    target(f"globals().update(one=loop({SIZE}, 3)[0], first=ctypes.c_void_p())")
    target("[cuda.cuCtxGetCurrent(ctypes.byref(first)), globals().update(second=start())][0]")
    assert target(f"globals().update(two=alloc({SIZE})[1]) or one != two") is True
    assert target("told(one)[0]") == INVALID
    target("[free(two), current(first.value)]")
    assert target(f"loop({SIZE}, 2) == [one]") is True
    assert target(
        "[current(second), [cuda.cuCtxDestroy_v2(ctypes.c_void_p(second))], current(first.value)]"
    ) == [0, [0], 0]
    assert spare(target) == (0, 0)  # as long as there were two
    assert target(f"len(loop({SIZE}, 3))") and spare(target) == (1, SIZE)


def test_what_peers_reach_is_recycled_once_they_do_not(new_machine: NewMachine) -> None:
    """What is spare when a peer is let in is reachable; what the peer's context may be using, for
    which nobody has waited, does not become spare.
    """
    target = new_machine(gpus=2).target()
    target("globals().update(zero=start(0), one=start(1))")
    target("current(zero)")
    [address] = target(f"loop({SIZE}, 3)")
    reach = f"[current(zero), alloc({SIZE})[1], cuda.fake_access(ctypes.c_ulonglong({address})), free({address})]"
    assert target("[current(one), cuda.cuCtxEnablePeerAccess(ctypes.c_void_p(zero), 0)]") == [0, 0]
    assert target(reach) == [0, address, 0b11, 0]
    assert spare(target) == (0, 0)
    recycled = target.agent.report().counts.recycled
    assert target(f"[current(zero), len(loop({SIZE}, 3))]")[0] == 0
    assert (target.agent.report().counts.recycled, *spare(target)) == (recycled, 0, 0)
    assert target("[current(one), cuda.cuCtxDisablePeerAccess(ctypes.c_void_p(zero))]") == [0, 0]
    [address] = target(f"[current(zero), loop({SIZE}, 3)[-1:]]")[1]
    assert target(
        f"[alloc({SIZE})[1], cuda.fake_access(ctypes.c_ulonglong({address})), free({address})]"
    ) == [address, 0b01, 0]
    assert spare(target) == (1, SIZE)


def test_a_forked_child_has_none_of_it(machine: Machine, target: Target, address: int) -> None:
    token = target.agent.report().token
    assert target(f"forked('[free({address}) != 0, alloc({SIZE})[1] != {address}]')") == [
        True,
        True,
    ]
    assert target(f"loop({SIZE}, 20)") == [address]
    assert [one.token for one in machine.keeper.processes()] == [token]
    assert len(machine.keeper.allocations(token)) == 1


def test_in_a_stream_capture_nothing_is_recycled(machine: Machine, target: Target) -> None:
    """What is allowed then, the driver knows; and nothing can be waited for."""
    target(f"loop({SIZE}, 3, 2)")
    live = target(f"alloc({SIZE})")[1]
    target("globals().update(stream=ctypes.c_void_p(77))")
    assert target("cuda.cuStreamBeginCapture_v2(stream, 2)") == 0
    assert calls(target, f"globals().update(at=alloc({SIZE})[1])")["cuMemAlloc_v2"] == 1
    assert target(f"[free({live}), free(at)]") == [0, 0]
    counts = target.agent.report().counts
    assert (counts.captured, counts.deferred, counts.spare) == (1, 1, 1)
    assert target("cuda.cuStreamEndCapture(stream, ctypes.byref(ctypes.c_void_p()))") == 0
    assert target(f"loop({SIZE}, 2)")
    counts = target.agent.report().counts
    assert (counts.deferred, counts.spare, counts.resident) == (0, 1, 0)
    assert machine.used() == SIZE


@pytest.mark.timeout(300)
@pytest.mark.parametrize("windows", [4, pytest.param(100, marks=pytest.mark.torture)])
def test_threads_never_have_each_others_memory(new_machine: NewMachine, windows: int) -> None:
    """Through windows, and where all of it has room only once what stayed is given back."""
    machine = new_machine(memory=64 * MIB)
    target = machine.target()
    target("start()")
    # At most 60 MiB live at once: none may ever go without.
    target(
        "recycle(4, [[30 * MIB], [2 * MIB, 14 * MIB, 6 * MIB], [8 * MIB], [2 * MIB, 4 * MIB, 8 * MIB, 6 * MIB]])"
    )
    until(lambda: target("len(_rounds)") > 100)
    for _ in range(windows):
        take(target)
        give_back(target.agent)
        before = target("len(_rounds)")
        until(lambda before=before: target("len(_rounds)") > before + 50)
    target("_stop.set()")
    rounds, errors = target("churned()")
    assert errors == [] and rounds > 0
    counts = target.agent.report().counts
    assert counts.recycled > 0 and counts.out_of_memory == 0
    until(lambda: target.agent.report().counts.resident == 0)
    until(lambda: machine.used() == spare(target)[1])


@pytest.mark.timeout(300)
def test_two_threads_race_for_one(target: Target) -> None:
    target(f"recycle(2, [[{SIZE}], [{SIZE}]])")
    until(lambda: target("len(_rounds)") > 2000)
    time.sleep(0.2)
    target("_stop.set()")
    assert target("churned()")[1] == []
    until(lambda: target.agent.report().counts.resident == 0)
    assert 1 <= spare(target)[0] <= 2


def test_several_contexts_on_one_device(machine: Machine, target: Target) -> None:
    """Each waits, maps and releases its own, whichever is current."""
    target("globals().update(contexts=[start(), start(), start()])")
    memory = []
    for number in range(9):
        target(f"current(contexts[{number % 3}])")
        at = target(f"alloc({SIZE})")[1]
        memory.append((at, target(f"fill({at}, {SIZE}, {number})")))
    token = target.agent.report().token
    for number in range(3):
        asked = calls(target, "0")
        assert asked == {}
        assert take(target) == 9 * SIZE
        assert sorted(digests(machine, token).values()) == sorted(digest for _, digest in memory)
        give_back(target.agent)
        assert [target(f"hashed({at}, {SIZE})") for at, _ in memory] == [
            digest for _, digest in memory
        ]
        assert target(
            "(lambda now: [cuda.cuCtxGetCurrent(ctypes.byref(now)), now.value == contexts[2]])(ctypes.c_void_p())"
        ) == [0, True]
        # One is released with its own context current, another with none, the third with another.
        for index, which in ((0, 0), (4, None), (8, 0)):
            at, _ = memory[index]
            now = "None" if which is None else f"contexts[{which}]"
            assert (
                target(f"[current({now}), free({at}), free({at}), current(contexts[{index % 3}])]")[
                    1
                ]
                == 0
            )
            at = target(f"alloc({SIZE})")[1]
            memory[index] = (at, target(f"fill({at}, {SIZE}, {10 * number + index})"))
        target("current(contexts[2])")
    assert [target(f"hashed({at}, {SIZE})") for at, _ in memory] == [digest for _, digest in memory]
    assert target("[cuda.cuCtxDestroy_v2(ctypes.c_void_p(contexts[1]))]") == [0]
    left = [one for index, one in enumerate(memory) if index % 3 != 1]
    assert [target(f"hashed({at}, {SIZE})") for at, _ in left] == [digest for _, digest in left]
    take(target)
    assert sorted(digests(machine, token).values()) == sorted(digest for _, digest in left)
    give_back(target.agent)
    assert [target(f"hashed({at}, {SIZE})") for at, _ in left] == [digest for _, digest in left]
    assert target(f"[free(at) for at in {[at for at, _ in left]}]") == [0] * 6
    assert (machine.used(), target.agent.report().counts.resident) == (spare(target)[1], 0)
