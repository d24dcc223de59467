"""Text from jobs and repositories: how to store and show names that are not UTF-8.

No two byte strings ever become the same text. In memory, a name from the kernel is a str with
surrogate escapes (PEP 383, `os.fsdecode`), which preserves the exact bytes. Such a str can be
neither printed nor stored nor put into JSON. Convert it with:

- `stored` and `loaded` for objects of the repository (docs/reference/format.md);
- `jsonable` for ``--json`` (docs/reference/events.md);
- `printable` for one value that people read; reversible;
- `harmless` for a whole line that people read and that may contain foreign parts.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from icecore.errors import UsageError

_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPES = re.compile(r"\\(?:\\|x([89a-f][0-9a-f]))")
#: Marks a stored text as escaped. No path, argument, variable or thread name can contain it.
_MARK = "\0"
#: Characters without a width that str.isprintable counts as printable (Default_Ignorable_Code_Point
#: in the Unicode Character Database).
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
_SHORT: Mapping[str, str] = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]")


def is_utf8(text: str) -> bool:
    """Return whether the text can be encoded as UTF-8: whether it contains no surrogate escapes."""
    return _SURROGATE.search(text) is None


# -- for people


def printable(text: str) -> str:
    """Return one value, such as a path or an argument, escaped for terminals, tables and logs.

    Escapes, with a backslash as in C and Python, the backslash, control characters, bytes that are
    not UTF-8, and every character without a glyph of its own (formatting and bidirectional
    controls, blanks other than the space, private and unassigned code points). Different values
    stay different.
    """
    return harmless(text.replace("\\", "\\\\"))


def harmless(text: str) -> str:
    """Return a line with the same characters escaped, except the backslash, so that the output of
    `printable` stays unchanged.
    """
    if text.isprintable() and _INVISIBLE.search(text) is None:
        return text
    return "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character.isprintable() and _INVISIBLE.match(character) is None:
        return character
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    if character in _SHORT:
        return _SHORT[character]
    # \x80 to \xff stand for bytes only; characters above 0x7f are written as \u.
    return (
        f"\\x{code:02x}"
        if code < 0x80
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )


def printable_command(words: Iterable[str]) -> str:
    """Return a command line, escaped for people."""
    return " ".join(map(printable, words))


def job_name(text: str) -> str:
    """Return a job name derived from a program's name, reduced to the characters that job names may
    contain. It may be empty.
    """
    return _NO_NAME.sub("-", text).lstrip("._-")[:56]


def require_label(text: str) -> None:
    """Require a valid label of a snapshot or of a passphrase.

    Raises:
        UsageError: The label is empty or contains characters that cannot be shown.
    """
    if not text.strip() or harmless(text) != text:
        raise UsageError(
            f"{printable(text)!r} is not a tag",
            cure="use a non-empty text without control characters",
        )


def host_name() -> str:
    """Return this machine's name, escaped, because it may contain any bytes."""
    import socket

    return printable(socket.gethostname())


# -- for the repository


def stored(text: str) -> str:
    """Return the text in a form that UTF-8 can encode: the text itself, or a NUL and the escaped
    text if it is not UTF-8 or begins with a NUL.

    Raises:
        ValueError: The text contains a surrogate that represents no byte.
    """
    if not text.startswith(_MARK) and is_utf8(text):
        return text
    text.encode("utf-8", "surrogateescape")  # raises UnicodeEncodeError, a ValueError
    return _MARK + _escaped(text)


def loaded(text: str) -> str:
    """Return the text from which `stored` made this one.

    Raises:
        ValueError: `stored` never returns this text.
    """
    if not text.startswith(_MARK):
        return text
    body = text[1:]
    found = _ESCAPES.sub(lambda match: chr(0xDC00 + int(match[1], 16)) if match[1] else "\\", body)
    # Each text has one stored form only, so two objects cannot name the same file differently.
    if (
        found.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape") != found
        or stored(found) != text
    ):
        raise ValueError(f"the escaped text {printable(body)!r} is not in its only form")
    return found


def _escaped(text: str) -> str:
    return _SURROGATE.sub(_byte, text.replace("\\", "\\\\"))


def _byte(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


# -- for JSON


def jsonable(value: object) -> Any:
    """Return a value that strict JSON can represent.

    A text that is not UTF-8 is escaped (as by `stored`, without the NUL); the same object then has
    a field ``NAME_base64`` with the exact bytes, or, for a list of texts, a list of the same
    length. A number that is not finite becomes null.
    """
    if isinstance(value, str):
        return value if is_utf8(value) else _escaped(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, Mapping):
        found: dict[str, Any] = {}
        for key, inner in value.items():
            name = jsonable(str(key))
            found[name] = jsonable(inner)
            raw = _base64(inner)
            if raw is not None:
                found[f"{name}_base64"] = raw
        return found
    if isinstance(value, (list, tuple)):
        return [jsonable(inner) for inner in value]
    return jsonable(str(value))


def _base64(value: object) -> Any:
    """Return the bytes of a text that is not UTF-8, or of all texts of a list that contains one, in
    base64; None if there is none.
    """
    if isinstance(value, str):
        return None if is_utf8(value) else _encoded(value)
    if isinstance(value, (list, tuple)) and any(_base64(inner) is not None for inner in value):
        return [_encoded(inner) if isinstance(inner, str) else _base64(inner) for inner in value]
    return None


def _encoded(text: str) -> str:
    return base64.b64encode(
        text.encode("utf-8", "surrogateescape" if _is_bytes(text) else "surrogatepass")
    ).decode()


def _is_bytes(text: str) -> bool:
    return all("\udc80" <= match[0] <= "\udcff" for match in _SURROGATE.finditer(text))
