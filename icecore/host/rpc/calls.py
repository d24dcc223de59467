"""Numbered calls to a process, many in flight at once. Each returns or raises, even if the process
dies.

A request is a JSON object, ``{"id": 1, "call": "lock", "of": 123, …}``, with descriptors if the
call requires them. Its answer is ``{"id": 1, "value": …}``, possibly with descriptors, or
``{"id": 1, "error": …}`` (`Refusal`). Answers arrive in any order. Number 0 is the start of the
process, which the process answers without a request.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self

from icecore.host.rpc import packets

#: Time-out for sending: a process receives its requests at once.
_SEND_SECONDS = 300.0


class Answer(NamedTuple):
    """An answer, and its descriptors, which the receiver closes."""

    value: Any
    descriptors: list[int]


class Refusal(NamedTuple):
    """Why a call failed.

    Attributes:
        code: The driver's error code.
        call, pid: The call and process that failed, if not the call itself.
    """

    text: str
    code: int = 1
    cure: str = ""
    call: str = ""
    pid: int = 0


class Call(Future[Answer]):
    """A call in flight.


    Args:
        name: What is called.
        of: The process or device.
    """

    def __init__(self, name: str, of: Any) -> None:
        super().__init__()
        self.name = name
        self.of = of


class Client(ABC):
    """A process and the calls to it (a context manager: on exit the process ends).

    Args:
        start: Starts it, with the other end of the socket.
        name: Of the thread that receives.
    """

    #: Default time-out of a call in seconds.
    _patience: ClassVar[float]

    def __init__(
        self, start: Callable[[socket.socket], subprocess.Popen[bytes] | None], name: str
    ) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_SEND_SECONDS)
        self._lock = threading.Lock()
        self._next = 1
        self._lost = False
        self._ready = Call("start", None)
        self._waiting = {0: self._ready}
        try:
            with theirs:
                self._process = start(theirs)
        except BaseException:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._receive, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the process: it ends with its socket. May be called twice."""
        self.give_up()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._socket.close()
        if self._process is not None:
            self._await_end(self._process)

    def give_up(self) -> None:
        """Make all pending and later calls fail at once; may be called from any thread. The process
        ends when it notices; `close` waits for that.
        """
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def _await_end(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until it has ended."""

    @abstractmethod
    def _refused(self, call: Call, why: Refusal) -> Exception:
        """Return the error of a call that failed."""

    @abstractmethod
    def _died(self, call: Call) -> Exception:
        """Return the error of a call that has no answer because the process ended."""

    @abstractmethod
    def _late(self, call: Call, seconds: float) -> Exception:
        """Return the error of a call without an answer in time."""

    def _begin(self, name: str, of: Any, descriptors: Sequence[int] = (), **more: object) -> Call:
        call = Call(name, of)
        with self._lock:
            number, self._next = self._next, self._next + 1
            if self._lost:
                call.set_exception(self._died(call))
                return call
            self._waiting[number] = call
        request = {"id": number, "call": name, "of": of, **more}
        try:
            packets.tell(self._socket, request, descriptors)
        except packets.PeerDied:
            self._end()
        except OSError as error:
            if self._take(number) is not None:
                late = isinstance(error, TimeoutError)
                call.set_exception(self._late(call, _SEND_SECONDS) if late else error)
        return call

    def _result(self, call: Call, seconds: float | None = None) -> Answer:
        seconds = self._patience if seconds is None else seconds
        try:
            return call.result(seconds)
        except TimeoutError:
            call.add_done_callback(_close_unheard)
            raise self._late(call, seconds) from None

    def _receive(self) -> None:
        while True:
            try:
                answer, _, descriptors = packets.hear(self._socket)
            except packets.DescriptorsLost as error:
                # If the answer to a long request was lost as well, the call ends with its time-out.
                answer = {"id": json.loads(error.data)["id"]} if error.data else {"id": -1}
                answer["error"], descriptors = Refusal(str(error))._asdict(), []
            except TimeoutError:  # the socket's time-out for sending
                continue
            except OSError:
                self._end()
                return
            call = self._take(answer["id"])
            if call is None:
                _close(descriptors)
            elif "error" in answer:
                call.set_exception(self._refused(call, Refusal(**answer["error"])))
            else:
                call.set_result(Answer(answer["value"], descriptors))

    def _take(self, number: int) -> Call | None:
        with self._lock:
            return self._waiting.pop(number, None)

    def _end(self) -> None:
        """Fail all pending calls: the process is gone."""
        with self._lock:
            self._lost = True
            waiting, self._waiting = self._waiting, {}
        for call in waiting.values():
            call.set_exception(self._died(call))


def _close_unheard(call: Future[Answer]) -> None:
    """Close the descriptors of an answer to a call that has been abandoned."""
    if call.exception() is None:
        _close(call.result().descriptors)


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class Request(NamedTuple):
    """A request, in the process that answers it. Any thread may answer.

    Attributes:
        of: The process or device.
        about: Its other fields.
        descriptors: Received with it; the code that carries it out closes them.
    """

    number: int
    call: str
    of: Any
    about: dict[str, Any]
    descriptors: list[int]
    peer: socket.socket

    def answer(self, value: object = None, descriptors: Sequence[int] = ()) -> None:
        """Return a value."""
        with suppress(OSError):  # the client is gone
            packets.tell(self.peer, {"id": self.number, "value": value}, descriptors)

    def refuse(self, why: Refusal) -> None:
        """Fail the call."""
        with suppress(OSError):
            packets.tell(self.peer, {"id": self.number, "error": why._asdict()})


def begun(peer: socket.socket) -> Request:
    """Return request 0, the start of the process, which no client sends."""
    return Request(0, "start", None, {}, [], peer)


def requests(peer: socket.socket, decode: Callable[[bytes], Any] = json.loads) -> Iterator[Request]:
    """Yield requests until the client is gone. ``decode`` parses their JSON."""
    while True:
        try:
            about, _, descriptors = packets.hear(peer, decode=decode)
        except packets.DescriptorsLost as error:
            if not error.data:
                return
            about = decode(error.data)
            Request(about["id"], "", None, about, [], peer).refuse(Refusal(str(error)))
        except OSError:
            return
        else:
            number, call, of = about.pop("id"), about.pop("call"), about.pop("of")
            yield Request(number, call, of, about, descriptors, peer)
