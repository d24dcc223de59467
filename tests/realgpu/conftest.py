"""A lab for each test; the table of what was measured is written to $ICECORE_GPU_REPORT, if that is
set.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .jobs import Lab, lack


def needs(gpus: int = 1, *modules: str) -> None:
    """Skip, with the reason, where the test cannot run."""
    why = lack(gpus, *modules)
    if why:
        pytest.skip(why)


@pytest.fixture
def lab(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Lab]:
    needs()
    made = Lab(tmp_path)
    yield made
    made.close()
    report = os.environ.get("ICECORE_GPU_REPORT")
    if report:
        with open(report, "a", encoding="utf-8") as file:
            for row in made.rows:
                print(json.dumps({"test": request.node.name, **row}), file=file)
