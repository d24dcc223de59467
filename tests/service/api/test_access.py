"""Callers, tokens, rates and the audit log, each by itself."""

from __future__ import annotations

import hmac
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from icecore.config import Config, ServiceSettings
from icecore.errors import Damaged, IcecoreError, NotFound, UsageError
from icecore.host.kernel import peer as peer_module
from icecore.host.kernel.peer import Peer
from icecore.node.backing import Repositories
from icecore.repository import Repository
from icecore.service.api import tokens as module
from icecore.service.api.audit import Audit
from icecore.service.api.caller import Caller, Role, of_peer
from icecore.service.api.limits import Rate
from icecore.service.api.routing import Call
from icecore.service.api.service import Where
from icecore.service.api.starting import identity_of
from icecore.service.api.tokens import Tokens
from tests.service.api.conftest import ALICE, BOB, Node


def caller(uid: int | None, *, sees_all: bool = False, jobs: tuple[str, ...] = ("*",)) -> Caller:
    return Caller("x", "token", Role.OPERATE, uid, sees_all, jobs)


def test_who_may_touch_what() -> None:
    alice, root = caller(ALICE), caller(0, sees_all=True)
    assert alice.may_touch("a", ALICE) and not alice.may_touch("a", BOB)
    assert not alice.may_touch("a", None) and not alice.may_touch("a", 0)
    assert root.may_touch("a", BOB) and root.may_touch("a", None)
    nobody = caller(None)
    assert not nobody.may_touch("a", None)  # no user is not the user of what has none
    some = caller(None, sees_all=True, jobs=("tr*", "x"))
    assert some.may_touch("train", BOB) and not some.may_touch("strain", BOB)
    assert not some.whole_node and root.whole_node and not alice.whole_node


def test_who_is_an_administrator() -> None:
    def role(uid: int, gid: int, *gids: int, admin: int | None = 7) -> tuple[Role, bool]:
        found = of_peer(Peer(1, uid, gid, gids), admin_gid=admin, others=Role.READ)
        return found.role, found.sees_all

    assert role(0, 0) == (Role.ADMIN, True)
    assert role(5, 7) == role(5, 5, 6, 7) == (Role.ADMIN, True)
    assert role(5, 5, 6) == (Role.READ, False)
    assert role(5, 0, admin=None) == (Role.READ, False)


CONNECT = """
import os, socket, sys
os.setgroups([40, 41]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX) as own:
    own.connect(sys.argv[1])
    own.recv(1)
"""


@pytest.fixture
def connected(public: Path) -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    """A connection from a process of alice's."""
    path = public / "s"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.settimeout(30)
        listening.bind(str(path))
        path.chmod(0o666)
        listening.listen()
        words = [sys.executable, "-c", CONNECT, str(path), str(ALICE)]
        with subprocess.Popen(words) as process:
            connection, _ = listening.accept()
            try:
                yield connection, process
            finally:
                process.kill()
                connection.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_the_kernel_says_who_calls(
    connected: tuple[socket.socket, subprocess.Popen[bytes]],
) -> None:
    connection, process = connected
    peer = Peer.of(connection)
    assert (peer.pid, peer.uid, peer.gid) == (process.pid, ALICE, ALICE)
    assert set(peer.gids) == {40, 41} and peer.pidfd >= 0 and peer.alive
    process.kill()
    process.wait()
    assert not peer.alive  # whoever gets its pid
    peer.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("older", [False, True])
