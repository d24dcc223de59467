"""The fifth phase: load the tree's memory, and have the driver restore the GPUs' meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from icecore.events import phase
from icecore.restorer.phases.attempt import Attempt
from icecore.restorer.phases.building import Built
from icecore.restorer.phases.files import Prepared
from icecore.restorer.phases.planning import Plan
from icecore.restorer.phases.resources import Resources
from icecore.restorer.tree import Tree


def load_memory(attempt: Attempt, plan: Plan, tree: Tree) -> None:
    """Wait until all memory is loaded."""
    with phase(attempt.emit, "restore.memory") as running:
        tree.fill.complete(running.progress)
        spent = tree.fill.spent
        running.bytes = spent.produced
        running.fields |= {
            "stored": spent.stored,
            "cells": spent.cells,
            "faults": tree.daemon.faults,
            "threads": plan.limits.threads,
            "placers": tree.fill.placers,
            "redone": spent.redone,
            **spent.thread_seconds(),
        }


def load_shared(attempt: Attempt, prepared: Prepared, built: Built) -> None:
    """Wait until the shared memory of the tree, which is held, is complete."""
    if not prepared.memory.placed:
        return
    with phase(attempt.emit, "restore.shared", objects=len(prepared.memory.placed)) as running:
        running.bytes = built.shared.wait(running.progress)
    built.shared.close()


def bring_devices_back(
    attempt: Attempt, resources: Resources, prepared: Prepared, tree: Tree
) -> None:
    """Have the driver restore device memory; the tree waits until then. Until it is done the guard
    kills the tree if this process dies.
    """
    if resources.devices is not None:
        tree.bring_devices_back(
            resources.devices, prepared.device_bytes, attempt.options.criu_seconds
        )
    if prepared.device_file is not None:
        prepared.device_file.filled.result()
        # Where its pages are small, giving them back takes a while.
        close = prepared.device_file.file.close
        threading.Thread(target=close, name="device-file", daemon=True).start()


def load_all(
    attempt: Attempt, plan: Plan, resources: Resources, prepared: Prepared, built: Built
) -> None:
    """Load all memory of a tree that is held; the driver restores device memory while it comes."""
    tree = built.tree
    if resources.devices is None:
        load_memory(attempt, plan, tree)
        return
    with ThreadPoolExecutor(1, "fill") as pool:
        filled = pool.submit(load_memory, attempt, plan, tree)
        try:
            bring_devices_back(attempt, resources, prepared, tree)
        except BaseException as error:
            tree.fill.fail(error)
            raise
        filled.result()
