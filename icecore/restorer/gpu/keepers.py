"""The keepers of instances that ended: which of them still holds a snapshot's device memory, and
which must let theirs go before a restore. Two restores never use one keeper's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from icecore.errors import IcecoreError, RestoreRefused
from icecore.host.jobs.registry import Registry
from icecore.host.resident.client import Keeper
from icecore.host.resident.keeper import claimed
from icecore.store.format.contract import ResidentProcess


def claim_keeper(
    places: Iterable[Path], processes: Mapping[int, ResidentProcess], stack: ExitStack
) -> Path:
    """Claim the keeper that holds the memory of these processes.

    Args:
        places: Directories of keepers, the likeliest first.
        stack: Ends the claim.

    Returns:
        Its directory.

    Raises:
        RestoreRefused: None holds it, or another restore has claimed the one that does.
    """
    wanted = {process.token_bytes for process in processes.values()}
    for place in places:
        if _claim(place, wanted, stack):
            return place
    raise RestoreRefused(
        "the snapshot's device memory is not held on this machine any more, or another restore uses it",
        cure="restore without --from-resident: all is fetched then",
    )


def _claim(place: Path, wanted: set[bytes], stack: ExitStack) -> bool:
    """Claim a keeper that holds wanted memory which no process has mapped."""
    with suppress(IcecoreError, OSError), ExitStack() as trying:
        if not trying.enter_context(claimed(place)):
            return False
        known = [one for one in Keeper(place).processes() if one.token in wanted]
        if any(one.retained for one in known) and not any(one.alive for one in known):
            stack.callback(trying.pop_all().close)
            return True
    return False


def let_go(
    registry: Registry, lineage: str, besides: str, processes: Mapping[int, ResidentProcess]
) -> None:
    """Have keepers let go of memory that a restore fetches anew, and of what ended instances of the
    lineage left for processes that have other tokens now (workers that were started again): there
    may not be room for both.

    Args:
        besides: The instance that is being restored.
        processes: Those that are being restored.
    """
    wanted = {process.token_bytes for process in processes.values()}
    left = registry.left_keepers(lineage, besides)
    for place in registry.keepers():
        with suppress(IcecoreError, OSError), claimed(place) as ours:
            if not ours:  # another restore uses it
                continue
            keeper = Keeper(place)
            held = keeper.processes()
            every = place in left and not any(known.alive for known in held)
            for known in held:
                if not known.alive and (every or known.token in wanted):
                    keeper.forget(known.token)
