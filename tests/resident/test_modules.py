"""The preload's modules: which uses which, read from what their sources include."""

from __future__ import annotations

import re
from graphlib import TopologicalSorter
from pathlib import Path

import icecore.host.resident

FOLDER = Path(icecore.host.resident.__file__).parent


def test_no_circle_joins_two_modules() -> None:
    used = {}
    for source in [*FOLDER.glob("*.c"), *FOLDER.glob("*.h")]:
        included = re.findall(r'^#include "(\w+)\.h"', source.read_text(), re.MULTILINE)
        used.setdefault(source.stem, set()).update(set(included) - {source.stem})
    assert used["agent"] > {"window", "fork"} and "agent" not in used["allocate"]
    order = list(TopologicalSorter(used).static_order())
    assert order.index("table") < order.index("holding") < order.index("window")


def test_a_module_declares_only_names_with_its_prefix() -> None:
    for header in FOLDER.glob("*.h"):
        if header.stem in ("hooks", "packet", "protocol", "driver", "start"):
            continue
        prefix = header.stem.removesuffix("s")
        for line in header.read_text().splitlines():
            declared = re.match(r"(?!static|typedef|#|\s|/)[\w *]*?\b(\w+)\(.*\);", line)
            assert not declared or declared[1].startswith(prefix), f"{header.name}: {line}"
