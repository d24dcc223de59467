"""Chooses the full form of a chunk: tried on a sample, measured in bytes and CPU time, and kept for
neighbouring chunks until the data looks different.

The cost of a form is the time that one byte of the job takes on its way in and out: its stored
bytes cross the link twice (written once, read once), and it is encoded and decoded once on one of
the cores. The form of least cost wins.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import msgspec
import numpy as np

from icecore.sizes import PAGE
from icecore.store.format import codec
from icecore.store.format.chunk import as_pages
from icecore.store.format.codec import Choice
from icecore.store.runtime.pool import SAMPLE_BYTES, Scratch

#: Forms to try; the slow ones only where bytes are expensive (see Objective.candidates).
_QUICK = (
    Choice(codec.LZ4),
    Choice(codec.BITSHUFFLE2_LZ4, 1),
    Choice(codec.BITSHUFFLE4_LZ4, 1),
    Choice(codec.BITSHUFFLE8_LZ4, 1),
    Choice(codec.ZSTD, -1),
    Choice(codec.ZSTD, 1),
    Choice(codec.SHUFFLE2_ZSTD, 1),
    Choice(codec.SHUFFLE4_ZSTD, 1),
    Choice(codec.SHUFFLE8_ZSTD, 1),
)
_SLOW = (
    Choice(codec.ZSTD, 3),
    Choice(codec.ZSTD, 6),
    Choice(codec.SHUFFLE2_ZSTD, 5),
    Choice(codec.SHUFFLE4_ZSTD, 5),
)
_SLOW_LINK = 0.2e9

SAMPLE_RUNS = 8
SAMPLE_PAGES = SAMPLE_BYTES // PAGE
_SAMPLE_RUN_PAGES = SAMPLE_PAGES // SAMPLE_RUNS
_PROBE_PAGES = 8
_PROBE_BYTES = 1024
_BUCKETS = 8
_FIRST_INTERVAL = 8
_LAST_INTERVAL = 128
_TOLERANCE = 0.15
#: Seconds of trials per byte of data: 5 % of the minimum time to hash, copy and write a byte.
_CREDIT_PER_BYTE = 0.05 * 0.7e-9
_FIRST_CREDIT = 0.006
_LARGEST_CREDIT = 0.1
#: Except on a slow link, a form that saves less than this share of the bytes is not used: the gain
#: is within the timing noise of a busy machine.
_LEAST_GAIN = 0.15
#: A form must be cheaper by this factor than one tried before it: timings are no more precise.
_MARGIN = 0.97
_RAW = Choice(codec.RAW)
_PROBE = Choice(codec.LZ4)


class Objective(msgspec.Struct, frozen=True):
    """What to save, bytes or time.

    Attributes:
        link: Assumed rate in bytes per second at which stored bytes are written and read back. A
            low rate means fewer bytes at more CPU time.
        cores: Number of threads that encode or decode at the same time.
    """

    link: float = 0.7e9
    cores: int = msgspec.field(default_factory=lambda: os.cpu_count() or 1)

    def cost(self, ratio: float, cpu: float) -> float:
        """Return the seconds per byte of a form that stores ``ratio`` of the bytes and takes
        ``cpu`` seconds per byte to encode and decode.
        """
        return 2 * ratio / self.link + cpu / self.cores

    @property
    def candidates(self) -> tuple[Choice, ...]:
        """Return the forms worth trying at this link rate."""
        return _QUICK + _SLOW if self.slow else _QUICK

    @property
    def slow(self) -> bool:
        """Whether bytes are expensive enough for slow codecs and small gains."""
        return self.link < _SLOW_LINK

    def for_small_deltas(self) -> Objective:
        """Return the same with bytes four times as expensive."""
        return Objective(self.link / 4, self.cores)


class Estimate(msgspec.Struct, frozen=True):
    """The outcome of a trial: the winner, the share of the bytes that it stores, and its cost as
    measured on the sample.

    ``kind`` is 0, or the delta bit (icecore.store.format.codec) of the data.
    """

    choice: Choice
    ratio: float
    cost: float
    kind: int = 0


def sample_starts(pages: int) -> list[int]:
    """Return the first page of each run of a sample of a chunk of ``pages`` pages."""
    return [run * (pages - _SAMPLE_RUN_PAGES) // (SAMPLE_RUNS - 1) for run in range(SAMPLE_RUNS)]


def sample(data: memoryview) -> memoryview:
    """Return at most 64 KiB of ``data``: 8 runs of 2 pages spread over it, or all of it if it is
    not longer.
    """
    pages = len(data) // PAGE
    if pages <= SAMPLE_PAGES:
        return data
    rows = (np.array(sample_starts(pages))[:, None] + np.arange(_SAMPLE_RUN_PAGES)).reshape(-1)
    chosen: memoryview = as_pages(data)[rows].reshape(-1).data
    return chosen


def trial(data: memoryview, scratch: Scratch, objective: Objective, kind: int = 0) -> Estimate:
    """Try every candidate on ``data`` (a sample) and return the cheapest. CPU time counts, not wall
    time, so that other threads do not affect it.
    """
    length = len(data)
    best, ratio, least = _RAW, 1.0, objective.cost(1.0, 0.0)
    limit = 1.0 if objective.slow else 1.0 - _LEAST_GAIN
    out = scratch.sample[:length]
    for choice in objective.candidates:
        started = time.thread_time()
        body = scratch.encoder.body(data, choice)
        encoded = time.thread_time()
        share = (len(body) + codec.DIGEST_BYTES) / length
        if share >= limit or objective.cost(share, (encoded - started) / length) >= least:
            continue
        codec.decode_body(choice.codec, memoryview(body), out)
        cost = objective.cost(share, (time.thread_time() - started) / length)
        if cost < least * _MARGIN:
            best, ratio, least = choice, share, cost
    return Estimate(best, ratio, least, kind)


class _Kept(msgspec.Struct):
    estimate: Estimate
    interval: int = _FIRST_INTERVAL
    left: int = _FIRST_INTERVAL


class Habit:
    """Recent choices in one stream, by region and by how the data looks. Threads may share it: a
    lost update only costs a trial.

    Trials may take 5 % of the time that the data takes anyway; unused time accumulates. With none
    left, a region that was never tried takes the form that suited similar data elsewhere in the
    stream.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._anywhere: dict[int, Estimate] = {}
        self._credit = _FIRST_CREDIT

    def choose(
        self,
        region: int,
        data: memoryview,
        scratch: Scratch,
        measure: Callable[[Scratch], Estimate],
    ) -> Estimate:
        """Return the form for a chunk of ``region``.

        The recent choice if the data looks as it did then, otherwise a trial by ``measure``. A
        trial follows after at most 8 chunks, and after more and more (up to 128) while trials
        confirm the choice.
        """
        self._credit = min(self._credit + len(data) * _CREDIT_PER_BYTE, _LARGEST_CREDIT)
        bucket = _probe(data, scratch)
        kept = self._kept.get((region, bucket))
        if kept is not None and kept.left > 0:
            kept.left -= 1
            return kept.estimate
        if self._credit < 0:
            known = kept.estimate if kept is not None else self._anywhere.get(bucket)
            if known is not None:
                return known
        started = time.thread_time()
        estimate = measure(scratch)
        self._credit -= time.thread_time() - started
        self._anywhere[bucket] = estimate
        if (
            kept is not None
            and kept.estimate.choice == estimate.choice
            and kept.estimate.kind == estimate.kind
        ):
            kept.interval = min(2 * kept.interval, _LAST_INTERVAL)
            kept.estimate, kept.left = estimate, kept.interval
        else:
            self._kept[region, bucket] = _Kept(estimate)
        return estimate

    def surprised(self, region: int) -> None:
        """Record that a chunk of ``region`` became much longer or shorter than estimated, so that
        the next one is tried.
        """
        for bucket in range(_BUCKETS + 2):
            kept = self._kept.get((region, bucket))
            if kept is not None:
                kept.interval, kept.left = _FIRST_INTERVAL, 0


def surprising(estimate: Estimate, length: int, stored: int) -> bool:
    """Return whether ``stored`` bytes for ``length`` differ much from the sample's estimate."""
    return abs(stored / length - estimate.ratio) > _TOLERANCE


def _probe(data: memoryview, scratch: Scratch) -> int:
    """Return how well a few kilobytes of ``data`` compress with the fastest form, in eighths:
    similar for similar data, at 1 % of a codec's time.
    """
    pages = len(data) // PAGE
    step = max(1, pages // _PROBE_PAGES)
    head = np.ascontiguousarray(as_pages(data)[::step, :_PROBE_BYTES]).reshape(-1).data
    return len(scratch.encoder.body(head, _PROBE)) * _BUCKETS // len(head)
