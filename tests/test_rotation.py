"""The matrices whose cases take turns: all are named rightly, and no case is forgotten. Long tests
begin first, and none is lost.
"""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests import rotation


@pytest.mark.parametrize("test", [*rotation.PARTS, *rotation.MOMENTS, *rotation.LONG])
def test_it_exists(test: str) -> None:
    path, _, name = test.partition("::")
    assert name in _functions(path)


@pytest.mark.parametrize("test", rotation.MOMENTS)
def test_it_asks_which_moments_are_due(test: str) -> None:
    path, _, name = test.partition("::")
    assert "due" in _functions(path)[name]


@cache
def _functions(path: str) -> dict[str, set[str]]:
    """Return the arguments of each function of a file."""
    body = ast.parse((rotation.ROOT / path).read_text()).body
    return {
        node.name: {argument.arg for argument in node.args.args}
        for node in body
        if isinstance(node, ast.FunctionDef)
    }


def test_every_case_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    test = "tests/store/test_crash.py::test_crash_at_every_call"
    cases, parts = range(50), rotation.PARTS[test]
    runs = []
    for commit in range(100, 100 + parts):
        monkeypatch.setattr(rotation, "turn", lambda commit=commit: commit)
        runs.append({case for case in cases if rotation.is_due(test, case, 50)})
        assert all(rotation.is_due("tests/other.py::test_other", case, 50) for case in cases)
        for few in range(1, parts):
            assert sum(rotation.is_due(test, case, few) for case in range(few)) == 1
    assert set.union(*runs) == set(cases) and sum(map(len, runs)) == len(cases)
    assert {len(run) for run in runs} <= {50 // parts, 50 // parts + 1}, "parts are equal"


@pytest.mark.parametrize("test", rotation.MOMENTS)
def test_every_moment_has_its_turn_in_every_case(
    test: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases, moments = range(rotation.PARTS.get(test, 1)), range(12)
    runs = []
    for commit in range(100, 100 + len(cases) * rotation.MOMENTS[test]):
        monkeypatch.setattr(rotation, "turn", lambda commit=commit: commit)
        runs.append(
            {
                (case, moment)
                for case in cases
                for moment in moments
                if rotation.is_due(test, case, len(cases))
                and rotation.is_moment_due(test, moment, len(moments))
            }
        )
    assert set.union(*runs) == {(case, moment) for case in cases for moment in moments}
    assert sum(map(len, runs)) == len(cases) * len(moments) and all(runs)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [0, 1, 5, 50, 51])
def test_long_tests_begin_first(workers: int, count: int) -> None:
    tests = [f"tests/other.py::test_{number}" for number in range(count)]
    tests[count // 2 : count // 2] = rotation.LONG
    tests[2:2] = rotation.LONG[:1]  # two cases
    order = rotation.ordered(tests, workers)
    assert sorted(order) == list(range(len(tests)))
    rest = [at for at in order if tests[at] not in rotation.LONG]
    assert rest == sorted(rest), "the others keep their order"
    if len(tests) >= 2 * len(rotation.LONG):
        begin = 0
        for number in range(workers):
            size = (len(tests) - begin) // (workers - number)
            piece = [tests[at] in rotation.LONG for at in order[begin : begin + size]]
            assert piece == sorted(piece, reverse=True) and piece[0], "in the piece of each worker"
            begin += size
