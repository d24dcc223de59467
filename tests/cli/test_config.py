"""Configuration: layers, environment, and messages that name file, key, value and what would be right."""

from __future__ import annotations

import os
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from icecore import config
from icecore.api import dump_options, restore_options
from icecore.config import Config, load, merge, override
from icecore.dumper.options import DumpOptions
from icecore.errors import NotFound, UsageError
from icecore.restorer.options import RestoreOptions

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_commented_file_holds_every_setting_with_its_default() -> None:
    table = tomllib.loads((ROOT / "configs" / "icecore.toml").read_text())
    written = {(section, key) for section, inner in table.items() if isinstance(inner, dict) for key in inner}
    written |= {("", key) for key, value in table.items() if not isinstance(value, dict)}
    assert written == {(section, key) for section, key, _, _ in config.every_setting()}
    assert merge(Config(), table, "icecore.toml") == Config()


def test_defaults_are_those_of_the_options() -> None:
    assert dump_options(Config()) == DumpOptions()
    assert restore_options(Config()) == RestoreOptions()


def test_every_setting_of_an_option_reaches_it() -> None:
    own = {"workdir", "hook_seconds", "after"}  # workdir is an argument of dump(), the others are the restore hook's
    for options, settings in ((DumpOptions, config.DumpSettings), (RestoreOptions, config.RestoreSettings)):
        assert {about.name for about in fields(settings)} - {about.name for about in fields(options)} <= own
    changed = override(Config(), {"ICECORE_DUMP_MAX_WINDOW": "250ms", "ICECORE_RESTORE_BUDGET_BYTES": "1GiB"})
    assert dump_options(changed).max_window == 0.25
    assert restore_options(changed).budget_bytes == 1 << 30


def test_layers_win_key_by_key(tmp_path: Path) -> None:
    first, second, named = (tmp_path / name for name in ("first.toml", "second.toml", "named.toml"))
    first.write_text('repository = "/one"\n[dump]\nmax_window = 1\nscan_threads = 7\nfiles = "check"\n')
    second.write_text('[dump]\nmax_window = "2 s"\n')
    named.write_text("[dump]\nscan_threads = 3\n")
    absent = tmp_path / "absent.toml"
    got = load(str(named), environment={"ICECORE_RESTORE_MODE": "lazy"}, files=[first, second, absent])
    assert (got.repository, got.dump.max_window, got.dump.scan_threads, got.dump.files) == ("/one", 2.0, 3, "check")
    assert got.restore.mode == "lazy"
    got = load(str(named), environment={"ICECORE_REPOSITORY": "/two"}, files=[first])
    assert got.repository == "/two"
    assert load(environment={"ICECORE_CONFIG": str(named)}, files=[]).dump.scan_threads == 3


def test_standard_files() -> None:
    found = config.standard_files({"HOME": "/home/x"}, Path("/here"))
    assert [str(path) for path in found] == ["/etc/icecore.toml", "/home/x/.config/icecore.toml", "/here/icecore.toml"]
    assert config.standard_files({"HOME": "/h", "XDG_CONFIG_HOME": "/c"}, Path("/w"))[1] == Path("/c/icecore.toml")


