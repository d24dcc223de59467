"""Documents: their shell examples run, their commands parse, and their links lead somewhere.

A block of ``sh`` or ``console`` runs, unless the word ``norun`` follows the language. All blocks of
a document run in one shell, in order. In a ``console`` block the lines that begin with ``$ `` run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from icecore.cli import build_parser, split_command
from tests.cli.conftest import Cli
from tests.cli.documents import ROOT

SECONDS = 240.0
DOCUMENTS = sorted(
    path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")] if path.is_file()
)
EXAMPLES = [
    ROOT / "README.md",
    ROOT / "docs" / "tutorial.md",
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
]
SHELL = ("sh", "console")
_FENCE = re.compile(r"^ *```(.*)\n((?:.*\n)*?) *```$", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")

#: The job of the examples; README calls it serve.py.
JOB = """\
import time

memory = bytearray(8 << 20)
step = 0
while True:
    step += 1
    memory[step * 4096 % len(memory)] = step % 256
    print("step", step, flush=True)
    time.sleep(0.1)
"""
#: What a how-to takes for granted: the repository and the job of the tutorial.
BEFORE = """\
export ICECORE_REPOSITORY=~/snapshots
icecore init
icecore run -d --name count -- python3 count.py
sleep 1
icecore dump -q count
icecore dump -q count
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    language: str
    runs: bool
    text: str

    @property
    def commands(self) -> str:
        """The shell commands, without prompts and output."""
        if self.language == "console":
            lines = [line for line in self.text.splitlines(True) if line.startswith("$ ")]
            return "".join(line.removeprefix("$ ") for line in lines)
        return self.text


def blocks(document: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a document."""
    for about, text in _FENCE.findall(document.read_text()):
        language, *words = about.split() or [""]
        assert set(words) <= {"norun"}, f"{document.name}: unknown word in ```{about}"
        runs = language in SHELL and "norun" not in words
        yield Block(language, runs, textwrap.dedent(text))


def named(document: Path) -> str:
    """Return the path of a document as a test id."""
    return str(document.relative_to(ROOT))


@pytest.mark.criu
@pytest.mark.parametrize("document", EXAMPLES, ids=named)
def test_examples_run(document: Path, cli: Cli, needs_criu: None) -> None:
    script = "".join(block.commands for block in blocks(document) if block.runs)
    if not script:
        pytest.skip("all its examples require a GPU, a bucket or another machine")
    if document.parent.name == "how-to":
        script = BEFORE + script
    for name in ("count.py", "serve.py"):
        (cli.folder / name).write_text(JOB)
    # The README runs commands as users do; the others, which begin with the same ones, run them in
    # forks.
    program, inherited = [sys.executable, "-P", "-m", "icecore.cli"], []
    if document.name != "README.md" and cli.zygote and cli.zygote.fits(cli.environment):
        program, descriptor = cli.zygote.client()
        inherited.append(descriptor)
    programs = cli.folder / "bin"
    programs.mkdir()
    (programs / "icecore").write_text(f'#!/bin/sh\nexec {shlex.join(program)} "$@"\n')
    (programs / "icecore").chmod(0o755)
    (cli.folder / "script").write_text(f"set -euxo pipefail\n{script}")
    environment = {
        **cli.environment,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
    }
    del environment["ICECORE_REPOSITORY"]
    done = subprocess.run(
        ["bash", "script"],
        cwd=cli.folder,
        env=environment,
        pass_fds=inherited,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout


def calls(text: str) -> Iterator[list[str]]:
    """Yield the words of each call of icecore in shell commands."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"\|\||&&|[|;]|\bsudo\b", line):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:  # a quotation that a split or another language has broken
                continue
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words = words[1:]
            if words[:1] == ["icecore"]:
                yield words[1:]


@pytest.mark.parametrize("document", EXAMPLES, ids=named)
def test_every_command_in_an_example_parses(document: Path) -> None:
    for block in blocks(document):
        if block.language in SHELL:
            for words in calls(block.commands):
                own, _ = split_command(words)
                build_parser().parse_args(own)


def headings(document: Path) -> set[str]:
    """Return the anchors of a document's headings."""
    text = _FENCE.sub("", document.read_text())
    found = set()
    for heading in re.findall(r"^#+ +(.*)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.add(re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_links_lead_somewhere(document: Path) -> None:
    wrong = []
    for link in _LINK.findall(_FENCE.sub("", document.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in headings(target)
        ):
            wrong.append(link)
    assert not wrong, f"{named(document)}: {wrong}"


def test_every_document_that_a_source_names_exists() -> None:
    named = set()
    for folder in ("icecore", "tests", "tools", "benchmarks", "configs"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and path != Path(__file__):
                text = path.read_bytes().decode(errors="replace")
                named |= set(re.findall(r"(?<![\w/.])docs/[\w/.-]*\.md\b", text))
    assert len(named) > 3
    assert not {name for name in named if not (ROOT / name).exists()}


def test_documents_were_found() -> None:
    assert len(DOCUMENTS) > 10 and all(path.is_file() for path in EXAMPLES)
    assert sum(block.runs for path in EXAMPLES for block in blocks(path)) > 10
