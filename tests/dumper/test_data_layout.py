"""No two files of a data directory share a cell."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from icecore.dumper.data.layout import Layout
from icecore.sizes import CELL_BYTES


def test_cells_released_twice_are_given_once() -> None:
    layout = Layout({"a": (0, 1), "b": (1, 1), "c": (2, 1)})
    for _ in range(2):
        layout.release({"c": None})
    assert sorted(layout.place(path, CELL_BYTES) for path in "xyz") == [
        0,
        CELL_BYTES,
        3 * CELL_BYTES,
    ]


@given(
    st.lists(
        st.one_of(
            st.frozensets(st.sampled_from("abcdef")),
            st.tuples(st.sampled_from("abcdef"), st.integers(1, 4)),
        )
    )
)
def test_no_cell_belongs_to_two_files(steps: list[frozenset[str] | tuple[str, int]]) -> None:
    """A step releases all files except some, or places a file with a number of cells."""
    layout = Layout({"a": (0, 2), "b": (3, 1), "c": (5, 3)})
    places = {"a": (0, 2), "b": (3, 1), "c": (5, 3)}
    for step in steps:
        if isinstance(step, frozenset):
            layout.release(dict.fromkeys(step))
            places = {path: place for path, place in places.items() if path in step}
        else:
            path, cells = step
            first = layout.place(path, cells * CELL_BYTES) // CELL_BYTES
            places[path] = first, max(cells, places.get(path, (0, 0))[1])
        used = [at for first, count in places.values() for at in range(first, first + count)]
        assert len(used) == len(set(used))
