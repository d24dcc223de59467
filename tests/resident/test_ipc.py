"""CUDA's legacy IPC of resident memory, through windows: what torch.multiprocessing and custom
all-reduces do with their buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from icecore.host.resident.sharing import Shares, find_shares
from icecore.host.resident.tree import ResidentTree
from tests.fakes.machine import MIB, Machine, Target, until

from .test_sharing import INVALID, SIZE, Ranks, seen

INVALID_CONTEXT, MAP_FAILED, INVALID_HANDLE = 201, 205, 400


@pytest.fixture
def ranks(new_machine: Callable[..., Machine]) -> Ranks:
    return Ranks(new_machine(gpus=2))


def share(one: Target, two: Target) -> tuple[int, str, int]:
    """Memory that one made and two opened: its address there, the handle, its address here."""
    code, address = one(f"alloc({SIZE})")
    assert code == 0
    code, handle = one(f"ipc_handle({address})")
    assert code == 0
    code, there = two(f"ipc_open({handle!r})")
    assert code == 0
    return address, handle, there


def test_one_memory_through_windows(ranks: Ranks) -> None:
    one, two = ranks.all
    address, handle, there = share(one, two)
    shares: list[Shares] = []

    def look(tree: ResidentTree) -> None:
        assert ranks.used() == [4 * MIB, 0]
        shares.append(find_shares(tree.taken))

    for number in range(3):
        seen(one, address, two, there, number)
        seen(two, there, one, address, 10 + number)
        digest = two(f"fill({there}, {SIZE}, {100 + number})")
        ranks.window(look)
        assert one(f"hashed({address}, {SIZE})") == digest == two(f"hashed({there}, {SIZE})")
        [(mine, _)], [copy] = shares[-1].owned[one.pid], shares[-1].imports[two.pid]
        assert (mine.address, mine.exported, copy.allocation.imported, copy.allocation.size) == (
            address,
            True,
            True,
            4 * MIB,
        )
        assert copy.owner == (one.pid, mine.identity) and not shares[-1].owned[two.pid]
        # It is of the allocation, and stays the same: applications look up by it.
        assert one(f"[ipc_handle({address}), ipc_handle({address} + 3 * MIB)]") == [[0, handle]] * 2
    # However it is found; what is open has one address, and is open until each was closed.
    ways = ("", ", 1, ipc_entry(13000)", ", 1, ipc_entry(10000)", ", 1, cuda.cuIpcOpenMemHandle")
    assert [two(f"ipc_open({handle!r}{way})") for way in ways] == [[0, there]] * 4
    assert [two(f"ipc_close({there})") for _ in range(4)] == [0] * 4
    seen(one, address, two, there, 50)
    assert two(
        f"[ipc_close({there}), ipc_close({there}), cuda.fake_access(ctypes.c_ulonglong({there}))]"
    ) == [0, INVALID, 0]
    assert two.agent.report().counts.imported == 0
    ranks.window(look)
    code, there = two(f"ipc_open({handle!r})")
    assert code == 0
    ranks.window(look)
    seen(two, there, one, address, 51)
    assert two(f"ipc_close({there})") == one(f"free({address})") == 0
    assert ranks.used() == [0, 0]


@pytest.mark.parametrize("window", [False, True])
def test_the_maker_frees_it_first(ranks: Ranks, window: bool) -> None:
    one, two = ranks.all
    address, handle, there = share(one, two)
    if window:
        ranks.window()
    digest = one(f"fill({address}, {SIZE}, 1)")
    assert one(f"free({address})") == 0
    third = ranks.machine.target()
    third("start(0)")
    assert third(f"ipc_open({handle!r})")[0] == INVALID_HANDLE
    shares: list[Shares] = []
    ranks.window(lambda tree: shares.append(find_shares(tree.taken)))
    [(orphan, _)] = shares[0].owned[two.pid]
    assert orphan.imported and orphan.size == 4 * MIB
    assert two(f"hashed({there}, {SIZE})") == digest and ranks.used() == [4 * MIB, 0]
    assert two(f"ipc_close({there})") == 0
    assert ranks.used() == [0, 0] and two(f"ipc_open({handle!r})")[0] == INVALID_HANDLE


def test_what_is_answered_as_the_driver_does(ranks: Ranks) -> None:
    one, two = ranks.all
    address, handle, there = share(one, two)
    assert one(f"ipc_open({handle!r})")[0] == INVALID_CONTEXT
    assert two(f"ipc_open({handle!r}, 2)")[0] == INVALID
    assert (
        two(
            f"[free({there}), *unmapped({there}, {SIZE}), access({there}, {SIZE}), retained({there})[0], ipc_handle({there})[0]]"
        )
        == [INVALID] * 6
    )
    assert one(f"[ipc_handle({address} - MIB)[0], ipc_close({address})]") == [INVALID] * 2
    assert (
        two(f"forked('[ipc_close({there}), cuda.fake_access(ctypes.c_ulonglong({there}))]')")[0]
        == INVALID
    )
    assert two(f"[current(None), ipc_open({handle!r})[0]]") == [0, INVALID_CONTEXT]
    code, small = one("alloc(MIB)")
    handle = one(f"ipc_handle({small})")[1]
    two("start(1)")
    code, other = two(f"ipc_open({handle!r})")
    assert (
        code == 0
        and one(f"fill({small}, MIB, 1)") == two(f"hashed({other}, MIB)")
        and two(f"ipc_close({other})") == 0
    )
    assert two(f"ipc_open({'00' * 64!r})")[0] == INVALID
    mine, its = (target.agent.report().counts for target in ranks.all)
    assert (mine.exports, mine.ipc_exports, its.ipc_exports) == (1, 1, 1), (
        "what stayed with the driver, no window takes away"
    )


def test_it_can_be_opened_without_end(ranks: Ranks) -> None:
    """Each opening takes numbers that never come again, of which there are 2^61: as many as it has
    bytes, and some.
    """
    one, two = ranks.all
    _, handle, there = share(one, two)
    first = max(found.address for found in two.agent.allocations())
    assert two(
        f"[ipc_close({there}), [ipc_close(ipc_open({handle!r})[1]) for _ in range(100)] == [0] * 100, ipc_open({handle!r})[0]]"
    ) == [0, True, 0]
    [found] = two.agent.allocations()
    assert found.imported and 101 * found.size < found.address - first <= 101 * (
        found.size + 2 * MIB
    )


def test_a_context_takes_along_what_it_opened(ranks: Ranks) -> None:
    one, two = ranks.all
    two("globals().update(mine=start(1))")
    address, handle, there = share(one, two)
    assert two("cuda.cuCtxDestroy_v2(ctypes.c_void_p(mine))") == 0
    assert (
        two.agent.report().counts.imported == 0
        and two(f"cuda.fake_access(ctypes.c_ulonglong({there}))") == 0
    )
    two("start(1)")
    code, there = two(f"ipc_open({handle!r})")
    assert code == 0
    seen(one, address, two, there, 1)


def test_opened_by_two_devices(ranks: Ranks) -> None:
    one, two = ranks.all
    _, handle, there = share(one, two)
    reach = f"cuda.fake_access(ctypes.c_ulonglong({there}))"
    assert two(reach) == 2, "the current context's device"
    assert two(f"[start(0), ipc_open({handle!r})][1]") == [0, there]
    ranks.window()
    assert two(reach) == 3 and two(f"[ipc_close({there}), ipc_close({there}), {reach}]") == [
        0,
        0,
        0,
    ]


def test_closed_in_a_stream_capture(ranks: Ranks) -> None:
    """It must not fail, and nothing can be waited for: the next that is closed takes it along."""
    one, two = ranks.all
    _, handle, there = share(one, two)
    _, other, elsewhere = share(one, two)
    graph = "ctypes.byref(ctypes.c_void_p())"
    assert two(
        f"[cuda.cuStreamBeginCapture_v2(None, 2), ipc_close({there}), cuda.cuStreamEndCapture(None, {graph})]"
    ) == [0, 0, 0]
    assert two.agent.report().counts.imported == 2 and two(f"ipc_close({there})") == INVALID
    assert two(f"[ipc_open({handle!r}), ipc_close({there}), ipc_close({elsewhere})]") == [
        [0, there],
        0,
        0,
    ]
    assert two.agent.report().counts.imported == 0
    assert two(f"ipc_open({other!r})")[0] == 0


def test_closed_as_a_stream_capture_begins(ranks: Ranks) -> None:
    one, two = ranks.all
    _, _, there = share(one, two)
    with ranks.machine.pausing("cuCtxPushCurrent_v2") as somebody_waits:
        two(f"begun(lambda: ipc_close({there}))")
        somebody_waits()
        assert two("cuda.cuStreamBeginCapture_v2(None, 2)") == 0
    assert two("[ended(), cuda.cuStreamEndCapture(None, ctypes.byref(ctypes.c_void_p()))]") == [
        0,
        0,
    ]
    assert two.agent.report().counts.imported == 1 and two(f"ipc_close({there})") == INVALID
    _, _, elsewhere = share(one, two)
    assert two(f"ipc_close({elsewhere})") == 0 and two.agent.report().counts.imported == 0


@pytest.mark.parametrize("window", [False, True])
def test_the_keeper_dies(ranks: Ranks, window: bool) -> None:
    one, two = ranks.all
    address, handle, there = share(one, two)
    _, second, elsewhere = share(one, two)
    if window:
        ranks.window()
    two(f"ipc_close({elsewhere})")
    ranks.machine.kill_keeper()
    assert two(f"[ipc_open({second!r})[0], ipc_open({handle!r}), ipc_close({there})]") == [
        MAP_FAILED,
        [0, there],
        0,
    ]
    ranks.machine.start_keeper()
    until(lambda: two(f"ipc_open({second!r})")[0] == 0)
    ranks.window(
        lambda tree: (
            len(find_shares(tree.taken).imports[two.pid]) == 2
            or pytest.fail("not known to be one memory")
        )
    )
    seen(one, address, two, there, 1)


def test_windows_under_load(ranks: Ranks) -> None:
    """Threads in the middle of opening and closing, at any moment, while the maker gives away other
    memory.
    """
    one, two = ranks.all
    addresses = [one("alloc(2 * MIB)")[1] for _ in range(3)]
    handles = [one(f"ipc_handle({address})")[1] for address in addresses]
    two(f"ipc_churn({handles!r}, [2 * MIB] * 3, 3)")
    for number in range(25):
        ranks.window()
        before, errors = two("churned()")
        assert errors == []
        assert one("[(a := alloc(2 * MIB)[1]), ipc_handle(a)[0], free(a)][1:]") == [0, 0], number
        until(lambda: two("churned()")[0] > before + 5)  # noqa: B023
    two("_stop.set()")
    until(lambda: two.agent.report().counts.imported == 0)
    assert ranks.used() == [6 * MIB, 0]


NOT_READY, CAPTURED, NOT_SUPPORTED = 600, 907, 801


def test_an_event_that_another_process_knows(ranks: Ranks) -> None:
    """Once a process knows that it was recorded, the recorded work is done: in both processes and
    across windows. The driver shares no event.
    """
    one, two = ranks.all
    code, event = one("event()")
    assert code == 0
    code, other = one("event(2)")
    assert code == 0
    # Without a handle, recording does not wait.
    assert one(
        f"[event_call('cuEventRecord', {event}, 0), event_call('cuEventQuery', {event})]"
    ) == [
        0,
        NOT_READY,
    ]
    code, handle = one(f"event_handle({event})")
    assert code == 0 and one(f"[event_call('cuEventQuery', {event}), event_handle({event})]") == [
        0,
        [0, handle],
    ]
    code, there = two(f"event_open({handle!r})")
    assert code == 0
    for _ in range(2):
        for target, shared in ((one, event), (two, there)):
            for name, arguments in (("cuEventRecord", "0"), ("cuEventRecordWithFlags", "0, 0")):
                for thread in (False, True):
                    call = f"event_call({name!r}, {shared}, {arguments}, per_thread={thread})"
                    assert target(f"[{call}, event_call('cuEventQuery', {shared})]") == [0, 0]
                    assert target(f"cuda.fake_calls(b'{name}{'_ptsz' * thread}')") > 0
        # Recording other events still does not wait.
        assert one(
            f"[event_call('cuEventRecord', {other}, 0), event_call('cuEventQuery', {other})]"
        ) == [
            0,
            NOT_READY,
        ]
        ranks.window()
    assert one(f"event_handle({event})") == [0, handle]
    third = ranks.machine.target()
    third("start(0)")
    code, late = third(f"event_open({handle!r})")
    assert code == 0 and third(f"event_call('cuEventQuery', {late})") == 0
    assert [target("cuda.fake_shared_events()") for target in (one, two, third)] == [0, 0, 0]


def test_events_answer_as_the_drivers_do(ranks: Ranks) -> None:
    one, two = ranks.all
    assert one("event(4)")[0] == INVALID
    code, plain = one("event(2)")
    assert code == 0 and one(f"event_handle({plain})")[0] == INVALID_HANDLE
    assert one("event_call('cuEventRecordWithFlags', event()[1], 0, 2)") == INVALID
    assert two("[current(None), event()[0], event_open('00' * 64)[0]]") == [
        0,
        INVALID_CONTEXT,
        INVALID_CONTEXT,
    ]
    # A destroyed event is forgotten, even if another event gets its address.
    events = one("[event()[1] for _ in range(200)]")
    handles = one(f"[event_handle(one)[0] for one in {events}]")
    assert handles == [0] * 200 and len(set(events)) == 200
    destroy = "event_call(name, one)"
    names = "['cuEventDestroy', 'cuEventDestroy_v2'] * 100"
    assert one(f"[{destroy} for one, name in zip({events}, {names})]") == [0] * 200
    later = one("[event(2)[1] for _ in range(200)]")
    assert set(later) & set(events), "the fake driver uses the memory again"
    recorded = f"[(event_call('cuEventRecord', one, 0), event_call('cuEventQuery', one)) for one in {later}]"
    assert one(recorded) == [[0, NOT_READY]] * 200


def test_an_event_in_a_capture(ranks: Ranks) -> None:
    """A captured record is a dependency in the graph, and nothing waits for it. A node that records
    at each launch is refused.
    """
    one, _ = ranks.all
    code, event = one("event()")
    code, other = one("event(2)")
    assert code == 0 and one(f"event_handle({event})")[0] == 0
    stream, graph = 0x7000, "ctypes.byref(ctypes.c_void_p())"
    record = f"event_call('cuEventRecord', {event}, {stream})"
    external = f"event_call('cuEventRecordWithFlags', {{}}, {stream}, 1)"
    query = f"event_call('cuEventQuery', {event})"
    assert one(
        f"[cuda.cuStreamBeginCapture_v2({stream}, 0), {record}, {query},"
        f" {external.format(event)}, {external.format(other)}, event_handle({event})[0],"
        f" cuda.cuStreamEndCapture({stream}, {graph}), {record}, {query}]"
    ) == [0, 0, CAPTURED, NOT_SUPPORTED, 0, 0, 0, 0, 0]
    assert one(f"[event_nodes({event}), event_nodes({other})]") == [[NOT_SUPPORTED] * 2, [0] * 2]


@pytest.mark.parametrize("mode", [0, 1], ids=["global", "of the thread"])
def test_an_event_beside_a_capture(mode: int, ranks: Ranks) -> None:
    """Waiting for the event does not invalidate the capture of another stream."""
    one, _ = ranks.all
    code, event = one("event()")
    assert code == 0
    stream, graph = 0x7000, "ctypes.byref(ctypes.c_void_p())"
    record = f"event_call('cuEventRecord', {event}, {0x7100})"
    query = f"event_call('cuEventQuery', {event})"
    assert one(
        f"[cuda.cuStreamBeginCapture_v2({stream}, {mode}), {record}, {query},"
        f" event_handle({event})[0], {query}, {record}, {query},"
        f" cuda.cuStreamEndCapture({stream}, {graph})]"
    ) == [0, 0, NOT_READY, 0, 0, 0, 0, 0]


def test_an_event_of_all_streams_of_a_context(ranks: Ranks) -> None:
    one, _ = ranks.all
    code, event = one("event()")
    assert code == 0
    record = f"vm('cuCtxRecordEvent', start(0), {event})"
    query = f"event_call('cuEventQuery', {event})"
    assert one(f"[{record}, {query}, event_handle({event})[0], {record}, {query}]") == [
        *(0, NOT_READY),
        *(0, 0, 0),
    ]


def test_very_many_events(ranks: Ranks) -> None:
    """PyTorch never destroys the events that it has opened."""
    one, two = ranks.all
    code, handle = one("event_handle(event()[1])")
    assert code == 0
    two("globals().update(opened=[])")
    seconds = []
    for _ in range(4):
        began = time.monotonic()
        assert two(f"[opened.append(event_open({handle!r})[1]) for _ in range(10_000)] and 0") == 0
        seconds.append(time.monotonic() - began)
    assert seconds[-1] < 4 * seconds[0], "each takes as long as the ones before"
    assert two("len(set(opened))") == 40_000
    # All of them are known, until they are destroyed, in whatever order.
    ready = "[event_call('cuEventRecord', one, 0) or event_call('cuEventQuery', one) for one in {}]"
    assert two(f"set({ready.format('opened[::40]')}) == {{0}}")
    assert two("[event_call('cuEventDestroy', one) for one in opened[1::2]] and 0") == 0
    assert two(f"set({ready.format('opened[::40]')}) == {{0}}")


def test_a_handle_is_made_while_others_record(ranks: Ranks) -> None:
    """A call that records the event once the handle exists waits for the work."""
    one, _ = ranks.all
    code, event = one("event()")
    assert code == 0
    record, query = (f"event_call('{name}', {event}" for name in ("cuEventRecord", "cuEventQuery"))
    one("globals().update(made=False)")
    one(f"begun(lambda: [(made, {record}, 0), {query})) for _ in range(20_000)])")
    assert one(f"[event_handle({event})[0], globals().update(made=True)][0]") == 0
    found = one("ended()")
    later = {tuple(answers) for made, *answers in found if made}
    assert later == {(0, 0)} and {answer for _, answer, _ in found} == {0}


def test_a_forked_child_has_events_of_its_own(ranks: Ranks) -> None:
    one, _ = ranks.all
    code, event = one("event()")
    assert code == 0 and one(f"event_handle({event})")[0] == 0
    record, query = (f"event_call('{name}', {event}" for name in ("cuEventRecord", "cuEventQuery"))
    begun = f"[start(0) > 0, event()[0], {record}, 0), {query})]"
    assert one(f"forked({begun!r})") == [True, 0, 0, NOT_READY]
    assert one(f"[{record}, 0), {query})]") == [0, 0]