def test_every_key_can_be_overridden_by_the_environment() -> None:
    texts = {"TEXT": "word", "TEXT …": "one two", "SIZE": "3MiB", "TIME": "7s", "N": "5"}
    for section, key, kind, default in config.every_setting():
        text = next((word for word in kind.words if word != default), "") or texts.get(kind.short, "")
        if kind is config.SWITCH:
            text = "no" if default else "yes"
        changed = override(Config(), {config.variable(section, key): text})
        got = next(value for name, inner, _, value in config.every_setting(changed) if (name, inner) == (section, key))
        assert got != default, (section, key)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[dump]\nmax_window = 'soon'\n", ("dump.max_window", "'soon'", "a duration such as")),
        ("[dump]\nmax_windwo = 3\n", ("dump.max_windwo", "did you mean dump.max_window?")),
        ("[dump]\nwith_files = 1\n", ("dump.with_files", "1", "true or false")),
        ("[dump]\nscan_threads = -1\n", ("dump.scan_threads", "-1", "a whole number")),
        ("[dump]\nscan_threads = true\n", ("dump.scan_threads", "True", "a whole number")),
        ("[dump]\nscan_threads = 1.5\n", ("dump.scan_threads", "1.5", "a whole number")),
        ("[dump]\nmax_window = nan\n", ("dump.max_window", "nan", "a duration")),
        ("[restore]\nmode = 'fast'\n", ("restore.mode", "'fast'", 'one of "full", "lazy"')),
        ("[restore]\nbudget_bytes = '12 parsecs'\n", ("restore.budget_bytes", "12 parsecs", "a size such as")),
        ("[dump]\nscan_threads = 100000\n", ("dump.scan_threads", "100000", "from 0 to 1024")),
        ("[restore]\nthreads = 1025\n", ("restore.threads", "1025", "from 0 to 1024")),
        ("[damp]\nmax_window = 3\n", ("damp",)),
        ("dump = 3\n", ("[dump] is a section",)),
        ("repository = 3\n", ("repository", "3", "a text")),
        ("repository = 'a'\nrepository = 'b'\n", ("is not TOML",)),
        ("\x00", ("is not TOML",)),
    ],
)
def test_a_wrong_value_is_named_with_its_place(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    path = tmp_path / "icecore.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load(environment={}, files=[path])
    for word in (str(path), *words):
        assert word in str(caught.value)
    assert caught.value.cure


def test_wrong_variables_are_named() -> None:
    with pytest.raises(UsageError, match="ICECORE_DUMP_MAX_WINDOW='soon'"):
        override(Config(), {"ICECORE_DUMP_MAX_WINDOW": "soon"})
    with pytest.raises(UsageError, match=r"ICECORE_DUMP_MAX_WINDWO.*ICECORE_DUMP_MAX_WINDOW"):
        override(Config(), {"ICECORE_DUMP_MAX_WINDWO": "3"})
    # What hooks and other tools get is not ours to judge.
    assert override(Config(), {"ICECORE_JOB": "x", "ICECORE_SNAPSHOT": "y", "ICECORE_CRIU_PREFIX": "/z"}) == Config()


def test_a_named_file_has_to_exist(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"nowhere\.toml"):
        load(str(tmp_path / "nowhere.toml"), environment={}, files=[])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give a file away")
def test_files_of_others_are_refused_unless_named(tmp_path: Path) -> None:
    path = tmp_path / "icecore.toml"
    path.write_text("[restore]\nafter = 'do-anything'\n")
    os.chown(path, 65534, 65534)
    with pytest.raises(UsageError, match="can be written by others"):
        load(environment={}, files=[path])
    assert load(str(path), environment={}, files=[]).restore.after == "do-anything"
    os.chown(path, 0, 0)
    path.chmod(0o666)
    with pytest.raises(UsageError, match="can be written by others"):
        load(environment={}, files=[path])


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("2 GiB", 2 << 30), ("1.5kib", 1536), ("3MB", 3_000_000), ("7 k", 7000), ("0", 0), ("12b", 12)],
)
def test_sizes(text: str, value: int) -> None:
    assert config.parse_size(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("30", 30), ("250ms", 0.25), ("1.5 s", 1.5), ("2min", 120), ("36h", 129600), ("2w 3d", 17 * 86400), ("1y6mo", 545 * 86400)],
)
def test_durations(text: str, value: float) -> None:
    assert config.parse_seconds(text) == value


@pytest.mark.parametrize("text", ["", "soon", "-1", "3 parsecs", "1e3", "0x10", "nan", "inf", "2 3x"])
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError):
        config.parse_seconds(text)
    with pytest.raises(ValueError):
        config.parse_size(text)
