"""The helper: the one process of a dump or restore that initialises CUDA. When its client is gone,
it unlocks every process that it locked.

It is started by the guard of a dump (or by the restorer), outlives both where it must, and is never
part of a job. It answers calls (`icecore.host.rpc.calls`), each in a thread of its own. When the
socket ends (its client died, or is done), or the deadline that it was given passes, it waits until
CRIU lets it, or has let go of the processes that it locked and has not unlocked, brings them back
to running, and ends.

Arguments: the number of the socket's descriptor, that of a pipe which it only holds (whoever has
the other end learns of its end), a word that stands in its command line, and the GPUs that it uses
(absent: any).
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from icecore.errors import IcecoreError, NotFound
from icecore.host.cuda.api import DeviceCheckpoint, DeviceError, IllegalState, device_error
from icecore.host.cuda.holder import Holder
from icecore.host.cuda.populate import Populating
from icecore.host.cuda.threads import wait_ended
from icecore.host.gpu import backend
from icecore.host.gpu.undo import Undo
from icecore.host.kernel import oom, procfs
from icecore.host.resident.client import Agent
from icecore.host.rpc import peer
from icecore.host.rpc.calls import Refusal, Request, begun, requests

#: Calls that are refused once all is being undone.
_ACTING = frozenset(("lock", "checkpoint", "restore", "unlock", "hold", "go-on"))


def _checkpoint(api: DeviceCheckpoint, pid: int, *, populate: bool, copies: bool) -> list[object]:
    """Return the fields of `Checkpointed`."""
    if copies:
        before = procfs.threads(pid)
        placement = api.checkpoint(pid)
        if others := wait_ended(pid, before):
            # CRIU does not know these threads and would omit them.
            raise device_error("checkpoint", pid, 999, f"threads {others} do not end")
        return [placement.value]
    if not populate:
        return [api.checkpoint(pid).value]
    thread = 0
    with suppress(DeviceError):
        thread = api.restore_thread(pid)
    with Populating(pid, thread) as made:
        placement = api.checkpoint(pid)
    return [placement.value, made.bytes, made.huge, made.why]


def _find(root: int, own: Sequence[int]) -> list[tuple[int, int]]:
    """Return (pid as the process sees itself, pid here) of those of ``own`` that are there."""
    wanted, found = set(own), []
    for pid in procfs.tree(root):
        with suppress(NotFound):
            seen = procfs.status(pid).own_pid
            if seen in wanted:
                found.append((seen, pid))
    return found


class _Server:
    def __init__(self, api: DeviceCheckpoint, control: socket.socket) -> None:
        self._api = api
        self._control = control
        self._undo = Undo(api)
        self._calls: list[threading.Thread] = []
        self._deadline: threading.Timer | None = None

    def serve(self) -> None:
        begun(self._control).answer(os.getpid())
        for request in requests(self._control):
            if request.call == "holder":
                plugin = socket.socket(fileno=request.descriptors[0])
                self._undo.held_by(Holder(plugin, self._undo_all))
                request.answer()
                continue
            if request.call == "deadline":
                self._set_deadline(request.about["seconds"])
                request.answer()
                continue
            self._calls = [thread for thread in self._calls if thread.is_alive()]
            thread = threading.Thread(target=self._answer, args=(request,))
            self._calls.append(thread)
            thread.start()
        self._set_deadline(None)
        self._undo_all()

    def _undo_all(self) -> dict[int, str]:
        """Undo everything once the calls under way have ended: two calls must not work on one
        process at a time.
        """
        self._undo.begin()
        for thread in self._calls:
            if thread is not threading.current_thread():
                thread.join()
        return self._undo.all()

    def _set_deadline(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if seconds is not None:
            self._deadline = threading.Timer(seconds, self._undo_all)
            self._deadline.daemon = True
            self._deadline.start()

    def _answer(self, request: Request) -> None:
        try:
            request.answer(self._make(request))
        except DeviceError as error:
            request.refuse(Refusal(error.name, error.code, call=error.call, pid=error.pid))
        except IcecoreError as error:
            request.refuse(Refusal(str(error)))
        except Exception as error:  # noqa: BLE001 - most often the process is gone; whatever it is, somebody waits for an answer
            request.refuse(Refusal(f"{type(error).__name__}: {error}"))

    def _make(self, request: Request) -> object:
        api, pid, about = self._api, int(request.of), request.about
        if self._undo.over and request.call in _ACTING:
            raise device_error(
                request.call, pid, 600, "it took too long, or failed, and is being undone"
            )
        match request.call:
            case "state":
                return api.state(pid).value
            case "lock":
                self._undo.locking(pid)
                try:
                    api.lock(pid, float(about["seconds"]))
                except IllegalState:
                    self._undo.running(pid)  # somebody else has it
                    raise
            case "checkpoint":
                return _checkpoint(api, pid, populate=about["populate"], copies=about["copies"])
            case "restore":
                api.restore(pid, about["gpus"])
            case "unlock":
                api.unlock(pid)
                self._undo.running(pid)
            case "restore-thread":
                return api.restore_thread(pid)
            case "hold":
                return self._undo.hold(about["pids"], float(about["seconds"]))
            case "bind":
                self._undo.bind(pid)
            case "find":
                return _find(pid, about["own"])
            case "go-on":
                self._undo.go_on()
            case "leave":
                self._undo.leave()
            case "resident":
                self._undo.standing(
                    [Agent(Path(place), own, tracee=seen) for place, own, seen in about["agents"]]
                )
            case "adopt":
                # Processes that another helper had locked when it died.
                for one in about["pids"]:
                    with suppress(NotFound):
                        self._undo.locking(one)
            case "undo":
                return {str(pid): why for pid, why in self._undo_all().items()}
            case unknown:
                raise ValueError(f"there is no call {unknown}")
        return None


def main() -> None:
    """Run the helper: ``helper CONTROL_FD LIFE_FD WORD [GPUS]``."""
    peer.ignore_signals()
    control = peer.take_over(*map(int, sys.argv[1:3]))
    oom.protect()
    backend.see_gpus(sys.argv[4:])
    try:
        api = backend.find_backend().connect()
    except IcecoreError as error:
        begun(control).refuse(Refusal(error.message, cure=error.cure))
        return
    _Server(api, control).serve()


if __name__ == "__main__":
    main()
