"""What the preload takes over, and that nothing else looks different to the application."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from icecore.host.resident.client import State
from icecore.host.resident.protocol import Counts
from tests.fakes.machine import MIB, Machine, Target, until, uuid_of

from .conftest import NewMachine

DOORS = [
    "None",
    "entry('cuMemAlloc')",
    "entry('cuMemAlloc_v2', 3020)",
    "entry('cuMemAlloc', 11040, older=True)",
]


def driver_bytes(counts: Counts) -> int:
    """Return what a window leaves for the driver to copy."""
    return counts.small_bytes + counts.pool_bytes + counts.managed_bytes + counts.foreign_bytes


@pytest.mark.parametrize("door", DOORS)
def test_every_way_to_the_allocation_leads_to_resident_memory(
    machine: Machine, target: Target, door: str
) -> None:
    code, address = target(f"alloc(5 * MIB, {door})")
    assert (code, address % (2 * MIB)) == (0, 0)
    assert target(f"fill({address}, 5 * MIB, 1) == hashed({address}, 5 * MIB)")
    [found] = target.agent.allocations()
    assert (found.address, found.requested, found.size, found.ordinal) == (
        address,
        5 * MIB,
        6 * MIB,
        0,
    )
    assert found.device == uuid_of(0)
    report = target.agent.report()
    assert (report.state, report.counts.resident_bytes, report.counts.unheld) == (
        State.RUNNING,
        6 * MIB,
        0,
    )
    assert machine.keeper.allocations(report.token) == [found]
    assert target(f"free({address})") == 0
    assert target(f"free({address})") == 1  # as the driver: invalid value
    assert machine.used() == 0
    assert target.agent.allocations() == machine.keeper.allocations(report.token) == []


def test_what_stays_with_the_driver_is_counted(target: Target) -> None:
    assert target("alloc(2 * MIB)")[0] == 0
    small = [target(f"alloc({size})")[1] for size in (1, 4096, 2 * MIB - 1)]
    pool = target("alloc(3 * MIB, lambda out, size: cuda.cuMemAllocAsync(out, size, None))")[1]
    managed = target("alloc(4 * MIB, lambda out, size: cuda.cuMemAllocManaged(out, size, 1))")[1]
    counts = target.agent.report().counts
    assert (counts.resident, counts.small, counts.pool, counts.managed, counts.foreign) == (
        1,
        3,
        1,
        1,
        0,
    )
    assert counts.small_bytes == 2 * MIB + 4096
    assert driver_bytes(counts) == counts.small_bytes + 7 * MIB
    assert target(f"free({pool}, lambda at: cuda.cuMemFreeAsync(at, None))") == 0
    assert [target(f"free({address})") for address in (*small, managed, 0)] == [0] * 5
    counts = target.agent.report().counts
    assert (driver_bytes(counts), counts.small, counts.resident) == (0, 0, 1)


def test_a_device_without_virtual_memory_stays_with_the_driver(machine: Machine) -> None:
    process = machine.target(FAKE_CUDA_NO_VMM="1")
    process("start()")
    assert process("alloc(8 * MIB)")[0] == 0
    counts = process.agent.report().counts
    assert (counts.resident, counts.foreign) == (0, 1)


@pytest.mark.parametrize(
    "how",
    [
        "no context",
        "nothing",
        "everything",
        "more than there is",
        "a wrong pointer",
        "pitch",
        "twice",
    ],
)
def test_answers_are_the_drivers(machine: Machine, how: str) -> None:
    tries = {
        "no context": "[cuda.cuInit(0), alloc(4 * MIB)]",
        "nothing": "[start() > 0, alloc(0)]",
        "everything": "[start() > 0, alloc(64 * MIB)[0], alloc(2 * MIB), info()]",
        "more than there is": "[start() > 0, alloc(1 << 50), alloc((1 << 64) - 1), info()]",
        "a wrong pointer": "[start() > 0, free(4096), free(alloc(4 * MIB)[1] + 512)]",
        "pitch": "[start() > 0, [(code, pitch) for code, _, pitch in (pitched(3000, 2000), pitched(10, 10), pitched(4096, 4096, 16))],"
        " pitched(100, 1 << 20, 3)[0], pitched(1 << 33, 1 << 33)[0]]",
        "twice": "[start() > 0, (lambda at: [free(at), free(at)])(alloc(4 * MIB)[1])]",
    }
    answers = []
    for resident in (True, False):
        process = machine.target(resident)
        answers.append(process(tries[how]))
        process.end()
        until(lambda: machine.used() == 0)
    assert answers[0] == answers[1]


def test_memory_that_was_freed_can_be_had_at_once(target: Target) -> None:
    """The keeper's descriptor would keep it from the device."""
    assert (
        target("[(lambda pair: (pair[0], free(pair[1])))(alloc(60 * MIB)) for _ in range(50)]")
        == [[0, 0]] * 50
    )
    assert target("[alloc(60 * MIB)[0], alloc(6 * MIB)]") == [0, [2, 0]]
    assert target.agent.report().counts.out_of_memory == 1


