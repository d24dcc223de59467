"""Work beside the running job, or beside other work of a dump."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

T = TypeVar("T")

#: Added to the nice value (sched(7)). Where the job keeps all cores busy, a thread of the default
#: nice value keeps five sixths of its core, and the work still makes progress.
NICE = 7


def lower_priority() -> None:
    """Lower the priority of the calling thread and of the threads that it starts. It may be
    impossible to raise it again.
    """
    with suppress(OSError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)


def in_background(work: Callable[[], T], stop: threading.Event) -> T:
    """Run ``work`` in a thread of low priority and return its result, or raise its error.

    Args:
        stop: Set if this thread is interrupted, so that the work ends.
    """
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        lower_priority()
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            failures.append(error)

    thread = threading.Thread(target=run, name="background")
    thread.start()
    try:
        thread.join()
    except BaseException:
        stop.set()
        thread.join()
        raise
    if failures:
        raise failures[0]
    return results[0]


@contextmanager
def beside(
    work: Callable[[], object], interrupt: Callable[[], None], failed: Callable[[], None]
) -> Iterator[None]:
    """Run ``work`` in another thread, at this thread's priority, until the context is left.

    Args:
        interrupt: Makes the work end soon. Called if the context fails; a later error of the work
            is dropped.
        failed: Makes the context end soon. Called if the work fails; a later error of the context is
            dropped, unless it is an interruption.

    Raises:
        The work's error, when the context is left.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            failures.append(error)
            failed()

    thread = threading.Thread(target=run, name="beside")
    try:
        thread.start()
        yield
        thread.join()
    except BaseException as error:
        later = bool(failures) and isinstance(error, Exception)
        interrupt()
        if thread.ident is not None:
            thread.join()
        if not later:
            raise
    if failures:
        raise failures[0]
