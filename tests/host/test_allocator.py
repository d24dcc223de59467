"""What the C library's allocator is told: a process that lives for months stays small."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Pieces that live for a moment, as a service's answers, between some that live for long.
_ANSWERS = """
import random, sys
from icecore.host.kernel import libc

def size():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))

if int(sys.argv[1]):
    libc.map_pieces_from(int(sys.argv[1]))
chosen, kept, before = random.Random(1), [], size()
for _ in range(50):
    answers = [bytes(chosen.randrange(40_000, 90_000)) for _ in range(100)]
    kept += [bytes(chosen.randrange(600, 4_000)) for _ in range(10)]
    del answers
print((size() - before) / sum(map(len, kept)))
"""


@pytest.mark.parametrize(("least", "expected"), [(32 << 10, True), (0, False)])
def test_what_lives_for_a_moment_leaves_no_gaps(least: int, expected: bool) -> None:
    """Without the limit, the heap keeps the peak."""
    words = [sys.executable, "-c", _ANSWERS, str(least)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert (float(done.stdout) < 2) is expected