def test_a_peer_that_has_ended_shares_no_user_namespace(
    connected: tuple[socket.socket, subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    older: bool,
) -> None:
    """Whatever process has its pid now, even if the kernel lacks SO_PEERPIDFD."""
    if older:
        monkeypatch.setattr(peer_module, "_SO_PEERPIDFD", 9999)
    connection, process = connected
    peer = Peer.of(connection)
    assert (peer.pidfd < 0) == older and peer.shares_user_namespace()
    if older:
        another = replace(peer, pid=os.getpid())
        assert another.alive and not another.shares_user_namespace()
    process.kill()
    process.wait()
    assert not peer.shares_user_namespace()
    assert not replace(peer, pid=0).shares_user_namespace()
    peer.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_caller_that_has_ended_starts_no_job(
    node: Node, connected: tuple[socket.socket, subprocess.Popen[bytes]]
) -> None:
    import asyncio

    connection, process = connected
    peer = Peer.of(connection)
    alice = of_peer(peer, admin_gid=None, others=Role.OPERATE)
    call = Call(node.service, None, alice)  # type: ignore[arg-type]
    assert asyncio.run(identity_of(call)).user == ALICE
    process.kill()
    process.wait()
    with pytest.raises(IcecoreError):
        asyncio.run(identity_of(call))
    peer.close()


# -- tokens


def test_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Tokens(tmp_path)
    secret = tokens.add("ci", "operate", jobs=["a*"], uid=5)
    other = tokens.add("other", "read", seconds=100)
    path = tmp_path / "service" / "tokens.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert secret not in path.read_text() and len(secret) > 43
    found = tokens.find(secret)
    assert found is not None
    assert (found.name, found.role, found.jobs, found.uid) == ("ci", "operate", ["a*"], 5)
    assert tokens.find(secret + "x") is tokens.find("") is tokens.find("ci") is None
    assert tokens.find(found.digest) is None
    assert tokens.find("\udcff") is None
    with pytest.raises(UsageError):
        tokens.add("ci", "read")
    with pytest.raises(UsageError):
        tokens.add("../x", "read")

    now = module.time.time()
    monkeypatch.setattr(module.time, "time", lambda: now + 101)
    assert tokens.find(other) is None and tokens.find(secret) is not None
    seen = Tokens(tmp_path)  # another process, such as the service
    assert seen.find(secret) is not None
    tokens.remove("ci")
    assert seen.find(secret) is None
    with pytest.raises(NotFound):
        tokens.remove("ci")
    path.write_text("{")
    with pytest.raises(Damaged):
        seen.all()


def test_tokens_are_compared_in_constant_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = Tokens(tmp_path)
    first = tokens.add("a", "read")
    tokens.add("b", "read")
    compared = []
    real = hmac.compare_digest

    def compare(one: str, two: str) -> bool:
        compared.append(one)
        return real(one, two)

    monkeypatch.setattr(module.hmac, "compare_digest", compare)
    assert tokens.find(first) is not None
    assert len(compared) == 2  # it goes on after the match


# -- rates, and the audit log


def test_a_rate_with_a_burst() -> None:
    now = 0.0
    rate = Rate(2, 4, lambda: now)
    assert [rate.take("a") for _ in range(4)] == [0.0] * 4
    assert rate.take("a") == 0.5 and rate.take("b") == 0.0
    now = 0.5
    assert rate.take("a") == 0.0 and rate.take("a") == 0.5
    now = 100.0
    assert [rate.take("a") for _ in range(5)][-1] > 0
    for number in range(10_000):
        rate.take(str(number))
    assert len(rate._buckets) <= 4096


def entries_of(audit: Audit, kind: str = "audit") -> list[dict[str, Any]]:
    """Return the entries of one of the logs, oldest first."""
    names = [f"{kind}.jsonl", *(f"{kind}.jsonl.{number}" for number in range(1, 6))]
    files = [file for file in map(audit.path.with_name, names) if file.exists()]
    lines = [line for file in reversed(files) for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def test_the_audit_log_is_rotated(tmp_path: Path) -> None:
    audit = Audit(tmp_path, limit=4000)
    for number in range(1000):
        audit.write(who=f"uid {number % 50}", number=number, name="\udcff")
    audit.close()
    files = [audit.path, *(audit.path.with_name(f"audit.jsonl.{n}") for n in range(1, 5))]
    assert all(0 < file.stat().st_size <= 4000 for file in files)
    assert not audit.path.with_name("audit.jsonl.5").exists()
    numbers = [one["number"] for one in entries_of(audit)]
    assert numbers == list(range(numbers[0], 1000)) and len(numbers) > 80
    newest = Audit(tmp_path, limit=4000).newest_first()
    assert [next(newest)["number"] for _ in range(60)] == list(range(999, 939, -1))


def test_changes_are_recorded_on_a_full_disk_for_a_while(tmp_path: Path) -> None:
    """Jobs can be ended, and space be freed."""
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path], check=True, timeout=9
    )
    try:
        audit = Audit(tmp_path, limit=1 << 20)
        audit.write(who="root", number=0)
        with open(tmp_path / "filled", "wb", 0) as rest, pytest.raises(OSError, match="No space"):
            while True:
                rest.write(bytes(4096))
        done = 0
        with pytest.raises(OSError, match="No space"):
            while done < 10_000:
                audit.write(who=f"uid {done % 50}", number=done + 1, subject={"job": "train"})
                done += 1
        assert done > 300
        (tmp_path / "filled").unlink()
        audit.write(who="root", number=done + 1)
        audit.close()
        # Nothing was cut off in the middle.
        assert [one["number"] for one in entries_of(audit)] == list(range(done + 2))
    finally:
        subprocess.run(["umount", tmp_path], check=True, timeout=9)


