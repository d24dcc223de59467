"""The keeper of another user's job: it talks to root, to its own user, and to that user."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from icecore.errors import NotFound, UsageError
from icecore.host.resident import keeper
from icecore.host.resident.client import Keeper, ResidentFailed
from icecore.host.resident.protocol import Message, Operation
from tests.fakes.machine import until

STRANGER, NOBODY = 12345, 65534

#: Sends a packet to the keeper and prints the answer, or what refused.
_ASK = """
import socket, sys
asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
asked.settimeout(5)
try:
    asked.connect(sys.argv[1])
    asked.send(bytes.fromhex(sys.argv[2]))
    print(asked.recv(4096).hex() or "hung up")
except OSError as error:
    print(type(error).__name__)
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root keeps the memory of others' jobs")


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="icecore-test-", dir="/dev/shm") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder) / "resident"


@pytest.fixture
def kept(place: Path) -> Iterator[Keeper]:
    keeper.make_place(place, STRANGER)
    yield keeper.start_keeper(place)
    (place / "keeper").unlink(missing_ok=True)
    for pid in keepers_at(place):
        os.kill(pid, 9)
    until(lambda: not keepers_at(place))


def keepers_at(place: Path) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[1:2] == [os.fsencode(place / "keeper")]:
                found.append(int(name))
    return found


def asks(user: int, place: Path, message: Message) -> str:
    """What a process of a user gets as answer."""
    python = sys.executable if user == 0 else "/usr/bin/python3"
    return subprocess.run(
        [python, "-c", _ASK, str(place / "keeper"), message.pack().hex()],
        user=user,
        group=user,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
        cwd="/",
    ).stdout.strip()


@pytest.mark.skipif(not os.path.exists("/usr/bin/python3"), reason="others need a Python")
def test_root_and_the_jobs_user_are_served_and_nobody_else(kept: Keeper, place: Path) -> None:
    assert kept.processes() == []
    question = Message(Operation.KEEPER_PROCESSES)
    assert Message.unpack(bytes.fromhex(asks(STRANGER, place, question))).result == 0
    assert Message.unpack(bytes.fromhex(asks(0, place, question))).result == 0
    # Neither by the modes of directory and socket, nor if somebody lets them through.
    assert asks(NOBODY, place, question) == "PermissionError"
    os.chmod(place, 0o755)
    os.chmod(place / "keeper", 0o666)
    assert asks(NOBODY, place, question) in ("hung up", "ConnectionResetError", "BrokenPipeError")


@pytest.mark.skipif(not os.path.exists("/usr/bin/python3"), reason="others need a Python")
def test_the_jobs_user_does_not_decide_what_outlives_the_job(kept: Keeper, place: Path) -> None:
    question = Message(Operation.KEEPER_KEEP)
    assert Message.unpack(bytes.fromhex(asks(STRANGER, place, question))).result == 1  # EPERM


def test_directory_and_socket_are_the_users_and_the_keeper_is_roots(
    kept: Keeper, place: Path
) -> None:
    assert (place.stat().st_uid, place.stat().st_mode & 0o777) == (STRANGER, 0o700)
    made = (place / "keeper").stat()
    assert made.st_uid == STRANGER and made.st_mode & 0o077 == 0
    (pid,) = keepers_at(place)
    assert os.stat(f"/proc/{pid}").st_uid == 0
    keeper.make_place(place, STRANGER)  # once more, as a restore does
    with pytest.raises(UsageError, match=f"belongs to user {STRANGER}"):
        keeper.make_place(place, NOBODY)


def test_a_socket_in_the_users_directory_that_is_no_keepers_is_not_believed(place: Path) -> None:
    """The user replaces the keeper's socket by one of its own, by a link, and by another server's
    of root's.
    """
    keeper.make_place(place, STRANGER)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(place / "keeper"))
        server.listen()
        with pytest.raises(ResidentFailed, match="is no keeper"):
            Keeper(place).processes()
    (place / "keeper").rename(place / "other")
    (place / "keeper").symlink_to("other")
    with pytest.raises((ResidentFailed, NotFound)):
        Keeper(place).processes()


def test_a_directory_that_root_did_not_give_to_its_owner_is_refused(place: Path) -> None:
    place.mkdir(mode=0o700)
    os.chown(place, STRANGER, STRANGER)
    with pytest.raises(ResidentFailed, match="others could have put there"):
        Keeper(place).processes()


def test_a_claim_follows_no_link_of_the_users(place: Path) -> None:
    keeper.make_place(place, STRANGER)
    victim = place.parent / "victim"
    (place / "restoring").symlink_to(victim)
    with pytest.raises(OSError), keeper.claimed(place):
        pass
    assert not victim.exists()
