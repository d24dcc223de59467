"""Has the driver restore the device memory of all processes. All of them continue together, or none
does.

CRIU holds all other threads meanwhile (`icecore.host.cuda.holder`), and what it holds dies with it.
The driver copies memory to the GPUs while it is still being fetched: it reads from the lowest
address up, and waits in a page fault where it is faster than the fetcher, which uses the same
order.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import partial

from icecore.errors import NotFound, RestoreFailed
from icecore.events import Sink, phase
from icecore.host.cuda.api import DeviceError
from icecore.host.gpu.client import CALL_SECONDS, Helper, start_here
from icecore.host.gpu.undo import in_parallel
from icecore.host.kernel import procfs
from icecore.restorer.fill.tree_fill import TreeFill
from icecore.restorer.gpu.gpus import GpuPlan

_POLL_SECONDS = 0.2


class Devices:
    """The GPU processes of one restore. Making it starts the helper, which takes a while to
    initialise CUDA.

    Args:
        plan: The processes, and the GPUs that they get.
        word: Shows in the helper's command line.
        emit: Gets the ``restore.gpu.…`` phases.

    Attributes:
        pids: Image id → pid here, of the GPU processes once `bring_back` has found them.
    """

    def __init__(self, plan: GpuPlan, word: str, emit: Sink) -> None:
        self._plan = plan
        self._emit = emit
        self._helper = Helper(start_here, word, plan.used)
        self.pids: dict[int, int] = {}

    def close(self) -> None:
        """End the helper; the tree runs or is dead."""
        self._helper.close()

    def holder(self) -> socket.socket:
        """Return a socket for CRIU's plugin, which will hold the tree; the caller closes it."""
        return self._helper.holder()

    @property
    def plan(self) -> GpuPlan:
        """The processes, and the GPUs that they get."""
        return self._plan

    def bring_back(
        self,
        root: Callable[[], int],
        sizes: Mapping[int, int],
        fill: TreeFill,
        failure: Callable[[], BaseException | None],
        end_of_criu: Callable[[], BaseException | None],
        seconds: float,
    ) -> bool:
        """Restore and unlock all processes while CRIU holds the tree; then let CRIU continue.

        Args:
            root: Returns the tree's first process, host pid, once CRIU holds the tree.
            sizes: Image id → bytes of device memory.
            fill: Fills the tree.
            failure: Returns what has broken the restore meanwhile; then this gives up.
            end_of_criu: Returns why CRIU has ended meanwhile; then this gives up too.
            seconds: How long CRIU may take until it holds the tree.

        Returns:
            Whether it was done; False: CRIU never held the tree.

        Raises:
            RestoreFailed: The driver failed, or a process is missing; the tree must be killed.
            MissingTool: There is no driver.
        """
        self._helper.wait_ready()
        # The pids are known once CRIU holds the tree.
        if not self._held(seconds):
            return False
        first, pids = root(), self.pids
        try:
            self._helper.bind(first)
            pids.update(self._helper.find(first, self._plan.processes))
        except DeviceError as error:
            _check([error], failure, end_of_criu)
        if missing := [image for image in self._plan.processes if image not in pids]:
            raise RestoreFailed(
                f"GPU processes {missing} of the snapshot are missing after CRIU restored it"
            )
        fill.attach_device_file()
        fill.start_zeros()
        failed: list[BaseException] = []
        lost: list[int] = []

        def one(image: int) -> None:
            if not self._helper.hold([pids[image]], _POLL_SECONDS):
                lost.append(image)
                return
            future = self._helper.begin_restore(pids[image], self._plan.processes[image])
            until = time.monotonic() + CALL_SECONDS
            while not (failure() or end_of_criu()):
                with suppress(FutureTimeout):
                    future.result(_POLL_SECONDS)
                    return
                # Until then it waits for the store, which has limits of its own.
                if not fill.has_device_memory():
                    until = time.monotonic() + CALL_SECONDS
                elif time.monotonic() > until:
                    raise RestoreFailed(
                        f"the driver did not restore process {image} within {CALL_SECONDS:.0f} s after all its memory was loaded"
                    )

        def noting(image: int) -> None:
            try:
                one(image)
            except DeviceError as error:
                failed.append(
                    error
                    if _lives(pids[image])
                    else RestoreFailed(f"process {image} ended while it was restored")
                )
            except BaseException as error:  # noqa: BLE001 - raised once all have ended
                failed.append(error)

        with phase(self._emit, "restore.gpu.restore", processes=len(pids)) as running:
            running.bytes = sum(sizes.get(image, 0) for image in pids)
            in_parallel(partial(noting, image) for image in pids)
            _check(failed, failure, end_of_criu)
        if lost:
            return False
        fill.check_device_file(pids.values())
        with phase(self._emit, "restore.gpu.unlock", processes=len(pids)):
            _check(list(self._helper.unlock(pids.values()).values()), failure, end_of_criu)
        try:
            self._helper.go_on()
        except DeviceError as error:
            _check([error], failure, end_of_criu)
        return True

    def _held(self, seconds: float) -> bool:
        try:
            return self._helper.hold([], seconds)
        except DeviceError as error:
            raise RestoreFailed(
                f"the driver does not work: {error.message}", cure=error.cure
            ) from error


def _lives(pid: int) -> bool:
    try:
        return not procfs.is_zombie(pid)
    except NotFound:
        return False


def _check(
    failed: Sequence[BaseException],
    failure: Callable[[], BaseException | None],
    end_of_criu: Callable[[], BaseException | None],
) -> None:
    """Raise the cause before what follows from it."""
    first = failure() or next(
        (error for error in failed if not isinstance(error, DeviceError)), None
    )
    if first is not None:
        raise first
    found = [error for error in failed if isinstance(error, DeviceError)]
    if found:
        cures = dict.fromkeys(error.cure for error in found if error.cure)
        words = "; ".join(error.message for error in found)
        raise RestoreFailed(
            f"the driver could not restore device memory: {words}", cure="; ".join(cures)
        )
    if (ended := end_of_criu()) is not None:
        raise ended
