"""What a ctime proves about writes after a look at the file."""

from __future__ import annotations

import pytest

from icecore.host.kernel.timestamps import shows_later_writes

SECOND, MS = 10**9, 10**6
NOON = 1_764_244_800 * SECOND


@pytest.mark.parametrize(
    ("ctime", "looked", "shows"),
    [
        (NOON + 200 * MS, NOON + 500 * MS, True),
        (NOON + 450 * MS, NOON + 500 * MS, False),
        (NOON + 600 * MS, NOON + 500 * MS, False),
        # written at 12:00:00.2, looked at .5, written again at .8: the ctime is 12:00:00 each time
        (NOON, NOON + 500 * MS, False),
        # the same on vfat, which records every other second
        (NOON, NOON + 1900 * MS, False),
        (NOON, NOON + 2200 * MS, True),
        (NOON - 1, NOON + 500 * MS, True),
    ],
)
def test_a_recent_ctime_proves_nothing(ctime: int, looked: int, shows: bool) -> None:
    assert shows_later_writes(ctime, looked) == shows
