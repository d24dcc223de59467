"""What the command line sends to the service is what the service knows."""

from __future__ import annotations

import msgspec
import pytest

from icecore.cli import build_parser
from icecore.commands import remote
from icecore.service.api import options, requests


@pytest.mark.parametrize(
    ("words", "names", "body"),
    [
        (["dump", "job"], options.DUMP, requests.DumpRequest),
        (["restore", "job"], options.RESTORE, requests.RestoreRequest),
        (["run"], options.RUN, requests.RunRequest),
        (["run"], options.SUPERVISE, requests.Supervise),
    ],
)
def test_options_have_the_same_names(
    words: list[str], names: tuple[str, ...], body: type[msgspec.Struct]
) -> None:
    parsed = build_parser().parse_args(words)
    assert remote._given(parsed, names) == {}
    assert set(names) <= {field.name for field in msgspec.structs.fields(body)}
