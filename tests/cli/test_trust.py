"""A client's record of a place is binding: every command refuses another repository there, or a
plain one where an encrypted one is expected.
"""

from __future__ import annotations

import ast
import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import icecore
from icecore import cli as command_line
from icecore.access.places import backend_at
from icecore.access.trust import Client
from icecore.config import Config, S3Settings
from icecore.errors import (
    Damaged,
    NotFound,
    PlainRefused,
    RecordDamaged,
    RepositoryReplaced,
    RollbackDetected,
    UsageError,
)
from icecore.store.backend.local import LocalBackend
from icecore.store.format.keys import FORMAT, Parameters, encode_config
from icecore.store.format.keys import Config as Identity
from icecore.store.format.names import log_name
from icecore.store.log.known import Known, KnownPlace
from icecore.store.log.repository import StoredRepository
from tests.cli.conftest import Cli
from tests.cli.documents import ROOT

SECRET = "the passphrase of the owner"


def files(place: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(place)): path.read_bytes()
        for path in sorted(place.rglob("*"))
        if path.is_file() and ".reserve" not in path.parts
    }


def plain_at(place: Path, identity: str = "") -> None:
    """Put a plain repository there, by another client; with the given id, if any."""

    async def body() -> None:
        shutil.rmtree(place, ignore_errors=True)
        repository = await StoredRepository.create(LocalBackend(place, create=True))
        if identity:
            forged = encode_config(Identity(FORMAT, identity, 1, Parameters()), repository.keys)
            for name in ("config", "copies/config"):
                (place / name).unlink()
                await repository.backend.create(name, [forged.data])
        await repository.close()

    asyncio.run(body())


