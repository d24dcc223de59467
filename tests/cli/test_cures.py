"""Every cure works: each command that a message names exists, and following the messages about
damage repairs it.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import io
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from icecore import errors
from icecore.cli import build_parser, main
from icecore.errors import Damaged, IcecoreError, ObjectMissing
from icecore.store.backend.local import LocalBackend
from icecore.store.log.repository import StoredRepository
from tests.cli.conftest import Cli, until
from tests.cli.documents import ROOT
from tests.cli.test_snapshots import counted, start
from tests.store.miniature import listed, take

#: Errors that say what to do wherever they are raised.
CURED = {
    "FormatTooNew",
    "MissingTool",
    "RollbackDetected",
    "SessionFenced",
    "StoreDenied",
    "StoreFull",
    "WrongPassphrase",
}
_NAMED = re.compile(
    r"'icecore ([^']+)'|`icecore ([^`]+)`|\bicecore ((?:key|run|repair|check|sync|init|gc|forget) [A-Za-z-][^;:,.'\"`]*)"
)
PASSPHRASE = "correct horse battery"


# -- messages in the sources


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Return the strings of a module without its docstrings; X replaces the fields of f-strings."""
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    inner = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node
    }
    for node in ast.walk(tree):
        if id(node) in documentation or id(node) in inner:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            yield (
                node.lineno,
                "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "X"
                    for part in node.values
                ),
            )


@cache
def sources() -> list[tuple[Path, ast.Module]]:
    paths = sorted((ROOT / "icecore").rglob("*.py"))
    return [(path, ast.parse(path.read_text(), str(path))) for path in paths]


parser_of_all = cache(build_parser)


def commands_in(text: str) -> list[list[str]]:
    """Return the icecore command lines that a text names, without 'icecore'."""
    found = ["".join(match) for match in _NAMED.findall(text)]
    return [shlex.split(one.replace(" …", "")) for one in found]


def wrong_with(words: list[str]) -> str:
    """Return the parser's complaint about a command and its options; empty if there is none."""
    parser = parser_of_all()
    commands = next(
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    if words[0] not in commands.choices:
        return f"there is no command {words[0]}"
    chosen = commands.choices[words[0]]
    own = words[1 : words.index("--")] if "--" in words else words[1:]
    unknown = [
        word
        for word in own
        if word.startswith("-") and word.split("=")[0] not in chosen._option_string_actions
    ]
    if unknown:
        return f"{words[0]} has no {unknown}"
    choices = next(
        (
            action.choices
            for action in chosen._actions
            if not action.option_strings and action.choices
        ),
        None,
    )
    if choices is not None and own and own[0] not in choices:
        return f"{words[0]} does not know {own[0]}"
    return ""


def test_every_command_that_a_message_names_exists() -> None:
    wrong, seen = [], set()
    for path, tree in sources():
        for line, text in texts(tree):
            for words in commands_in(text):
                if words[0] == "COMMAND":
                    continue
                seen.add(" ".join(words[:2]))
                problem = wrong_with(words)
                if problem:
                    wrong.append(
                        f"{path.relative_to(ROOT)}:{line}: 'icecore {shlex.join(words)}': {problem}"
                    )
    assert not wrong, "\n".join(wrong)
    assert {
        "repair",
        "repair --accept-rollback",
        "check --read-data",
        "key import",
        "key export",
        "init",
        "gc",
        "ls",
    } <= seen
    assert (
        wrong_with(["repair", "--all"]) and wrong_with(["mend"]) and wrong_with(["key", "lose"])
    )  # the check can fail


def test_errors_that_can_be_cured_say_how() -> None:
    for name in CURED:
        assert issubclass(getattr(errors, name), IcecoreError)
    missing = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.func.id}"
        for path, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CURED
        if not any(keyword.arg == "cure" for keyword in node.keywords)
    ]
    assert not missing, "\n".join(missing)
    for error in (Damaged("kind", "name", "why"), ObjectMissing("there is none")):
        assert commands_in(error.cure)


