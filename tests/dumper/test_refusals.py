"""Walks all refusals of preflight, of restores and of CRIU's log: a cure names options and
capabilities that exist, and is never to do what was done.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

import icecore
from icecore.cli import build_parser
from icecore.dumper.observe.inspection import inspect_tree
from icecore.dumper.options import DumpOptions
from icecore.dumper.preflight import checks
from icecore.dumper.preflight.judge import CHECKS, WARNINGS, refuse, warn
from icecore.host.criu import log
from icecore.host.criu.program import find_criu
from icecore.host.jobs.namespaces import OWN_FILES, Isolation, RunRecord
from icecore.host.kernel import limits, procfs
from tests.host.target import eventually

PACKAGE = Path(icecore.__file__).parent
#: Where refusals are written.
SOURCES = [
    *sorted((PACKAGE / "dumper" / "preflight").glob("*.py")),
    PACKAGE / "dumper" / "observe" / "resident_inspection.py",
    PACKAGE / "host" / "criu" / "log.py",
    PACKAGE / "host" / "jobs" / "start.py",
    PACKAGE / "host" / "kernel" / "oom.py",
    *sorted((PACKAGE / "restorer" / "requirements").glob("*.py")),
    PACKAGE / "node" / "doctor.py",
]
#: Options of other programs, each with a word that stands before it in the same text.
FOREIGN = {
    "--disable-custom-all-reduce": "vLLM",
    "--cap-add": "container",
    "--cgroupns": "container",
    "--privileged": "container",
    "--fork": "unshare",
    "--mount-proc": "unshare",
    "--other": "chrt",
    "--suite": "tools/install-criu",
    "--force-reinstall": "pip",
    "--only-binary": "pip",
    "--get-state": "cuda-checkpoint",
    "--import": "podman",
}
#: Refusals of what cannot be a job of icecore: the machine's init, and icecore itself.
NEVER_JOBS = {"init", "self"}


def texts(tree: ast.AST) -> Iterator[str]:
    """The strings of a part of a program, each with what is joined to it; X replaces fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def own_options() -> set[str]:
    parser = build_parser()
    commands = next(
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    return {
        option for one in commands.choices.values() for option in one._option_string_actions
    } | set(parser._option_string_actions)


def test_every_option_that_a_refusal_names_exists() -> None:
    known, seen = own_options(), set()
    for path in SOURCES:
        for text in texts(ast.parse(path.read_text())):
            for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+[a-z]", text):
                seen.add(option)
                if option not in known:
                    assert FOREIGN.get(option, "\0") in text, f"{path.name}: {option} in {text!r}"
    assert {"--ghost-limit", "--workdir", "--file-budget", "--max-window", "--root"} <= seen


def test_every_capability_that_a_refusal_names_exists() -> None:
    seen = set()
    for path in SOURCES:
        for text in texts(ast.parse(path.read_text())):
            for name in re.findall(r"CAP_[A-Z_]+", text):
                assert name in limits._CAPABILITIES, f"{path.name}: {name}"
                seen.add(name)
    assert {"CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_SYS_RESOURCE"} <= seen


def test_a_cure_to_use_icecore_run_depends_on_whether_that_was_done() -> None:
    """Either the check looks how the job was started, or the cure names the option that was not
    used: 'icecore run --ipc private'.
    """
    bare = 0
    for path in sorted((PACKAGE / "dumper" / "preflight").glob("*.py")):
        for function in ast.parse(path.read_text()).body:
            if not isinstance(function, ast.FunctionDef):
                continue
            words = [text for text in texts(function) if re.search(r"icecore run\b(?! --)", text)]
            if ast.get_docstring(function, clean=False) in words:
                words.remove(str(ast.get_docstring(function, clean=False)))
            if not words or NEVER_JOBS & set(texts(function)):
                continue
            bare += 1
            looks = any(
                isinstance(node, ast.Attribute) and node.attr == "run"
                for node in ast.walk(function)
            )
            assert looks, f"{path.name}: {function.name}: {words}"
    assert bare >= 1


def test_every_known_cause_of_criu_has_a_cure() -> None:
    for pattern, cause in log.KNOWN:
        assert cause.message and cause.cure, pattern.pattern
        for vague in ("allow ", "skip the", "leave cgroups", "raise the ghost"):
            assert not cause.cure.startswith(vague), f"{cause.name}: {cause.cure}"


def test_every_check_is_registered() -> None:
    """A check that is forgotten refuses nothing."""
    registered = {check.__name__ for check in (*CHECKS, *WARNINGS)}
    assert {"proc", "foreign_limits", "traced", "unix_peers", "loose_pipes"} <= registered


# -- with a job of icecore's


def record(isolation: Isolation) -> RunRecord:
    files = {name: f"/x/{name}" for name in OWN_FILES}
    return RunRecord("job", ["sleep"], "/", isolation, files, [], b"init")


@pytest.mark.criu
def test_a_job_that_icecore_run_started_is_not_told_to_start_with_icecore_run() -> None:
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    process = subprocess.Popen(
        ["sleep", "100"], pass_fds=(theirs.fileno(), write), start_new_session=True
    )
    try:
        with ours, theirs:
            eventually(lambda: procfs.command_line(process.pid)[:1] == ["sleep"])
            found = inspect_tree(process.pid, find_criu(), "/dev/shm", DumpOptions())
            every = {one.name: one.cure for one in (*refuse(found), *warn(found))}
            assert "icecore run" in every["pipe"] and "icecore run" not in every["unix-peer"]
            known = replace(found, run=record(Isolation(root=True)))
            every = {one.name: one.cure for one in (*refuse(known), *warn(known))}
            assert {"unix-peer", "pipe"} <= set(every)
            assert not [cure for cure in every.values() if "icecore run" in cure]
    finally:
        process.kill()
        process.wait(10)
        os.close(read)
        os.close(write)


# -- trees of other users


@pytest.mark.criu
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_an_unprivileged_root_of_a_pid_namespace_without_a_proc() -> None:
    command = ["unshare", "--pid", "--fork", "setpriv", "--reuid", "12345", "--regid", "12345"]
    process = subprocess.Popen([*command, "--clear-groups", "sleep", "100"])
    try:
        eventually(
            lambda: any(
                procfs.command_line(child)[:1] == ["sleep"]
                for child in procfs.children(process.pid)
            )
        )
        (root,) = procfs.children(process.pid)
        found = inspect_tree(root, find_criu(), "/dev/shm", DumpOptions())
        (refusal,) = [one for one in refuse(found) if one.name == "proc"]
        assert "may not mount its own" in refusal.message and "--user" in refusal.cure
        os.kill(root, 9)
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.criu
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_limits_of_another_user_are_refused_where_nothing_can_read_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    process = subprocess.Popen(["sleep", "100"], user=12345, group=12345, start_new_session=True)
    try:
        found = inspect_tree(process.pid, find_criu(), "/dev/shm", DumpOptions())
        assert checks.foreign_limits(found) == []
        everything = limits.capabilities()
        monkeypatch.setattr(checks, "CRIU_LIBRARY", tmp_path / "none")
        monkeypatch.setattr(
            limits, "capabilities", lambda pid=None: everything - {"CAP_SYS_RESOURCE"}
        )
        (refusal,) = checks.foreign_limits(found)
        assert "CAP_SYS_RESOURCE" in refusal.message and "CAP_SYS_RESOURCE" in refusal.cure
        assert "of user 12345" in refusal.message
        everything |= {"CAP_SYS_RESOURCE"}
        monkeypatch.setattr(limits, "capabilities", lambda pid=None: everything)
        assert checks.foreign_limits(found) == []
    finally:
        process.kill()
        process.wait(10)
