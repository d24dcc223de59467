"""The S3 servers of the tests leave no files behind, wherever SeaweedFS puts them."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import pytest

from tests import seaweedfs
from tests.seaweedfs import Server, running, shared, sockets


def named_after(pid: int) -> list[Path]:
    """Return the log files of a process in the machine's temporary directory, and links to them."""
    names = [
        Path(tempfile.gettempdir()) / name
        for name in os.listdir(tempfile.gettempdir())
        if name.startswith("weed")
    ]
    return [
        path
        for path in names
        if (os.readlink(path) if path.is_symlink() else path.name).endswith(f".{pid}")
    ]


def test_a_server_leaves_nothing_outside_of_its_folder(tmp_path: Path) -> None:
    with running(tmp_path / "server") as server:
        server.make_bucket("a-bucket")
        assert not named_after(server.process.pid)
        assert list((server.folder / "logs").glob("weed*"))
    assert not named_after(server.process.pid) and not sockets(server.ports)


def test_processes_share_a_server(tmp_path: Path) -> None:
    """The first one ends it, after the last of the others has done with it; then there is another."""
    left, ended = threading.Event(), threading.Event()

    def first() -> None:
        with shared(tmp_path, "a-bucket") as server:
            found.append(server)
            begun.set()
            left.wait(60)
        ended.set()

    found: list[Server] = []
    begun = threading.Event()
    starter = threading.Thread(target=first)
    starter.start()
    assert begun.wait(60)
    with shared(tmp_path, "a-bucket") as second, shared(tmp_path, "a-bucket") as third:
        assert second.process is None and second.endpoint == third.endpoint == found[0].endpoint
        left.set()
        assert not ended.wait(0.3)
        second.make_bucket("b-bucket")  # it still answers
    assert ended.wait(60)
    starter.join(60)
    assert found[0].process is not None and found[0].process.poll() is not None
    with shared(tmp_path, "a-bucket") as fourth:
        assert fourth.process is not None


def test_two_servers_never_have_a_port_in_common(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that finds a port taken exits, and removes the sockets in /tmp that are named after
    the port.
    """
    with seaweedfs._own_ports() as some, seaweedfs._own_ports() as others:
        monkeypatch.setattr(seaweedfs, "_FIRST", [some[0], others[0]])
    with running(tmp_path / "one") as one:
        with seaweedfs._own_ports() as ports:
            assert not set(ports) & set(one.ports)
            with pytest.raises(RuntimeError, match="none are free"), seaweedfs._own_ports():
                pass
        with running(tmp_path / "two") as two:
            assert not set(two.ports) & set(one.ports)
        assert sockets(one.ports)
        one.make_bucket("a-bucket")