class Owner:
    """A client of the API with its own state directory."""

    def __init__(self, folder: Path) -> None:
        self.state = str(folder / "state")
        self.records = folder / "state" / "places"

    def make(self, place: object, *, encrypted: bool = True, plain: bool = False) -> str:
        passphrase = SECRET.encode if encrypted else None
        with icecore.Repository.create(
            str(place), passphrase=passphrase, plain=plain, state=self.state
        ) as made:
            made.snapshots()
            return made.id

    def open(
        self,
        place: object,
        *,
        passphrase: bool = True,
        plain: bool = False,
        config: Config | None = None,
    ) -> str:
        given = SECRET.encode if passphrase else None
        with icecore.Repository.open(
            str(place), passphrase=given, plain=plain, state=self.state, config=config
        ) as opened:
            opened.snapshots()
            return opened.id


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Owner:
    for name in [
        name for name in os.environ if "PASSPHRASE" in name or name.startswith("ICECORE_")
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return Owner(tmp_path)


#: What each command that opens a repository is given; PLACE is the one that was replaced, OTHER
#: another, trusted one.
COMMANDS = [
    "-r PLACE ls",
    "-r PLACE show latest",
    "-r PLACE diff latest",
    "-r PLACE mark latest --pin",
    "-r PLACE forget latest",
    "-r PLACE forget --keep-last 1 -n",
    "-r PLACE gc",
    "-r PLACE gc -n",
    "-r PLACE check",
    "-r PLACE check --read-only",
    "-r PLACE repair",
    "-r PLACE repair -n",
    "-r PLACE stats --read-only",
    "-r PLACE import images",
    "-r PLACE export latest out",
    "-r PLACE export latest out --read-only",
    "-r PLACE dump PID",
    "-r PLACE restore latest",
    "-r PLACE restore latest -n",
    "-r PLACE restore latest --read-only",
    "-r PLACE key list",
    "-r PLACE key add another --new-command true",
    "-r PLACE copy OTHER",
    "-r PLACE copy OTHER --read-only",
    "-r OTHER copy PLACE",
    "-r PLACE sync OTHER",
    "-r OTHER sync PLACE",
    "-r OTHER sync PLACE -n",
    "-r OTHER repair --from PLACE",
    "-r OTHER repair --from PLACE -n",
    "init new --replica-of PLACE",
    "trust PLACE",
]


@pytest.fixture
def in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Runs commands in this process, because there are many."""
    for name in [
        name for name in os.environ if name.startswith("ICECORE_") and name != "ICECORE_CRIU_PREFIX"
    ]:
        monkeypatch.delenv(name)
    for name, value in {
        "HOME": str(tmp_path),
        "ICECORE_STATE": str(tmp_path / "state"),
        "ICECORE_PASSPHRASE": SECRET,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as job:
        names = {
            "PLACE": str(tmp_path / "place"),
            "OTHER": str(tmp_path / "other"),
            "PID": str(job.pid),
        }

        def run(words: str) -> int:
            return command_line.main([names.get(word, word) for word in words.split()])

        try:
            yield run
            assert job.poll() is None
        finally:
            job.kill()


@pytest.mark.parametrize("same_id", [False, True], ids=["another id", "the same id"])
def test_no_command_uses_a_plain_repository_in_the_place_of_an_encrypted_one(
    in_process: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    same_id: bool,
) -> None:
    assert in_process("init PLACE --encrypt") == in_process("init OTHER --replica-of PLACE") == 0
    with icecore.Repository.open(tmp_path / "place") as opened:
        known = opened.id
    plain_at(tmp_path / "place", known if same_id else "")
    (tmp_path / "images").mkdir()
    before = files(tmp_path / "place"), files(tmp_path / "other")
    capsys.readouterr()
    for words in COMMANDS:
        status, told = in_process(words), capsys.readouterr()
        assert status == 15, (words, status, told)
        assert (
            f"this client knows encrypted repository {known}" in told.out + told.err
            and "icecore trust" in told.err
        ), (words, told)
    assert (files(tmp_path / "place"), files(tmp_path / "other")) == before
    # Also without a passphrase, because the record does not depend on it.
    os.environ.pop("ICECORE_PASSPHRASE")
    assert in_process("-r PLACE ls") == in_process("-r PLACE restore latest") == 15
    assert (
        in_process("-r PLACE doctor") == 1
        and "this client knows encrypted repository" in capsys.readouterr().out
    )


def test_every_command_that_opens_a_repository_is_tried_here() -> None:
    parsers = next(
        action for action in command_line.build_parser()._actions if action.dest == "command"
    )
    assert parsers.choices is not None
    tried = {word for line in COMMANDS for word in line.split()}
    # These open no repository, or have their own tests. completion opens one as ls does, and offers
    # nothing of it where ls fails.
    assert set(parsers.choices) - tried == {
        "run",
        "ps",
        "logs",
        "attach",
        "wait",
        "kill",
        "rm",
        "doctor",
        "schedule",
        "completion",
        "serve",
        "page",
        "token",
    }


def test_only_one_module_opens_repositories() -> None:
    """No command can bypass the check, because one module opens all repositories."""
    opening: set[str] = set()
    for path in sorted((ROOT / "icecore").rglob("*.py")):
        if not path.is_relative_to(ROOT / "icecore" / "store"):
            tree = ast.parse(path.read_text(), str(path))
            names = {
                alias.asname or alias.name
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom)
                and node.module == "icecore.store.log.repository"
                for alias in node.names
                if alias.name == "StoredRepository"
            }
            for node in ast.walk(tree):
                if (
                    isinstance(node, ast.Attribute)
                    and node.attr in ("open", "create")
                    and isinstance(node.value, ast.Name)
                    and node.value.id in names
                ):
                    opening.add(str(path.relative_to(ROOT)))
    assert opening == {"icecore/access/trust.py"}


def test_a_place_is_known_by_all_its_names(
    owner: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place, link = tmp_path / "place", tmp_path / "link"
    link.symlink_to("place")
    made = owner.make(place)
    names = [
        place,
        f"{place}/",
        f"file://{place}",
        "place",
        "./place/",
        "../" + tmp_path.name + "/place",
        link,
        f"{link}/",
        "~/place",
    ]
    assert {owner.open(name) for name in names} == {made}
    plain_at(place)
    for name in names:
        with pytest.raises(RepositoryReplaced):
            owner.open(name)
    # Also under a new name.
    (tmp_path / "another").symlink_to(place)
    with pytest.raises(RepositoryReplaced):
        owner.open(tmp_path / "another")


def test_a_link_that_is_changed_leads_nowhere(owner: Owner, tmp_path: Path) -> None:
    """An attacker who can change the link needs no write access to the place."""
    link, elsewhere = tmp_path / "link", tmp_path / "elsewhere"
    made = owner.make(tmp_path / "place")
    link.symlink_to("place")
    assert owner.open(link) == made
    plain_at(elsewhere)
    link.unlink()
    link.symlink_to(elsewhere)
    for passphrase in (True, False):
        with pytest.raises(RepositoryReplaced):
            owner.open(link, passphrase=passphrase)
    # Also to a place where this client knows another repository.
    owner.open(elsewhere, passphrase=False)
    with pytest.raises(RepositoryReplaced, match="where the link led"):
        owner.open(link, passphrase=False)
    # The repository moved, and the link follows.
    shutil.rmtree(elsewhere)
    (tmp_path / "place").rename(tmp_path / "moved")
    link.unlink()
    link.symlink_to("moved")
    assert owner.open(link) == made


def test_a_link_in_the_stead_of_the_place_leads_nowhere(owner: Owner, tmp_path: Path) -> None:
    """An attacker who can write to the parent directory needs no write access to the place either."""
    place, elsewhere = tmp_path / "place", tmp_path / "elsewhere"
    made = owner.make(place)
    plain_at(elsewhere)
    place.rename(tmp_path / "aside")
    place.symlink_to(elsewhere)
    for _ in range(2):
        with pytest.raises(RepositoryReplaced):
            owner.open(place, passphrase=False)
    place.unlink()
    place.symlink_to("aside")
    assert owner.open(place) == owner.open(tmp_path / "aside") == made


def test_a_new_repository_in_the_same_place_needs_no_word(owner: Owner, tmp_path: Path) -> None:
    place, link = tmp_path / "place", tmp_path / "link"
    place.mkdir()
    link.symlink_to("place")
    made = owner.make(link)
    for _ in range(2):
        shutil.rmtree(place)
        place.mkdir()
        with pytest.raises(NotFound, match=f"knows encrypted repository {made}"):
            owner.open(place)
        before, made = made, owner.make(place)
        assert owner.open(link) == owner.open(place) == made != before


def test_a_plain_repository_takes_the_place_of_an_encrypted_one_only_where_it_is_meant(
    owner: Owner, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    owner.make(place)
    shutil.rmtree(place)
    with pytest.raises(PlainRefused, match="would be plain"):
        owner.make(place, encrypted=False)
    assert not (place / "config").exists()
    made = owner.make(place, encrypted=False, plain=True)
    assert owner.open(place) == made
    shutil.rmtree(place)
    assert owner.make(place) == owner.open(place)


def test_where_a_passphrase_is_given_a_plain_repository_is_refused(
    owner: Owner, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    plain_at(place)
    for _ in range(2):
        with pytest.raises(PlainRefused, match="an encrypted one is expected") as caught:
            owner.open(place)
        assert f"icecore trust {place} --accept " in caught.value.cure
        assert not list(owner.records.glob("[0-9a-f]*"))  # a refused repository is not recorded
    there = owner.open(place, passphrase=False)
    with pytest.raises(PlainRefused):
        owner.open(place)  # using it once does not mark it as plain on purpose
    assert owner.open(place, plain=True) == there
    (tmp_path / "link").symlink_to(place)
    assert (
        owner.open(
            place,
            config=Config(plain_places=("/nowhere", str(tmp_path / "link")), state=owner.state),
        )
        == there
    )
    with pytest.raises(PlainRefused):
        owner.open(place, config=Config(plain_places=(str(tmp_path),), state=owner.state))


@pytest.mark.parametrize(
    "how",
    [
        "ICECORE_PASSPHRASE",
        "ICECORE_PASSPHRASE_FILE",
        "ICECORE_PASSPHRASE_COMMAND",
        "passphrase_file",
        "passphrase_command",
    ],
)
def test_a_passphrase_may_be_configured_in_several_ways(cli: Cli, tmp_path: Path, how: str) -> None:
    plain_at(tmp_path / "repository")
    (tmp_path / "file").write_text(SECRET)
    value = {"ICECORE_PASSPHRASE": SECRET}.get(
        how, str(tmp_path / "file") if how.lower().endswith("file") else f"echo {SECRET}"
    )
    variables = {}
    if how.islower():
        (tmp_path / "icecore.toml").write_text(f'{how} = "{value}"\n')
    else:
        variables = {how: value}
    assert "an encrypted one is expected" in cli.run("ls", status=15, **variables).stderr
    cli.run("ls", ICECORE_PLAIN_PLACES=str(tmp_path / "repository"), **variables)
    cure = next(
        line
        for line in cli.run("ls", status=15, **variables).stderr.splitlines()
        if "cure:" in line
    )
    cli.run(*cure.split(": icecore ")[1].split(",")[0].split(), **variables)
    cli.run("ls", **variables)


def test_copies_and_replicas_go_only_to_places_that_are_trusted(
    owner: Owner, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    owner.make(source)
    plain_at(target)
    with icecore.Repository.open(source, passphrase=SECRET.encode, state=owner.state) as opened:
        with pytest.raises(PlainRefused):
            opened.copy_to(target, passphrase=SECRET.encode)
        opened.create_replica(tmp_path / "replica", passphrase=SECRET.encode).close()
        opened.sync_to(tmp_path / "replica")
        shutil.rmtree(tmp_path / "replica")
        # Another replica of the same repository has the same secret and another id.
        with icecore.Repository.open(
            source, passphrase=SECRET.encode, state=str(tmp_path / "elsewhere")
        ) as other:
            other.create_replica(tmp_path / "replica", passphrase=SECRET.encode).close()
        for use in (opened.sync_to, opened.plan_sync, opened.repair, opened.plan_repair):
            with pytest.raises(RepositoryReplaced):
                use(tmp_path / "replica")


def test_a_replica_has_a_watermark_of_its_own(owner: Owner, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    made = owner.make(source)
    with icecore.Repository.open(source, passphrase=SECRET.encode, state=owner.state) as opened:
        with opened.create_replica(target, passphrase=SECRET.encode) as replica:
            assert replica.id != made
        before = files(target)
        for _ in range(3):
            opened.loop.run(opened.core.log.transact(_step, "step"))
        opened.sync_to(target)
        with icecore.Repository.open(
            target, passphrase=SECRET.encode, state=owner.state
        ) as replica:
            replica.loop.run(replica.core.log.transact(_step, "step"))
        for name in files(target).keys() - before.keys():
            (target / name).unlink()
        for use in (opened.sync_to, opened.plan_sync):
            with pytest.raises(RollbackDetected):
                use(target)
    assert owner.open(source) == made


async def _step(state: object, pages: object) -> object:
    import msgspec

    return msgspec.structs.replace(state)  # type: ignore[type-var]


def test_a_replica_that_was_replaced_is_passed_over_and_told_of(
    owner: Owner, tmp_path: Path
) -> None:
    source, replica = tmp_path / "source", tmp_path / "replica"
    owner.make(source)
    told: list[str] = []
    with icecore.Repository.open(source, passphrase=SECRET.encode, state=owner.state) as opened:
        opened.create_replica(replica, passphrase=SECRET.encode).close()
    plain_at(replica)
    with (
        icecore.Repository.open(
            source,
            replicas=[str(replica)],
            passphrase=SECRET.encode,
            state=owner.state,
            emit=lambda event: told.append(f"{event.name} {event.fields}"),
        ) as opened,
        pytest.raises(NotFound),
    ):
        opened.locate("nobody")
    assert any(
        "store.replica_missing" in line and "this client knows encrypted repository" in line
        for line in told
    )


ELSEWHERE = (
    b'{"type":"repository","place":"file:///elsewhere","known":{"id":"'
    + b"0" * 32
    + b'","encrypted":true}}'
)


@pytest.mark.parametrize("torn", [b"", b"{", b"{}", b"\xff\xfe", ELSEWHERE])
def test_a_record_that_is_torn_is_not_taken_for_none(
    owner: Owner, tmp_path: Path, torn: bytes
) -> None:
    place = tmp_path / "place"
    made = owner.make(place)
    record = next(owner.records.glob("[0-9a-f]*"))
    record.write_bytes(torn)
    for passphrase in (True, False):
        with pytest.raises(RecordDamaged) as caught:
            owner.open(place, passphrase=passphrase)
        assert caught.value.exit_code == 15 and f"icecore trust {place}" in caught.value.cure
    assert record.read_bytes() == torn
    # The cure works, and so does a new encrypted repository.
    asyncio.run(Client(owner.state).accept(LocalBackend(place), made, passphrase=SECRET.encode))
    assert owner.open(place) == made
    record.write_bytes(torn)
    shutil.rmtree(place)
    with pytest.raises(PlainRefused):
        owner.make(place, encrypted=False)
    assert owner.make(place) == owner.open(place)


def test_a_seen_state_that_is_torn_has_a_cure(cli: Cli, tmp_path: Path) -> None:
    secret = {"ICECORE_PASSPHRASE": SECRET}
    cli.run("init", "--encrypt", **secret)
    cli.run("ls", **secret)
    seen = next((tmp_path / "state" / "seen").glob("[0-9a-f]*"))
    seen.write_bytes(b"")
    assert f"icecore trust {tmp_path / 'repository'}" in cli.run("ls", status=15, **secret).stderr
    shown = cli.run("trust", status=15, **secret)
    accept = shown.stderr.strip().splitlines()[-1].split("icecore ")[1].split()
    assert accept[0] == "trust" and "@1" in accept[-1]
    cli.run(*accept, **secret)
    cli.run("ls", **secret)


def test_a_plain_pair_planted_beside_the_known_repository_is_passed_over(
    owner: Owner, tmp_path: Path
) -> None:
    """The key object and the matching copy of the configuration still exist: commands, and `trust`,
    find the repository by them.
    """
    place, other = tmp_path / "place", tmp_path / "other"
    made = owner.make(place)
    plain_at(other)
    shutil.copy(other / "keys" / "00000000", place / "keys" / "00000009")
    shutil.copy(other / "config", place / "config")
    assert owner.open(place) == made
    finding = asyncio.run(
        Client(owner.state).examine(LocalBackend(place), passphrase=SECRET.encode)
    )
    assert finding.found.id == made and not finding.troubles
    (place / "copies" / "config").unlink()
    with pytest.raises(Damaged, match="configuration"):
        owner.open(place)
    shutil.rmtree(place)
    plain_at(place)
    with pytest.raises(RepositoryReplaced):
        owner.open(place)


def test_trust_shows_both_and_wants_the_whole_id(cli: Cli, tmp_path: Path) -> None:
    secret, place = {"ICECORE_PASSPHRASE": SECRET}, tmp_path / "repository"
    cli.run("trust", status=3)
    known = cli.one("repository", "init")["id"]
    assert cli.one("trust.done", "trust")["troubles"] == []
    shutil.rmtree(place)
    elsewhere = Owner(tmp_path / "elsewhere")
    new = elsewhere.make(place)
    assert known in cli.run("ls", status=15, **secret).stderr
    shown = cli.run("trust", status=15, **secret)
    assert shown.stdout.splitlines() == [
        str(place),
        f"  known  plain repository {known}",
        f"  there  encrypted repository {new}, at generation 1",
    ]
    assert f"icecore trust {place} --accept {new}\n" in shown.stderr
    for wrong in (new[:12], "yes", "0" * 32, known):
        cli.run("trust", "--accept", wrong, status=2, **secret)
    assert (
        "opens none"
        in cli.run("trust", "--accept", new, status=14, ICECORE_PASSPHRASE="another one").stderr
    )
    cli.run("ls", status=15, **secret)
    cli.run("trust", str(place), "--accept", new, **secret)
    cli.run("ls", **secret)
    said = cli.run("trust", **secret).stderr.splitlines()
    # Each command also tells what it cleans up behind the dumps that other tests have killed.
    assert [line for line in said if not line.startswith("note: removed /dev/shm/")] == []
    # An older backup of the repository: its log ends before the newest entry seen.
    backup = files(place)
    with icecore.Repository.open(
        place, passphrase=SECRET.encode, state=str(tmp_path / "state")
    ) as opened:
        for _ in range(3):
            opened.loop.run(opened.core.log.transact(_step, "step"))
    shutil.rmtree(place)
    for name, data in backup.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)
    assert "already seen 4" in cli.run("ls", status=12, **secret).stderr
    assert f"--accept {new}@1" in cli.run("trust", status=15, **secret).stderr
    cli.run("trust", "--accept", new, status=2, **secret)
    cli.run("trust", "--accept", f"{new}@2", status=2, **secret)
    cli.run("trust", "--accept", f"{new}@1", **secret)
    cli.run("ls", **secret)
    assert cli.run("trust", "--plain", status=2, **secret)


def test_init_says_what_it_does_not_do(cli: Cli, tmp_path: Path) -> None:
    secret = {"ICECORE_PASSPHRASE": SECRET}
    assert "not encrypted, although a passphrase is configured" in cli.run("init", **secret).stderr
    cli.run("ls", **secret)  # it was created plain
    shutil.rmtree(tmp_path / "repository")
    cli.run("init", "--encrypt", **secret)
    shutil.rmtree(tmp_path / "repository")
    assert "icecore init --plain" in cli.run("init", status=15, **secret).stderr
    cli.run("init", "--plain", "--encrypt", status=2, **secret)
    cli.run("init", "--plain", **secret)
    cli.run("ls", **secret)
    cli.run("init", status=2, **secret)


def test_init_takes_over_no_log(tmp_path: Path, owner: Owner) -> None:
    """An attacker deletes the configuration and waits for the owner to make a repository there
    again.
    """
    place = tmp_path / "place"
    plain_at(place)
    with icecore.Repository.open(place, state=str(tmp_path / "theirs")) as opened:
        opened.loop.run(opened.core.log.transact(_step, "step"))
    (place / "config").unlink()
    with pytest.raises(UsageError, match="lost its configuration"):
        owner.make(place, encrypted=False)
    (place / "log" / log_name(2).removeprefix("log/")).unlink()
    assert owner.make(place, encrypted=False)


@pytest.mark.parametrize(
    "identity", ["../../../escaped", "/etc/escaped", "", "A" * 32, "0" * 31, "0" * 32 + "\n"]
)
def test_an_id_names_no_other_file(owner: Owner, tmp_path: Path, identity: str) -> None:
    """Files of the state directory are named after the id."""
    place = tmp_path / "place"
    plain_at(place, identity or "-")
    with pytest.raises(Damaged):
        owner.open(place, passphrase=False)
    assert not list(tmp_path.parent.rglob("escaped*"))


def test_records_are_private_whatever_the_umask(owner: Owner, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        owner.make(tmp_path / "place")
        owner.open(tmp_path / "place")
    finally:
        os.umask(before)
    for folder in ("places", "seen"):
        assert (tmp_path / "state" / folder).stat().st_mode & 0o777 == 0o700
        assert all(
            path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "state" / folder).iterdir()
        )


def test_two_clients_that_use_a_new_place_at_once_know_one_repository(
    owner: Owner, tmp_path: Path
) -> None:
    """An attacker shows each client another repository: one client is refused."""
    place, one, other = tmp_path / "place", tmp_path / "one", tmp_path / "other"
    plain_at(one)
    plain_at(other)
    made = {}
    for number in range(5):
        shutil.rmtree(owner.records, ignore_errors=True)
        shutil.rmtree(tmp_path / "state" / "seen", ignore_errors=True)

        def use(which: Path) -> str:
            backend = LocalBackend(which)
            backend.known_as, backend.where = (f"file://{place}",), str(place)

            async def body() -> str:
                try:
                    return (await Client(owner.state).open(backend)).config.id
                except RepositoryReplaced:
                    return ""
                finally:
                    await backend.close()

            return asyncio.run(body())

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(use, [one, other, one, other]))
        made[number] = set(found) - {""}
        assert len(made[number]) == 1 and found.count("") == 2, found


def test_what_another_client_records_meanwhile_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It records its repository after this one has looked for a record, and found none."""
    place = KnownPlace(tmp_path / "seen", ["file:///place"], "/place")
    first, second = Known("1" * 32, False), Known("2" * 32, False)
    looked = KnownPlace._complete

    def complete(self: KnownPlace) -> bool:
        self.note(first)
        return looked(self)

    monkeypatch.setattr(KnownPlace, "_complete", complete)
    with pytest.raises(RepositoryReplaced):
        place.admit(second)
    place.admit(first)


def test_the_names_of_buckets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    (tmp_path / "credentials").write_text(
        "[far]\naws_access_key_id = a\naws_secret_access_key = b\nregion = eu-west-1\n"
    )
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
    }.items():
        monkeypatch.setenv(name, value)

    def names(location: str, **settings: str) -> set[str]:
        return set(backend_at(location, config=Config(s3=S3Settings(**settings))).known_as)  # type: ignore[arg-type]

    same = [
        names("s3://bucket/p"),
        names("s3://bucket/p/"),
        names("s3://far@bucket/p"),
        names("s3://bucket/p", region="us-west-2", addressing="path"),
    ]
    assert all(one == same[0] != set() for one in same)
    elsewhere = {"endpoint": "http://127.0.0.1:8333"}
    assert (
        names("s3://bucket/p", **elsewhere)
        == names("s3://bucket/p", endpoint="http://127.0.0.1:8333/")
        != same[0]
    )
    assert (
        len(
            {
                frozenset(one)
                for one in (
                    names("s3://bucket/q"),
                    names("s3://bucket"),
                    names("s3://bucket2/p"),
                    same[0],
                )
            }
        )
        == 4
    )


def test_a_repository_that_cannot_be_written_to_is_checked_too(
    owner: Owner, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    made = owner.make(place)
    for path in (place, *place.rglob("*")):
        path.chmod(0o500 if path.is_dir() else 0o400)
    assert owner.open(place) == made
    for path in (place, *place.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    plain_at(place)
    for path in (place, *place.rglob("*")):
        path.chmod(0o500 if path.is_dir() else 0o400)
    with pytest.raises(RepositoryReplaced):
        owner.open(place)
    for path in (place, *place.rglob("*")):
        path.chmod(0o700)
