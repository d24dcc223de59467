"""The storing side of a snapshot, whatever its source: session, parent, writer, staging and
pipeline, and in the end the maps and hints.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from icecore.dumper.encode.encoders import Encoders, can_encode
from icecore.dumper.memory.budget import CpuBudget, OwnSeconds
from icecore.dumper.memory.parent import Parent, choose_parent, load_parent
from icecore.dumper.memory.pipeline import Pipeline
from icecore.dumper.memory.spaces import ScanContext, SpaceCapture
from icecore.dumper.memory.staging import Staging
from icecore.events import Sink
from icecore.host.kernel import limits
from icecore.sizes import PAGE
from icecore.store.format.cell import data_pages
from icecore.store.format.fingerprints import Fingerprints, encode_fingerprints, fingerprint_seed
from icecore.store.format.manifest import Sizes, Space
from icecore.store.log.repository import StoredRepository
from icecore.store.runtime.loop import LoopThread
from icecore.store.snapshot.trial import Objective
from icecore.store.snapshot.writer import SnapshotWriter


class Stored(msgspec.Struct, frozen=True):
    """What the manifest records of what was stored: spaces, sizes in bytes, and where the hints are."""

    spaces: list[Space]
    sizes: Sizes
    hints: str
    hints_digest: str
    chunks: int
    deltas: int


class Storing:
    """Begins a session on top of a job's newest snapshot and stores spaces in it.

    Args:
        stack: Undoes, in reverse, everything that is begun here; it aborts the session unless the
            session was committed.
        job: The job whose newest snapshot becomes the parent, unless ``parent`` names another.
        streams: Number of shard streams, ideally one for each process.
        staging_bytes: Bound on staging, which never exceeds a third of the available memory.
        threads: Number of scan threads.
        encode_threads: Number of encoding threads.
        encoders: Number of processes that encode in place of these threads once there is much to
            store, if the storage allows it (`icecore.dumper.encode.encoders.can_encode`).
        eager: Start the encoders at once.
        link_rate: Bytes per second that codec trial optimises for; 0: the default.
        under: Session without which the snapshot is not committed; empty: none.
        processes: Pids whose CPU time counts as that of this work.
        last: The job is being stopped: store what fits, even if little room is left.
    """

    def __init__(
        self,
        repository: StoredRepository,
        loop: LoopThread,
        stack: ExitStack,
        *,
        job: str,
        parent: str,
        purpose: str,
        streams: int,
        staging_bytes: int,
        threads: int,
        encode_threads: int,
        encoders: int = 0,
        eager: bool = False,
        link_rate: float,
        emit: Sink,
        under: str = "",
        processes: Sequence[int] = (),
        last: bool = False,
    ) -> None:
        self.stop = threading.Event()
        # The threads that were there before belong to the program that calls the library.
        mine = {threading.get_native_id(), loop.thread}
        others = {thread.native_id or 0 for thread in threading.enumerate()} - mine
        own = OwnSeconds(others, processes)
        self.budget = CpuBudget(own)
        record = loop.run(choose_parent(repository, job, parent))
        session = loop.run(
            repository.begin(record.snapshot if record else None, purpose, prove=False, insist=last)
        )
        session.under = under
        objective = Objective(link_rate) if link_rate else None
        self.writer = stack.enter_context(
            SnapshotWriter(
                repository, session, loop.loop, streams=streams, objective=objective, emit=emit
            )
        )
        # Not before the session pins it.
        self.parent: Parent | None = (
            load_parent(repository, loop, session.base, emit) if session.base else None
        )
        self.lineage = record.lineage if record else secrets.token_hex(16)
        self.parent_id = record.snapshot if record else ""
        self.staging = stack.enter_context(Staging(limits.at_most_a_third(staging_bytes), threads))
        self.encoders: Encoders | None = None
        if encoders and can_encode(repository.backend):
            self.encoders = stack.enter_context(
                Encoders(
                    encoders,
                    repository,
                    streams,
                    objective or Objective(),
                    own.add,
                    eager=eager,
                )
            )
        self.pipeline = stack.enter_context(
            Pipeline(self.writer, self.staging, encode_threads, self.budget, self.encoders, emit)
        )
        seed = fingerprint_seed(repository.keys, self.lineage)
        self.context = ScanContext(
            self.pipeline, self.staging, seed, threads, streams, self.stop, self.budget
        )

    def abandon(self, why: BaseException) -> None:
        """Stop every thread that scans or waits for staging."""
        self.stop.set()
        self.budget.lift()
        self.staging.abandon(why)

    def finish(self, captures: Sequence[SpaceCapture], reused: Sequence[Space] = ()) -> Stored:
        """Wait for the pipeline, then write maps and hints.

        Args:
            captures: New spaces.
            reused: Spaces of the parent to take over as they are.
        """
        self.pipeline.drain()
        if self.encoders is not None:
            self.encoders.end()
        spaces: list[Space] = []
        logical = zero = changed = device = 0
        for capture in captures:
            space, data, zeros, own = capture.store(self.writer)
            spaces.append(space)
            logical, zero, device = logical + data, zero + zeros, device + own
            changed += capture.changed
        fingerprints = {f"{c.kind}:{c.key}": c.fingerprints() for c in captures}
        for space in reused:
            assert self.parent is not None, "only a parent's spaces can be taken over"
            before = self.parent.space(space.kind, space.key)
            assert before is not None
            spaces.append(space)
            logical += sum(int(data_pages(r).sum()) for r in before.records) * PAGE
            fingerprints[f"{space.kind}:{space.key}"] = Fingerprints(
                before.known.key, before.known.fingerprint
            )
        hints, digest = self.writer.put_hints(self.lineage, encode_fingerprints(fingerprints))
        statistics = self.writer.statistics
        sizes = Sizes(
            logical=logical,
            zero=zero,
            changed=changed,
            stored=statistics.stored,
            device=device,
            by_codec=dict(statistics.by_codec),
            resident_changed=sum(one.changed for one in captures if one.kind == "device"),
        )
        return Stored(spaces, sizes, hints, digest.hex(), statistics.chunks, statistics.deltas)
