"""Reads the tables of docs/, which the tests compare with the code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
COMMON = {"event", "at"}
PHASE = {"state", "seconds", "bytes", "gb_per_s", "error", "total"}


@dataclass(frozen=True)
class Documented:
    """An event in docs/reference/events.md: fields that are always present, and optional ones."""

    always: frozenset[str]
    sometimes: frozenset[str]

    @property
    def all(self) -> frozenset[str]:
        """Every field."""
        return self.always | self.sometimes


def rows(document: str, section: str) -> list[list[str]]:
    """Return the cells of the first table in a section."""
    text = (ROOT / "docs" / document).read_text()
    part = re.split(r"^## ", text.split(f"\n## {section}\n")[1], flags=re.MULTILINE)[0]
    lines = dropwhile(lambda line: not line.startswith("| "), part.splitlines())
    table = list(takewhile(lambda line: line.startswith("| "), lines))
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table[2:]]


def documented_events() -> dict[str, Documented]:
    """Return every documented event by name."""
    found = {}
    for section, column in (("Phases", 1), ("While it works", 1), ("Results", 2)):
        for cells in rows("reference/events.md", section):
            fields = re.findall(r"`(\w+\??)`", cells[column])
            always = {name for name in fields if not name.endswith("?")}
            sometimes = {name[:-1] for name in fields if name.endswith("?")}
            if section == "Phases":
                always, sometimes = always | {"state"}, sometimes | PHASE - {"state"}
            found[cells[0].strip("`")] = Documented(frozenset(always), frozenset(sometimes))
    return found


def check_event(event: dict[str, object], documented: dict[str, Documented]) -> None:
    """Assert that an event is what docs/reference/events.md says."""
    name = str(event["event"])
    assert name in documented, f"{name} is not in docs/reference/events.md"
    fields = event.keys() - COMMON
    fields = {key.removesuffix("_base64") for key in fields}  # beside a field that is not UTF-8
    assert fields <= documented[name].all, (
        f"{name} has undocumented fields {fields - documented[name].all}"
    )
    assert documented[name].always <= fields, f"{name} lacks {documented[name].always - fields}"
    assert isinstance(event["at"], float)
