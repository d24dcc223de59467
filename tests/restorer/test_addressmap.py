"""The address map against a model that keeps one number a page."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icecore.restorer.place.addressmap import TOP, AddressMap

PAGES = 48

Operation = tuple[str, int, int, int]
page = st.integers(0, PAGES - 1)
operation = st.one_of(
    st.tuples(st.just("remove"), page, st.integers(1, PAGES), st.just(0)),
    st.tuples(st.just("remap"), page, st.integers(1, PAGES // 2), page),
    st.tuples(st.just("fork"), page, st.just(0), st.just(0)),
)


def apply(
    model: dict[int, int], addresses: AddressMap, step: Operation
) -> tuple[dict[int, int], AddressMap]:
    kind, start, length, target = step
    if kind == "remove":
        for i in range(start, start + length):
            model.pop(i, None)
        addresses.remove(start * 4096, (start + length) * 4096)
    elif kind == "remap":
        if abs(start - target) < length:
            return model, addresses
        moved = {i: model.pop(i) for i in range(start, start + length) if i in model}
        for i in range(target, target + length):
            model.pop(i, None)
        model.update({i - start + target: value for i, value in moved.items()})
        addresses.remap(start * 4096, target * 4096, length * 4096)
    else:
        return dict(model), addresses.copy()
    return model, addresses


@settings(max_examples=300, deadline=None)
@given(st.lists(operation, max_size=25))
def test_the_map_agrees_with_a_model(steps: list[Operation]) -> None:
    limit = 3 * PAGES
    model = {i: i for i in range(limit)}
    addresses = AddressMap()
    for step in steps:
        before = [(dict(model), addresses)] if step[0] == "fork" else []
        model, addresses = apply(model, addresses, step)
        for old, parent in before:  # a child's changes are its own
            addresses.remove(0, limit * 4096)
            assert all(
                parent.original(i * 4096) == (old[i] * 4096 if i in old else None)
                for i in range(limit)
            )
            addresses = parent.copy()
        for i in range(limit):
            expected = model[i] * 4096 if i in model else None
            assert addresses.original(i * 4096) == expected
            later = [j for j in range(i, limit) if j in model]
            assert addresses.next_mapped(i * 4096) == (later[0] if later else limit) * 4096
        now_at = {original: current for current, original in model.items()}
        for first in range(0, limit, 7):
            found: dict[int, int] = {}
            for piece in addresses.locate(first * 4096, 11 * 4096):
                for k in range(0, piece.length, 4096):
                    found[(piece.original + k) // 4096] = (piece.current + k) // 4096
            expected_pieces = {
                o: now_at[o] for o in range(first, min(first + 11, limit)) if o in now_at
            }
            assert {o: c for o, c in found.items() if o < limit} == expected_pieces


def pages(addresses: AddressMap, first: int, count: int) -> list[int | None]:
    """Return the original pages of what lies at some current ones."""
    found = [addresses.original(page * 4096) for page in range(first, first + count)]
    return [None if one is None else one // 4096 for one in found]


def shrink(addresses: AddressMap, source: int, target: int, old: int, new: int, told: int) -> None:
    """Apply the events of an mremap(2) that moves, shrinks and reports the length ``told``."""
    addresses.unmap((source + new) * 4096, (source + old) * 4096)
    addresses.remap(source * 4096, target * 4096, told * 4096)
    addresses.unmap(source * 4096, (source + new) * 4096)


@pytest.mark.parametrize("told", ["old", "new"])
def test_what_moves_and_shrinks_leaves_its_new_neighbour_alone(told: str) -> None:
    """Before Linux 6.15, the kernel reports the old length."""
    addresses = AddressMap()
    addresses.unmap(100 * 4096, 103 * 4096)  # the target, with MREMAP_FIXED
    shrink(addresses, 10, 100, 8, 3, 8 if told == "old" else 3)
    assert pages(addresses, 10, 8) == [None] * 8
    assert pages(addresses, 100, 8) == [10, 11, 12, 103, 104, 105, 106, 107]


def test_what_moves_whole_after_a_part_of_it_came_back() -> None:
    addresses = AddressMap()
    addresses.remap(13 * 4096, 200 * 4096, 5 * 4096)
    addresses.unmap(13 * 4096, 18 * 4096)
    addresses.remap(200 * 4096, 13 * 4096, 5 * 4096)
    addresses.unmap(200 * 4096, 205 * 4096)
    addresses.remap(10 * 4096, 100 * 4096, 8 * 4096)
    assert pages(addresses, 100, 9) == [*range(10, 18), 108]


def test_what_moves_whole_after_a_part_of_it_was_discarded() -> None:
    addresses = AddressMap()
    addresses.remove(13 * 4096, 18 * 4096)
    addresses.remap(10 * 4096, 100 * 4096, 8 * 4096)
    assert pages(addresses, 100, 9) == [10, 11, 12, *[None] * 5, 108]


def test_everything_is_where_it_was_at_first() -> None:
    addresses = AddressMap()
    assert addresses.original(TOP - 4096) == TOP - 4096
    assert addresses.locate(0x7F0000000000, 1 << 20) == [(0x7F0000000000, 0x7F0000000000, 1 << 20)]
    assert addresses.original(TOP) is None
