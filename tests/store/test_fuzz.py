"""Every parser with very many inputs, in a process with bounded memory: no crash, no unbounded
allocation, always a named error.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_MUTATE = "import sys; sys.path.append({root!r})\nfrom tests.store import fuzzing; fuzzing.run({inputs}, {seed})"
_ATHERIS = """
import sys; sys.path.append({root!r})
import atheris
with atheris.instrument_imports(include=["icecore.store", "icecore.restorer.workingset"]):
    from tests.store import fuzzing
from pathlib import Path
fuzzer = fuzzing.Fuzzer()
for number, data in enumerate(fuzzer.corpus()):
    Path({folder!r}, str(number)).write_bytes(data)
atheris.Setup(
    [sys.argv[0], "-runs={inputs}", "-seed={seed}", "-max_len=2048", "-malloc_limit_mb=1100", "-print_final_stats=1", {folder!r}], fuzzer.one
)
atheris.Fuzz()
"""


def run(script: str, seconds: float, folder: Path) -> str:
    """Run a script in a separate process; return its output."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=seconds,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    ("inputs", "seed"),
    [
        (50_000, 1),
        (50_000, 4),
        pytest.param(1_000_000, 2, marks=[pytest.mark.torture, pytest.mark.timeout(3600)]),
    ],
)
def test_mutated_objects(inputs: int, seed: int, tmp_path: Path) -> None:
    said = run(
        _MUTATE.format(root=str(ROOT), inputs=inputs, seed=seed), 110 * inputs / 100_000, tmp_path
    )
    print(said)
    assert f"{inputs} inputs" in said


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    find_spec("atheris") is None, reason="atheris is not installed ('make torture' tries)"
)
def test_inputs_that_follow_the_code(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    said = run(
        _ATHERIS.format(root=str(ROOT), folder=str(folder), inputs=1_000_000, seed=3),
        3500,
        tmp_path,
    )
    print(said[-1500:])
    assert "stat::number_of_executed_units: 1000000" in said
