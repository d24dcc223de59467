"""docs/reference/events.md and docs/reference/cli.md match the code: names and fields of events, exit codes, commands."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import icecore
from icecore.cli import build_parser
from icecore.errors import IcecoreError
from tests.cli.documents import ROOT, documented_events, rows

#: Which argument of these calls is an event's name.
NAMED = {"Event": 0, "phase": 1, "result": 0, "_tell": 0, "tell": 0}


def said() -> dict[str, set[str]]:
    """Return the events in the sources, with the fields that static analysis can find."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "icecore").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Call):
                _call(node, found)
            elif isinstance(node, ast.With):
                _phase(node, found)
            elif isinstance(node, ast.FunctionDef):
                _passed(node, found)
    return found


def _name(call: ast.Call) -> str | None:
    function = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    at = NAMED.get(function)
    if at is None or len(call.args) <= at:
        return None
    name = call.args[at]
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else None


def _call(call: ast.Call, found: dict[str, set[str]]) -> None:
    name = _name(call)
    if name is None:
        return
    found[name] |= {key for one in call.args if isinstance(one, ast.Dict) for key in _keys(one)}
    if getattr(call.func, "id", "") == "phase":
        found[name] |= {keyword.arg for keyword in call.keywords if keyword.arg}


def _phase(node: ast.With, found: dict[str, set[str]]) -> None:
    """Collect the fields that are added to a running phase."""
    names = [
        _name(item.context_expr) for item in node.items if isinstance(item.context_expr, ast.Call)
    ]
    if not names or names[0] is None:
        return
    found[names[0]] |= _fields(node)


def _passed(node: ast.FunctionDef, found: dict[str, set[str]]) -> None:
    """What a function adds to the fields of a phase that its docstring names."""
    for one in node.args.args:
        if isinstance(one.annotation, ast.Name) and one.annotation.id == "Phase":
            named = re.search(rf"{one.arg}: The phase ``([a-z.]+)``", ast.get_docstring(node) or "")
            if named:
                found[named[1]] |= _fields(node)


def _fields(node: ast.AST) -> set[str]:
    """Names of fields of a phase that are set below a node."""
    names: set[str] = set()
    for inner in ast.walk(node):
        if (
            isinstance(inner, ast.AugAssign)
            and getattr(inner.target, "attr", "") == "fields"
            and isinstance(inner.value, ast.Dict)
        ):
            names |= set(_keys(inner.value))
        if (
            isinstance(inner, ast.Subscript)
            and getattr(inner.value, "attr", "") == "fields"
            and isinstance(inner.slice, ast.Constant)
        ):
            names.add(str(inner.slice.value))
    return names


def _keys(node: ast.Dict) -> list[str]:
    return [
        key.value
        for key in node.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    ]


def test_every_event_is_documented_and_every_documented_one_exists() -> None:
    found, documented = said(), documented_events()
    assert len(found) > 50  # the sources were found
    assert found.keys() - documented.keys() == set(), "in the code, not in docs/reference/events.md"
    assert documented.keys() - found.keys() == set(), "in docs/reference/events.md, not in the code"
    wrong = {
        name: fields - documented[name].all
        for name, fields in found.items()
        if fields - documented[name].all
    }
    assert not wrong, f"fields that docs/reference/events.md does not have: {wrong}"


def error_classes() -> list[type[IcecoreError]]:
    """Return every error class of the package."""
    for module in pkgutil.walk_packages(icecore.__path__, "icecore."):
        # Programs, and a library that is not an extension module.
        if ".libicecore-" not in module.name and not module.name.endswith(
            ("launch", "guard_process", "__main__")
        ):
            importlib.import_module(module.name)
    found: list[type[IcecoreError]] = [IcecoreError]
    for kind in found:
        found.extend(one for one in kind.__subclasses__() if one not in found)
    return found


def test_exit_codes_are_documented() -> None:
    table = {
        int(code): set(classes.replace("`", "").split(", "))
        for code, classes, *_ in rows("reference/cli.md", "Exit statuses")
        if code.isdecimal()
    }
    assert {code for code in table if code < 100} == {
        0,
        *(kind.exit_code for kind in error_classes()),
    }
    private = {
        "Busy",
        "Conflict",
        "FileUnusable",
        "GuardLost",
        "NotHeld",
        "PidTaken",
        "PlacerLost",
        "TooLarge",
        "Unauthenticated",
    }  # always converted into another class before they leave icecore
    for kind in error_classes():
        if kind.__name__ not in private:
            assert kind.__name__ in table[kind.exit_code], (
                f"{kind.__name__} has exit code {kind.exit_code}"
            )


def test_every_error_has_a_docstring_and_every_exit_code_one_meaning() -> None:
    assert all(inspect.getdoc(kind) for kind in error_classes())
    direct = [
        kind
        for kind in error_classes()
        if kind.exit_code
        not in (1, *(up.exit_code for up in kind.__mro__[1:] if issubclass(up, IcecoreError)))
    ]
    codes = [kind.exit_code for kind in direct]
    assert len(codes) == len(set(codes)), direct


def test_every_command_is_documented() -> None:
    parsers = next(action for action in build_parser()._actions if action.dest == "command")
    assert parsers.choices is not None
    documented = {
        words[0].split("`")[1].split()[0] for words in rows("reference/cli.md", "Commands")
    }
    assert set(parsers.choices) == documented


def test_the_readme_names_only_commands_that_exist() -> None:
    parsers = next(action for action in build_parser()._actions if action.dest == "command")
    assert parsers.choices is not None
    words = [
        line.strip().removeprefix("$ ").split()
        for line in (ROOT / "README.md").read_text().splitlines()
        if line.strip().startswith("$ icecore ")
    ]
    assert words
    assert {line[1] for line in words} <= set(parsers.choices)


def security_page() -> Path:
    """Return the page, which moves to docs/explanation/."""
    moved = ROOT / "docs" / "explanation" / "security.md"
    return moved if moved.exists() else ROOT / "docs" / "security.md"


def test_every_test_that_the_security_page_names_exists() -> None:
    """A reader of a promise there can run the test that proves it."""
    text = (ROOT / "docs" / "explanation" / "security.md").read_text()
    files = list((ROOT / "tests").rglob("test_*.py"))
    defined = {
        name
        for path in files
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 50 and not named - defined
    assert set(re.findall(r"`(test_\w+\.py)`", text)) <= {path.name for path in files}


def test_the_generated_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "-P", str(ROOT / "tools" / "generate-docs"), "--check"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