@pytest.mark.parametrize("per_thread", [False, True])
def test_a_release_in_a_streams_order_waits_for_that_stream(
    target: Target, per_thread: bool
) -> None:
    """The default one is the calling thread's own where the program was compiled so."""
    target("setattr(cuda.fake_waited_for, 'restype', ctypes.c_void_p)")
    waited = f"[free_async(alloc(4 * MIB)[1], stream, {per_thread}) or cuda.fake_waited_for() or 0 for stream in (77, 0, 1, 2)]"
    assert target(waited) == [77, 2 if per_thread else 0, 1, 2]


@pytest.mark.parametrize("per_thread", [False, True])
def test_a_release_in_the_order_of_no_stream_is_refused_as_the_driver_does(
    machine: Machine, per_thread: bool
) -> None:
    """The memory stays."""
    answers = []
    for resident in (True, False):
        target = machine.target(resident)
        target("globals().update(context=start())")
        address = target("alloc(4 * MIB)[1]")
        digest = target(f"fill({address}, 4 * MIB, 1)")
        free = f"free_async({address}, {{}}, {per_thread})"
        answers.append(
            target(f"[{free.format(0xBAD)}, current(None), {free.format(0)}, current(context)]")
        )
        assert target(f"hashed({address}, 4 * MIB)") == digest
        if resident:
            assert (target.agent.report().counts.resident, target.agent.report().counts.frees) == (
                1,
                0,
            )
        answers[-1] += target(f"[{free.format(77)}, {free.format(77)}]")
        assert machine.used() == 0
        target.end()
    assert answers[0] == answers[1] == [400, 0, 201, 0, 0, 1]


def test_in_a_stream_capture_a_release_is_deferred(machine: Machine, target: Target) -> None:
    first, second = (target("alloc(4 * MIB)")[1] for _ in range(2))
    target("globals().update(stream=ctypes.c_void_p(77))")
    assert target("cuda.cuStreamBeginCapture_v2(stream, 2)") == 0
    assert target(f"[free({first}), free({first})]") == [0, 1]
    assert target.agent.report().counts.deferred_bytes == 4 * MIB
    assert target("cuda.cuStreamEndCapture(stream, ctypes.byref(ctypes.c_void_p()))") == 0
    assert target(f"free({second})") == 0
    assert (machine.used(), target.agent.report().counts.deferred) == (0, 0)


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("other_thread", [False, True])
@pytest.mark.parametrize("name", ["cuda.cuStreamBeginCapture_v2", "begin"])
def test_allocation_in_a_stream_capture_is_as_without(
    machine: Machine, mode: int, other_thread: bool, name: str
) -> None:
    """What is forbidden then, and makes the capture fail, depends on its mode: relaxed, it goes on."""
    answers = []
    for resident in (True, False):
        process = machine.target(resident)
        process("globals().update(context=start())")
        assert process("alloc(2 * MIB)")[0] == 0
        process(
            "globals().update(stream=ctypes.c_void_p(77), results=[], begin=entry('cuStreamBeginCapture'))"
        )
        assert process(f"{name}(stream, {mode})") == 0
        work = (
            "results.extend([(lambda pair: [pair[0], free(pair[1])])(alloc(4 * MIB)), alloc(1)[0]])"
        )
        if other_thread:
            process(
                f"(lambda t: [t.start(), t.join()])(threading.Thread(target=lambda: [current(context), {work}]))"
            )
        else:
            process(work)
        answers.append(
            [
                process("results"),
                process("cuda.cuStreamEndCapture(stream, ctypes.byref(ctypes.c_void_p()))"),
            ]
        )
        if resident:
            counts = process.agent.report().counts
            assert (counts.captured, counts.resident, counts.foreign) == (1, 1, 0)
            assert process("alloc(4 * MIB)")[0] == 0
            assert process.agent.report().counts.resident == 2
        process.end()
        until(lambda: machine.used() == 0)
    assert answers[0] == answers[1]
    assert answers[0][1] == (0 if mode == 2 or (mode == 1 and other_thread) else 901)


