"""A job names sockets and puts there what it likes: nobody gets root to speak to anybody else, to
touch anything else, or to wait for ever.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from icecore.dumper.observe.gpus import GpuInspection, GpuProcess
from icecore.dumper.observe.resident_inspection import inspect_resident
from icecore.errors import NotFound, PreflightRefused
from icecore.host.cuda import nccl
from icecore.host.gpu.backend import find_backend
from icecore.host.resident import client, signals
from icecore.host.resident.client import Agent, Keeper, ResidentFailed
from icecore.host.resident.protocol import VARIABLE, Message, Operation
from tests.fakes.machine import MIB, Machine, until

NOBODY = 65534
#: A process of nobody's that listens at PLACE/agent-PID and answers every packet with the same
#: bytes, as often as it is told: 0 never, -1 without end.
_HOSTILE = """
import os, socket, sys, time
place, answer, often, name = sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
if name:
    listener.bind(f"{place}/{name.replace('PID', str(os.getpid()))}")
    listener.listen()
print("ready", flush=True)
while not name:
    time.sleep(1000)
while True:
    connection, _ = listener.accept()
    try:
        if connection.recv(4096):
            open(f"{place}/heard", "a").close()
        while often < 0:
            connection.send(answer)
            time.sleep(0.01)
        for _ in range(often):
            connection.send(answer)
        if not often:
            time.sleep(1000)
    except OSError:
        pass
    connection.close()
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that nobody owns, in one that all may enter."""
    with tempfile.TemporaryDirectory(prefix="icecore-test-", dir="/dev/shm") as folder:
        os.chmod(folder, 0o755)
        made = Path(folder) / "resident"
        made.mkdir(mode=0o700)
        os.chown(made, NOBODY, NOBODY)
        yield made


Hostile = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def hostile(place: Path) -> Iterator[Hostile]:
    """Starts a hostile process."""
    started: list[subprocess.Popen[str]] = []

    def start(
        answer: bytes = b"",
        often: int = 1,
        *,
        name: str = "agent-PID",
        where: Path = place,
        named: str = "",
        user: int = NOBODY,
        **more: str,
    ) -> subprocess.Popen[str]:
        words = [
            "setpriv",
            "--reuid",
            str(user),
            "--regid",
            str(user),
            "--clear-groups",
            "--",
            "/usr/bin/python3",
            "-c",
            _HOSTILE,
        ]
        process = subprocess.Popen(
            [*words, str(where), answer.hex(), str(often), name],
            env={"PATH": os.environ["PATH"], VARIABLE: named or str(where), **more},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=20)


def seen_through(process: subprocess.Popen[str], place: Path) -> Path:
    """The directory as a dumper reaches it."""
    return Path(f"/proc/{process.pid}/root{place}")


def agent_of(process: subprocess.Popen[str], place: Path) -> Agent:
    return Agent(seen_through(process, place), process.pid, tracee=process.pid)


def look(process: subprocess.Popen[str]) -> object:
    """A dumper's look at the resident memory of a process."""
    return inspect_resident(GpuInspection(find_backend(), [GpuProcess(process.pid)]), 0)[1]


STATUS = Message(Operation.AGENT_STATUS, token=b"t" * 16, text=bytes(29 * 8)).pack()


def test_an_agent_that_is_another_process_is_not_believed(hostile: Hostile, place: Path) -> None:
    named = hostile(name="")
    impostor = hostile(STATUS, name=f"agent-{named.pid}")
    with pytest.raises(
        ResidentFailed, match=f"process {impostor.pid} listens there, not process {named.pid}"
    ):
        agent_of(named, place).report()
    time.sleep(0.1)
    assert not (place / "heard").exists()
    with pytest.raises(PreflightRefused, match="listens there"):
        look(named)


@pytest.mark.parametrize("how", ["socket", "directory", "out of its root"])
def test_no_link_leads_to_a_socket_of_somebody_elses(
    how: str, hostile: Hostile, place: Path
) -> None:
    """Of root's, say, that takes orders from root."""
    ours = place.parent / "ours"
    ours.mkdir(mode=0o700)
    heard: list[bytes] = []
    process = hostile(name="", named=str(place / "link") if how != "socket" else str(place))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(ours / f"agent-{process.pid}"))
        listener.listen()
        listener.settimeout(0.3)
        if how == "socket":
            (place / f"agent-{process.pid}").symlink_to(ours / f"agent-{process.pid}")
        elif how == "directory":
            (place / "link").symlink_to(ours)
        else:
            (place / "link").symlink_to(f"/proc/{os.getpid()}/root{ours}")
        with pytest.raises((ResidentFailed, NotFound)):
            agent_of(process, place if how == "socket" else place / "link").report()
        with pytest.raises(TimeoutError):
            heard.append(listener.accept()[0].recv(4096))
    assert not heard