def test_one_caller_rotates_no_change_of_another_out(tmp_path: Path) -> None:
    audit = Audit(tmp_path, limit=1 << 14)
    audit.write(who="token admin", what="gc")
    for number in range(5000):
        audit.write(who="uid 5", what="kill_job", subject={"job": "x" * 100}, number=number)
        if number == 1000:  # a restart gives nobody a new share
            audit.close()
            audit = Audit(tmp_path, limit=1 << 14)
    audit.write(who="token admin", what="check")
    first, *others, last = entries_of(audit)
    assert first["what"] == "gc" and last["what"] == "check"
    assert {one["who"] for one in others} == {"uid 5"} and len(others) < 20
    more = entries_of(audit, "audit-more")
    assert [one["number"] for one in more][-1] == 4999 and {one["who"] for one in more} == {"uid 5"}
    newest = audit.newest_first()
    assert next(newest)["what"] == "check" and next(newest)["number"] == 4999
    audit.close()


def test_refusals_rotate_nothing_out(tmp_path: Path) -> None:
    now = [0.0]
    audit = Audit(tmp_path, limit=1 << 20, clock=lambda: now[0])
    audit.write(state="done", who="root")
    for number in range(5000):
        audit.refuse(who="", subject={"job": "x" * 256}, **{"from": f"127.0.0.{number % 9}"})
        audit.refuse(who="uid 5", subject={"job": "x" * 256})
        audit.refuse(who="uid 7", subject={"job": f"{number}"})
    now[0] = 61.0
    audit.refuse(who="uid 6")
    assert [one["who"] for one in entries_of(audit)] == ["root"]
    refused = entries_of(audit, "audit-refused")
    assert len(refused) == 1 + 1 + 60 + 3 + 1
    counted = [(one["who"], one["more"], "subject" in one) for one in refused if "more" in one]
    assert counted == [("", 4999, True), ("uid 5", 4999, True), ("uid 7", 4940, False)]
    audit.refuse(who="uid 6")
    audit.close()
    assert entries_of(audit, "audit-refused")[-1] | {"at": 0} == {
        "at": 0,
        "state": "refused",
        "who": "uid 6",
        "more": 1,
    }


def test_one_caller_rotates_no_refusal_of_another_out(tmp_path: Path) -> None:
    """For hours, a caller tries whatever it can."""
    now = [0.0]
    audit = Audit(tmp_path, limit=1 << 16, clock=lambda: now[0])
    audit.refuse(who="uid 6", what="remove_job", subject={"job": "train"})
    for minute in range(120):
        now[0] = 61.0 * minute
        for number in range(61):
            audit.refuse(who="uid 5", subject={"job": f"{minute}-{number}" + "x" * 200})
            audit.refuse(who="uid 5", subject={"job": f"{minute}-{number}" + "x" * 200})
    audit.close()
    refused = entries_of(audit, "audit-refused")
    assert [one["what"] for one in refused if one["who"] == "uid 6"] == ["remove_job"]
    recorded = len(refused) + sum(one.get("more", 0) for one in refused)
    totals = sum(one.keys() == {"at", "state", "who", "more"} for one in refused)
    counts = sum("more" in one for one in refused)
    assert recorded - counts == 1 + 2 * 61 * 120 and totals > 100


# -- repositories


def test_a_repository_that_a_user_can_write_to(tmp_path: Path) -> None:
    """Whoever can write to a plain repository decides what a restore runs."""
    place = tmp_path / "own" / "repository"
    place.parent.mkdir()
    config = Config(state=str(tmp_path / "state"))
    Repository.create(str(place), config=config, state=config.state).close()
    where = Where(str(place), shared=True)
    backing = Repositories(config, str(place))
    assert backing.snapshots(where) == []
    backing.close()
    for path, owner, mode in (
        (place, BOB, 0o700),
        (place, 0, 0o777),
        (place.parent, BOB, 0o755),
        (place.parent, 0, 0o775),
    ):
        os.chown(path, owner, -1)
        path.chmod(mode)
        with pytest.raises(UsageError, match="other users can replace"):
            backing.snapshots(where)
        os.chown(path, 0, -1)
        path.chmod(0o700)
    assert backing.snapshots(where) == []
    backing.close()


def test_where_the_snapshots_of_a_user_are(tmp_path: Path) -> None:
    def where(template: str, uid: int | None) -> Where:
        config = Config(service=ServiceSettings(repository=template))
        return Repositories(config, "/all").where(uid)

    assert where("", ALICE) == where("/of/{uid}", None) == Where("/all", shared=True)
    assert where("/of/{uid}", ALICE) == Where(f"/of/{ALICE}", shared=False)
    assert where("s3://b/{user}", 1) == Where("s3://b/daemon", shared=False)
    assert where("/others", ALICE) == Where("/others", shared=True)