# -- cures that work


class Broken:
    """A repository in a directory with snapshots, for a test to damage."""

    def __init__(self, cli: Cli, *, encrypted: bool = False, snapshots: int = 2) -> None:
        self.cli = cli
        self.folder = cli.folder / "repository"
        self.variables = {"ICECORE_PASSPHRASE": PASSPHRASE} if encrypted else {}
        self.run("init", *(["--encrypt"] if encrypted else []))
        self.taken = asyncio.run(self._fill(snapshots))
        self.run("ls")
        self.run("key", "export", "recovery")

    async def _fill(self, number: int) -> list[str]:
        repository = await StoredRepository.open(
            LocalBackend(self.folder), passphrase=lambda: PASSPHRASE.encode()
        )
        taken = [await take(repository, {1: value, 2: value + 1}) for value in range(number)]
        assert await listed(repository) == taken
        await repository.close()
        return taken

    def run(self, *words: str, status: int | tuple[int, ...] = 0, **variables: str) -> str:
        """Run a command in this process, which saves start-up time; assert its exit status, or one
        of several. Return its output.
        """
        environment = {**self.cli.environment, **self.variables, **variables}
        said = io.StringIO()
        before = os.getcwd()
        os.chdir(self.cli.folder)
        try:
            with (
                mock.patch.dict(os.environ, environment, clear=True),
                redirect_stdout(said),
                redirect_stderr(said),
            ):
                ended = main(words)
        finally:
            os.chdir(before)
        allowed = (status,) if isinstance(status, int) else status
        assert ended in allowed, f"{words}: {ended}\n{said.getvalue()}"
        assert "Traceback" not in said.getvalue()
        return said.getvalue()

    def paths(self, prefix: str) -> list[Path]:
        """Return the objects whose names begin with a prefix, sorted by name."""
        return sorted(path for path in (self.folder / prefix).rglob("*") if path.is_file())

    def flip(self, path: Path) -> None:
        """Flip a bit in the middle of an object."""
        path.write_bytes(_flipped(path))

    def cure(self, *words: str, status: int) -> list[list[str]]:
        """Run a command that fails, then every command that its cure names, in order; the last of
        them must succeed. Return those commands.
        """
        said = self.run(*words, status=status)
        cure = said[said.index("cure: ") :]
        named = [
            [{"FILE": "recovery", "SNAPSHOT": self.taken[-1]}.get(word, word) for word in one]
            for one in commands_in(cure)
        ]
        named = [
            one for one in named if one[:2] != ["key", "export"]
        ]  # it had to be run before the damage
        assert named, f"no command in {cure!r}"
        for at, one in enumerate(named):
            # What only looks ends with the status of what it finds; the last one is what helps, and
            # may have to say that something is lost.
            said = self.run(
                *one, status={"check": (0, 9), "repair": (0, 9), "trust": (0, 15)}.get(one[0], 0)
            )
            assert at < len(named) - 1 or "0 things" not in said or "QUARANTINED" in said
        return named


def newest_entry(broken: Broken) -> None:
    broken.flip(broken.paths("log")[0])


def all_entries(broken: Broken) -> None:
    for path in broken.paths("log"):
        broken.flip(path)


def no_entries(broken: Broken) -> None:
    shutil.rmtree(broken.folder / "log")
    shutil.rmtree(broken.cli.folder / "state")


def newest_entry_gone(broken: Broken) -> None:
    broken.paths("log")[0].unlink()


def older_copy(broken: Broken) -> None:
    for path in broken.paths("log")[:3]:
        path.unlink()


def page(broken: Broken) -> None:
    broken.flip(broken.paths("pages")[0])


def keys(broken: Broken) -> None:
    for path in [*broken.paths("keys"), *broken.paths("copies/keys")]:
        broken.flip(path)


