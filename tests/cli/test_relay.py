"""An output whose reader does not read delays only those who show a job's output."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from io import TextIOWrapper

import pytest

from icecore.commands.output import Output
from icecore.events import Event

_BIG = "x" * 200_000


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIOWrapper]]:
    reader, writer = os.pipe()
    with open(writer, "w", encoding="utf-8") as stream:
        yield reader, stream
    os.close(reader)


def read(reader: int, until: bytes) -> bytes:
    got = b""
    while until not in got:
        got += os.read(reader, 1 << 16)
    return got


def test_events_and_remarks_do_not_wait(pipe: tuple[int, TextIOWrapper]) -> None:
    reader, stream = pipe
    output = Output(as_json=True, stdout=stream, stderr=stream)
    output.relay()
    began = time.monotonic()
    with output:
        for number in range(10_000):
            output.event(Event("first", {"number": number, "text": _BIG if not number else ""}))
        output.note("a remark")
        assert time.monotonic() - began < 5.0
    assert time.monotonic() - began < 15.0
    assert os.path.samestat(os.stat(os.devnull), os.fstat(stream.fileno()))  # nothing waits for it
    assert b'"number": 0' in read(reader, b'"number": 0')


def test_the_order_is_kept(pipe: tuple[int, TextIOWrapper]) -> None:
    reader, stream = pipe
    output = Output(stdout=stream, stderr=stream)
    output.relay()
    with output:
        for number in range(100):
            output.note(f"remark {number}")
            output.raw(f"output {number}\n".encode())
        output.note("the end")
    found = read(reader, b"the end\n").decode().splitlines()
    wanted = [f"{what} {number}" for number in range(100) for what in ("remark", "output")]
    assert found == [*wanted, "the end"]


def test_results_wait_until_they_are_read(pipe: tuple[int, TextIOWrapper]) -> None:
    reader, stream = pipe
    output = Output(as_json=True, stdout=stream, stderr=stream)
    output.relay()
    thread = threading.Thread(target=output.result, args=("big", {"text": _BIG}), daemon=True)
    thread.start()
    thread.join(1.0)
    assert thread.is_alive()
    assert _BIG.encode() in read(reader, b"}\n")
    thread.join(10.0)
    assert not thread.is_alive()


def test_the_last_events_wait_for_a_reader_that_pauses(pipe: tuple[int, TextIOWrapper]) -> None:
    """It has five seconds from the end on, even if it has paused for longer before."""
    reader, stream = pipe
    output = Output(as_json=True, stdout=stream, stderr=stream)
    output.relay()
    got: list[bytes] = []

    def late() -> None:
        time.sleep(3.0)
        got.append(read(reader, b"run.preempted"))

    thread = threading.Thread(target=late, daemon=True)
    with output:
        output.event(Event("first", {"text": _BIG}))
        time.sleep(1.2)  # longer than a job's output would wait
        thread.start()
        output.event(Event("run.preempted", {}))
    thread.join(10.0)
    assert got and not os.path.samestat(os.stat(os.devnull), os.fstat(stream.fileno()))
