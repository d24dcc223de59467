"""The collector's protocol as a small model, and every interleaving of two writers, a reader and
two collectors, with forgetting, fencing and crashes in between.

The model is the protocol of docs/reference/format.md and nothing else: a transaction is one step on the
newest state; each put, listing and delete is another. A process that crashes takes no further step,
so every prefix is covered. Each rule is also broken once, to show that the model notices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

Shard = str


class ModelState(NamedTuple):
    """The newest log entry, and the contents of the store."""

    generation: int
    snapshots: frozenset[tuple[str, Shard]]
    sessions: frozenset[tuple[str, int, Shard]]  # who, began, pinned shard
    marks: frozenset[tuple[Shard, int]]
    index: frozenset[Shard]
    store: frozenset[Shard]

    @property
    def reached(self) -> frozenset[Shard]:
        return frozenset(shard for _, shard in self.snapshots) | {
            pin for *_, pin in self.sessions if pin
        }

    @property
    def marked(self) -> dict[Shard, int]:
        return dict(self.marks)

    def session(self, who: str) -> tuple[str, int, Shard] | None:
        return next((session for session in self.sessions if session[0] == who), None)


class World(NamedTuple):
    """The state of every actor: its step and what it remembers."""

    state: ModelState
    actors: tuple[tuple[object, ...], ...]
    forgets: int
    fences: int


#: Ways to break the rules.
RULES = (
    "wait for sessions",
    "avoid the marked",
    "list first",
    "index before marks",
    "ours by session",
)


def writer(
    name: str, state: ModelState, memory: tuple[object, ...], broken: str
) -> Iterator[tuple[ModelState, tuple[object, ...]]]:
    """BEGIN, then reuse what the index finds or put a new shard; COMMIT, or end and delete what it
    put.
    """
    step, shard = memory
    generation = state.generation + 1
    session = state.session(name)
    if step == "begin":
        begun = state._replace(
            generation=generation, sessions=state.sessions | {(name, generation, "")}
        )
        yield begun, ("put", f"new-{name}")
        usable = state.index if broken == "avoid the marked" else state.index - state.marked.keys()
        for found in sorted(usable):
            yield begun, ("commit", found)
    elif step == "put":
        yield state._replace(store=state.store | {str(shard)}), ("commit", shard)
    elif step == "commit":
        assert isinstance(shard, str)
        if session is not None:
            left = state._replace(generation=generation, sessions=state.sessions - {session})
            marks = frozenset(mark for mark in state.marks if mark[0] != f"new-{name}")
            snapshots = state.snapshots | {(f"snapshot-{name}", shard)}
            committed = left._replace(snapshots=snapshots, marks=marks, index=state.index | {shard})
            yield committed, ("over", "")
            yield committed, ("unknown", shard)  # the reply is lost
            if shard == f"new-{name}":
                yield left, ("delete", shard)
        else:
            yield state, ("over", "")
    elif step == "unknown":
        # Ended by others, or committed: nothing is deleted, unless the rule is broken.
        gone = broken == "ours by session" and shard == f"new-{name}"
        yield state, ("delete" if gone else "over", shard)
    elif step == "delete":
        yield state._replace(store=state.store - {str(shard)}), ("over", "")


def reader(
    name: str, state: ModelState, memory: tuple[object, ...], broken: str
) -> Iterator[tuple[ModelState, tuple[object, ...]]]:
    """BEGIN pins a snapshot that is listed; END."""
    generation = state.generation + 1
    if memory[0] == "begin":
        for _, shard in sorted(state.snapshots):
            yield (
                state._replace(
                    generation=generation, sessions=state.sessions | {(name, generation, shard)}
                ),
                ("read",),
            )
    elif memory[0] == "read":
        session = state.session(name)
        if session is not None:
            yield (
                state._replace(generation=generation, sessions=state.sessions - {session}),
                ("over",),
            )


def collector(
    name: str, state: ModelState, memory: tuple[object, ...], broken: str
) -> Iterator[tuple[ModelState, tuple[object, ...]]]:
    """LIST, CONDEMN, DELETE one after the other by the state that condemned, then clear the marks
    of what is gone.
    """
    step, *held = memory
    generation = state.generation + 1
    if step == "list":
        yield state, ("condemn", state.generation, state.store, state.reached)
    elif step == "condemn":
        before, listed, seen = held
        assert (
            isinstance(before, int)
            and isinstance(listed, frozenset)
            and isinstance(seen, frozenset)
        )
        # Broken: what is reached is looked up first, what there is is listed afterwards.
        reached = seen if broken == "list first" else state.reached
        listed = state.store if broken == "list first" else listed
        marks = {shard: at for shard, at in state.marks if shard not in reached}
        marks |= {shard: generation for shard in listed - reached if shard not in marks}
        changed = state._replace(generation=generation, marks=frozenset(marks.items()))
        oldest = min((began for _, began, _ in state.sessions), default=generation + 1)
        if broken == "wait for sessions":
            oldest = generation + 1
        gone = sorted(
            shard
            for shard, at in marks.items()
            if shard in listed and shard not in reached and at < oldest
        )
        absent = {shard for shard, at in marks.items() if at <= before and shard not in listed}
        yield changed, ("delete", tuple(gone), tuple(sorted(absent.union(gone))))
    elif step == "delete":
        gone, cleared = held[:2]
        assert isinstance(gone, tuple) and isinstance(cleared, tuple)
        if broken == "index before marks" and len(memory) == 3 and gone:
            # The mark goes first, and the index is left for later.
            marks = frozenset(mark for mark in state.marks if mark[0] not in cleared)
            yield (
                state._replace(generation=generation, marks=marks),
                ("delete", gone, cleared, True),
            )
        elif gone:
            yield (
                state._replace(store=state.store - {gone[0]}),
                ("delete", gone[1:], cleared, *memory[3:]),
            )
        elif cleared:
            marks = frozenset(mark for mark in state.marks if mark[0] not in cleared)
            yield (
                state._replace(
                    generation=generation, marks=marks, index=state.index - set(cleared)
                ),
                ("over",),
            )


ACTORS = (
    ("one", writer, ("begin", "")),
    ("two", writer, ("begin", "")),
    ("reader", reader, ("begin",)),
    ("gc-1", collector, ("list",)),
    ("gc-2", collector, ("list",)),
)
FIRST = ModelState(
    1,
    frozenset({("first", "old")}),
    frozenset(),
    frozenset(),
    frozenset({"old"}),
    frozenset({"old"}),
)
EVERYBODY = ("one", "two", "reader", "gc-1", "gc-2")


def following(world: World, forgets: int, fences: int, broken: str) -> Iterator[World]:
    """Yield every world that one step leads to."""
    state = world.state
    for number, (name, program, _) in enumerate(ACTORS):
        for changed, memory in program(name, state, world.actors[number], broken):
            actors = (*world.actors[:number], memory, *world.actors[number + 1 :])
            yield World(changed, actors, world.forgets, world.fences)
    if world.forgets < forgets:
        for snapshot in state.snapshots:
            left = state._replace(
                generation=state.generation + 1, snapshots=state.snapshots - {snapshot}
            )
            yield world._replace(state=left, forgets=world.forgets + 1)
    if world.fences < fences:
        for session in state.sessions:
            left = state._replace(
                generation=state.generation + 1, sessions=state.sessions - {session}
            )
            yield world._replace(state=left, fences=world.fences + 1)


def normal(world: World) -> World:
    """Renumber generations: only their order counts, so worlds that differ in nothing else are the
    same.
    """
    state = world.state
    numbers = (
        {began for _, began, _ in state.sessions}
        | {at for _, at in state.marks}
        | {state.generation}
    )
    numbers |= {
        memory[1]
        for memory in world.actors
        if memory[0] == "condemn" and isinstance(memory[1], int)
    }
    rank = {number: at for at, number in enumerate(sorted(numbers), 1)}
    state = state._replace(
        generation=rank[state.generation],
        sessions=frozenset((who, rank[began], pin) for who, began, pin in state.sessions),
        marks=frozenset((shard, rank[at]) for shard, at in state.marks),
    )
    actors = tuple(
        (memory[0], rank[memory[1]], *memory[2:]) if memory[0] == "condemn" else memory  # type: ignore[index]
        for memory in world.actors
    )
    # The collectors are alike.
    return world._replace(state=state, actors=(*actors[:3], *sorted(actors[3:], key=repr)))


def explore(
    present: Sequence[str], forgets: int, fences: int, broken: str = ""
) -> tuple[int, World | None]:
    """Return the number of worlds with these actors, and the first in which something reached is
    gone.
    """
    memories = tuple(memory if name in present else ("over", "") for name, _, memory in ACTORS)
    start = World(FIRST, memories, 0, 0)
    seen, frontier = {start}, [start]
    while frontier:
        world = frontier.pop()
        if not world.state.reached <= world.state.store:
            return len(seen), world
        for after in map(normal, following(world, forgets, fences, broken)):
            if after not in seen:
                seen.add(after)
                frontier.append(after)
    return len(seen), None


_LONG = [pytest.mark.torture, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("present", "forgets", "fences"),
    [
        (("one", "two", "reader", "gc-1"), 1, 1),
        (("one", "reader", "gc-1", "gc-2"), 2, 1),
        (("one", "two", "gc-1"), 2, 2),
        pytest.param(EVERYBODY, 1, 0, marks=_LONG),
        pytest.param(EVERYBODY, 2, 1, marks=_LONG),
        pytest.param(EVERYBODY, 1, 2, marks=_LONG),
    ],
)
def test_nothing_that_is_reached_is_ever_gone(
    present: Sequence[str], forgets: int, fences: int
) -> None:
    worlds, lost = explore(present, forgets, fences)
    assert lost is None, lost
    print(
        f"{worlds} worlds of {', '.join(present)} with {forgets} snapshots forgotten and {fences} sessions fenced"
    )
    assert worlds > 1000


@pytest.mark.parametrize("broken", RULES)
def test_the_model_notices_a_broken_rule(broken: str) -> None:
    _, lost = explore(("one", "two", "gc-1"), 2, 1, broken)
    assert lost is not None
