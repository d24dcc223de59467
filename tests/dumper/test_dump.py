"""Dumps of real programs: what was recorded is, byte for byte, what was there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import driving

from .conftest import Start
from .world import Events, Stillness, Store, assert_same_memory, standing

pytestmark = [pytest.mark.criu, pytest.mark.timeout(60)]


def watching(root: int, *files: str | Path) -> tuple[Stillness, Events]:
    """A look at the tree, taken in the window."""
    still = Stillness()
    events = Events({("dump.files", "begin"): lambda _: still.look(root, *files)})
    return still, events


@pytest.mark.parametrize(
    "name", ["memory-pattern", "training", "many-vmas", "inference", "tree", "mutator", "sparse", "node"]
)
def test_every_page_is_recorded(name: str, start: Start, store: Store) -> None:
    running = start(name)
    if name == "mutator":
        driving.go(running.state_dir)
    still, events = watching(running.pid)
    result = store.dump(running.pid, events=events)
    assert set(still.states.values()) <= set("tZ")
    assert not standing(running.pid)
    compared = assert_same_memory(store.read(result.snapshot), still)
    assert compared * 4096 > 1 << 20
    driving.wait_progress(running.state_dir)
    driving.ask_finish(running.program, running.state_dir)
    assert driving.wait_finished(running.program, running.state_dir).passed
