"""icecore: transparent, incremental snapshots of running process trees, stored deduplicated and
restored fast.

Public names load on first use, so importing the package is cheap::

    import icecore

    job = icecore.run(["python3", "train.py"])
    with icecore.Repository.open("/srv/snapshots") as repository:
        taken = icecore.dump(job.name, repository)
        back = icecore.restore(taken.snapshot, repository)
"""

from __future__ import annotations

#: As `typing.TYPE_CHECKING`, whose module takes longer to load than a guard needs to start.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from icecore.api import check_restore, dump, restore, run
    from icecore.config import Config
    from icecore.dumper.dump import DumpResult
    from icecore.dumper.options import DumpOptions
    from icecore.errors import IcecoreError
    from icecore.events import Event
    from icecore.host.jobs.job import ExitStatus, Job
    from icecore.host.jobs.namespaces import Isolation
    from icecore.host.jobs.registry import Registry
    from icecore.repository import Repository
    from icecore.restorer.options import RestoreOptions
    from icecore.restorer.restored import Restored
    from icecore.snapshots.difference import Difference
    from icecore.store.format.manifest import Manifest
    from icecore.store.format.state import SnapshotRecord
    from icecore.store.maintenance.forget import Policy

__all__ = [
    "Config",
    "Difference",
    "DumpOptions",
    "DumpResult",
    "Event",
    "ExitStatus",
    "IcecoreError",
    "Isolation",
    "Job",
    "Manifest",
    "Policy",
    "Registry",
    "Repository",
    "RestoreOptions",
    "Restored",
    "SnapshotRecord",
    "check_restore",
    "dump",
    "restore",
    "run",
]


#: The module of each public name.
_HOMES = {
    "Config": "config",
    "Difference": "snapshots.difference",
    "DumpOptions": "dumper.options",
    "DumpResult": "dumper.dump",
    "Event": "events",
    "ExitStatus": "host.jobs.job",
    "IcecoreError": "errors",
    "Isolation": "host.jobs.namespaces",
    "Job": "host.jobs.job",
    "Manifest": "store.format.manifest",
    "Policy": "store.maintenance.forget",
    "Registry": "host.jobs.registry",
    "Repository": "repository",
    "RestoreOptions": "restorer.options",
    "Restored": "restorer.restored",
    "SnapshotRecord": "store.format.state",
    "check_restore": "api",
    "dump": "api",
    "restore": "api",
    "run": "api",
}


def __getattr__(name: str) -> object:
    """Load a public name on first use (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'icecore' has no attribute {name!r}")
    from importlib import import_module  # not at the start, as typing

    value: object = getattr(import_module(f"icecore.{home}"), name)
    globals()[name] = value  # later accesses bypass this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
