"""Processes out of older snapshots, with the preload that they had: it speaks version 1, which is
the same without shared memory.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from icecore.host.cuda.driver import uuid_bytes
from icecore.host.resident.client import Agent, ResidentFailed, State
from icecore.host.resident.protocol import Allocation, Message, Operation, receive
from tests.fakes.machine import MIB, Machine, Target, uuid_of

OLD = 1


@pytest.fixture
def old_agent(machine: Machine) -> Iterator[dict[int, list[int]]]:
    """Serves as version 1 did: who speaks another is hung up on. What it was given by MAP."""
    path = machine.directory / "agent-77"
    given: dict[int, list[int]] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve(client: socket.socket) -> None:
            data, _, _, _ = socket.recv_fds(client, 1024, 1)
            if struct.unpack_from("<I", data)[0] != OLD:
                return
            wanted = Message.unpack(data)
            answer = Message(
                wanted.operation,
                state=int(State.UNMAPPED),
                token=bytes(16),
                text=struct.pack("<20Q", 3, 6 * MIB, *range(18)),
            )
            if wanted.operation == Operation.AGENT_MAP:
                for _ in range(wanted.count):
                    one, descriptor = receive(client)
                    given.setdefault(one.identity, []).append(os.fstat(descriptor).st_ino)
                    os.close(descriptor)
            client.sendall(answer.pack(OLD))

        def run() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    with client:
                        serve(client)

        thread = threading.Thread(target=run)
        thread.start()
        yield given
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_an_older_agent(machine: Machine, old_agent: dict[int, list[int]]) -> None:
    report = Agent(machine.directory, 77).report()
    assert (
        report.version,
        report.state,
        report.counts.resident,
        report.counts.captured,
        report.counts.imported,
    ) == (OLD, State.UNMAPPED, 3, 17, 0)
    with open("/dev/null") as one, open("/dev/zero") as other:
        agent = Agent(machine.directory, 77)
        agent.map({5: one.fileno(), 6: other.fileno()})
        agent.go()
        assert old_agent == {
            5: [os.fstat(one.fileno()).st_ino],
            6: [os.fstat(other.fileno()).st_ino],
        }


def test_an_older_client(target: Target) -> None:
    """It does not know which memory is whose."""
    assert target("alloc(2 * MIB)")[0] == 0
    agent = Agent(target.machine.directory, target.pid)
    assert agent.report().version == 2
    agent.version = OLD
    with pytest.raises(ResidentFailed, match="hung up"):
        agent.report()


def test_the_keeper_of_an_older_process(machine: Machine) -> None:
    keeper, token = machine.keeper, bytes(range(16))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as process, open("/dev/null") as held:
        process.connect(str(machine.directory / "keeper"))

        def ask(message: Message, descriptor: int = -1, answered: bool = True) -> Message | None:
            socket.send_fds(process, [message.pack(OLD)], [descriptor] if descriptor >= 0 else [])
            if not answered:
                return None
            data = process.recv(1024)
            assert struct.unpack_from("<I", data)[0] == OLD
            return Message.unpack(data)

        assert ask(Message(Operation.KEEPER_HELLO, token=token)).result == 0  # type: ignore[union-attr]
        about = Message(
            Operation.KEEPER_HOLD,
            identity=3,
            address=2 * MIB,
            size=2 * MIB,
            requested=5,
            device=uuid_bytes(uuid_of(0)),
            token=token,
        )
        ask(about, held.fileno(), answered=False)
        assert ask(Message(Operation.KEEPER_CONFIRM)).count == 1  # type: ignore[union-attr]
        [(found, descriptor)] = keeper.take(token)
        os.close(descriptor)
        assert found == Allocation(3, 2 * MIB, 2 * MIB, 5, uuid_of(0), 0, token)
        process.sendall(Message(Operation.KEEPER_TAKE, token=token).pack(OLD))
        assert [struct.unpack_from("<I", process.recv(1024))[0] for _ in range(2)] == [OLD, OLD]
