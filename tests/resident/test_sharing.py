"""Memory that an application manages itself and shares between its processes, through windows: what
NCCL does with its buffers, PyTorch with its segments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from errno import EOPNOTSUPP
from pathlib import Path

import pytest

from icecore.errors import IcecoreError
from icecore.host.resident.client import ResidentFailed
from icecore.host.resident.protocol import Allocation
from icecore.host.resident.sharing import Shares, find_shares
from icecore.host.resident.tree import ResidentTree
from tests.fakes.machine import MIB, Machine, Target, until

INVALID = 1
SIZE = "4 * MIB"


class Ranks:
    """Processes with a GPU each.

    Attributes:
        all: One for each GPU.
    """

    def __init__(self, machine: Machine, some: int = 2) -> None:
        self.machine = machine
        self.all = [machine.target() for _ in range(some)]
        for number, target in enumerate(self.all):
            target(f"start({number})")
            target(f"listen({self.path(number)!r})")

    def path(self, number: int) -> str:
        return str(self.machine.root / f"rank-{number}")

    def window(self, meanwhile: Callable[[ResidentTree], None] = lambda _: None) -> None:
        """One through all of them."""
        tree = ResidentTree(self.machine.directory, {target.pid: target.pid for target in self.all})

        def lock(pids: Collection[int], seconds: float) -> None:
            for target in self.all:
                target.lock(seconds)

        def unlock(pids: Collection[int]) -> None:
            for target in self.all:
                target.unlock()

        with tree:
            tree.take_away(lock, unlock)
            meanwhile(tree)
            tree.give_back()

    def share(self, size: str = SIZE, device: int = 0) -> tuple[int, int, int, int]:
        """Memory of the first that the second has, too: handle and address there, handle and
        address here.
        """
        one, two = self.all[:2]
        code, handle = one(f"create({size}, {device})")
        assert code == 0
        address = one(f"mapped({handle}, {size})")
        assert one(f"send({self.path(1)!r}, {handle})") == 0
        other = two("received()")
        return handle, address, other, two(f"mapped({other}, {size}, 1)")

    def used(self) -> list[int]:
        return [self.machine.used(gpu) for gpu in range(len(self.all))]


@pytest.fixture
def ranks(new_machine: Callable[..., Machine]) -> Ranks:
    return Ranks(new_machine(gpus=2))


def seen(writer: Target, at: int, reader: Target, there: int, seed: int) -> None:
    """What one writes the other reads."""
    digest = writer(f"fill({at}, {SIZE}, {seed})")
    assert reader(f"hashed({there}, {SIZE})") == digest


def test_one_memory_through_windows(ranks: Ranks) -> None:
    one, two = ranks.all
    handle, address, other, there = ranks.share()
    shares: list[Shares] = []

    def look(tree: ResidentTree) -> None:
        assert ranks.used() == [4 * MIB, 0]
        shares.append(find_shares(tree.taken))
        assert not any(
            "/gpu" in Path(f"/proc/{rank.pid}/maps").read_text() for rank in ranks.all
        )  # or it cannot be restored

    for number in range(3):
        seen(one, address, two, there, number)
        digest = two(f"fill({there}, {SIZE}, {100 + number})")
        ranks.window(look)
        assert one(f"hashed({address}, {SIZE})") == digest
        seen(two, there, one, address, 10 + number)
        [[mine]], [copy] = (shares[-1].owned[one.pid],), shares[-1].imports[two.pid]
        assert (mine[0].address, mine[0].exported, mine[0].device) == (
            handle,
            True,
            copy.allocation.device,
        )
        assert (copy.allocation.address, copy.allocation.imported, copy.allocation.size) == (
            other,
            True,
            4 * MIB,
        )
        assert copy.owner == (one.pid, mine[0].identity) and not shares[-1].owned[two.pid]
    # What the application knows is as before: handles can be used, given away and let go of.
    assert (
        one(f"retained({address + MIB})") == [0, handle]
        and one(f"vm('cuMemRelease', {handle})") == 0
    )
    assert one(f"properties({handle})") == [0, 1, 1, 1, 0]
    assert two(f"export({other})")[0] == INVALID
    assert one(f"send({ranks.path(1)!r}, {handle})") == 0
    again = two("received()")
    ranks.window(look)
    assert len(shares[-1].imports[two.pid]) == 2
    assert (
        two(f"unmapped({there}, {SIZE})"),
        two(f"[vm('cuMemRelease', h) for h in ({other}, {again})]"),
    ) == ([0, 0], [0, 0])
    assert ranks.used() == [4 * MIB, 0]
    assert one(f"vm('cuMemRelease', {handle})") == 0
    seen(one, address, one, address, 99)  # its mapping keeps it
    ranks.window()
    assert one(f"[vm('cuMemRelease', {handle}), *unmapped({address}, {SIZE})]") == [INVALID, 0, 0]
    assert ranks.used() == [0, 0]
    assert one.agent.report().counts.resident == two.agent.report().counts.imported == 0


@pytest.mark.parametrize("window", [False, True])
def test_memory_whose_creator_lets_go_of_it(ranks: Ranks, window: bool) -> None:
    one, two = ranks.all
    handle, address, other, there = ranks.share()
    if window:
        ranks.window()
    digest = one(f"fill({address}, {SIZE}, 1)")
    assert one(f"[*unmapped({address}, {SIZE}), vm('cuMemRelease', {handle})]") == [0, 0, 0]
    shares: list[Shares] = []
    ranks.window(lambda tree: shares.append(find_shares(tree.taken)))
    [(orphan, _)] = shares[0].owned[two.pid]
    assert (orphan.imported, orphan.size, orphan.address) == (True, 4 * MIB, other)
    assert two(f"hashed({there}, {SIZE})") == digest
    assert two(f"[*unmapped({there}, {SIZE}), vm('cuMemRelease', {other})]") == [0, 0, 0]
    assert ranks.used() == [0, 0]


def test_what_comes_and_goes_between_windows(ranks: Ranks) -> None:
    one, two = ranks.all
    live = [ranks.share() for _ in range(3)]
    for number in range(4):
        handle, address, other, there = live.pop(number % 3)
        assert one(f"[vm('cuMemRelease', {handle}), *unmapped({address}, {SIZE})]") == [0, 0, 0]
        assert two(f"[*unmapped({there}, {SIZE}), vm('cuMemRelease', {other})]") == [0, 0, 0]
        live.append(ranks.share())
        ranks.window()
        for seed, (_, address, _, there) in enumerate(live):
            seen(one, address, two, there, seed)
            seen(two, there, one, address, 50 + seed)
    assert ranks.used() == [3 * 4 * MIB, 0]


@pytest.mark.parametrize("when", ["before", "in a window"])
def test_a_keeper_that_dies(ranks: Ranks, when: str) -> None:
    one, two = ranks.all
    _, address, _, there = ranks.share()
    if when == "before":
        ranks.machine.kill_keeper()
        ranks.machine.start_keeper()
        until(lambda: not any(who.agent.report().counts.unheld for who in ranks.all))
        ranks.window()
    else:
        ranks.window(lambda _: ranks.machine.kill_keeper())
        ranks.machine.start_keeper()
        until(lambda: not any(who.agent.report().counts.unheld for who in ranks.all))
    shares: list[Shares] = []
    ranks.window(lambda tree: shares.append(find_shares(tree.taken)))
    assert [len(own) for own in shares[0].owned.values()] == [1, 0]
    seen(one, address, two, there, 1)


@pytest.mark.parametrize("window", [False, True])
def test_an_application_that_closes_all_it_finds(ranks: Ranks, window: bool) -> None:
    """Memory that it gives away afterwards is known to be the same."""
    one, two = ranks.all
    handle, address, _, there = ranks.share()
    other = one(f"create({SIZE})")[1]
    if window:
        ranks.window()
    assert one("os.closerange(500, 4096)") is None  # ours; the fake's own are below

    def settled() -> bool:
        with suppress(IcecoreError):
            return one.agent.report().counts.unheld == 0
        return False

    until(settled)
    assert [one(f"send({ranks.path(1)!r}, {which})") for which in (handle, other)] == [0, 0]
    copies = [two("received()"), two("received()")]
    shares: list[Shares] = []
    ranks.window(lambda tree: shares.append(find_shares(tree.taken)))
    assert (
        len(shares[0].owned[one.pid]) == 2
        and not shares[0].owned[two.pid]
        and len(shares[0].imports[two.pid]) == 3
    )
    seen(one, address, two, two(f"mapped({copies[0]}, {SIZE}, 1)"), 1)
    seen(two, there, one, address, 2)


def test_a_rank_that_dies(ranks: Ranks) -> None:
    one, two = ranks.all
    _, address, _, there = ranks.share()
    digest = one(f"fill({address}, {SIZE}, 1)")
    one.end()
    until(lambda: len([p for p in ranks.machine.keeper.processes() if p.alive]) == 1)
    ranks.all.remove(one)
    ranks.window()
    assert two(f"hashed({there}, {SIZE})") == digest
    two.end()
    until(lambda: ranks.used() == [0])


def test_a_child_has_none_of_it(ranks: Ranks) -> None:
    one, two = ranks.all
    handle, address, other, there = ranks.share()
    ranks.window()
    assert one(
        f"forked(\"[vm('cuMemRelease', {handle}), export({handle})[0], len(os.listdir('/proc/self/fd')) < 12]\")"
    ) == [INVALID, INVALID, True]
    assert two(f"[*unmapped({there}, {SIZE}), vm('cuMemRelease', {other})]") == [0, 0, 0]
    ranks.window()
    seen(one, address, one, address, 3)


def test_segments_that_grow(ranks: Ranks) -> None:
    """PyTorch's: one range of addresses, memory that cannot be exported mapped into it piece by
    piece, access for all at once, pieces given back.
    """
    one = ranks.all[0]
    base = one("reserve(16 * MIB)")
    handles = [one("create(2 * MIB, 0, 0)") for _ in range(8)]
    assert [code for code, _ in handles] == [0] * 8
    for number, (_, handle) in enumerate(handles):
        assert one(f"vm('cuMemMap', {base} + {number} * 2 * MIB, 2 * MIB, 0, {handle}, 0)") == 0
    assert one(
        f"[access({base}, 8 * MIB), access({base} + 8 * MIB, 8 * MIB), access({base}, 3 * MIB)]"
    ) == [0, 0, INVALID]
    assert one(f"access({base} + 14 * MIB, 2 * MIB, 1)") == 0
    digest = one(f"fill({base}, 16 * MIB, 7)")
    assert one(f"[export({handles[0][1]})[0], properties({handles[0][1]})[2]]") == [INVALID, 0]
    ranks.window()
    assert one(f"hashed({base}, 16 * MIB)") == digest
    reach = f"[cuda.fake_access(ctypes.c_ulonglong({base} + at * 2 * MIB)) for at in (0, 6, 7)]"
    assert one(reach) == [1, 1, 3]
    assert one(
        f"[vm('cuMemUnmap', {base} + 4 * MIB, 4 * MIB), *(vm('cuMemRelease', h) for h in ({handles[2][1]}, {handles[3][1]}))]"
    ) == [0, 0, 0]
    assert ranks.used()[0] == 12 * MIB
    before = one(f"hashed({base} + 8 * MIB, 8 * MIB)")
    ranks.window()
    assert one(f"hashed({base} + 8 * MIB, 8 * MIB)") == before and one(reach) == [1, 1, 3]
    assert one(f"vm('cuMemAddressFree', {base}, 16 * MIB)") == INVALID
    assert one.agent.report().counts.handles == 6


def test_what_cuda_malloc_made_is_no_handle(target: Target) -> None:
    address = target("alloc(4 * MIB)")[1]
    assert target(f"[retained({address})[0], retained({address} + MIB)[0]]") == [INVALID, INVALID]
    assert target(f"[vm('cuMemUnmap', {address}, 4 * MIB), access({address}, 4 * MIB)]") == [
        INVALID,
        INVALID,
    ]
    assert target(f"free({address})") == 0


@pytest.mark.parametrize("what", ["host memory", "multicast"])
def test_what_no_window_can_take_away(ranks: Ranks, what: str) -> None:
    one = ranks.all[0]
    _, address, _, _ = ranks.share()
    if what == "host memory":
        code, handle = one("create(2 * MIB, 0, 1, 3)")
        assert (code, one(f"properties({handle})")[3]) == (0, 3)
        ranks.window()  # as long as it is nobody else's
        assert one(f"send({ranks.path(1)!r}, {handle})") == 0
    else:
        assert one("vm('cuMulticastCreate', ctypes.byref(ctypes.c_ulonglong()), None)") == 0
    with pytest.raises(ResidentFailed) as caught:
        ranks.window()
    assert caught.value.code == EOPNOTSUPP
    seen(one, address, one, address, 1)


def test_windows_under_load(ranks: Ranks) -> None:
    """Threads in the middle of creating, exporting, importing and letting go, at any moment."""
    one, two = ranks.all
    _, address, _, there = ranks.share()
    one("churn(3)")
    digest = two(f"fill({there}, {SIZE}, 1)")
    rounds = 0
    for _ in range(25):
        ranks.window()
        before, rounds = rounds, one("churned()")[0]
        assert one("churned()")[1] == [] and one(f"hashed({address}, {SIZE})") == digest
        until(lambda: one("churned()")[0] > rounds + 5)  # noqa: B023
        assert rounds > before
    assert one.agent.report().counts.windows >= 25


def test_many_at_once(ranks: Ranks) -> None:
    """The groups of a job with many buffers, as the kernel tells them."""
    one = ranks.all[0]
    one("[create(2 * MIB)[1] for _ in range(4)]")
    shared = [ranks.share("2 * MIB") for _ in range(8)]
    found: list[Shares] = []
    ranks.window(lambda tree: found.append(find_shares(tree.taken)))

    def addresses(some: list[tuple[Allocation, int]]) -> list[int]:
        return [allocation.address for allocation, _ in some]

    first, second = (rank.pid for rank in ranks.all)
    assert len(found[0].owned[first]) == 12 and addresses(found[0].owned[first]) == sorted(
        addresses(found[0].owned[first])
    )
    by_identity = {
        allocation.identity: allocation.address for allocation, _ in found[0].owned[first]
    }
    assert {
        one.allocation.address: by_identity[one.owner[1]] for one in found[0].imports[second]
    } == {other: mine for mine, _, other, _ in shared}
