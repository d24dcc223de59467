"""The matrices whose cases take turns: all are named rightly, and no case is forgotten."""

from __future__ import annotations

import ast

import pytest

from tests import rotation


@pytest.mark.parametrize("test", rotation.PARTS)
def test_it_exists(test: str) -> None:
    path, _, name = test.partition("::")
    tree = ast.parse((rotation.ROOT / path).read_text())
    assert any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body)


def test_every_case_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    test = "tests/store/test_crash.py::test_crash_at_every_call"
    cases = [f"case {number}" for number in range(50)]
    runs = []
    for commit in range(100, 100 + rotation.PARTS[test]):
        monkeypatch.setattr(rotation, "turn", lambda commit=commit: commit)
        runs.append({case for case in cases if rotation.is_due(test, case)})
        assert rotation.is_due("tests/other.py::test_other", "any")
    assert set.union(*runs) == set(cases) and sum(map(len, runs)) == len(cases)
    assert all(runs), "each commit runs some"