def test_a_release_while_a_capture_begins_is_no_end_of_it(machine: Machine, target: Target) -> None:
    """The driver has begun it, and the call has not returned."""
    address = target("alloc(4 * MIB)[1]")
    target("globals().update(stream=ctypes.c_void_p(77))")
    with machine.pausing("cuStreamBeginCapture_v2") as somebody_waits:
        target(
            "begun(lambda: [cuda.cuStreamBeginCapture_v2(stream, 2), _stop.wait(60), cuda.cuStreamEndCapture(stream, ctypes.byref(ctypes.c_void_p()))])"
        )
        somebody_waits()
        assert target(f"free({address})") == 0
    target("_stop.set()")
    assert target("ended()") == [0, True, 0]
    assert target.agent.report().counts.deferred == 1
    assert target("(free(alloc(4 * MIB)[1]))") == 0
    assert (machine.used(), target.agent.report().counts.deferred) == (0, 0)


def test_a_capture_that_begins_while_a_release_is_under_way_goes_on(
    machine: Machine, target: Target
) -> None:
    address = target("alloc(4 * MIB)[1]")
    target("globals().update(stream=ctypes.c_void_p(77))")
    with machine.pausing("cuCtxPushCurrent_v2") as somebody_waits:
        target(f"begun(lambda: free({address}))")
        somebody_waits()
        assert target("cuda.cuStreamBeginCapture_v2(stream, 2)") == 0
    assert target(
        "[ended(), cuda.cuStreamEndCapture(stream, ctypes.byref(ctypes.c_void_p()))]"
    ) == [0, 0]
    assert target.agent.report().counts.deferred == 1


def test_what_a_capture_kept_is_released_when_memory_is_short(target: Target) -> None:
    first = target("alloc(40 * MIB)")[1]
    target("globals().update(stream=ctypes.c_void_p(77))")
    target("cuda.cuStreamBeginCapture_v2(stream, 2)")
    assert target(f"free({first})") == 0
    assert target("cuda.cuStreamEndCapture(stream, ctypes.byref(ctypes.c_void_p()))") == 0
    assert target("alloc(40 * MIB)[0]") == 0
    assert target.agent.report().counts.deferred == 0


@pytest.mark.parametrize(
    "end",
    [
        "cuda.cuCtxDestroy_v2(ctypes.c_void_p(context))",
        "cuda.cuCtxDestroy(ctypes.c_void_p(context))",
        "(lambda out: [cuda.cuCtxAttach(ctypes.byref(out), 0), cuda.cuCtxDetach(out), alloc(2 * MIB)[0], cuda.cuCtxDetach(out)])(ctypes.c_void_p())[-1]",
        "entry('cuCtxDestroy', 3020)(context, 0)",
        "entry('cuCtxDetach')(context, 0)",
        "cuda.cuDevicePrimaryCtxReset_v2(0)",
        "cuda.cuDevicePrimaryCtxRelease_v2(0)",
    ],
)
def test_a_contexts_memory_ends_with_it(machine: Machine, target: Target, end: str) -> None:
    kept = target("alloc(2 * MIB)")[1]
    if "Primary" in end:
        make = "cuda.cuDevicePrimaryCtxRetain(ctypes.byref(made), 0)"
    else:
        make = "cuda.cuCtxCreate_v2(ctypes.byref(made), 0, 0)"
    target(f"globals().update(made=ctypes.c_void_p()) or {make} or current(made.value)")
    target("globals().update(context=made.value)")
    assert target("[alloc(4 * MIB)[0], alloc(1 * MIB)[0]]") == [0, 0]
    assert target(end) == 0
    assert machine.used() == 2 * MIB
    assert [one.address for one in target.agent.allocations()] == [kept]


