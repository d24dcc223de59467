"""Messages to the processes that icecore starts: whole or not at all, in time, and the death of the
peer is told.
"""

from __future__ import annotations

import os
import resource
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from icecore.host.rpc import packets
from icecore.host.rpc.calls import Call, Client, Refusal, Request, begun, requests

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def closed(reading: int) -> bool:
    """Return whether nobody has the writing end of a pipe."""
    poll = select.poll()
    poll.register(reading, 0)
    return bool(poll.poll(0))


@contextmanager
def without_descriptors() -> Iterator[None]:
    """As many files are open as may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while True:
            try:
                stack.callback(os.close, os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
            except OSError:
                break
        yield


@pytest.mark.parametrize("size", [1, packets.PACKET, packets.PACKET + 1, 8 << 20])
@pytest.mark.parametrize("passed", [0, 1, packets.MOST_DESCRIPTORS])
def test_a_message_arrives_whole(pair: Pair, size: int, passed: int) -> None:
    reading, writing = os.pipe()
    data = os.urandom(size)
    packets.send(pair[0], data, [writing] * passed)
    os.close(writing)
    received, descriptors = packets.receive(pair[1], 5)
    assert received == data and len(descriptors) == passed
    assert not any(map(os.get_inheritable, descriptors))
    assert closed(reading) == (passed == 0)
    for descriptor in descriptors:
        os.close(descriptor)
    assert closed(reading)
    os.close(reading)


def test_an_object_and_what_follows_it(pair: Pair) -> None:
    packets.tell(pair[0], {"say": "ä"}, data=b"\0\1\0")
    assert packets.hear(pair[1], 5) == ({"say": "ä"}, b"\0\1\0", [])
    packets.tell(pair[0], {"long": "x" * packets.PACKET})
    about, data, _ = packets.hear(pair[1], 5)
    assert (len(about["long"]), data) == (packets.PACKET, b"")


def test_a_peer_that_hangs_up(pair: Pair) -> None:
    packets.send(pair[0], b"last")
    pair[0].close()
    assert packets.receive(pair[1]) == (b"last", [])
    for _ in range(2):
        with pytest.raises(packets.PeerDied):
            packets.receive(pair[1])
    with pytest.raises(packets.PeerDied):
        packets.send(pair[1], b"nobody")


def test_a_peer_that_ends_with_a_message_unread(pair: Pair) -> None:
    packets.send(pair[1], b"unread")
    pair[0].close()
    with pytest.raises(packets.PeerDied):
        packets.receive(pair[1], 5)


def test_neither_end_waits_longer_than_it_may(pair: Pair) -> None:
    with pytest.raises(TimeoutError):
        packets.receive(pair[0], 0.01)
    pair[0].settimeout(0.01)
    with pytest.raises(TimeoutError):
        for _ in range(1000):
            packets.send(pair[0], bytes(packets.PACKET))
    assert packets.receive(pair[1], 5)[0] == bytes(packets.PACKET)  # whole ones


@pytest.mark.parametrize("size", [5, packets.PACKET + 5])
def test_descriptors_without_room_are_an_error(pair: Pair, size: int) -> None:
    reading, writing = os.pipe()
    packets.send(pair[0], b"x" * size, [writing])
    os.close(writing)
    with without_descriptors(), pytest.raises(packets.DescriptorsLost) as caught:
        packets.receive(pair[1], 5)
    assert caught.value.data == (b"xxxxx" if size == 5 else b"")
    assert closed(reading)
    packets.send(pair[0], b"next")
    assert packets.receive(pair[1], 5) == (b"next", [])
    os.close(reading)


# -- numbered calls


class Failed(Exception):
    """A call failed."""


class Caller(Client):
    """A client of a thread that stands for a process."""

    _patience = 5.0

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        super().__init__(lambda theirs: self.start(serve, theirs.dup()), "caller")

    def start(self, serve: Callable[[socket.socket], None], theirs: socket.socket) -> None:
        def run() -> None:
            with theirs:
                serve(theirs)

        self.serving = threading.Thread(target=run)
        self.serving.start()

    def ask(
        self, name: str, of: object = 1, seconds: float | None = None, **more: object
    ) -> object:
        return self._result(self._begin(name, of, **more), seconds).value

    def begin(self, name: str, *descriptors: int) -> Call:
        return self._begin(name, 1, descriptors)

    def end(self, call: Call, seconds: float | None = None) -> list[int]:
        return self._result(call, seconds).descriptors

    @property
    def ready(self) -> object:
        return self._result(self._ready).value

    def _await_end(self, process: subprocess.Popen[bytes]) -> None:
        raise AssertionError("there is no process")

    def _refused(self, call: Call, why: Refusal) -> Failed:
        return Failed("refused", call.name, *why)

    def _died(self, call: Call) -> Failed:
        return Failed("died", call.name)

    def _late(self, call: Call, seconds: float) -> Failed:
        return Failed("late", call.name, seconds)


def test_answers_come_in_any_order() -> None:
    def serve(control: socket.socket) -> None:
        begun(control).answer("here")
        waiting: list[Request] = []
        for request in requests(control):
            waiting.append(request)
            if len(waiting) == 3:
                waiting[2].answer([waiting[2].call, waiting[2].of, waiting[2].about])
                waiting[1].refuse(Refusal("why", 7, "cure", "other", 5))
                waiting[0].answer()

    with Caller(serve) as caller:
        assert caller.ready == "here"
        first, second = caller.begin("first"), caller.begin("second")
        assert caller.ask("third", "gpu", long="x" * packets.PACKET) == [
            "third",
            "gpu",
            {"long": "x" * packets.PACKET},
        ]
        with pytest.raises(Failed) as caught:
            caller.end(second)
        assert caught.value.args == ("refused", "second", "why", 7, "cure", "other", 5)
        assert caller.end(first) == []
    caller.serving.join(5)


def test_all_pending_calls_end_with_the_peer() -> None:
    def serve(control: socket.socket) -> None:
        assert next(requests(control)).call == "one"

    with Caller(serve) as caller:
        calls = [caller.begin("one"), caller.begin("two")]
        for call in calls:
            with pytest.raises(Failed, match="died"):
                caller.end(call)
        with pytest.raises(Failed, match="died"):
            caller.ask("three")
        with pytest.raises(Failed, match="died"):
            _ = caller.ready
    caller.serving.join(5)


def test_a_late_answer_leaves_no_descriptor() -> None:
    go, writing = threading.Event(), []
    reading, end = os.pipe()
    writing.append(end)

    def serve(control: socket.socket) -> None:
        request = next(requests(control))
        go.wait(5)
        request.answer(None, writing)
        os.close(writing.pop())
        next(requests(control)).answer()

    with Caller(serve) as caller:
        call = caller.begin("late")
        with pytest.raises(Failed, match="late"):
            caller.end(call, 0.01)
        go.set()
        assert caller.ask("next") is None
        assert closed(reading)
    os.close(reading)
    caller.serving.join(5)


def test_a_request_whose_descriptors_are_lost_is_refused() -> None:
    def serve(control: socket.socket) -> None:
        for request in requests(control):
            request.answer(len(request.descriptors))

    with Caller(serve) as caller, open("/dev/null") as file:
        with without_descriptors():
            call = caller.begin("passing", file.fileno())
            with pytest.raises(Failed, match="Too many open files"):
                caller.end(call)
        assert caller.ask("next") == 0
    caller.serving.join(5)


def test_an_answer_whose_descriptors_are_lost_fails_the_call() -> None:
    def serve(control: socket.socket) -> None:
        with open("/dev/null") as file:
            for request in requests(control):
                request.answer(None, [file.fileno()] if request.call == "passing" else [])

    with Caller(serve) as caller:
        caller.ask("first")
        with without_descriptors(), pytest.raises(Failed, match="Too many open files"):
            caller.ask("passing")
        assert caller.ask("next") is None
    caller.serving.join(5)


def test_many_threads_call_at_once() -> None:
    def serve(control: socket.socket) -> None:
        for request in requests(control):
            threading.Thread(target=answer, args=(request,)).start()

    def answer(request: Request) -> None:
        time.sleep(0.001 * (request.of % 3))
        request.answer(request.of)

    found: dict[int, object] = {}
    with Caller(serve) as caller:

        def ask(number: int) -> None:
            found[number] = caller.ask("same", number)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert found == {number: number for number in range(64)}
    caller.serving.join(5)
