"""Sockets outside of the tree to which CRIU connects a job's as root."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from icecore.host.criu.socket_images import UnixImage
from icecore.restorer.files.peers import can_connect

USER = 4711
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user")


def peer(name: str, directory: str = "") -> UnixImage:
    kind = socket.SOCK_DGRAM
    return UnixImage(51, 0, kind, 10, True, name.encode(), directory, 0, 0, 0, False)


def can(name: str, root: Path, user: int = USER, directory: str = "") -> bool:
    return can_connect(peer(name, directory), str(root), user, own_network=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with a directory of the user's, one of root's, and a sticky one."""
    tmp_path.chmod(0o755)
    for name, mode in (("home", 0o755), ("run", 0o755), ("tmp", 0o1777)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    if os.geteuid() == 0:
        os.chown(tmp_path / "home", USER, USER)
    return tmp_path


@pytest.fixture
def daemon(root: Path) -> Iterator[Path]:
    """A socket in root's directory that only root may use."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.bind(str(root / "run/daemon"))
        (root / "run/daemon").chmod(0o600)
        yield root / "run/daemon"


def test_whether_a_name_can_be_connected(tmp_path: Path) -> None:
    root = tmp_path / ("long" * 30)
    (root / "dev").mkdir(parents=True)
    me = os.geteuid()
    assert not can("/dev/log", root, me)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.bind(str(tmp_path / "log"))
        (tmp_path / "log").rename(root / "dev/log")
        assert can("/dev/log", root, me)
        assert not can("/dev/./x/../log", root, me), "x may be a link when CRIU looks"
    assert not can("/dev/log", root, me), "nobody listens any more"


@needs_root
def test_a_users_link_to_a_socket_leads_nowhere(root: Path, daemon: Path) -> None:
    daemon.chmod(0o666)
    (root / "home/peer").symlink_to("../run/daemon")
    (root / "home/away").symlink_to("../run")
    (root / "tmp/peer").symlink_to("../run/daemon")
    os.lchown(root / "tmp/peer", USER, USER)
    for user in (0, USER):
        assert can("/run/daemon", root, user)
        for name in ("/home/peer", "/home/away/daemon", "/tmp/peer"):
            assert not can(name, root, user)
    assert not can("peer", root, directory="/home")


@needs_root
def test_links_of_roots_are_followed(root: Path, daemon: Path) -> None:
    daemon.chmod(0o666)
    (root / "var").mkdir()
    (root / "var/run").symlink_to("/run")
    (root / "var/log").symlink_to("../run/daemon")
    assert can("/var/run/daemon", root) and can("/var/log", root)


@needs_root
def test_what_the_user_may_not_use_is_not_connected(root: Path, daemon: Path) -> None:
    assert not can("/run/daemon", root) and can("/run/daemon", root, 0)
    daemon.chmod(0o666)
    assert can("/run/daemon", root)
    (root / "run").chmod(0o700)
    assert not can("/run/daemon", root), "the directory is closed to the user"


@needs_root
def test_what_the_user_can_replace_is_not_connected(root: Path) -> None:
    """It is the user's own socket now, and may be a link once CRIU connects."""
    for name, owner, expected in (
        ("home/peer", USER, False),
        ("home/roots", 0, False),
        ("tmp/peer", USER, False),
        ("tmp/roots", 0, True),
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
            there.bind(str(root / name))
            (root / name).chmod(0o666)
            os.chown(root / name, owner, owner)
            assert can(f"/{name}", root) == expected, name
