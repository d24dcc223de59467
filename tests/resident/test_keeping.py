"""Memory that outlives a process because it is in a snapshot: while its job runs on nobody lacks it
for long, and a job that ends well leaves nothing.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from errno import EINVAL, EMFILE
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from icecore.dumper.options import DumpOptions
from icecore.dumper.target import Target
from icecore.errors import NotFound, RestoreRefused, UsageError
from icecore.events import Value
from icecore.host.jobs.job import Job as Instance
from icecore.host.jobs.registry import Registry
from icecore.host.resident import client
from icecore.host.resident.client import Keeper, ResidentFailed
from icecore.host.resident.keeper import claimed, keeper_path
from icecore.host.resident.protocol import Allocation, Message, Operation
from icecore.host.resident.sharing import repeated
from icecore.restorer.gpu.keepers import let_go
from icecore.restorer.gpu.resident import Resident
from tests.dumper.world import Events, Store
from tests.fakes.joined import Job, Ring
from tests.fakes.machine import HERE, MIB, Machine, gone, until, uuid_of
from tests.fakes.machine import Target as Process

from .test_restore import bring_back, ended

pytestmark = pytest.mark.timeout(120)

Launch = Callable[..., Job]


class Init:
    """What stands for a job's init: its end is the job's, and what is in its file says how that
    was.
    """

    def __init__(self, folder: Path) -> None:
        self.status = folder / "status"
        self.status.touch()
        self._process = subprocess.Popen(["sleep", "600"])
        self.pid = self._process.pid

    def end(self, words: str = "") -> None:
        """It ends, with these last words."""
        self.status.write_text(words)
        self._process.kill()
        self._process.wait(10)


@pytest.fixture
def init(tmp_path: Path) -> Iterator[Init]:
    made = Init(tmp_path)
    yield made
    made.end()


def kept(target: Process, init: Init, mib: int = 8, **how: float) -> bytes:
    """It has memory, and a snapshot; its token."""
    assert target(f"alloc({mib} * MIB)")[0] == 0
    token = target.agent.report().token
    target.machine.keeper.keep(token, init.pid, init.status, **how)
    return token


def test_a_job_that_breaks_off(machine: Machine, target: Process, init: Init) -> None:
    token = kept(target, init)
    target.end()
    init.end("killed 9\n")
    [process] = machine.keeper.processes()
    assert (process.token, process.alive, process.retained, process.size) == (
        token,
        False,
        True,
        8 * MIB,
    )
    machine.keeper.drop(token, [77])
    assert machine.used() == 8 * MIB
    machine.keeper.drop(token, [one.identity for one in machine.keeper.allocations(token)])
    assert (machine.used(), machine.keeper.processes()) == (0, [])


@pytest.mark.parametrize(
    ("words", "held"), [("exited 0\n", 0), ("exited 1\n", 8), ("", 8), ("killed 15\n", 8)]
)
@pytest.mark.parametrize("first", ["process", "job"])
def test_how_a_job_ends(
    words: str, held: int, first: str, machine: Machine, target: Process, init: Init
) -> None:
    token = kept(target, init)
    for who in (target.end, lambda: init.end(words))[:: 1 if first == "process" else -1]:
        who()
        machine.keeper.processes()
    assert machine.used() == held * MIB
    machine.keeper.forget(token)
    assert machine.used() == 0


def test_what_lives_is_not_dropped(machine: Machine, target: Process, init: Init) -> None:
    token = kept(target, init)
    with pytest.raises(ResidentFailed):
        machine.keeper.drop(token, [1])
    assert machine.used() == 8 * MIB


def at_rest(pid: int) -> set[int]:
    """The descriptors of a process once they have been the same for a while: an earlier request's
    may still be open.
    """
    looks: list[set[int]] = []

    def same() -> bool:
        looks.append({int(name) for name in os.listdir(f"/proc/{pid}/fd")})
        time.sleep(0.02)
        return len(looks) > 10 and all(look == looks[-1] for look in looks[-10:])

    until(same)
    return looks[-1]


def test_a_keeper_without_descriptors_keeps_nothing(
    machine: Machine, target: Process, init: Init
) -> None:
    """That its job cannot be looked at does not mean that it ended."""
    token = kept(target, init)
    pid = machine.keeper_pid()
    there = at_rest(pid)
    free = [number for number in range(len(there) + 2) if number not in there]
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(
        pid, resource.RLIMIT_NOFILE, (free[1] + 1, hard)
    )  # for the connection and the status file
    with pytest.raises(ResidentFailed) as caught:
        machine.keeper.keep(token, init.pid, init.status)
    assert caught.value.code == EMFILE
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    target.end()
    assert (machine.keeper.processes(), machine.used()) == ([], 0)


def test_while_the_job_runs_on_it_is_there_for_a_while(
    machine: Machine, target: Process, init: Init
) -> None:
    token = kept(target, init, seconds=1.0)
    identity = machine.keeper.allocations(token)[0].identity
    target.end()
    machine.keeper.processes()
    assert machine.used() == 8 * MIB
    assert machine.keeper.fetch(token, [identity]) == {}  # to the others its creator is gone
    until(lambda: machine.used() == 0)
    assert machine.keeper.processes() == []


def test_a_job_that_begins_anew_by_itself_has_the_memory(
    machine: Machine, target: Process, init: Init
) -> None:
    kept(target, init, 40)
    target.end()
    machine.keeper.processes()
    second = machine.target()
    second("start()")
    assert second("alloc(4 * MIB)")[0] == 0
    until(lambda: machine.used() == 4 * MIB)


def test_an_allocation_that_finds_no_memory_gets_it(
    machine: Machine, target: Process, init: Init
) -> None:
    other = machine.target()
    other("start()")
    assert other("alloc(2 * MIB)")[0] == 0
    kept(target, init, 40)
    target.end()
    machine.keeper.processes()
    assert (machine.used(), other("alloc(50 * MIB)")[0]) == (42 * MIB, 0)
    assert machine.used() == 52 * MIB
    assert other("alloc(50 * MIB)")[0] == 2


def replaced(target: Process, *command: str) -> None:
    """It executes another program."""
    target.say(f"os.execv({command[0]!r}, {[*command]!r})")


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_program_that_replaces_another_has_its_memory(
    machine: Machine, target: Process, init: Init, is_kept: bool
) -> None:
    if is_kept:
        kept(target, init, 40)
    else:
        assert target("alloc(40 * MIB)")[0] == 0
    replaced(target, sys.executable, "-I", str(HERE / "target.py"))
    assert target.read() == "ready"
    target("start()")
    assert target("alloc(50 * MIB)")[0] == 0
    token = target.agent.report().token
    [process] = machine.keeper.processes()
    assert (process.token, process.alive, process.size) == (
        token,
        True,
        50 * MIB,
    )


def test_a_program_without_device_memory_that_replaces_another(
    machine: Machine, target: Process
) -> None:
    assert target("alloc(8 * MIB)")[0] == 0
    replaced(target, "/bin/sleep", "600")
    until(lambda: machine.used() == 0)
    assert machine.keeper.processes() == []


def test_a_stopped_process_without_a_connection_loses_nothing(
    machine: Machine, target: Process
) -> None:
    """It has closed all that it found."""
    assert target("alloc(8 * MIB)")[0] == 0
    token = target.agent.report().token
    target.say("[os.closerange(3, 4096), os.kill(os.getpid(), 19)]")
    until(lambda: "T (stopped)" in Path(f"/proc/{target.pid}/status").read_text())
    time.sleep(2.5)  # longer than it takes to look
    [process] = machine.keeper.processes()
    assert (process.token, process.alive, process.size) == (token, True, 8 * MIB)
    os.kill(target.pid, signal.SIGCONT)
    target.read()


@pytest.mark.parametrize("hidden", [False, True])
def test_another_program_of_the_same_process(machine: Machine, hidden: bool) -> None:
    """Where the keeper cannot tell that one was replaced, it is when another says hello; where it
    can, two may be in one process.
    """
    if hidden:
        machine.kill_keeper()
        words = [
            "unshare",
            "-m",
            "sh",
            "-c",
            'mount -t tmpfs none /proc; exec "$0" "$1"',
            str(keeper_path()),
            str(machine.directory / "keeper"),
        ]
        blind = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert blind.stdout is not None
        assert blind.stdout.readline() == b"ready\n"
    tokens = [bytes([number]) * 16 for number in range(2)]
    try:
        with open("/dev/null") as held:
            for token in tokens:
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as process:
                    process.connect(str(machine.directory / "keeper"))
                    process.sendall(Message(Operation.KEEPER_HELLO, token=token).pack())
                    assert Message.unpack(process.recv(1024)).result == 0
                    hold = Message(
                        Operation.KEEPER_HOLD,
                        identity=3,
                        address=2 * MIB,
                        size=2 * MIB,
                        device=bytes(16),
                        token=token,
                    )
                    socket.send_fds(process, [hold.pack()], [held.fileno()])
                until(lambda token=token: machine.keeper.allocations(token))  # type: ignore[misc]
        assert sorted(one.token for one in machine.keeper.processes()) == tokens[hidden:]
    finally:
        if hidden:
            blind.kill()
            blind.wait(10)
            blind.stdout.close()


def test_a_job_that_broke_off_yields_to_nobody(
    machine: Machine, target: Process, init: Init
) -> None:
    kept(target, init, 40)
    target.end()
    init.end("exited 1\n")
    other = machine.target()
    other("start()")
    assert (other("alloc(2 * MIB)")[0], other("alloc(50 * MIB)")[0]) == (0, 2)
    assert machine.used() == 42 * MIB


def test_a_keeper_that_nobody_can_reach_holds_nothing(
    machine: Machine, target: Process, init: Init
) -> None:
    other = machine.target()
    other("start()")
    assert other("alloc(2 * MIB)")[0] == 0
    assert not other.agent.report().counts.unheld
    kept(target, init)
    pid = machine.keeper_pid()
    target.end()
    init.end("exited 1\n")
    (machine.directory / "keeper").unlink()
    time.sleep(2.5)  # longer than it takes to look
    assert (machine.used(), gone(pid)) == (10 * MIB, False)  # somebody still lives
    other.end()
    until(lambda: gone(pid))
    assert machine.used() == 0


def instance(registry: Registry, machine: Machine) -> Instance:
    """One that has ended, with the machine's keeper."""
    job = registry.start(["true"])
    job.wait(10)
    return Instance.load(job.directory).with_resident(machine.directory, keep=True)


