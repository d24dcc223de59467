"""Configuration: layers, environment, and messages that name file, key, value and what is expected."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest

from icecore import config
from icecore.api import dump_options, restore_options
from icecore.config import Config, kinds, loading
from icecore.config.loading import load, merge, override
from icecore.dumper.options import DumpOptions
from icecore.errors import NotFound, UsageError
from icecore.restorer.options import RestoreOptions

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_commented_file_holds_every_setting_with_its_default() -> None:
    table = tomllib.loads((ROOT / "configs" / "icecore.toml").read_text())
    written = {
        (section, key)
        for section, inner in table.items()
        if isinstance(inner, dict)
        for key in inner
    }
    written |= {("", key) for key, value in table.items() if not isinstance(value, dict)}
    assert written == {(section, key) for section, key, _, _ in config.every_setting()}
    assert merge(Config(), table, "icecore.toml") == Config()


def test_defaults_are_those_of_the_options() -> None:
    assert dump_options(Config()) == DumpOptions()
    assert restore_options(Config()) == RestoreOptions()


def test_every_setting_of_an_option_reaches_it() -> None:
    own = {
        "workdir",
        "hook_seconds",
        "after",
    }  # workdir is an argument of dump(), the others are the restore hook's
    for options, settings in (
        (DumpOptions, config.DumpSettings),
        (RestoreOptions, config.RestoreSettings),
    ):
        assert set(settings.__struct_fields__) - {about.name for about in fields(options)} <= own
    changed = override(
        Config(), {"ICECORE_DUMP_MAX_WINDOW": "250ms", "ICECORE_RESTORE_BUDGET_BYTES": "1GiB"}
    )
    assert dump_options(changed).max_window == 0.25
    assert restore_options(changed).budget_bytes == 1 << 30


def test_layers_win_key_by_key(tmp_path: Path) -> None:
    first, second, named = (tmp_path / name for name in ("first.toml", "second.toml", "named.toml"))
    first.write_text(
        'repository = "/one"\n[dump]\nmax_window = 1\nscan_threads = 7\nfiles = "check"\n'
    )
    second.write_text('[dump]\nmax_window = "2 s"\n')
    named.write_text("[dump]\nscan_threads = 3\n")
    absent = tmp_path / "absent.toml"
    got = load(
        str(named), environment={"ICECORE_RESTORE_MODE": "lazy"}, files=[first, second, absent]
    )
    assert (got.repository, got.dump.max_window, got.dump.scan_threads, got.dump.files) == (
        "/one",
        2.0,
        3,
        "check",
    )
    assert got.restore.mode == "lazy"
    got = load(str(named), environment={"ICECORE_REPOSITORY": "/two"}, files=[first])
    assert got.repository == "/two"
    assert load(environment={"ICECORE_CONFIG": str(named)}, files=[]).dump.scan_threads == 3


def test_standard_files() -> None:
    found = loading.standard_files({"HOME": "/home/x"}, Path("/here"))
    assert [str(path) for path in found] == [
        "/etc/icecore.toml",
        "/home/x/.config/icecore.toml",
        "/here/icecore.toml",
    ]
    assert loading.standard_files({"HOME": "/h", "XDG_CONFIG_HOME": "/c"}, Path("/w"))[1] == Path(
        "/c/icecore.toml"
    )


def test_every_key_can_be_overridden_by_the_environment() -> None:
    texts = {
        "SIZE": "3MiB",
        "DURATION": "7s",
        "N": "5",
        "PLACE …": "one two",
        "SHARE": "7%",
        "SHARE|auto": "7%",
    }
    for section, key, kind, default in config.every_setting():
        text = next((word for word in kind.words if word != default), "") or texts.get(
            kind.short, "word"
        )
        if kind is kinds.SWITCH:
            text = "no" if default else "yes"
        changed = override(Config(), {config.variable(section, key): text})
        got = next(
            value
            for name, inner, _, value in config.every_setting(changed)
            if (name, inner) == (section, key)
        )
        assert got != default, (section, key)


@pytest.mark.parametrize(
    ("given", "share"), [("50%", 0.5), ("1%", 0.01), ("0.25", 0.25), ("auto", 0.0), ("0.0", 0.0)]
)
def test_a_share_of_the_cores(given: str, share: float) -> None:
    assert override(Config(), {"ICECORE_DUMP_BACKGROUND_CPU": given}).dump.background_cpu == share


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[dump]\nmax_window = 'soon'\n", ("dump.max_window", "'soon'", "a duration such as")),
        ("[dump]\nmax_windwo = 3\n", ("dump.max_windwo", "did you mean dump.max_window?")),
        ("[dump]\nwith_files = 1\n", ("dump.with_files", "1", "true or false")),
        ("[dump]\nscan_threads = -1\n", ("dump.scan_threads", "-1", "a whole number")),
        ("[dump]\nscan_threads = true\n", ("dump.scan_threads", "True", "a whole number")),
        ("[dump]\nscan_threads = 1.5\n", ("dump.scan_threads", "1.5", "a whole number")),
        ("[dump]\nbackground_cpu = 1.5\n", ("dump.background_cpu", "1.5", "a share from 1%")),
        ("[dump]\nbackground_cpu = '0.5%'\n", ("dump.background_cpu", "0.5%", "a share from 1%")),
        ("[dump]\nbackground_cpu = 1e-6\n", ("dump.background_cpu", "1e-06", "a share from 1%")),
        ("[dump]\nbackground_cpu = -1\n", ("dump.background_cpu", "-1", "or 'auto'")),
        ("[dump]\nbackground_cpu = nan\n", ("dump.background_cpu", "nan", "a share from 1%")),
        ("[dump]\nmax_window = nan\n", ("dump.max_window", "nan", "a duration")),
        ("[restore]\nmode = 'fast'\n", ("restore.mode", "'fast'", 'one of "full", "lazy"')),
        (
            "[restore]\nbudget_bytes = '12 parsecs'\n",
            ("restore.budget_bytes", "12 parsecs", "a size such as"),
        ),
        ("[dump]\nscan_threads = 100000\n", ("dump.scan_threads", "100000", "from 0 to 1024")),
        ("[restore]\nthreads = 1025\n", ("restore.threads", "1025", "from 0 to 1024")),
        ("[damp]\nmax_window = 3\n", ("damp",)),
        ("dump = 3\n", ("[dump] is a section",)),
        ("repository = 3\n", ("repository", "3", "a text")),
        ("repository = 'a'\nrepository = 'b'\n", ("is not TOML",)),
        ("\x00", ("is not TOML",)),
    ],
)
def test_a_wrong_value_is_named_with_its_place(
    tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    path = tmp_path / "icecore.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load(environment={}, files=[path])
    for word in (str(path), *words):
        assert word in str(caught.value)
    assert caught.value.cure


def test_old_names_of_settings_work() -> None:
    changed = merge(Config(), {"dump": {"tcp": "close"}, "restore": {"tcp": "close"}}, "here")
    assert (changed.dump.connections, changed.restore.connections) == ("close", "close")
    assert override(Config(), {"ICECORE_DUMP_TCP": "close"}).dump.connections == "close"
    with pytest.raises(UsageError, match=r"dump\.tcp = 'maybe'|dump\.connections = 'maybe'"):
        merge(Config(), {"dump": {"tcp": "maybe"}}, "here")
    with pytest.raises(UsageError, match="one setting"):
        merge(Config(), {"dump": {"tcp": "close", "connections": "keep"}}, "here")
    assert DumpOptions(tcp="close").connections == RestoreOptions(tcp="close").connections
    assert replace(DumpOptions(tcp="close"), job="x").connections == "close"


def test_wrong_variables_are_named() -> None:
    with pytest.raises(UsageError, match="ICECORE_DUMP_MAX_WINDOW='soon'"):
        override(Config(), {"ICECORE_DUMP_MAX_WINDOW": "soon"})
    with pytest.raises(UsageError, match=r"ICECORE_DUMP_MAX_WINDWO.*ICECORE_DUMP_MAX_WINDOW"):
        override(Config(), {"ICECORE_DUMP_MAX_WINDWO": "3"})
    # Variables for hooks and other tools are accepted unchecked.
    assert (
        override(
            Config(), {"ICECORE_JOB": "x", "ICECORE_SNAPSHOT": "y", "ICECORE_CRIU_PREFIX": "/z"}
        )
        == Config()
    )


def test_a_named_file_has_to_exist(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"nowhere\.toml"):
        load(str(tmp_path / "nowhere.toml"), environment={}, files=[])


NOBODY = 65534
#: An access control list by which a second user may write: user::rw-, user:65534:rw-, group::r--,
#: mask::rw-, other::r--.
_ACL = struct.pack(
    "<I" + 5 * "HHI",
    2,
    1,
    6,
    0xFFFFFFFF,
    2,
    6,
    NOBODY,
    4,
    4,
    0xFFFFFFFF,
    0x10,
    6,
    0xFFFFFFFF,
    0x20,
    4,
    0xFFFFFFFF,
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs to give a file away")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Return a valid file in its own directory."""
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "icecore.toml"
    path.write_text("[restore]\nafter = 'do-anything'\n")
    return path


