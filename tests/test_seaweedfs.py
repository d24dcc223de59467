"""The S3 servers of the tests leave no files behind, wherever SeaweedFS puts them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests import seaweedfs
from tests.seaweedfs import running, sockets


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
