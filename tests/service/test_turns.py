"""The jobs of a node take their periodic snapshots in turn, and none keeps the others out."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from icecore.service.record import FOLDER
from icecore.service.supervision import snapshots
from icecore.service.supervision.messages import Messages
from icecore.service.supervision.snapshots import Snapshots

SECONDS = 20


class OneOfMany:
    """The snapshots of one job, in a thread each as in its supervisor."""

    def __init__(self, state: Path, work: Callable[[], None]) -> None:
        self.heard: Messages = queue.SimpleQueue()

        def dump(*_: object, **__: object) -> Any:
            work()
            return SimpleNamespace(
                snapshot="1", window_seconds=0.1, sizes=SimpleNamespace(stored=1)
            )

        engine: Any = SimpleNamespace(registry=SimpleNamespace(state=state), dump=dump)
        plan: Any = SimpleNamespace(keep=None, name="job")
        self.needless = False
        self.taking = Snapshots(
            plan,
            engine,
            self.heard,
            mock.Mock(),
            mock.Mock(),
            session=lambda: "",
            needless=lambda: self.needless,
            forgets=lambda: True,
        )

    def take(self, *, stop: bool = False) -> None:
        self.taking.begin(mock.Mock(), stop=stop)

    def taken(self) -> Any:
        return self.heard.get(timeout=SECONDS)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / FOLDER).mkdir()
    return tmp_path


def test_a_busy_job_does_not_keep_another_out(state: Path) -> None:
    order: list[str] = []
    over = threading.Event()

    def working(name: str) -> Callable[[], None]:
        def work() -> None:
            order.append(name)
            time.sleep(0.05)

        return work

    busy, other = OneOfMany(state, working("busy")), OneOfMany(state, working("other"))

    def again_and_again() -> None:
        while not over.is_set():
            busy.take()
            busy.taken()

    thread = threading.Thread(target=again_and_again)
    thread.start()
    try:
        for _ in range(3):
            since = len(order)
            other.take()
            assert other.taken().taken is not None
            assert len(order) - since <= 5, order
    finally:
        over.set()
        thread.join(SECONDS)


def test_a_job_that_hangs_delays_the_others_and_no_more(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    hangs, other = (
        OneOfMany(state, lambda: go.wait(SECONDS) and None),
        OneOfMany(state, lambda: None),
    )
    hangs.take()
    time.sleep(0.2)
    try:
        other.take()
        with pytest.raises(queue.Empty):
            other.heard.get(timeout=0.5)
        other.needless = True  # it has to leave: the snapshot that it takes then waits for nobody
        assert other.taken().taken is None
        other.take(stop=True)
        assert other.taken().taken is not None
        other.needless = False
        monkeypatch.setattr(snapshots, "_MOST_WAIT_SECONDS", 0.5)
        other.take()
        assert other.taken().taken.seconds < 0.4, "it does not count what it waited"
    finally:
        go.set()
    assert hangs.taken().taken is not None
