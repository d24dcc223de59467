"""The names that ``import icecore`` promises."""

from __future__ import annotations

import importlib

import icecore


def test_every_public_name_loads() -> None:
    fresh = importlib.reload(icecore)
    assert set(fresh._HOMES) == set(fresh.__all__)
    for name in fresh.__all__:
        assert fresh.__getattr__(name) is getattr(fresh, name)