@pytest.mark.parametrize(
    "end",
    [
        "cuda.cuCtxDestroy_v2(ctypes.c_void_p(context))",
        "cuda.cuDevicePrimaryCtxReset_v2(0)",
        "cuda.cuDevicePrimaryCtxRelease_v2(0)",
        "max(free(at, unseen('cuMemFree_v2')) for at in small)",
    ],
    ids=["destroyed", "reset", "released", "unseen"],
)
def test_what_was_small_once_does_not_hide_what_lies_there_now(machine: Machine, end: str) -> None:
    """Addresses come again, and the driver, asked about resident memory, answers that it is none of
    its own.
    """
    for _ in range(10):  # the kernel chooses the addresses of large allocations
        target = machine.target()
        if "Primary" in end:
            target(
                "globals().update(made=ctypes.c_void_p()) or cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(made), 0)"
            )
            target("globals().update(context=made.value) or current(made.value)")
        else:
            target("globals().update(context=start())")
        target(
            "globals().update(small=[alloc(4096)[1] for _ in range(3000)])"
        )  # side by side: where there is room for larger ones
        assert target(end) == 0 and machine.used() == 0
        target("start()")
        large = target("[alloc(2 * MIB)[1] for _ in range(12)]")
        if target(f"len({set(large)} & set(small))"):
            break
        target.end()
    else:
        raise AssertionError("no large allocation got the address of a small one")
    assert target(f"[free(at) for at in {large}]") == [0] * 12
    assert machine.used() == 0
    assert target("alloc(2 * MIB)[0]") == 0  # of which there is an agent
    counts = target.agent.report().counts
    assert counts.resident == 1
    if "small" not in end:
        assert (counts.small, driver_bytes(counts)) == (0, 0)


def test_a_contexts_end_takes_along_what_is_counted_of_it_alone(target: Target) -> None:
    """Not what is another context's, nor what came from a pool, which is the device's."""
    target("[alloc(2 * MIB), alloc(4096), globals().update(context=start())]")
    target(
        "[alloc(100), cuda.cuMemAllocManaged(ctypes.byref(ctypes.c_ulonglong()), ctypes.c_ulonglong(3 * MIB), 1)]"
    )
    assert target("alloc(MIB, lambda out, size: cuda.cuMemAllocAsync(out, size, None))[0]") == 0
    assert target("cuda.cuCtxDestroy_v2(ctypes.c_void_p(context))") == 0
    counts = target.agent.report().counts
    assert (counts.small, counts.small_bytes, counts.managed, counts.pool, counts.resident) == (
        1,
        4096,
        0,
        1,
        1,
    )


def test_peers_reach_what_the_application_lets_them(new_machine: NewMachine) -> None:
    process = new_machine(gpus=3).target()
    process("globals().update(zero=start(0), one=start(1), two=start(2))")
    process("current(zero)")
    before = process("alloc(2 * MIB)")[1]
    reach = "[cuda.fake_access(ctypes.c_ulonglong(at)) for at in ({}, {})]"
    process("[current(one), cuda.cuCtxEnablePeerAccess(ctypes.c_void_p(zero), 0)]")
    own = process("alloc(2 * MIB)")[1]
    process("current(zero)")
    after = process("alloc(2 * MIB)")[1]
    assert process(reach.format(before, after)) == [0b011, 0b011]
    assert process(reach.format(own, own)) == [0b010, 0b010]
    process("[current(one), cuda.cuCtxDisablePeerAccess(ctypes.c_void_p(zero))]")
    assert process(reach.format(before, after)) == [0b001, 0b001]
    assert [
        one.ordinal for one in sorted(process.agent.allocations(), key=lambda one: one.identity)
    ] == [0, 1, 0]


