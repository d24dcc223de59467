"""An entry of the log, how entries refer to each other, and which of them may have been trimmed."""

from __future__ import annotations

import msgspec

from icecore.store.format import gaps
from icecore.store.format.state import REMEMBERED, Anchor, LogState

#: Entries that ``trim`` leaves: a listing may be this many generations old and still lead to the
#: newest entry.
KEPT_ENTRIES = 1024
#: One in so many generations is an anchor: it is trimmed before everything that follows it.
ANCHOR_EVERY = 512
#: No writer and no repair advances the log by so much at once: a name listed so far beyond the log
#: that cannot be read is planted.
FAR = 1 << 40
#: What is wrong with such a name.
PLANTED = "it is not a log entry: it cannot be read, and its generation is far beyond the log"


class Entry(msgspec.Struct, frozen=True):
    """A state, and the digest by which the next entry refers to it."""

    state: LogState
    digest: bytes

    @property
    def generation(self) -> int:
        """The entry's generation."""
        return self.state.generation

    @property
    def anchor(self) -> Anchor | None:
        """The anchor of whatever follows this entry, as far as this entry knows."""
        if not is_anchor(self.generation):
            return self.state.anchor
        before = self.state.anchor
        return Anchor(self.generation, self.digest, before.since if before else self.generation + 1)


def is_anchor(generation: int) -> bool:
    """Return whether the entry of this generation is trimmed before everything that follows it."""
    return generation % ANCHOR_EVERY == 1


def anchor_before(generation: int) -> int:
    """Return the generation of the anchor that is trimmed before the entry of this generation; less
    than 1 if there is none.
    """
    return (generation - 2) // ANCHOR_EVERY * ANCHOR_EVERY + 1


def may_be_trimmed(generation: int, newest: int) -> bool:
    """Return whether a trim of a log that has reached ``newest`` may have deleted the entry of
    ``generation``.
    """
    return generation <= newest - KEPT_ENTRIES


def step_back(entry: Entry, to: int) -> int:
    """Return the oldest generation, from ``to`` on, for which ``entry`` tells whether it continues
    it.
    """
    # Generation 1 carries no transaction: only its successor names it.
    step = max(to, entry.generation - REMEMBERED + 1, 2 if entry.generation > 2 else 1)
    anchor = entry.state.anchor
    if (
        anchor is None
        or not to <= anchor.generation < step
        or gaps.gap_of(entry.state.gaps, anchor.generation) is not None
    ):
        return step
    return anchor.generation


def continues(entry: Entry, before: Entry) -> bool:
    """Return whether ``entry`` continues ``before``: by its digest if it holds that, otherwise by
    the transactions that it carried.
    """
    state, anchor = entry.state, entry.state.anchor
    if before.generation == entry.generation - 1:
        return state.predecessor == before.digest
    if anchor is not None and anchor.generation == before.generation:
        return anchor.digest == before.digest
    return (
        before.state.transactions[-1:] != [] and before.state.transactions[-1] in state.transactions
    )
