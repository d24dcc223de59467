"""What the command line sends to the service is what the service knows."""

from __future__ import annotations

import msgspec
import pytest

from icecore.cli import build_parser
from icecore.commands import remote
from icecore.service.api import requests


@pytest.mark.parametrize(
    ("words", "names", "body"),
    [
        (["dump", "job"], remote._DUMP, requests.DumpRequest),
        (["restore", "job"], remote._RESTORE, requests.RestoreRequest),
    ],
)
def test_options_have_the_same_names(
    words: list[str], names: tuple[str, ...], body: type[msgspec.Struct]
) -> None:
    parsed = build_parser().parse_args(words)
    assert remote._given(parsed, names) == {}
    assert set(names) <= {field.name for field in msgspec.structs.fields(body)}
