"""The device memory of a restore: the driver moves it on while it is still being fetched; its rule: all go on together, or none does.

CRIU holds all other threads meanwhile (`icecore.host.cuda.holder`). The driver reads from the lowest address on, and waits in a page fault where it overtakes
the fetching, which goes in the same order.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import partial

from icecore.errors import NotFound, RestoreFailed
from icecore.events import Sink, phase
from icecore.host import procfs
from icecore.host.cuda.api import DeviceError
from icecore.host.cuda.client import Helper, start_here
from icecore.host.cuda.helper import in_parallel
from icecore.restorer.gpus import GpuPlan
from icecore.restorer.guard_process import descendants

_POLL_SECONDS = 0.2


class Devices:
    """The GPU processes of one restore. CUDA begins to be initialised in the helper, which takes a while, when this is made.

    Args:
        plan: Who they are, and which GPUs they get.
        word: Shows in the helper's command line.
        emit: Gets the ``restore.gpu.…`` phases.
    """

    def __init__(self, plan: GpuPlan, word: str, emit: Sink) -> None:
        self._plan = plan
        self._emit = emit
        self._helper = Helper(start_here, word)

    def close(self) -> None:
        """End the helper. The tree runs, or is dead."""
        self._helper.close()

    def holder(self) -> socket.socket:
        """For the plugin of the CRIU that will hold the tree; to be closed."""
        return self._helper.holder()

    @property
    def plan(self) -> GpuPlan:
        """Who they are, and which GPUs they get."""
        return self._plan

    def bring_back(
        self,
        root: Callable[[], int],
        sizes: Mapping[int, int],
        failure: Callable[[], BaseException | None],
        seconds: float,
    ) -> bool:
        """Restore and unlock all, while CRIU holds the tree, which is built; then it goes on.

        Args:
            root: Gives the tree's first process, host pid, once CRIU holds the tree.
            sizes: Image id → how many bytes that are.
            failure: What has broken the restore meanwhile; then this gives up.
            seconds: How long CRIU may take until it holds it.

        Returns:
            Whether it was done; otherwise CRIU did not come to hold the tree.

        Raises:
            RestoreFailed: The driver could not; the tree must be killed.
            MissingTool: There is no driver.
        """
        self._helper.wait_ready()
        # Nobody runs until its pid is known.
        if not self._hold([], seconds):
            return False
        pids = host_pids(root(), self._plan)
        if not self._hold(pids.values(), seconds):
            return False
        failed: list[DeviceError] = []

        def one(image: int) -> None:
            future = self._helper.begin_restore(pids[image], self._plan.processes[image])
            while failure() is None:
                try:
                    future.result(_POLL_SECONDS)
                    return
                except FutureTimeout:
                    continue
                except DeviceError as error:
                    failed.append(error)
                    return

        with phase(self._emit, "restore.gpu.restore", processes=len(pids)) as running:
            running.bytes = sum(sizes.get(image, 0) for image in pids)
            in_parallel(partial(one, image) for image in pids)
            _check(failed, failure)
        with phase(self._emit, "restore.gpu.unlock", processes=len(pids)):
            _check(list(self._helper.unlock(pids.values()).values()), failure)
        try:
            self._helper.go_on()
        except DeviceError as error:
            _check([error], failure)
        return True

    def _hold(self, pids: Iterable[int], seconds: float) -> bool:
        try:
            return self._helper.hold(list(pids), seconds)
        except DeviceError as error:
            raise RestoreFailed(f"the driver cannot work: {error.message}", cure=error.cure) from error


def _check(failed: list[DeviceError], failure: Callable[[], BaseException | None]) -> None:
    first = failure()
    if first is not None:
        raise first
    if failed:
        cures = dict.fromkeys(error.cure for error in failed if error.cure)
        words = "; ".join(error.message for error in failed)
        raise RestoreFailed(f"the driver could not bring device memory back: {words}", cure="; ".join(cures))


def host_pids(root: int, plan: GpuPlan) -> dict[int, int]:
    """Image id → pid here, of a tree's processes.

    Raises:
        RestoreFailed: A process is not there.
    """
    found: dict[int, int] = {}
    for pid in (root, *descendants(root)):
        with suppress(NotFound):
            found[procfs.status(pid).own_pid] = pid
    missing = [image for image in plan.processes if image not in found]
    if missing:
        raise RestoreFailed(f"GPU processes {missing} of the snapshot are not there after CRIU restored it")
    return {image: found[image] for image in plan.processes}
