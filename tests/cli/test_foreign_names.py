"""Foreign names of jobs and repositories through the command line: they arrive exactly, and no byte
of them controls a terminal.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import io
import json
import os
import pty
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icecore.commands.output import Output
from icecore.errors import IcecoreError, PreflightRefused
from icecore.events import Event
from icecore.host.jobs.registry import Registry
from icecore.store.backend.local import LocalBackend
from icecore.store.format.cell import CELL
from icecore.store.format.manifest import (
    Manifest,
    Namespaces,
    OpenFile,
    Process,
    Region,
    Requirements,
    Space,
    encode_manifest,
)
from icecore.store.format.names import new_snapshot_id, object_name, random_id
from icecore.store.format.state import SnapshotRecord
from icecore.store.log.repository import StoredRepository
from icecore.store.snapshot.packs import MapWriter
from tests.cli.conftest import Cli, until
from tests.cli.documents import ROOT, check_event, documented_events
from tests.programs.foreign_names import __file__ as PROGRAM

#: An escape sequence, markup, invalid UTF-8, an encoded surrogate, line ends of every kind, what
#: /proc writes for a newline, and what it adds to deleted files.
HOSTILE = b"n\xff\xc3\xa4\x1b[31m[red]x\x07\ny\\z\xe2\x80\xae"
NAMES = [
    HOSTILE,
    b"\x80\xfe (deleted)",
    b"a\\012b\r\x0b\xc2\x85[link=file:x]\xed\xa0\x80\xe2\x80\xa8 \t",
    b"\\xff",
    b"\nUid:\t9\n",
]
#: Control characters but the newline, and whatever else has no glyph of its own.
_COMMANDS = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def assert_harmless(text: str, *, lines: int | None = None) -> None:
    """Assert that a text contains no control characters except newlines and rich's own bold and
    normal.
    """
    plain = _COLOUR.sub(
        lambda match: "" if match[0] in ("\x1b[1m", "\x1b[0m", "\x1b[3m") else match[0], text
    )
    assert not _COMMANDS.search(plain), ascii(plain)
    if lines is not None:
        assert plain.count("\n") == lines, ascii(plain)


# -- the single output path

_TEXTS = st.one_of(
    st.sampled_from([os.fsdecode(name) for name in NAMES]),
    st.binary(max_size=12).map(os.fsdecode),
    st.text(max_size=8),
)


@given(_TEXTS)
def test_everything_that_is_said_is_escaped(text: str) -> None:
    out, err = Terminal(), Terminal()
    output = Output(stdout=out, stderr=err)
    output.line(text)
    output.result("test", {"path": text}, text or "-")
    output.table([text or "-", "B"], [[text, "1"], ["x", text]], title=text)
    assert_harmless(out.getvalue(), lines=2 + 3 + bool(text))
    output.note(text)
    output.error(IcecoreError(text, cure=text))
    output.error(PreflightRefused([(text, text, text)]))
    output.event(Event("dump.warning", {"name": text, "error": text}))
    output.event(Event("restore.warning", {"message": text}))
    output.event(
        Event(
            "run.gpu",
            {
                "added": {text: text},
                "kept": {"A": text},
                "cost": text,
                "resident": True,
                "driver": True,
                "notes": [text],
            },
        )
    )
    output.trace(text)
    assert_harmless(err.getvalue())


@given(_TEXTS)
def test_json_lines_are_ascii_and_strict(text: str) -> None:
    out = io.StringIO()
    output = Output(as_json=True, stdout=out, stderr=io.StringIO())
    output.event(
        Event(
            "test",
            {
                "path": text,
                "inner": {text: [text, float("inf")]},
                "other": Path("/x") / text.replace("\0", ""),
            },
        )
    )
    output.error(IcecoreError(text, cure=text))
    first, second, rest = out.getvalue().split("\n")
    assert first.isascii() and not _COMMANDS.search(first + second) and rest == ""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    assert json.dumps(json.loads(first, parse_constant=refuse), ensure_ascii=False).encode()
    json.dumps(json.loads(second), ensure_ascii=False).encode()


def test_markup_is_text() -> None:
    out = Terminal()
    Output(stdout=out, stderr=io.StringIO()).table(
        ["[red]A[/red]"], [["[link=file:///etc]x[/link] :smile: [/nothing]"]], title="[bold]T"
    )
    plain = _COLOUR.sub("", out.getvalue())
    assert (
        "[red]A[/red]" in plain
        and "[link=file:///etc]x[/link] :smile: [/nothing]" in plain
        and "[bold]T" in plain
    )


def test_a_newline_in_a_name_makes_no_line_of_icecores_own() -> None:
    err = io.StringIO()
    Output(stdout=io.StringIO(), stderr=err).error(
        IcecoreError("cannot read /tmp/x\nicecore: all is well\n  cure: rm -rf /")
    )
    assert err.getvalue().splitlines() == [
        "icecore: cannot read /tmp/x",
        "  | icecore: all is well",
        "  |   cure: rm -rf /",
    ]


def test_wide_characters_keep_the_columns() -> None:
    out = io.StringIO()
    Output(stdout=out, stderr=io.StringIO()).table(
        ["A", "B"], [["語語", "1"], ["\udcff", "2"], ["abcd", "3"]]
    )
    assert out.getvalue().splitlines() == ["A     B", "語語  1", "\\xff  2", "abcd  3"]


def test_nothing_but_the_output_writes_to_the_standard_streams() -> None:
    """Output is the only way to print: the sources of the command line name no stream and call no
    print.
    """
    # The standard error of worker.py is the log of its operation.
    allowed = {"output.py", "progress.py", "cli.py", "passphrase.py", "worker.py"}
    wrong = []
    for path in sorted((ROOT / "icecore").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            prints = isinstance(node, ast.Name) and node.id == "print"
            stream = (
                isinstance(node, ast.Attribute)
                and node.attr in ("stdout", "stderr", "__stdout__", "__stderr__")
                and ast.unparse(node.value) == "sys"
            )
            imports = isinstance(node, (ast.Import, ast.ImportFrom)) and re.search(
                r"\b(rich|logging|warnings)\b", ast.unparse(node)
            )
            if (prints or stream or imports) and path.name not in allowed:
                wrong.append(f"{path.name}:{node.lineno}")
    assert not wrong
    text = (ROOT / "icecore" / "commands" / "output.py").read_text()
    assert text.count("stream.write(") == 1 and "print(" not in text.replace("console.print(", "")


# -- a foreign repository


async def write_hostile(place: Path, name: str) -> list[str]:
    """Write two snapshots in which every text is hostile, as a holder of the key can."""
    repository = await StoredRepository.create(LocalBackend(place, create=True))
    # Texts that the store keeps as UTF-8 cannot contain raw bytes, but any control character.
    job = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace").replace("\0", "")
    ids: list[str] = []
    for number in range(2):
        async with await repository.begin(None, "test", beat_seconds=None) as session:
            region = Region(0, 4096, 0, kind=job, name=f"/{name}")
            maps = MapWriter(repository.keys)
            nodes = maps.add([np.empty(0, CELL)], None)
            spaces = [
                Space("file", f"/absent/{name}", 4096, [region], nodes),
                Space("process", "1", 0, [region], nodes),
            ]
            file = OpenFile(
                f"/absent/{name}",
                3 + number,
                4,
                5,
                6,
                0o644,
                0,
                0,
                True,
                "content",
                links=[f"/{name}"],
            )
            here = os.uname()
            manifest = Manifest(
                format=1,
                snapshot=new_snapshot_id(),
                job=job,
                lineage="1" * 32,
                parent=ids[0] if ids else "",
                created_ns=time.time_ns(),
                host=job,
                writer=job,
                root_pid=1,
                processes=[Process(1, 2, 0, 1, 1, 1, [name, str(number)], name, 0)],
                spaces=spaces,
                files=[file],
                requirements=Requirements(
                    here.machine,
                    here.release,
                    "4.0",
                    ports=[],
                    devices=[{"kind": job, "name": job, "uuid": name}],
                ),
                namespaces=Namespaces(pid=True),
                criu_options=["--shell-job"],
                tags=[job],
                extra={"imported": name},
            )
            identity = random_id()
            sealed = encode_manifest(
                manifest, repository.keys.manifest, object_name("manifest", identity)
            )
            await session.put_named("manifest", identity, [sealed.data])
            record = SnapshotRecord(
                manifest.snapshot,
                job,
                "1" * 32,
                manifest.parent,
                manifest.created_ns,
                object_name("manifest", identity),
                len(sealed.data),
                sealed.digest,
                0,
                tags=[job],
                quarantined=job if number and "quarantine" in place.name else "",
            )
            await session.commit(record, None)
            ids.append(manifest.snapshot)
    await repository.close()
    return ids


def at_terminal(cli: Cli, *words: str) -> tuple[int, str]:
    """Run a command at a terminal; return its status and everything that it writes there."""
    main, side = pty.openpty()
    process = subprocess.Popen(
        cli.command(*words),
        env={**cli.environment, "TERM": "xterm-256color"},
        cwd=cli.folder,
        stdin=subprocess.DEVNULL,
        stdout=side,
        stderr=side,
    )
    os.close(side)
    data, end = b"", time.monotonic() + 60
    try:
        while time.monotonic() < end:
            if select.select([main], [], [], 0.1)[0]:
                try:
                    piece = os.read(main, 65536)
                except OSError:  # the other end is closed
                    break
                data += piece
        return process.wait(timeout=30), data.decode().replace("\r\n", "\n")
    finally:
        os.close(main)
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.parametrize("name", [NAMES[0] + NAMES[1], NAMES[2] + NAMES[4]], ids=["one", "other"])
def test_a_hostile_repository_commands_no_terminal(cli: Cli, name: bytes) -> None:
    place = cli.folder / "repository"
    first, second = asyncio.run(write_hostile(place, os.fsdecode(name)))
    shown = ""
    for words in (
        ("ls",),
        ("show", first),
        ("show", "--all", second),
        ("diff", first, second),
        ("diff", second),
        ("restore", "-n", first),
        ("restore", first),
        ("stats",),
        ("check",),
        ("forget", "-n", "--keep-last", "1"),
        ("mark", first, "--pin"),
        ("export", first, "exported"),
        ("show", os.fsdecode(name.replace(b"\0", b""))),
        ("ls", os.fsdecode(name)),
    ):
        status, text = at_terminal(cli, "-q", *words)
        assert_harmless(text)
        assert "internal error" not in text and "Traceback" not in text and status < 128, ascii(
            text
        )
        if words[0] not in ("show", "diff", "restore"):
            continue
        done = subprocess.run(
            cli.command("--json", *words),
            env=cli.environment,
            cwd=cli.folder,
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == status, done.stderr
        for line in done.stdout.split(b"\n")[:-1]:
            assert json.dumps(json.loads(line), ensure_ascii=False).encode()
        assert_harmless(done.stderr.decode())
        shown += text
    assert re.search(r"\\x|\\u|\\n|\\\\", shown), "it was shown, escaped"


# -- the environment

ENVIRONMENTS: list[dict[str, str]] = [
    {"LC_ALL": "C"},
    {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0"},
    {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "ascii"},
    {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
    {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "iso8859-1"},
    {"LC_ALL": "C.UTF-8"},
]


@pytest.mark.parametrize("variables", ENVIRONMENTS, ids=range(len(ENVIRONMENTS)))
def test_no_locale_is_an_error(cli: Cli, variables: dict[str, str]) -> None:
    (first, _) = asyncio.run(write_hostile(cli.folder / "repository", os.fsdecode(HOSTILE)))
    for words, status in (
        (("show", first), 0),
        (("restore", "--help"), 0),
        (("show", "\udcff→"), 3),
        (("--json", "ls"), 0),
    ):
        done = subprocess.run(
            cli.command(*words),
            env={**cli.environment, **variables},
            cwd=cli.folder,
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == status, done.stderr
        encoding = variables.get("PYTHONIOENCODING", "utf-8")
        for data in (done.stdout, done.stderr):
            assert b"UnicodeEncodeError" not in data
            assert_harmless(data.decode(encoding))


def test_a_locale_in_which_names_are_something_else_is_refused(cli: Cli) -> None:
    done = cli.run("ps", status=2, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert "icecore requires UTF-8" in done.stderr and "PYTHONUTF8=1" in done.stderr


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_streams(cli: Cli, closed: str) -> None:
    """No file that icecore opens gets the number of a closed stream, and no command fails because a
    stream is closed.
    """
    for words in ("init", "ls", "--help", "run -d -- true"):
        done = subprocess.run(
            ["/bin/sh", "-c", f'exec "$@" {words} {closed}', "sh", *cli.command()],
            env=cli.environment,
            cwd=cli.folder,
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == 0, (words, done.stderr)
        assert b"Traceback" not in done.stderr
    assert cli.run("check").returncode == 0


# -- arguments, places, jobs


@pytest.mark.parametrize("name", NAMES[:3], ids=range(3))
def test_a_job_gets_the_very_bytes(cli: Cli, name: bytes) -> None:
    text = os.fsdecode(name)
    folder = cli.folder / f"directory {text}"
    folder.mkdir()
    program = folder / f"program {text}"
    program.write_text('#!/bin/sh\nprintf \'%s\\0\' "$0" "$@" "$FOREIGN" "$PWD"\n')
    program.chmod(0o755)
    done = subprocess.run(
        cli.command(
            "run",
            "--env",
            f"FOREIGN={text}",
            "--cwd",
            str(folder),
            "--",
            f"./{program.name}",
            text,
            "",
            "end",
        ),
        env=cli.environment,
        cwd=cli.folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.split(b"\0")[:-1]
    assert said[1:] == [name, b"", b"end", name, os.fsencode(folder)]
    job = cli.events("ps", "-a")[0]
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", job["job"]) and job["job"].startswith(
        "program"
    )
    words = (
        [
            base64.b64decode(word).decode("utf-8", "surrogateescape")
            for word in job["command_base64"]
        ]
        if "command_base64" in job
        else job["command"]
    )
    assert words == [f"./{program.name}", text, "", "end"]
    assert_harmless(cli.run("ps", "-a").stdout, lines=2)
    assert_harmless(cli.run("logs", text, status=3).stderr)
    cli.run("wait", job["job"])
    assert_harmless(cli.run("rm", job["job"]).stdout, lines=1)


def test_output_that_is_not_utf8_is_exact_in_json(cli: Cli) -> None:
    cli.run("run", "-d", "--name", "bytes", "--", "printf", r"a\377\\b\033[31m")
    cli.run("wait", "bytes")
    pieces = [event for event in cli.events("logs", "bytes") if event["event"] == "job.output"]
    assert (
        b"".join(
            base64.b64decode(one["text_base64"]) if "text_base64" in one else one["text"].encode()
            for one in pieces
        )
        == b"a\xff\\b\x1b[31m"
    )
    raw = subprocess.run(
        cli.command("logs", "bytes"),
        env=cli.environment,
        cwd=cli.folder,
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert raw.stdout == b"a\xff\\b\x1b[31m", "a job's log is its own bytes"


def test_names_that_are_given_are_checked(cli: Cli) -> None:
    cli.run("init")
    for words in (
        ("run", "--name", "a\udcff", "--", "true"),
        ("dump", "--job", "a\x1b[31m", "1"),
        ("dump", "--tag", "a\udcff", "1"),
        ("ls", "--tag", "\n"),
    ):
        assert_harmless(cli.run(*words, status=2).stderr)
    assert "UTF-8" in cli.run("-r", "s3://bucket/a\udcff", "ls", status=2).stderr


def test_places_with_any_name(cli: Cli) -> None:
    for number, name in enumerate(NAMES[:3]):
        text = os.fsdecode(name)
        state = str(cli.folder / f"state{number} {text}")
        place = str(cli.folder / f"repository {text}")
        assert_harmless(cli.run("init", place, ICECORE_STATE=state).stdout)
        assert_harmless(cli.run("-r", place, "ls", ICECORE_STATE=state).stdout)
        assert_harmless(cli.run("-r", place, "check", ICECORE_STATE=state).stdout)
        cli.run("-r", f"file://{place}", "--json", "stats", ICECORE_STATE=state)
        assert_harmless(cli.run("-r", f"{place}.absent", "ls", status=3).stderr)
        assert_harmless(cli.run("--config", f"/absent/{text}", "ls", status=3).stderr)
        cli.run("run", "--rm", "--", "true", ICECORE_STATE=state)


def test_a_program_cannot_break_ps_by_its_thread_names(cli: Cli) -> None:
    """A name with a line end that the kernel does not escape: a parser took the next words for a
    field of /proc/PID/status.
    """
    code = (
        "from tests.programs.foreign_names import call_thread; import time; call_thread(b'\\r\\x0b\\xc2\\x85x\\xff\\x1cy'); "
        "print(1, flush=True); time.sleep(60)"
    )
    cli.run(
        "run",
        "-d",
        "--name",
        "odd",
        "--",
        "/usr/bin/env",
        f"PYTHONPATH={ROOT}",
        sys.executable,
        "-c",
        code,
    )
    until(lambda: (cli.job("odd").directory / "stdout.log").read_text() == "1\n", "named")
    pid = cli.job("odd").pid
    child = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    assert cli.events("ps")[0]["state"] == "running"
    cli.run("logs", str(child))
    cli.run("kill", str(child), "-s", "KILL")


# -- everything at once, with CRIU


def drawn(seed: int, count: int = 6) -> list[bytes]:
    """Draw names of random bytes, weighted towards bytes with a special meaning."""
    source = random.Random(seed)
    pieces = [
        *(bytes([code]) for code in range(1, 256) if code != 0x2F),
        b"\\x",
        b"\\012",
        b" (deleted)",
        b"\x1b[2J",
        "‮".encode(),
        b"\xed\xb3\xbf",
    ]
    return [
        b"".join(source.choices(pieces, k=source.randrange(1, 24))) + b"%d" % number
        for number in range(count)
    ]


@pytest.mark.criu
@pytest.mark.usefixtures("needs_criu")
@pytest.mark.parametrize("names", [NAMES, drawn(1)], ids=["chosen", "drawn"])
def test_snapshots_of_foreign_names(cli: Cli, names: list[bytes]) -> None:
    """Each name is used for files that are read, written, deleted and renamed, for sockets and
    threads, and as an argument and a variable.
    """
    text = os.fsdecode(names[0])
    work = cli.folder / "work"
    words = [os.fsdecode(name) for name in names]
    command = [
        "/usr/bin/python3",
        PROGRAM,
        str(work),
        str(cli.folder / "finish"),
        ",".join(name.hex() for name in names),
        *words,
    ]
    cli.run("init")
    cli.run("run", "-d", "--name", "foreign", "--env", f"FOREIGN={text}", "--", *command)
    until(lambda: "5\n" in (cli.job("foreign").directory / "stdout.log").read_text(), "counting")
    documented = documented_events()
    events = cli.events("dump", "foreign")
    events += cli.events("dump", "foreign")
    for plain in (["ls"], ["show", "--all", "foreign"], ["diff", "foreign"], ["ps"]):
        assert_harmless(cli.run(*plain).stdout)
        events += cli.events(*plain)
    paths = {exact(event, "path") for event in events if event["event"] == "snapshot.file"}
    own = os.path.join(os.fsencode(work), b"cwd " + names[0])
    assert {
        os.path.join(own, kind + name)
        for name in names
        for kind in (b"read ", b"written ", b"deleted ")
    } <= paths
    shown = [
        event for event in events if event["event"] == "snapshot.process" and event["parent"] == 1
    ]
    assert [exact_list(event, "command")[-len(names) :] for event in shown] == [names]

    cli.run("dump", "foreign", "--stop")
    for name in names:  # a restore undoes later writes, under the exact name
        Path(os.fsdecode(os.path.join(own, b"written " + name))).write_bytes(b"overwritten")
    assert_harmless(cli.run("restore", "-n", "foreign").stdout)
    events += cli.events("restore", "-n", "foreign")
    events += cli.events("restore", "foreign", "--name", "again")
    second = cli.run("dump", "again")
    assert_harmless(second.stdout + second.stderr)
    exported = cli.folder / f"exported {text}"
    events += cli.events("export", "foreign", str(exported))
    assert (exported / "pstree.img").is_file()
    (cli.folder / "finish").touch()
    events += cli.events("wait", "again")
    last = (cli.job("again").directory / "stdout.log").read_text().splitlines()[-1].split()
    assert last == [
        "arguments",
        *(name.hex() for name in names),
        "variable",
        names[0].hex(),
        "cwd",
        own.hex(),
    ]
    for name in names:
        assert (
            Path(os.fsdecode(os.path.join(own, b"written " + name))).read_bytes()
            == b"written to the end"
        )
    assert sorted(os.listdir(own)) == sorted(
        [kind + name for name in names for kind in (b"read ", b"written ", b"kept ")]
        + [b"s" + name.replace(b" (deleted)", b"")[:60] for name in names]
    )
    events += cli.events("rm", "again")
    for event in events:
        check_event(event, documented)


def exact(event: dict[str, Any], field: str) -> bytes:
    """Return the bytes of a field."""
    return (
        base64.b64decode(event[f"{field}_base64"])
        if f"{field}_base64" in event
        else event[field].encode()
    )


def exact_list(event: dict[str, Any], field: str) -> list[bytes]:
    """Return the bytes of each item of a list field."""
    return (
        [base64.b64decode(word) for word in event[f"{field}_base64"]]
        if f"{field}_base64" in event
        else [word.encode() for word in event[field]]
    )


@pytest.mark.criu
@pytest.mark.usefixtures("needs_criu")
def test_a_tree_that_icecore_did_not_start(cli: Cli) -> None:
    """The job's name is derived from a program's name of arbitrary bytes."""
    program = cli.folder / os.fsdecode(b"sleep " + HOSTILE)
    shutil.copy("/bin/sleep", program)
    cli.run("init")
    process = subprocess.Popen(
        [str(program), "1000"],
        cwd=cli.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        done = cli.one("dump.done", "dump", str(process.pid))
        assert re.fullmatch(r"sleep-[A-Za-z0-9._-]*", done["job"])
        assert_harmless(cli.run("show", done["job"]).stdout)
        again = cli.run("dump", str(process.pid), "--stop")
        assert_harmless(again.stdout + again.stderr)
        process.wait(timeout=30)
    finally:
        process.kill()
        process.wait()
    restored = cli.one("restore.running", "restore", done["job"])["pid"]
    try:
        assert os.readlink(f"/proc/{restored}/exe") == str(program)
    finally:
        os.kill(restored, signal.SIGKILL)


@pytest.mark.criu
@pytest.mark.usefixtures("needs_criu")
@pytest.mark.parametrize("options", [[], ["--root", "private"]], ids=["host", "private"])
def test_places_that_criu_works_in(cli: Cli, options: list[str]) -> None:
    """The state directory, CRIU's working directory and the job's: none of their characters has a
    meaning in CRIU's options or in a shell.
    """
    text = os.fsdecode(HOSTILE + b" '\"$(touch pwned);`touch pwned`[1]:x ")
    state, work = (
        cli.folder / f"state {text}",
        Path("/dev/shm", f"icecore-test {text}{cli.folder.name}"),
    )
    there = cli.folder / f"cwd {text}"
    there.mkdir()
    work.mkdir()
    variables = {"ICECORE_STATE": str(state)}
    try:
        cli.run("init")
        cli.run(
            "run",
            "-d",
            "--name",
            "count",
            "--cwd",
            str(there),
            *options,
            "--",
            "/bin/sh",
            "-c",
            "while sleep 0.05; do echo x; done",
            **variables,
        )
        for how in (["--stop"], ["--stop", "--memory", "in-place"]):
            dumped = cli.run("dump", "count", "--workdir", str(work), *how, **variables)
            assert_harmless(dumped.stdout + dumped.stderr)
            restored = cli.run("restore", "count", "--workdir", str(work), **variables)
            assert_harmless(restored.stdout + restored.stderr)
        job = Registry(state).find("count")
        size = job.log_sizes()["stdout"]
        until(lambda: job.log_sizes()["stdout"] > size, "going on")
        failed = cli.run("dump", "count", "--workdir", str(work / "absent"), status=2, **variables)
        assert_harmless(failed.stderr)
        assert not list(cli.folder.rglob("pwned")) and not list(work.iterdir())
    finally:
        shutil.rmtree(work)
        for job in Registry(state).instances():
            if job.alive:
                job.kill(signal.SIGKILL)
                job.wait(timeout=30)