def keys_gone(broken: Broken) -> None:
    shutil.rmtree(broken.folder / "keys")
    shutil.rmtree(broken.folder / "copies")


def configuration(broken: Broken) -> None:
    for path in (broken.folder / "config", broken.folder / "copies" / "config"):
        broken.flip(path)
    shutil.rmtree(broken.cli.folder / "state" / "opened")


@pytest.mark.parametrize(
    ("harm", "status", "encrypted"),
    [
        (newest_entry, 9, True),
        (all_entries, 9, False),
        (no_entries, 9, False),
        (newest_entry_gone, 12, False),
        (older_copy, 12, True),
        (page, 9, False),
        (keys, 9, False),
        (keys, 9, True),
        (keys_gone, 9, True),
        (configuration, 9, False),
        (configuration, 9, True),
    ],
)
def test_the_cure_of_damage_helps(
    harm: Callable[[Broken], None], status: int, encrypted: bool, cli: Cli
) -> None:
    broken = Broken(cli, encrypted=encrypted, snapshots=40 if harm is page else 2)
    harm(broken)
    broken.cure("ls", status=status)
    listed = [
        event["snapshot"]
        for event in map(json.loads, broken.run("--json", "ls").splitlines())
        if event["event"] == "snapshot"
    ]
    assert set(listed) == set(broken.taken)
    broken.run("show", broken.taken[-1])
    broken.run("gc")
    assert "all is well" in broken.run("check", "--read-data")


def test_what_is_lost_for_good_is_not_cured_in_a_circle(cli: Cli) -> None:
    broken = Broken(cli)
    record = asyncio.run(_manifest_of(broken, broken.taken[-1]))
    broken.flip(broken.folder / record)
    assert ["repair"] in broken.cure("show", broken.taken[-1], status=9)
    # The snapshot is now in quarantine: only a replica or forgetting it helps.
    said = broken.run("show", broken.taken[-1], status=9)
    assert "icecore repair --from PLACE" in said and "icecore forget SNAPSHOT" in said
    for words in (["export", broken.taken[-1], "out"], ["diff", broken.taken[0], broken.taken[-1]]):
        assert "icecore forget SNAPSHOT" in broken.run(*words, status=9)
    broken.run("forget", broken.taken[-1])
    broken.run("gc")
    assert "all is well" in broken.run("check", "--read-data")


async def _manifest_of(broken: Broken, snapshot: str) -> str:
    repository = await StoredRepository.open(LocalBackend(broken.folder))
    try:
        return (await repository.find(snapshot)).manifest
    finally:
        await repository.close()


def test_one_copy_is_enough(cli: Cli) -> None:
    broken = Broken(cli)
    broken.flip(broken.folder / "keys" / "00000000")
    assert "warning: store.copy_read" in broken.run("ls")
    assert "key slot keys/00000000" in broken.run("check", status=9)
    assert "stored again" in broken.run("repair")
    assert "warning" not in broken.run("ls") and "all is well" in broken.run("check")


def test_a_recovery_file(cli: Cli) -> None:
    broken = Broken(cli)
    recovery = cli.folder / "recovery"
    assert recovery.stat().st_mode & 0o777 == 0o600
    assert "exists" in broken.run("key", "export", "recovery", status=2)
    assert "nothing was changed" in broken.run("key", "import", "recovery")
    assert "which file?" in broken.run("key", "export", status=2)
    assert "cannot read" in broken.run("key", "import", "nothing", status=3)
    os.symlink(cli.folder / "elsewhere", cli.folder / "link")
    broken.run("key", "export", "link", status=2)
    assert not (cli.folder / "elsewhere").exists()
    # The file of another repository, a damaged file, and a file of another kind.
    other = str(cli.folder / "other")
    broken.run("-r", other, "init")
    assert "is not the recovery file of" in broken.run(
        "-r", other, "key", "import", "recovery", status=2
    )
    broken.flip(recovery)
    assert "use another copy" in broken.run("key", "import", "recovery", status=9)
    recovery.write_bytes(b"no such thing")
    assert "use another copy" in broken.run("key", "import", "recovery", status=9)