@pytest.mark.parametrize("enabled", [True, False])
def test_peers_that_change_during_an_allocation_reach_it_or_do_not(
    new_machine: NewMachine, enabled: bool
) -> None:
    machine = new_machine(gpus=2)
    process = machine.target()
    process("globals().update(zero=start(0), one=start(1))")
    if not enabled:
        process("cuda.cuCtxEnablePeerAccess(ctypes.c_void_p(zero), 0)")
    process("current(zero)")
    with machine.pausing("cuMemSetAccess") as somebody_waits:
        process("begun(lambda: alloc(2 * MIB))")
        somebody_waits()
        change = (
            "cuCtxEnablePeerAccess(ctypes.c_void_p(zero), 0)"
            if enabled
            else "cuCtxDisablePeerAccess(ctypes.c_void_p(zero))"
        )
        assert process(f"[current(one), cuda.{change}]") == [0, 0]
    code, address = process("ended()")
    assert code == 0
    assert process(f"cuda.fake_access(ctypes.c_ulonglong({address}))") == (
        0b11 if enabled else 0b01
    )


def test_a_forked_child_owns_nothing(machine: Machine, target: Target) -> None:
    address = target("alloc(4 * MIB)")[1]
    digest = target(f"fill({address}, 4 * MIB, 3)")
    # The driver is not usable in a child. What the preload does there must not reach the parent's
    # memory or the keeper's descriptors.
    assert target(f"forked('free({address}) != 0')") is True
    assert target(f"hashed({address}, 4 * MIB)") == digest
    token = target.agent.report().token
    assert len(machine.keeper.allocations(token)) == 1
    assert [one.token for one in machine.keeper.processes()] == [token]


def test_the_keeper_finds_each_of_many(new_machine: NewMachine) -> None:
    """Whatever was allocated and released before, in whatever order."""
    machine = new_machine(memory=600 * MIB)
    target = machine.target()
    target("start()")
    rng, live, token = random.Random(7), list[int](), b""
    for most in (200, 20, 250, 1):
        while len(live) != most:
            some = min(40, abs(most - len(live)))
            if len(live) < most:
                live += target(f"[alloc(2 * MIB)[1] for _ in range({some})]")
            else:
                rng.shuffle(live)
                gone, live = live[:some], live[some:]
                assert target(f"[free(at) for at in {gone}]") == [0] * some
        token = token or target.agent.report().token
        known = {one.address: one.identity for one in target.agent.allocations()}
        assert sorted(known) == sorted(live)
        # What the keeper is handed it is not waited for; it may have read that only in part.
        until(
            lambda known=known, token=token: (
                known.items()
                <= {one.address: one.identity for one in machine.keeper.allocations(token)}.items()
            )
        )
        held = machine.keeper.allocations(token)
        assert len({one.identity for one in held}) == len(held)
        found = machine.keeper.fetch(token, list(known.values()))
        assert found.keys() == set(known.values())
        for descriptor in found.values():
            os.close(descriptor)


def test_a_program_without_cuda_notices_nothing(machine: Machine) -> None:
    done = subprocess.run(
        ["sh", "-c", "ls /proc/self/task | wc -l; echo $LD_PRELOAD"],
        env={**machine.environment(), "LD_LIBRARY_PATH": ""},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert (done.returncode, done.stderr, done.stdout.split()[0]) == (0, "", "1")


@pytest.mark.parametrize("first", [True, False])
def test_another_preload_finds_what_comes_after_it(machine: Machine, first: bool) -> None:
    """dlsym(RTLD_NEXT) depends on who calls: ours must not be taken for the caller."""
    source, library = machine.root / "other.c", machine.root / "other.so"
    source.write_text(
        "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <unistd.h>\n"
        'int getpid(void) { int (*next)(void) = (int (*)(void))dlsym(RTLD_NEXT, "getpid"); return next == getpid ? -1 : -next(); }\n'
        'int cuMemFree_v2(unsigned long long at) { int (*next)(unsigned long long) = dlsym(RTLD_NEXT, "cuMemFree_v2");'
        " return next ? 7000 + next(at) : -1; }\n"
    )
    subprocess.run(
        ["gcc", "-w", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60
    )
    environment = machine.environment()
    ours = environment["LD_PRELOAD"]
    code = "import ctypes, os; c = ctypes.CDLL(None); c.cuMemFree_v2.argtypes = [ctypes.c_ulonglong]; print(os.getpid(), c.cuMemFree_v2(0))"
    environment["LD_PRELOAD"] = f"{library}:{ours}" if first else f"{ours}:{library}"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    pid, code_of_free = (int(word) for word in done.stdout.split())
    assert pid < -1
    assert code_of_free == (
        7003 if first else 3
    )  # not initialised, through the other one where that comes first