def change_link(path: Path) -> None:
    """Replace the file by another user's link to a file of root's."""
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def lead_away(path: Path) -> None:
    """Put a directory that others can write to on the path of the file."""
    loose = path.parent.parent / "loose"
    loose.mkdir()
    loose.chmod(0o775)
    path.rename(loose / path.name)
    path.symlink_to(loose / path.name)


CHANGEABLE = {
    "group": lambda path: path.chmod(0o664),
    "all": lambda path: path.chmod(0o646),
    "list": lambda path: os.setxattr(path, "system.posix_acl_access", _ACL),
    "owner": lambda path: os.chown(path, NOBODY, NOBODY),
    "group of the directory": lambda path: path.parent.chmod(0o775),
    "owner of the directory": lambda path: os.chown(path.parent, NOBODY, NOBODY),
    "link": change_link,
    "way": lead_away,
}


@needs_root
@pytest.mark.parametrize("named", [False, True, None], ids=["found", "named", "ICECORE_CONFIG"])
@pytest.mark.parametrize("how", CHANGEABLE)
def test_a_file_that_others_can_change_is_refused_with_the_command_that_corrects_it(
    own: Path, how: str, named: bool | None
) -> None:
    def read() -> str:
        if named is None:
            return load(environment={"ICECORE_CONFIG": str(own)}, files=[]).restore.after
        return (
            load(str(own), environment={}, files=[]).restore.after
            if named
            else load(environment={}, files=[own]).restore.after
        )

    assert read() == "do-anything"
    CHANGEABLE[how](own)
    for _ in range(3):  # one cure after the other
        with pytest.raises(UsageError, match=r"can be written by others|belongs to user") as caught:
            read()
        assert re.match(r"(chmod go-w|chown 0) /", caught.value.cure)
        subprocess.run(
            caught.value.cure.replace("chown", "chown -h"), shell=True, check=True, timeout=20
        )
        try:
            assert read() == "do-anything"
        except UsageError:
            continue
        return
    pytest.fail("the cures lead nowhere")


