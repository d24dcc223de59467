"""The test programs verify themselves and detect every kind of damage that they claim to detect; no
snapshot is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.programs import driving, logger, redis_client, redis_load, training
from tests.programs.catalogue import PROGRAMS, Program, missing, port_of

Start = Callable[[str], driving.Running]

SELF_CHECKING = [program for program in PROGRAMS.values() if program.source]
DAMAGES = [(program.name, region) for program in PROGRAMS.values() for region in program.damage]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("binaries")


@pytest.fixture
def start(tmp_path: Path, cache: Path) -> Iterator[Start]:
    """Start a program in its small size, wait until it works, and end it after the test."""
    started: list[driving.Running] = []

    def start_one(name: str) -> driving.Running:
        program = PROGRAMS[name]
        if lacking := missing(program):
            pytest.skip(f"this machine has no {', '.join(lacking)}")
        state_dir = tmp_path / str(len(started))  # short, because programs bind sockets below it
        state_dir.mkdir()
        running = driving.start(program, state_dir, cache, program.quick)
        started.append(running)
        driving.wait_ready(program, state_dir)
        return running

    yield start_one
    for running in started:
        driving.stop(running)


def verdict(running: driving.Running) -> tuple[driving.Progress, int]:
    """Return the program's own verdict and its exit status."""
    driving.ask_finish(running.program, running.state_dir)
    said = driving.wait_finished(running.program, running.state_dir)
    return said, running.process.wait(timeout=20)


@pytest.mark.parametrize("program", SELF_CHECKING, ids=lambda program: program.name)
def test_it_works_and_passes_its_own_checks(program: Program, start: Start) -> None:
    running = start(program.name)
    before = driving.progress(running.state_dir)
    after = driving.wait_progress(running.state_dir, steps=5)
    assert before is not None and after.counter > before.counter
    said, status = verdict(running)
    assert said.passed and not said.errors, said.errors
    assert status == program.exit_status
    assert (running.state_dir / "output.log").read_text() == ""


@pytest.mark.parametrize(
    ("name", "region"), DAMAGES, ids=[f"{name}-{region}" for name, region in DAMAGES]
)
def test_one_changed_bit_is_noticed(name: str, region: str, start: Start) -> None:
    running = start(name)
    now = driving.progress(running.state_dir)
    assert now is not None
    # Where it is may be just about to be rewritten, without being looked at again; not so much one
    # after the other.
    for page in range({"blackboard": 8, "cache": 2}.get(region, 1)):
        driving.damage(
            running.pid, now, region, after=page * {"blackboard": 4096}.get(region, 1 << 20)
        )
    said, status = verdict(running)
    assert said.passed is False and said.errors
    assert status == 1


def test_the_mutator_survives_its_own_operations(start: Start) -> None:
    running = start("mutator")
    driving.go(running.state_dir)
    done = driving.wait_until(
        running.state_dir,
        lambda now: now.facts.get("operations", 0) > 2000 or bool(now.errors) or now.finished,
        60.0,
        "done with 2000 operations",
    )
    assert all(
        done.facts[operation] > 0
        for operation in ("dontneed", "free", "move", "grow", "shrink", "punch", "fork")
    )
    said, status = verdict(running)
    assert said.passed and status == 0, said.errors


def test_memory_pattern_changes_what_it_is_asked_to(start: Start) -> None:
    running = start("memory-pattern")
    pages = 32 * 256
    assert driving.change(running.state_dir, 1, 100, 100) == pages
    assert driving.change(running.state_dir, 2, 100, 10) == pytest.approx(pages / 10, rel=0.1)
    assert driving.change(running.state_dir, 3, 50, 100) % 256 == 0
    counter, at = driving.steps(running.state_dir)
    assert driving.wait_step(running.state_dir, at) > at
    assert driving.steps(running.state_dir)[0] > counter
    said, status = verdict(running)
    assert said.passed and status == 0, said.errors


def test_training_agrees_with_the_pure_function(start: Start) -> None:
    running = start("training")
    said, _ = verdict(running)
    config = training.Config(
        **{name: said.facts["config"][name] for name in ("seed", "threads", "width")},
    )
    losses, chain = training.expected(config, said.counter)
    assert (losses, chain) == (said.facts["losses"], said.facts["chain"])


@pytest.mark.parametrize("harm", ["line appended", "line missing", "block put back"])
def test_the_logger_notices_what_is_done_to_its_files(harm: str, start: Start) -> None:
    running = start("logger")
    log, ledger = running.state_dir / "job.log", running.state_dir / "ledger"
    old_block = logger.block_of(0, 1)
    if harm == "line appended":
        with log.open("ab") as file:
            file.write(logger.line_of(999_999))
    elif harm == "line missing":
        with log.open("r+b") as file:
            file.truncate(log.stat().st_size - 10)
    else:
        driving.wait_until(
            running.state_dir,
            lambda now: ledger.read_bytes()[:4096] != old_block,
            20.0,
            "past block 0",
        )
        with ledger.open("r+b") as file:
            file.write(old_block)
    said, status = verdict(running)
    assert said.passed is False and status == 1
    assert any(("ledger" if harm == "block put back" else "log") in error for error in said.errors)


@pytest.mark.parametrize("name", ["redis", "redis-append-only"])
def test_a_value_changed_behind_the_clients_is_noticed(name: str, start: Start) -> None:
    running = start(name)
    intruder = redis_load.connect(port_of(running.state_dir), timeout_s=10)
    for key in range(500):
        intruder.call("SET", f"client0:{key}", "nonsense")
    intruder.close()
    said, status = verdict(running)
    assert said.passed is False and status == 1
    assert any("is not its version" in error for error in said.errors)


def test_redis_alone_serves_clients_outside(start: Start) -> None:
    running = start("redis-alone")
    connection = redis_load.connect(port_of(running.state_dir), timeout_s=10)
    load = redis_client.Load(connection, "outside", 200)
    wrong = [what for _ in range(10) for what in load.round()]
    assert wrong + load.verify_all() == []
    connection.call("SET", load.name(max(load.version)), "nonsense")
    assert load.verify_all()
    connection.close()
    driving.ask_finish(running.program, running.state_dir)
    assert running.process.wait(timeout=20) == running.program.exit_status
