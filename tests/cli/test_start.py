"""What a command loads before it works: most of the time that a short command takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from icecore.cli import GROUPS, build_parser, main, parser_on_demand
from icecore.commands.demand import OneCommand
from icecore.errors import UsageError

#: Modules that neither a list of jobs nor a list of snapshots needs.
_HEAVY = (
    *("numpy", "cryptography", "rich.console", "rich.table", "prometheus_client", "shtab"),
    *("icecore.service", "icecore.host.jobs.start", "icecore.store.log.session"),
    *("icecore.store.format.manifest", "icecore.dumper", "icecore.restorer"),
)
_LOADED = """
import json, sys
before = set(sys.modules)
from icecore.cli import main
status = main(sys.argv[1:])
print(json.dumps([status, sorted(set(sys.modules) - before)]))
"""


def loaded(*words: str) -> list[str]:
    """Return the modules that a command loads in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", _LOADED, *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    status, modules = json.loads(done.stdout.splitlines()[-1])
    assert status == 0, done.stdout + done.stderr
    return list(modules)


def own(modules: list[str]) -> list[str]:
    return [name for name in modules if name.partition(".")[0] == "icecore"]


def heavy(modules: list[str]) -> list[str]:
    return [name for name in modules if name in _HEAVY]


def test_ps_loads_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ICECORE_STATE", str(tmp_path / "state"))
    found = loaded("ps", "-a")
    assert not heavy(found)
    assert not [name for name in found if name in ("asyncio", "icecore.store")]
    assert len(own(found)) <= 36, own(found)
    assert len(found) <= 130, len(found)


def test_ls_loads_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ICECORE_STATE", str(tmp_path / "state"))
    place = str(tmp_path / "repository")
    assert main(["-r", place, "init"]) == 0
    found = loaded("-r", place, "ls")
    assert not [name for name in heavy(found) if name != "icecore.service"]
    assert not [name for name in found if name == "icecore.host.jobs.registry"]
    assert len(own(found)) <= 70, own(found)
    assert len(found) <= 230, len(found)


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (["ps", "--help"], "jobs"),
        (["key", "--help"], "keys"),
        (["-q", "mark", "-h"], "repositories"),
    ],
)
def test_only_the_module_of_the_command_is_loaded(words: list[str], module: str) -> None:
    code = f"""
import sys
from icecore.cli import main
try:
    main({words!r})
except SystemExit as ended:
    assert not ended.code
print([name for name in sys.modules if name.startswith("icecore.commands.")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    others = {name for _, modules in GROUPS for name in modules} - {module}
    if module == "jobs":
        others -= {"supervise"}  # its options belong to run
    names = done.stdout.splitlines()[-1]
    assert f"'icecore.commands.{module}'" in names
    assert not [name for name in others if f"'icecore.commands.{name}'" in names]


def commands_of(parser: object) -> object:
    return next(action for action in parser._actions if action.dest == "command")  # type: ignore[attr-defined]


def test_the_table_names_the_commands_that_the_modules_add() -> None:
    listed = [name for _, modules in GROUPS for names in modules.values() for name in names]
    assert list(commands_of(build_parser()).choices) == listed  # type: ignore[attr-defined]
    assert list(commands_of(parser_on_demand()).choices) == listed  # type: ignore[attr-defined]


def test_both_parsers_parse_alike() -> None:
    for _, modules in GROUPS:
        for names in modules.values():
            for name in names:
                whole = commands_of(build_parser()).choices[name]  # type: ignore[attr-defined]
                one = parser_on_demand()
                with pytest.raises(SystemExit):
                    one.parse_args([name, "--help"])
                built = commands_of(one)._name_parser_map  # type: ignore[attr-defined]
                assert list(built) == [name]
                assert built[name].format_help() == whole.format_help()
    assert parser_on_demand().format_help() == build_parser().format_help()


def test_an_unknown_command_is_refused_alike() -> None:
    for parser in (build_parser(), parser_on_demand()):
        with pytest.raises(UsageError, match="invalid choice: 'nonsense'"):
            parser.parse_args(["nonsense"])


def test_a_skipped_command_takes_any_option() -> None:
    parser = parser_on_demand()
    commands = OneCommand(commands_of(parser), lambda parser: None, "ps")  # type: ignore[arg-type]
    skipped = commands.add("ls", lambda arguments, context: 0, "List.", "icecore ls")
    group = skipped.add_mutually_exclusive_group()
    group.add_argument("--one", action="store_true")
    skipped.add_argument_group("others").add_argument("--two")
    assert "ls" not in commands_of(parser)._name_parser_map  # type: ignore[attr-defined]
