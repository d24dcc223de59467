"""The help texts: groups, examples that parse, placeholders, and defaults with units."""

from __future__ import annotations

import argparse
import shlex

import pytest

from icecore import units
from icecore.cli import GROUPS, build_parser, split_command
from icecore.commands.parsing import CommandParser
from icecore.config.kinds import parse_seconds, parse_size
from icecore.errors import UsageError


def commands() -> dict[str, CommandParser]:
    """Return the parser of each command."""
    parsers = next(
        one for one in build_parser()._actions if isinstance(one, argparse._SubParsersAction)
    )
    return dict(parsers.choices)


def test_the_help_shows_the_commands_in_groups() -> None:
    lines = build_parser().format_help().splitlines()
    at = [lines.index(f"{title}:") for title, _ in GROUPS]
    assert at == sorted(at)
    for name, parser in commands().items():
        [line] = [at for at, line in enumerate(lines) if line.startswith(f"  {name} ")]
        section = [lines[start] for start in at if start < line][-1]
        assert section == f"{parser.group}:"


def test_every_example_parses() -> None:
    for name, parser in commands().items():
        title, *examples = (parser.epilog or "").splitlines()
        assert title in ("example:", "examples:") and examples, name
        for example in examples:
            words = shlex.split(example.partition(" > ")[0])
            assert words[:2] == ["icecore", name]
            own, rest = split_command(words[1:])
            assert build_parser().parse_args(own).command == name
            assert (rest is not None) == (name == "run")


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("token add --role read ci", "name", "ci"),
        ("token add ci --role read", "name", "ci"),
        ("key add --new-file secret alice", "slot", "alice"),
        ("key list", "slot", ""),
    ],
)
def test_an_optional_argument_may_follow_options(line: str, name: str, value: str) -> None:
    assert getattr(build_parser().parse_args(line.split()), name) == value


@pytest.mark.parametrize("line", ["token add --role read a b", "key list x --new-file f y"])
def test_what_is_too_much_is_refused(line: str) -> None:
    with pytest.raises(UsageError, match="unrecognized"):
        build_parser().parse_args(line.split())


def test_every_value_has_a_placeholder() -> None:
    for name, parser in commands().items():
        for action in parser._actions:
            if action.nargs != 0 and action.help != argparse.SUPPRESS:
                assert action.metavar and action.metavar != "TEXT", (name, action.dest)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1500, "1500 B"), (64 << 20, "64 MiB"), (3 << 29, "1536 MiB"), (2 << 30, "2 GiB")],
)
def test_sizes_read_back(count: int, text: str) -> None:
    assert units.exact_size(count) == text
    assert parse_size(text) == count


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.25, "250 ms"),
        (2.5, "2.5 s"),
        (30.0, "30 s"),
        (90.0, "90 s"),
        (1800.0, "30 min"),
        (7200.0, "2 h"),
        (7 * 86400.0, "7 d"),
    ],
)
def test_durations_read_back(seconds: float, text: str) -> None:
    assert units.exact_seconds(seconds) == text
    assert parse_seconds(text) == seconds


def test_defaults_have_units() -> None:
    text = " ".join(commands()["dump"].format_help().split())
    assert "(default: 2 GiB)" in text and "(default: 30 s)" in text
    arguments = build_parser().parse_args(
        ["dump", "x", "--max-window", "1min", "--staging", "64 MiB", "--gpu-lock", "3"]
    )
    assert (arguments.max_window, arguments.staging_bytes, arguments.gpu_lock) == (60, 64 << 20, 3)