def test_a_recovery_file_of_an_encrypted_repository_needs_a_passphrase_of_its_time(
    cli: Cli,
) -> None:
    broken = Broken(cli, encrypted=True)
    assert PASSPHRASE.encode() not in (cli.folder / "recovery").read_bytes()
    new = {"ICECORE_NEW_PASSPHRASE": "a later one that differs"}
    broken.run("key", "rotate", "first", **new)
    keys(broken)
    broken.run(
        "key", "import", "recovery", status=14, ICECORE_PASSPHRASE=new["ICECORE_NEW_PASSPHRASE"]
    )
    broken.run("key", "import", "recovery")
    assert "all is well" in broken.run("check", "--read-data")
    # Later changes work.
    broken.run("key", "add", "second", **new)
    broken.run("ls", ICECORE_PASSPHRASE=new["ICECORE_NEW_PASSPHRASE"])
    assert "all is well" in broken.run("check")


def test_another_node_that_saw_the_lost_entry_is_told_and_goes_on(cli: Cli) -> None:
    broken = Broken(cli)
    state = str(cli.folder / "another")
    broken.run("ls", ICECORE_STATE=state)
    newest_entry(broken)
    broken.cure("ls", status=9)
    assert "warning: log.repaired" in broken.run("ls", ICECORE_STATE=state)
    assert "warning" not in broken.run("ls", ICECORE_STATE=state)


# -- real jobs


@pytest.mark.criu
@pytest.mark.usefixtures("needs_criu")
def test_the_newest_snapshot_of_a_job_is_restored_although_its_log_entry_is_lost(cli: Cli) -> None:
    start(cli)
    cli.run("dump", "count")
    until(lambda: counted(cli) >= 15, "still counting")
    newest = cli.one("dump.done", "dump", "count", "--stop")["snapshot"]
    entry = sorted((cli.folder / "repository" / "log").iterdir())[0]
    entry.write_bytes(_flipped(entry))
    assert "log entry" in cli.run("restore", "count", status=9).stderr
    assert cli.one("repair.recovered", "repair", "--dry-run")["snapshot"] == newest
    assert cli.one("repair.recovered", "repair")["snapshot"] == newest
    cli.run("gc", "--fence", "0s")
    assert cli.one("restore.running", "restore", "count")["snapshot"] == newest
    before = counted(cli)
    until(lambda: counted(cli) > before, "counting again")
    cli.run("dump", "count")
    assert cli.one("check.done", "check", "--read-data")["sound"] is True


@pytest.mark.criu
@pytest.mark.usefixtures("needs_criu")
def test_damaged_keys_index_and_advice_stop_neither_a_dump_nor_a_restore(cli: Cli) -> None:
    start(cli)
    cli.run("dump", "count")
    repository = cli.folder / "repository"
    for path in [
        repository / "config",
        repository / "keys" / "00000000",
        *(path for name in ("index", "hints") for path in (repository / name).rglob("*")),
    ]:
        if path.is_file():
            path.write_bytes(_flipped(path))
    until(lambda: counted(cli) >= 15, "still counting")
    cli.run("dump", "count", "--stop")
    cli.run("restore", "count")
    before = counted(cli)
    until(lambda: counted(cli) > before, "counting again")
    kinds = {
        event["kind"]
        for event in cli.events("check", status=9)
        if event["event"] == "check.finding"
    }
    assert {"configuration", "key slot", "index segment", "hints"} <= kinds
    cli.run("repair")
    assert cli.one("check.done", "check", "--read-data")["sound"] is True
    cli.run("dump", "count", "--stop")
    cli.run("restore", "count")


def _flipped(path: Path) -> bytes:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    return bytes(data)
