"""Addresses on which a job listens, and what is left on them when it is restored."""

from __future__ import annotations

import os
import socket

import pytest
from msgspec.structs import replace

from icecore.errors import Damaged, RestoreRefused
from icecore.host.kernel import tcp
from icecore.restorer.requirements.ports import check_ports, remove_leftovers
from tests.cli.conftest import Cli, until

pytestmark = [
    pytest.mark.criu,
    pytest.mark.skipif(os.geteuid() != 0, reason="destroying a socket needs root"),
]

#: Listens without SO_REUSEADDR, as many libraries do, and is the first to close each connection.
_SERVER = """
import socket, sys
listener = socket.socket({family})
listener.bind(("{host}", 0))
listener.listen()
open(sys.argv[1], "w").write(str(listener.getsockname()[1]))
while True:
    connection, _ = listener.accept()
    connection.sendall(b"hello")
    connection.close()
"""


def greeting(host: str, port: int) -> bytes:
    """Connect, and close after the server has."""
    with socket.create_connection((host, port), 10) as connection:
        found = b""
        while part := connection.recv(100):
            found += part
    return found


@pytest.mark.parametrize(
    ("host", "client"),
    [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1")],
)
def test_closed_connections_of_a_killed_job_do_not_delay_its_restore(
    host: str, client: str, cli: Cli
) -> None:
    cli.run("init")
    family = "socket.AF_INET6" if ":" in host else "socket.AF_INET"
    there = cli.folder / "port"
    program = _SERVER.format(family=family, host=host)
    cli.run("run", "-d", "--name", "j", "--", "python3", "-c", program, str(there))
    until(lambda: there.exists() and there.read_text() != "", "the server listens")
    port = int(there.read_text())
    assert greeting(client, port) == b"hello"
    cli.run("dump", "j")
    cli.run("kill", "j")
    assert tcp.TIME_WAIT in {one.state for one in at(port)}
    cli.run("restore", "j")
    assert greeting(client, port) == b"hello"


def at(port: int) -> list[tcp.TcpSocket]:
    """The sockets with a local port."""
    return [one for one in tcp.list_sockets() if one.local[1] == port]


def test_the_message_names_the_process_that_has_the_port() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = f"127.0.0.1:{other.getsockname()[1]}"
        found = check_ports([port, port])
        assert not found.met and f"process {os.getpid()} (" in found.message
        assert str(os.getpid()) not in check_ports([port], name=False).message
        with pytest.raises(RestoreRefused, match="a socket is open already"):
            remove_leftovers([port])
    assert check_ports([port]).met


def test_a_listener_of_the_other_family_is_not_in_the_way() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        number = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", number), 10)
        listener.accept()[0].close()  # it closes first
        client.close()
    until(lambda: [one.state for one in at(number)] == [tcp.TIME_WAIT], "a leftover is there")
    with socket.socket(socket.AF_INET6) as other:
        other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        other.bind(("::1", number))
        other.listen()
        remove_leftovers([f"0.0.0.0:{number}"])
        assert [one.state for one in at(number)] == [tcp.LISTEN]


@pytest.mark.parametrize(
    "address", ["[fe80::1%a\0b]:80", "[fe80::1%\x1b[31m]:80", "nonsense", "::1"]
)
def test_a_hostile_address(address: str) -> None:
    with pytest.raises(Damaged):
        check_ports([address])


def test_an_address_of_another_machine() -> None:
    found = check_ports(["192.0.2.1:8000"])
    assert not found.met and "not available here" in found.message


def test_only_leftovers_are_removed() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = listener.getsockname()
        client = socket.create_connection(address, 10)
        served, _ = listener.accept()
    with client, served:
        port = f"{address[0]}:{address[1]}"
        assert not check_ports([port]).met
        with pytest.raises(RestoreRefused, match="a socket is open already"):
            remove_leftovers([port])
        [before] = at(address[1])
        tcp.destroy_leftover(before)
        tcp.destroy_leftover(replace(before, state=tcp.TIME_WAIT, inode=0))  # not believed
        client.sendall(b"still there")
        assert served.recv(100) == b"still there"
        served.close()
        assert client.recv(10) == b""
        # It waits for the end of a client that still has its own socket.
        until(lambda: [one.state for one in at(address[1])] == [tcp.FIN_WAIT2], "all is received")
        assert all(one.is_leftover for one in at(address[1]))
    assert check_ports([port]).met
    remove_leftovers([port])
    assert not at(address[1])
