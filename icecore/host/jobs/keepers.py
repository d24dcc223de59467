"""The keepers of instances' GPU memory: where they are, what they kept, and letting go of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from icecore.errors import IcecoreError, NotFound, UsageError
from icecore.host.jobs.job import Job
from icecore.host.jobs.namespaces import INSTANCE_MOUNT

#: Where the keepers of jobs on the host's root have their directories.
_RESIDENT = Path("/run/icecore/resident")


def keeper_place(job: Job) -> Path:
    """Return where an instance's keeper is, if it has one. Instances without a root of their own
    share one short path, which a restore finds again.
    """
    known = job.description
    return Path(
        known.resident
        or (job.directory / "resident" if known.isolation.root else _RESIDENT / job.instance)
    )


def places_of_unknown(directory: Path) -> list[Path]:
    """Return where the keeper of an instance may be if only the instance's directory is known."""
    return [directory / "resident", _RESIDENT / directory.name]


def living(jobs: Sequence[Job], snapshot: str, name: str) -> list[Path]:
    """Return where the running keepers of instances are: first those of instances last dumped to or
    restored from a snapshot, then those of instances with a name, newer ones first.

    Args:
        jobs: All instances, oldest first.
    """
    ordered = [*reversed(jobs)]
    ordered.sort(key=lambda job: (job.description.snapshot != snapshot, job.name != name))
    places = dict.fromkeys(keeper_place(job) for job in ordered)
    return [place for place in places if (place / "keeper").is_socket()]


def left(jobs: Sequence[Job], lineage: str) -> set[Path]:
    """Return the places of keepers whose instances have all ended, one or more of a lineage."""
    busy = {keeper_place(job) for job in jobs if job.state in ("running", "starting")}
    return {keeper_place(job) for job in jobs if job.description.lineage == lineage} - busy


def kept_bytes(job: Job, jobs: Callable[[], Sequence[Job]]) -> int:
    """Return the bytes of GPU memory that its keeper still holds of an ended instance.

    Args:
        jobs: Returns all instances, oldest first. They are read only if the instance has a keeper.
    """
    with suppress(IcecoreError, OSError):
        place = keeper_place(job)
        if (
            job.state in ("running", "starting")
            or not (place / "keeper").is_socket()
            or not has_last(job, jobs())
        ):
            return 0
        from icecore.host.resident.client import Keeper  # starts slowly; few commands need it

        keeper = Keeper(place)
        tokens = [process.token for process in keeper.processes() if not process.alive]
        return sum(
            one.size for token in tokens for one in keeper.allocations(token) if not one.imported
        )
    return 0


def has_last(job: Job, jobs: Sequence[Job]) -> bool:
    """Return whether no later instance has the same keeper: kept memory is that of the last one.
    Instances of one snapshot share a keeper unless they have private roots.
    """
    same = [other for other in jobs if keeper_place(other) == keeper_place(job)]
    return not same or same[-1].instance == job.instance


def start_for(job: Job, environment: Mapping[str, str]) -> dict[str, str]:
    """Start the keeper of an instance that is about to start.

    Returns:
        Variables that the job's environment must have.
    """
    from icecore.host.resident import keeper

    known, place = job.description, keeper_place(job)
    keeper.make_place(place, known.user)
    keeper.start_keeper(place)
    if not known.isolation.root:
        return keeper.environment(str(_RESIDENT / job.instance), environment)
    if known.user:
        # The way to the keeper leads through it; it shows nothing else.
        job.directory.chmod(0o711)
    return keeper.environment(str(Path(INSTANCE_MOUNT) / "resident"), environment)


def let_go_unless_claimed(place: Path, whose: str) -> None:
    """Release what a keeper has kept, as `let_go` does, unless a restore takes it.

    Raises:
        UsageError: One does.
        ResidentFailed: The keeper does not answer.
    """
    from icecore.host.resident.keeper import claimed

    with claimed(place) as ours:
        if not ours:
            raise UsageError(
                f"{whose} is being restored from", cure="wait until that restore is done"
            )
        let_go(place)


def let_go(place: Path) -> None:
    """Have a keeper let go of what it kept of processes that have ended, keep nothing of those that
    live (an init that is killed may leave some), and remove its directory, unless somebody uses it.

    Raises:
        ResidentFailed: It does not answer. Without its directory nobody could ask it any more.
    """
    from icecore.host.resident.client import Keeper

    with suppress(NotFound):  # it has ended, and let go of everything
        keeper = Keeper(place)
        for process in keeper.processes():
            if process.alive:
                keeper.unkeep(process.token)
        held = keeper.processes()  # one may have ended before
        for process in held:
            if not process.alive:
                keeper.forget(process.token)
        if any(process.alive for process in held):
            return
    shutil.rmtree(place, ignore_errors=True)
