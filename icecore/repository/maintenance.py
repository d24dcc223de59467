"""Maintenance of a whole repository: garbage collection, checks, repair, statistics."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from icecore.access.places import backend_at
from icecore.repository.opened import Opened

if TYPE_CHECKING:
    from icecore.store.maintenance.diagnosis import Plan as RepairPlan
    from icecore.store.maintenance.findings import Report
    from icecore.store.maintenance.gc import Options as GcOptions
    from icecore.store.maintenance.gc import Plan as GcPlan
    from icecore.store.maintenance.gc import Result as GcResult
    from icecore.store.maintenance.repair import Repairer
    from icecore.store.maintenance.stats import Stats


class Maintenance(Opened):
    """Collects garbage, finds and repairs damage, and counts."""

    def plan_gc(self, options: GcOptions | None = None) -> GcPlan:
        """Return what a garbage collection would do, bytes included. Changes nothing.

        Raises:
            Damaged: A kept snapshot cannot be read, so its needs are unknown.
        """
        from icecore.store.maintenance.gc import Collector

        return self.loop.run(Collector(self.core, options).plan())

    def gc(self, options: GcOptions | None = None) -> GcResult:
        """Delete what no snapshot and no open session needs, and rewrite objects that are mostly
        dead. Safe beside all other operations.

        Raises:
            Damaged: A kept snapshot cannot be read, so its needs are unknown; nothing was deleted.
        """
        from icecore.store.maintenance.gc import Collector

        return self.loop.run(Collector(self.core, options).collect())

    def check(self, *, read_data: float = 0.0, register: bool = True) -> Report:
        """Verify every object that the snapshots need, while the repository is in use.

        Args:
            read_data: Share (0 to 1) of the data that is also read, decoded and verified.
            register: Protect the checked objects from concurrent collections. Pass False where the
                storage is not writable.

        Returns:
            The findings; damage is reported, not raised.
        """
        from icecore.store.maintenance.check import check

        return self.loop.run(
            check(self._without_replicas(), read_data=read_data, register=register)
        )

    def plan_repair(
        self,
        source: Opened | str | os.PathLike[str] | None = None,
        *,
        read_data: float = 1.0,
        accept_rollback: bool = False,
    ) -> RepairPlan:
        """Return what a repair would fix, and what is lost. Changes nothing.

        Args:
            source: A replica, or its location, where damaged objects are looked up first.
            read_data: Share (0 to 1) of the data that is read; damage to the rest is not found.
            accept_rollback: Continue from the existing log even where this node has seen newer log
                entries that are absent, or different ones.

        Raises:
            UsageError: ``source`` is not a replica of this repository.
            RollbackDetected: This node has seen a newer state, and ``accept_rollback`` is false.
        """
        return self._repair(source, lambda repairer: repairer.plan(), read_data, accept_rollback)

    def repair(
        self,
        source: Opened | str | os.PathLike[str] | None = None,
        *,
        read_data: float = 1.0,
        accept_rollback: bool = False,
    ) -> RepairPlan:
        """Repair damage in one transaction. Readable data stays unchanged, and snapshots that lost
        data stay listed, in quarantine.

        Takes the arguments and raises the errors of `plan_repair`; returns what was done.
        """
        return self._repair(source, lambda repairer: repairer.apply(), read_data, accept_rollback)

    def _repair(
        self,
        source: Opened | str | os.PathLike[str] | None,
        what: Callable[[Repairer], Coroutine[Any, Any, RepairPlan]],
        read_data: float,
        accept_rollback: bool,
    ) -> RepairPlan:
        from icecore.store.maintenance.repair import Repairer

        if source is None:
            return self.loop.run(
                what(
                    Repairer(
                        self._without_replicas(),
                        read_data=read_data,
                        accept_rollback=accept_rollback,
                    )
                )
            )

        async def run() -> RepairPlan:
            # An open source has its own event loop; this one needs a back end of its own.
            place = source.location if isinstance(source, Opened) else os.fspath(source)
            backend = backend_at(place, config=self._config, emit=self.core.emit)
            try:
                return await what(
                    Repairer(
                        self._without_replicas(),
                        await self._open_replica(backend),
                        read_data=read_data,
                        accept_rollback=accept_rollback,
                    )
                )
            finally:
                await backend.close()

        return self.loop.run(run())

    def stats(self, *, register: bool = True) -> Stats:
        """Return bytes by job, lineage and codec, live and dead.

        Args:
            register: Protect what is read from concurrent collections. Pass False where the storage
                is not writable.
        """
        from icecore.store.maintenance.stats import stats

        return self.loop.run(stats(self.core, register=register))