def test_rm_where_the_keeper_does_not_answer(
    machine: Machine, target: Process, init: Init, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(tmp_path / "state")
    job = instance(registry, machine)
    kept(target, init)
    target.end()
    init.end("exited 1\n")
    pid = machine.keeper_pid()
    os.kill(pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(client, "_ANSWER_SECONDS", 0.2)
        with pytest.raises(ResidentFailed, match="did not answer"):
            registry.remove(job)
    os.kill(pid, signal.SIGCONT)
    assert (registry.find(job.instance).instance, machine.used()) == (job.instance, 8 * MIB)
    registry.remove(job)
    assert (registry.instances(), machine.used(), machine.directory.exists()) == ([], 0, False)


def test_rm_while_a_process_outlives_its_init(
    machine: Machine, target: Process, init: Init, tmp_path: Path
) -> None:
    registry = Registry(tmp_path / "state")
    job = instance(registry, machine)
    other = machine.target()
    other("start()")
    gone_first = kept(other, init, 2)
    kept(target, init)
    init.end()
    other.end()
    assert [one.token for one in machine.keeper.processes() if not one.alive] == [gone_first]
    registry.remove(job)
    assert (machine.used(), target("alloc(2 * MIB)")[0]) == (8 * MIB, 0)
    target.end()
    assert (machine.keeper.processes(), machine.used()) == ([], 0)


def test_while_a_restore_takes_it_nobody_lets_go_of_it(
    machine: Machine, target: Process, init: Init, tmp_path: Path
) -> None:
    registry = Registry(tmp_path / "state")
    job = instance(registry, machine)
    token = kept(target, init)
    target.end()
    init.end("exited 1\n")
    processes: Any = {1: SimpleNamespace(token_bytes=token)}
    with claimed(machine.directory) as ours, claimed(machine.directory) as again:
        assert (ours, again) == (True, False)
        with pytest.raises(UsageError, match="is being restored from"):
            registry.remove(job)
        let_go(registry, "", "", processes)
        assert machine.used() == 8 * MIB
    let_go(registry, "", "", processes)
    assert machine.used() == 0
    registry.remove(job)


def test_the_same_memory_twice() -> None:
    descriptors = [os.memfd_create("a"), os.memfd_create("b")]
    descriptors += [os.dup(descriptors[0]), os.dup(descriptors[0]), os.dup(descriptors[1])]
    try:
        flags = [32, 0, 16, 16, 0]
        taken = [
            (Allocation(number, 0, 2 * MIB, 1, uuid_of(0), 0, bytes(16), flag), descriptor)
            for number, (flag, descriptor) in enumerate(zip(flags, descriptors, strict=True))
        ]
        assert repeated(taken) == [2, 3]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


# -- with real dumps and restores


def keep_all(job: Job, folder: Path) -> None:
    """As a dump of a job of `icecore run --keep-resident` does in the end; the job's first process
    is its init.
    """
    status = folder / "status"
    status.touch()
    for process in job.machine.keeper.processes():
        job.machine.keeper.keep(process.token, job.pid, status)


def memory_phase(events: Events) -> dict[str, Value]:
    [end] = [
        event.fields
        for event in events.named("restore.resident.memory")
        if event.fields["state"] == "end"
    ]
    return dict(end)


@pytest.mark.criu
@pytest.mark.parametrize(("mode", "placers"), [("lazy", 0), ("full", 2)])
def test_killed_and_brought_back(
    mode: str, placers: int, store: Store, launch: Launch, joined: Machine, tmp_path: Path
) -> None:
    job = launch(gpus=(0, 1), children=1)
    snapshot = store.dump(job.pid).snapshot
    keep_all(job, tmp_path)
    job.wait_steps(40)
    job.kill()
    assert sum(joined.used(gpu) for gpu in range(2)) == job.resident
    events = Events()
    bring_back(store, snapshot, events, mode=mode, placers=placers, from_resident=True)
    job.goes_on()
    assert (
        memory_phase(events)["fetched"] == len(job.pids) * job.buffers
    )  # only the first cell of each buffer changes
    assert sum(joined.used(gpu) for gpu in range(2)) == job.resident + len(job.pids) * MIB // 2
    job.kill()


@pytest.mark.criu
def test_what_was_freed_since_is_fetched_and_what_was_made_since_is_let_go_of(
    store: Store, launch: Launch, joined: Machine, tmp_path: Path
) -> None:
    job = launch(gpus=(0,), children=1)
    snapshot = store.dump(job.pid).snapshot
    keep_all(job, tmp_path)
    stranger = joined.target()
    stranger("start()")
    assert stranger("alloc(8 * MIB)")[0] == 0
    one, other = (process.token for process in joined.keeper.processes() if process.pid in job.pids)
    joined.keeper.keep(stranger.agent.report().token, job.pid, tmp_path / "status")
    stranger.end()
    job.kill()
    assert joined.used(0) == job.resident + 8 * MIB
    # All of one process, and of the other's an allocation.
    joined.keeper.forget(one)
    gone = joined.keeper.allocations(other)[1]
    joined.keeper.drop(other, [gone.identity])
    assert joined.used(0) == (job.buffers - 1) * 4 * MIB + 8 * MIB
    events = Events()
    bring_back(store, snapshot, events, from_resident=True)
    job.goes_on()
    cells = (job.buffers + 1) * 4
    assert cells <= int(memory_phase(events)["fetched"]) <= cells + job.buffers - 1  # type: ignore[call-overload]
    assert joined.used(0) == job.resident + len(job.pids) * MIB // 2
    job.kill()


@pytest.mark.criu
@pytest.mark.parametrize("same", [True, False])
def test_what_other_processes_of_the_lineage_left(
    same: bool,
    store: Store,
    launch: Launch,
    joined: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers that were started again after the snapshot have other tokens."""
    monkeypatch.setenv("ICECORE_STATE", str(tmp_path / "state"))
    job = launch()
    done = store.dump(job.pid)
    left = instance(Registry(), joined).with_snapshot(
        "another", done.lineage if same else "another"
    )
    keep_all(job, tmp_path)
    stranger = joined.target()
    stranger("start()")
    assert stranger("alloc(8 * MIB)")[0] == 0
    joined.keeper.keep(stranger.agent.report().token, job.pid, tmp_path / "status")
    stranger.end()
    job.kill()
    assert joined.used(0) == job.resident + 8 * MIB
    assert Registry().left_keepers(left.description.lineage) == {joined.directory}
    assert Registry().left_keepers(left.description.lineage, left.instance) == set()
    bring_back(store, done.snapshot)
    job.goes_on()
    assert joined.used(0) == job.resident + MIB // 2 + (0 if same else 8 * MIB)


@pytest.mark.criu
@pytest.mark.parametrize("ipc", [False, True])
def test_ranks_that_have_each_others_memory(
    ipc: bool, store: Store, launch: Launch, joined: Machine, tmp_path: Path
) -> None:
    job = launch(kind=Ring, ipc=ipc)
    assert isinstance(job, Ring)
    snapshot = store.dump(job.pid).snapshot
    for whole in (True, False):
        keep_all(job, tmp_path)
        job.goes_on()
        job.kill()
        assert sum(joined.used(gpu) for gpu in range(2)) == job.resident
        if not whole:  # a rank's own, with what the other has of it
            token = joined.keeper.processes()[0].token
            joined.keeper.drop(
                token,
                [one.identity for one in joined.keeper.allocations(token) if not one.imported],
            )
        job.pid = bring_back(store, snapshot, from_resident=True).pid
        job.goes_on()
        assert sum(joined.used(gpu) for gpu in range(2)) == job.resident + job.ranks * MIB // 2
    job.kill()


@pytest.mark.criu
def test_a_rank_that_dies_before_its_job(
    store: Store, launch: Launch, joined: Machine, tmp_path: Path
) -> None:
    """Its memory is there, too, when the others follow it."""
    job = launch(gpus=(0, 1), children=1)
    snapshot = store.dump(job.pid).snapshot
    keep_all(job, tmp_path)
    [child] = [pid for pid in job.pids if pid != job.pid]
    os.kill(child, signal.SIGKILL)
    until(lambda: [one.retained for one in joined.keeper.processes() if not one.alive] == [True])
    job.kill()
    events = Events()
    bring_back(store, snapshot, events, from_resident=True)
    job.goes_on()
    assert int(memory_phase(events)["fetched"]) <= len(job.pids) * job.buffers  # type: ignore[call-overload]
    job.kill()


@pytest.mark.criu
def test_the_keeper_that_had_it_ends_meanwhile(
    store: Store, launch: Launch, joined: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(self: Keeper, token: bytes) -> None:
        raise NotFound(f"nothing listens at {self.directory}")

    job = launch()
    snapshot = store.dump(job.pid).snapshot
    keep_all(job, tmp_path)
    job.kill()
    with monkeypatch.context() as patch:
        made = Resident.__init__

        def elsewhere(self: Resident, *words: Any, **named: Any) -> None:
            made(self, *words, **named)
            self._elsewhere = True

        patch.setattr(Resident, "__init__", elsewhere)
        patch.setattr(Keeper, "forget", ends)
        bring_back(store, snapshot, from_resident=True)
    job.goes_on()


@pytest.mark.criu
def test_a_restore_that_fails_leaves_it_where_it_is(
    store: Store, launch: Launch, joined: Machine, tmp_path: Path
) -> None:
    job = launch()
    snapshot = store.dump(job.pid).snapshot
    keep_all(job, tmp_path)
    job.kill()
    with claimed(joined.directory) as ours, pytest.raises(RestoreRefused, match="another restore"):
        assert ours
        bring_back(store, snapshot, from_resident=True)
    (joined.cuda / "faults" / "1").write_text('{"call": "restore", "code": 801}')
    with pytest.raises(Exception, match=r"801|restore"):
        bring_back(store, snapshot, from_resident=True)
    until(lambda: joined.used(0) == job.resident)
    bring_back(store, snapshot, from_resident=True)
    job.goes_on()


@pytest.mark.criu
def test_a_dump_says_that_nothing_is_kept(
    store: Store, launch: Launch, joined: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a keeper that an older icecore started; by another it is, whoever dumps."""

    def refuse(*_: object) -> None:
        raise ResidentFailed("the keeper refused", EINVAL)

    job = launch()
    target = Target(job.pid, "job", status=str(tmp_path / "status"))
    (tmp_path / "status").touch()
    with monkeypatch.context() as patch:
        patch.setattr(Keeper, "keep", refuse)
        events = Events()
        store.dump(target, events=events)
    assert [event.fields["name"] for event in events.named("dump.warning")] == ["keep-resident"]
    snapshot = store.dump(target).snapshot
    job.kill()
    assert joined.used(0) == job.resident
    bring_back(store, snapshot)
    job.goes_on()
    assert joined.used(0) == job.resident + MIB // 2


@pytest.mark.criu
def test_a_dump_that_stops_the_job_leaves_nothing(
    store: Store, launch: Launch, joined: Machine, tmp_path: Path
) -> None:
    job = launch()
    store.dump(job.pid)
    keep_all(job, tmp_path)
    store.dump(job.pid, DumpOptions(stop=True))
    job.reap()
    ended(job)
