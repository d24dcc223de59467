"""The collector's large sets agree with plain ones, within memory and spilled."""

from __future__ import annotations

import numpy as np
import pytest

from icecore.store.maintenance.pieces import Pieces, Seen


@pytest.mark.parametrize("budget", [64 << 20, 20_000])
def test_pieces_are_what_was_added(budget: int) -> None:
    dice = np.random.default_rng(3)
    pieces, model = Pieces(budget=budget), dict[int, dict[int, int]]()
    for round_ in range(40):
        count = int(dice.integers(0, 900))
        shards = dice.integers(0, 200, count).astype(np.uint64)
        offsets = dice.integers(0, 50, count).astype(np.uint64) << np.uint64(33)
        lengths = (offsets >> np.uint64(30)).astype(np.uint32) + 7
        pieces.add(shards, offsets, lengths)
        for shard, offset, length in zip(
            shards.tolist(), offsets.tolist(), lengths.tolist(), strict=True
        ):
            model.setdefault(shard, {})[offset] = length
        if round_ % 13 == 0 or round_ == 39:  # what was asked for may go on growing
            found = {
                shard: (length, offsets.tolist()) for shard, length, offsets in pieces.shards()
            }
            assert found == {
                shard: (sum(here.values()), sorted(here)) for shard, here in model.items()
            }


def test_nothing_has_no_shards() -> None:
    assert list(Pieces().shards()) == []


def test_seen_ids() -> None:
    dice = np.random.default_rng(4)
    seen, model = Seen(), set[bytes]()
    seen._PENDING = 500  # type: ignore[misc]
    pool = dice.integers(0, 256, (3000, 32), np.uint8)
    pool[100:200, :8] = pool[0, :8]  # equal leading halves
    for _ in range(60):
        ids = pool[np.unique(dice.integers(0, len(pool), 90))]
        missing = seen.missing(ids)
        expected = [at for at in range(len(ids)) if ids[at].tobytes() not in model]
        # One with the leading half of another may be taken for new again; never one that is new for
        # seen.
        assert set(expected) <= set(missing.tolist())
        assert all(
            (ids[at, :8] == pool[0, :8]).all() for at in set(missing.tolist()) - set(expected)
        )
        seen.add(ids[missing])
        model |= {ids[at].tobytes() for at in expected}
    assert len(seen) >= len(model) > 2500