@needs_root
def test_a_file_that_an_unprivileged_user_plants_is_not_read(tmp_path: Path) -> None:
    """The file is in a sticky directory, and ICECORE_CONFIG names a file that does not exist there.
    Another user's FIFO does not block.
    """
    folder = tmp_path / "public"
    folder.mkdir()
    folder.chmod(0o1777)
    for parent in [one for one in (tmp_path, *tmp_path.parents) if "pytest-" in str(one)]:
        parent.chmod(0o711)
    path = folder / "icecore.toml"
    as_nobody = ["setpriv", "--reuid", str(NOBODY), "--clear-groups", "--"]
    for make in (f'echo "[restore]" > {path}', f"mkfifo {path}", f"ln -s /etc/passwd {path}"):
        subprocess.run([*as_nobody, "/bin/sh", "-c", make], check=True, timeout=20)
        with pytest.raises(UsageError, match=f"belongs to user {NOBODY}"):
            load(environment={"ICECORE_CONFIG": str(path)}, files=[])
        path.unlink()
    path.write_text("[restore]\nafter = 'mine'\n")
    assert load(environment={"ICECORE_CONFIG": str(path)}, files=[]).restore.after == "mine"


def test_a_pipe_that_was_handed_over_is_read() -> None:
    ours, theirs = os.pipe()
    os.write(theirs, b"[restore]\nafter = 'piped'\n")
    os.close(theirs)
    try:
        assert load(f"/dev/fd/{ours}", environment={}, files=[]).restore.after == "piped"
    finally:
        os.close(ours)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("2 GiB", 2 << 30),
        ("1.5kib", 1536),
        ("3MB", 3_000_000),
        ("7 k", 7000),
        ("0", 0),
        ("12b", 12),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert kinds.parse_size(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("30", 30),
        ("250ms", 0.25),
        ("1.5 s", 1.5),
        ("2min", 120),
        ("36h", 129600),
        ("2w 3d", 17 * 86400),
        ("1y6mo", 545 * 86400),
    ],
)
def test_durations(text: str, value: float) -> None:
    assert kinds.parse_seconds(text) == value


@pytest.mark.parametrize(
    "text", ["", "soon", "-1", "3 parsecs", "1e3", "0x10", "nan", "inf", "2 3x"]
)
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError):
        kinds.parse_seconds(text)
    with pytest.raises(ValueError):
        kinds.parse_size(text)