def test_nothing_of_a_keepers_is_done_in_a_directory_of_somebody_elses(
    hostile: Hostile, place: Path
) -> None:
    """A keeper is started where none runs: it takes the place of what is called so."""
    process = hostile(STATUS)
    assert agent_of(process, place).report().token == b"t" * 16  # it is who it says
    victim = place.parent / "victim"
    victim.mkdir(mode=0o700)
    (victim / "keeper").write_text("precious")
    (place / "keeper").write_text("its own")
    with pytest.raises(PreflightRefused, match="other users can write to"):
        look(process)
    with pytest.raises(ResidentFailed, match="others could have put there"):
        Keeper(seen_through(process, place)).processes()
    assert (victim / "keeper").read_text() == "precious" and (
        place / "keeper"
    ).read_text() == "its own"


def test_a_keeper_of_somebody_elses_gets_nothing_from_a_dumper(
    hostile: Hostile, place: Path
) -> None:
    hostile(STATUS, name="keeper")
    os.chown(place, 0, 0)  # it is root's by now, but who listens is not
    with pytest.raises(ResidentFailed, match=f"a process of user {NOBODY} listens there"):
        Keeper(place).processes()
    assert not (place / "heard").exists()


def test_a_keeper_of_somebody_elses_gets_no_memory_from_a_job(
    machine: Machine, hostile: Hostile
) -> None:
    machine.kill_keeper()
    (machine.directory / "keeper").unlink()
    for folder in (machine.root, machine.directory):
        folder.chmod(0o777)
    hostile(Message(Operation.KEEPER_HELLO).pack(), name="keeper", where=machine.directory)
    target = machine.target()
    target("start()")
    assert target("alloc(2 * MIB)")[0] == 0
    time.sleep(1.5)  # it tries again all the time
    machine.directory.chmod(0o700)
    assert target.agent.report().counts.unheld == 1
    assert not (machine.directory / "heard").exists()
    (machine.directory / "keeper").unlink()
    machine.start_keeper()
    until(lambda: target.agent.report().counts.unheld == 0)


@pytest.mark.parametrize("often", [0, -1], ids=["silent", "endless"])
def test_a_peer_that_never_comes_to_an_end_keeps_nobody(
    often: int, hostile: Hostile, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(client, "_LIST_SECONDS", 0.5)
    process = hostile(Message(Operation.AGENT_LIST, size=MIB).pack(), often)
    done: list[object] = []

    def ask() -> None:
        for call in (lambda: agent_of(process, place).allocations(), lambda: look(process)):
            with pytest.raises((ResidentFailed, PreflightRefused)) as caught:
                call()
            done.append(caught.value)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(20)
    assert len(done) == 2


def test_threads_of_others_are_not_reached(
    hostile: Hostile, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent names the threads that block its signal, and a dumper stops them by ptrace(2): only
    those of its own process.
    """
    victim = subprocess.Popen(["sleep", "1000"])
    reached: list[int] = []
    reach = signals.reach
    monkeypatch.setattr(
        signals,
        "reach",
        lambda pid, threads, number: reached.extend(threads) or reach(pid, threads, number),
    )
    try:
        text = f"{victim.pid} {os.getpid()}".encode() + b"\0"
        process = hostile(Message(Operation.AGENT_PARK, result=11, ordinal=9, text=text).pack())
        with pytest.raises(ResidentFailed):
            agent_of(process, place).park(1.0)
        assert not reached
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait(20)


@pytest.mark.parametrize("what", ["fifo", "device", "link"])
def test_a_configuration_file_that_a_job_names_is_no_trap(
    what: str, hostile: Hostile, place: Path
) -> None:
    """NCCL's settings are looked up where the process's environment says."""
    file, secret = place / ".nccl.conf", place.parent / "secret"
    secret.write_text("NCCL_SECRET = of root")
    if what == "fifo":
        os.mkfifo(file)
    elif what == "device":
        os.mknod(file, 0o020666, os.makedev(1, 5))  # /dev/zero: without end
    else:
        file.symlink_to(f"/proc/{os.getpid()}/root{secret}")
    process = hostile(name="", HOME=str(place))
    found: list[dict[str, str]] = []
    thread = threading.Thread(
        target=lambda: found.append(nccl.settings_of(process.pid)), daemon=True
    )
    thread.start()
    thread.join(10)
    assert found == [{}]
