"""Texts of jobs and repositories on their way to a terminal, a repository or JSON: nothing is lost,
no two texts become one, and no control character passes.
"""

from __future__ import annotations

import base64
import json
import os
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from icecore.errors import UsageError
from icecore.events import Event
from icecore.host.jobs.registry import require_name
from icecore.text import harmless, job_name, jsonable, loaded, printable, require_label, stored

#: Characters that a terminal, a table or the other side of an escape could take for something else.
NASTY = [
    *(chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))),
    *"\\x[]u0nrt /\u200b\u200e\u202e\u2028\u2066\u00ad\ufeff\u00a0\u3164\ufe0f\U000e0041\U000e0100ä語\ue000\u0378",
    *(chr(code) for code in range(0xDC80, 0xDD00)),
]
_BYTES = st.lists(
    st.one_of(st.sampled_from([os.fsencode(one) for one in NASTY]), st.binary(max_size=4))
).map(b"".join)
_TEXTS = _BYTES.map(os.fsdecode)


def shown_safely(text: str) -> bool:
    """Return whether every character has a glyph of its own, or is the space."""
    return all(one == " " or unicodedata.category(one)[0] not in "CZ" for one in text)


def read_back(text: str) -> str:
    """Return the argument from which `printable` made this text."""
    short = {"\\\\": "\\", "\\n": "\n", "\\r": "\r", "\\t": "\t"}

    def one(match: re.Match[str]) -> str:
        word = match[0]
        if word in short:
            return short[word]
        code = int(word[2:], 16)
        return chr(0xDC00 + code) if word[1] == "x" and code >= 0x80 else chr(code)

    return re.sub(r"\\(?:[\\nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})", one, text)


@given(_TEXTS)
def test_what_is_shown_is_safe_and_tells_all(text: str) -> None:
    shown = printable(text)
    assert shown_safely(shown) and read_back(shown) == text
    assert shown.encode().decode() == shown
    assert shown_safely(harmless(text)) and harmless(shown) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain/path é 語.txt", "plain/path é 語.txt"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("a\nb\rc\td", r"a\nb\rc\td"),
        ("\udcff\udc80", r"\xff\x80"),
        ("\x9b31m", r"\u009b31m"),
        ("exe\u202egpj.sh", r"exe\u202egpj.sh"),
        ("\u2066\u2069\u200e\u200f\u2028\u2029", r"\u2066\u2069\u200e\u200f\u2028\u2029"),
        ("a\ufe0fb\U000e0101", r"a\ufe0fb\U000e0101"),
        (r"a\xff", r"a\\xff"),
        ("\x00\x7f", r"\x00\x7f"),
    ],
)
def test_how_it_is_shown(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(_TEXTS)
@example("\0\\xff")
@example("\\xff")
def test_what_is_stored_is_what_was_given(text: str) -> None:
    kept = stored(text)
    assert kept.encode().decode() == kept and loaded(kept) == text
    if "\0" not in text and not re.search("[\ud800-\udfff]", text):
        assert kept == text, "a UTF-8 text is stored as it always was"


@given(_TEXTS)
def test_no_stored_text_hides_another(text: str) -> None:
    """Any stored text that is accepted is the one that `stored` writes for the loaded text."""
    for written in (text, f"\0{text}"):
        try:
            written.encode()
            found = loaded(written)
        except ValueError:
            continue
        assert stored(found) == written


@pytest.mark.parametrize(
    "written",
    [
        "\0plain",
        r"\x41\xff",
        "\0\\xc3\\xa4",
        "\0\\xFF",
        "\0\\",
        "\0\\n\\xff",
        "\0\\xff\\",
        "\0\\u0041\\xff",
        "\0\\x7f\\xff",
    ],
)
def test_a_text_that_nobody_stores_is_refused(written: str) -> None:
    if written.startswith("\0"):
        with pytest.raises(ValueError, match="not in its only form"):
            loaded(written)
    else:
        assert loaded(written) == written, "without the mark nothing is an escape"


def test_what_stands_for_no_byte_is_not_stored() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        stored("\ud800")


_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), _TEXTS, st.just("\ud800")),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(_TEXTS, inner, max_size=4)
    ),
    max_leaves=12,
)


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from (key, *texts(inner))
    elif isinstance(value, Sequence):
        for inner in value:
            yield from texts(inner)


@given(st.dictionaries(_TEXTS, _VALUES, max_size=4))
def test_json_is_strict_and_utf8(fields: dict[str, Any]) -> None:
    line = json.dumps(Event("test", fields).as_json(), allow_nan=False, ensure_ascii=False)
    assert all(text.encode() is not None for text in texts(json.loads(line.encode())))


def exact(fields: Mapping[str, Any], name: str) -> bytes:
    """Return the bytes of an event's field, as docs/reference/events.md defines them."""
    return (
        base64.b64decode(fields[f"{name}_base64"])
        if f"{name}_base64" in fields
        else fields[name].encode()
    )


@given(_BYTES)
def test_json_gives_the_very_bytes(name: bytes) -> None:
    text = os.fsdecode(name)
    event = json.loads(
        json.dumps(
            Event(
                "test", {"path": text, "command": ["run", text], "at_all": {"inner": text}}
            ).as_json()
        )
    )
    assert exact(event, "path") == exact(event["at_all"], "inner") == name
    commands = event.get("command_base64")
    assert (
        [base64.b64decode(word) for word in commands] == [b"run", name]
        if commands
        else event["command"] == ["run", text]
    )


def test_a_text_that_is_utf8_is_itself_in_json() -> None:
    fields = {"path": "/tmp/\x1b[31m ä \\xff", "command": ["a", "\n"]}
    assert jsonable(fields) == fields
    assert jsonable({"a": "x\udcff\\", "b": float("nan"), "c": os}) == {
        "a": "x\\xff\\\\",
        "a_base64": "eP9c",
        "b": None,
        "c": str(os),
    }


@given(_TEXTS)
def test_guessed_names_are_names(text: str) -> None:
    name = job_name(text)
    if name:
        require_name(name)


def test_labels() -> None:
    require_label("épreuve 1")
    for wrong in ("", " ", "a\nb", "\x1b[0m", "a\udcff", "\u202e"):
        with pytest.raises(UsageError, match="not a tag"):
            require_label(wrong)
