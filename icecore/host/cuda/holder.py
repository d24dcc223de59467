"""A CRIU that holds a tree while the driver works in it (icecore/host/criu/devices.c). Processes
that were let go are stopped again before CRIU continues.

The driver's checkpoint takes mappings away from a process and its restore brings them back; a
thread that touches them meanwhile ends the process. So of all its threads only the one in which the
driver works may run, and CRIU, which holds them, lets it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from icecore.errors import IcecoreError, MissingTool
from icecore.host.rpc import packets

#: CRIU's plugin; not there where the build found no compiler.
PLUGIN = Path(__file__).parents[1] / "criu" / "libicecore-devices.so"
#: Names the plugin's end of the socket in CRIU's environment, by its number.
VARIABLE = "ICECORE_DEVICES"
#: Among CRIU's images: which of its files and mappings are device files that come back as others
#: (icecore/host/criu/device_files.c).
RECORD = "icecore-device-files.img"
_FILES, _RETRIES = "ICECORE_DEVICE_FILES", "ICECORE_CRIU_RETRIES"
#: From this version on CRIU passes to RESTORE_EXT_FILE where the plugin says whether it is to be
#: called again (CRIU's commit fb02dbf68).
_RETRIES_SINCE = (4, 3)
#: What is to be said where it is not there.
LACK = (
    f"{PLUGIN.name} was not built, with which CRIU holds the threads of a GPU process while the driver works in it: they could end it",
    "install a C compiler, then icecore once more",
)
#: Lines of the record, and what the kernel adds to the name of a file that was removed.
_MAPPING, _DELETED = "mapping ", " (deleted)"
_ANSWER_SECONDS = 30.0


def replaced_mappings(images: Path) -> set[str]:
    """Return the recorded paths of the device files for whose mappings the plugin gives CRIU others
    (icecore/host/criu/device_files.c).

    Args:
        images: CRIU's images.
    """
    try:
        lines = os.fsdecode((images / RECORD).read_bytes()).splitlines()
    except FileNotFoundError:
        return set()
    paths = {line.removeprefix(_MAPPING) for line in lines if line.startswith(_MAPPING)}
    return paths | {path.removesuffix(_DELETED) for path in paths}


def require_plugin() -> Path:
    """Return the plugin.

    Raises:
        MissingTool: It was not built.
    """
    if not PLUGIN.exists():
        raise MissingTool(LACK[0], cure=LACK[1])
    return PLUGIN


def dump_environment(holder: int, kinds: Sequence[str]) -> dict[str, str]:
    """Return what the plugin reads in the environment of a CRIU that dumps.

    Args:
        holder: The descriptor of its end of the socket.
        kinds: Which device files are the driver's (`Backend.kinds`).
    """
    return {VARIABLE: str(holder), _FILES: " ".join(kinds)}


def restore_environment(holder: int | None, criu: tuple[int, int, int]) -> dict[str, str]:
    """Return what the plugin reads in the environment of a CRIU that restores.

    Args:
        holder: The descriptor of its end of the socket; None: the snapshot has no device memory for
            the driver.
        criu: The version of CRIU.
    """
    return {
        **({} if holder is None else {VARIABLE: str(holder)}),
        **({_RETRIES: "1"} if criu >= _RETRIES_SINCE else {}),
    }


class NotHeld(IcecoreError):
    """CRIU does not hold the tree, or did not carry out an order."""


class Holder:
    """The connection to CRIU's plugin. Thread-safe; threads run only between `let_go` and `go_on`.

    Args:
        peer: Our end of the socket.
        failed: Called, in a thread of its own, when CRIU has failed and waits to let the tree go.
    """

    def __init__(self, peer: socket.socket, failed: Callable[[], object]) -> None:
        peer.settimeout(None)
        self._peer = peer
        self._failed = failed
        self._change = threading.Condition()
        self._lost = False
        self._held = False
        self._left = False
        self._answer: str | None = None
        self._gone: set[int] = set()
        self._orders = threading.Lock()
        threading.Thread(target=self._listen, name="holder", daemon=True).start()

    @property
    def lost(self) -> bool:
        """Return whether this CRIU is gone, or nothing more is wanted of it."""
        return self._lost or self._left

    def wait(self, seconds: float) -> bool:
        """Wait until the tree is held and CRIU waits for orders; return whether it does."""
        with self._change:
            self._change.wait_for(lambda: self._held or self.lost, seconds)
            return self._held and not self.lost

    def let_go(self, threads: Collection[int]) -> None:
        """Let threads of a held tree run, with all signals blocked.

        Raises:
            NotHeld: They do not.
        """
        with self._orders:
            wanted = [thread for thread in threads if thread not in self._gone]
            if wanted:
                self._gone.update(wanted)
                try:
                    self._order(f"let {' '.join(map(str, wanted))}")
                except NotHeld:
                    # Some may have been let go of and others not: all stand again, or CRIU is gone.
                    with suppress(NotHeld):
                        self._order("take")
                        self._gone.clear()
                    raise

    def bind(self, pids: Collection[int]) -> None:
        """Make processes of a held tree die with CRIU if it ends before it releases them.

        Raises:
            NotHeld: They do not.
        """
        with self._orders:
            self._order(f"bind {' '.join(map(str, pids))}")

    def go_on(self, *, failed: bool = False) -> None:
        """Stop all threads again and let CRIU continue, to the end of its dump or until it releases
        the tree.

        Args:
            failed: What it does has failed: a dump ends with that, a restore with the end of the
                tree.

        Raises:
            NotHeld: CRIU has ended, or a thread has.
        """
        with self._orders:
            try:
                if self._gone and not failed:
                    self._order("take")
            finally:
                self._gone.clear()  # those that live stand again, also where one has ended
            self._release("fail" if failed else "go")

    def leave(self) -> None:
        """Make a CRIU that has not finished fail. Returns at once."""
        with self._change:
            self._left = True
            self._change.notify_all()
            held = self._held
        if held:
            with suppress(NotHeld):
                self._release("fail")

    def _order(self, words: str) -> None:
        with self._change:
            if not self._held or self.lost:
                raise NotHeld("CRIU does not hold the tree")
            self._answer = None
        self._send(words)
        with self._change:
            in_time = self._change.wait_for(
                lambda: self._answer is not None or self._lost, _ANSWER_SECONDS
            )
            answer = self._answer
        if not in_time:
            self._end()  # a late answer would be taken for the next one's
        if answer != "0":
            raise NotHeld(
                f"CRIU could not: {words} (error {answer})"
                if answer
                else "CRIU ended while it held the tree"
            )

    def _release(self, words: str) -> None:
        with self._change:
            if not self._held:
                raise NotHeld("CRIU does not hold the tree")
            self._held = False
        self._send(words)

    def _send(self, words: str) -> None:
        try:
            packets.send(self._peer, words.encode())
        except OSError as error:
            self._end()
            raise NotHeld(f"CRIU has ended: {error}") from error

    def _end(self) -> None:
        with self._change:
            self._lost = True
            self._held = False
            self._change.notify_all()
        with suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        while True:
            try:
                word = packets.receive(self._peer)[0].decode()
            except OSError:
                self._end()
                return
            with self._change:
                if word.isdecimal():
                    self._answer = word
                else:
                    self._held = True
                self._change.notify_all()
                left = self._left and self._held
            if left:
                with suppress(NotHeld):
                    self._release("fail")
            elif word == "failed":
                threading.Thread(target=self._failed, name="failed", daemon=True).start()
