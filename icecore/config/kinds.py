"""Types of settings: what values each has, and how they are read from TOML and from text."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec
from msgspec.structs import replace

from icecore.text import harmless

T = TypeVar("T")

_SIZES = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4} | {
    f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)
}
_SIZES |= {f"{letter}b": _SIZES[letter] for letter in "kmgt"}
_DAY = 86400.0
_TIMES = {
    "": 1.0,
    "ms": 0.001,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": _DAY,
    "w": 7 * _DAY,
    "mo": 30 * _DAY,
    "y": 365 * _DAY,
}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")
_NUMBERS = re.compile(rf"(?:{_NUMBER.pattern})+")
#: More than the cores of any machine; starting tens of thousands of threads fails.
_MOST_THREADS = 1024
#: Of the cores, for work in the background: with less, changed memory would wait in staging for days.
LEAST_CPU_SHARE = 0.01
_WORDS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


class Kind(msgspec.Struct, Generic[T], frozen=True):
    """The type of a setting.

    Attributes:
        expects: A description of valid values, for messages.
        read: Converts a TOML value; raises ValueError or TypeError.
        parse: Converts text from the environment or the command line; raises ValueError.
        short: The placeholder for a value in usage lines.
        words: All valid values, if the type is an enumeration.
    """

    expects: str
    read: Callable[[Any], T]
    parse: Callable[[str], T]
    short: str = "TEXT"
    words: tuple[str, ...] = ()

    def __call__(self, text: str) -> T:
        """Parse the text; raise the error that argparse reports."""
        try:
            return self.parse(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not {self.expects}") from None


def _quantity(text: str, units: Mapping[str, float]) -> float:
    match = _NUMBER.fullmatch(text)
    if match is None or match[2].lower() not in units:
        raise ValueError(text)
    return float(match[1]) * units[match[2].lower()]


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``2 GiB``, ``500MB`` or ``4096``; binary units have an i.

    Raises:
        ValueError: The text is not a size.
    """
    return int(_quantity(text, _SIZES))


def parse_seconds(text: str) -> float:
    """Return the seconds of a duration such as ``30``, ``250ms``, ``5min``, ``36h``, ``2w 3d`` or
    ``1y6mo`` (a month has 30 days, a year 365).

    Raises:
        ValueError: The text is not a duration.
    """
    if not _NUMBERS.fullmatch(text):
        raise ValueError(text)
    return sum(_quantity(part[0], _TIMES) for part in _NUMBER.finditer(text))


def _refuse(value: Any) -> Any:
    raise ValueError(value)


def _number(
    parse: Callable[[str], T], made: Callable[[Any], T], *wanted: type
) -> Callable[[Any], T]:
    def read(value: Any) -> T:
        if isinstance(value, str):
            return parse(value)
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise TypeError(value)
        number: Any = value
        return made(number) if 0 <= number < 2**63 else _refuse(value)

    return read


def _count(text: str | int) -> int:
    value = int(text)
    return value if 0 <= value < 2**31 else _refuse(value)


def _threads(text: str | int) -> int:
    value = _count(text)
    return value if value <= _MOST_THREADS else _refuse(value)


def _kept(text: str) -> int:
    return -1 if text == "all" else _count(text)


def _share(value: str | float) -> float:
    text = str(value).strip()
    share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    return share if 0 < share <= 1 else _refuse(value)


def check_cpu_share(share: float) -> float:
    """Return a share of the cores for work in the background, which is 0 (auto) or at least
    `LEAST_CPU_SHARE`.

    Raises:
        ValueError: It is neither.
    """
    if share == 0 or LEAST_CPU_SHARE <= share <= 1:
        return share
    raise ValueError(
        f"background_cpu is {share}; it must be from {LEAST_CPU_SHARE} to 1, or 0 (auto)"
    )


def _share_or_auto(value: str | float) -> float:
    if value in ("auto", 0) or str(value).strip() in ("0", "0.0"):
        return 0.0
    return check_cpu_share(_share(value))


def _plain(text: str) -> str:
    return text if "\0" not in text else _refuse(text)


def _label(text: str) -> str:
    return text if text.strip() and harmless(text) == text else _refuse(text)


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise TypeError(value)
    return tuple(_plain(one) for one in value)


SIZE: Kind[int] = Kind(
    "a size such as '2 GiB' or a number of bytes", _number(parse_size, int, int), parse_size, "SIZE"
)
SECONDS: Kind[float] = Kind(
    "a duration such as '30 s' or a number of seconds",
    _number(parse_seconds, float, int, float),
    parse_seconds,
    "DURATION",
)
COUNT: Kind[int] = Kind("a whole number, 0 or more", _number(_refuse, _count, int), _count, "N")
THREADS: Kind[int] = Kind(
    f"a whole number from 0 to {_MOST_THREADS}", _number(_refuse, _threads, int), _threads, "N"
)
TEXT: Kind[str] = Kind(
    "a text", lambda value: _plain(value) if isinstance(value, str) else _refuse(value), _plain
)
DIRECTORY: Kind[str] = replace(TEXT, short="DIR")
FILE: Kind[str] = replace(TEXT, short="FILE")
COMMAND: Kind[str] = replace(TEXT, short="COMMAND")
URL: Kind[str] = replace(TEXT, short="URL")
PLACE: Kind[str] = replace(TEXT, short="PLACE")
GROUP: Kind[str] = replace(TEXT, short="GROUP")
ADDRESS: Kind[str] = replace(TEXT, short="HOST:PORT")
TAG_KIND: Kind[str] = Kind(
    "a tag: a non-empty text without control characters",
    lambda value: _label(value) if isinstance(value, str) else _refuse(value),
    _label,
    "TAG",
)
KEEP: Kind[int] = Kind(
    "a whole number, 0 or more, or 'all'", _number(_kept, _count, int), _kept, "N"
)
SHARE: Kind[float] = Kind(
    "a share such as '1%' or 0.01", _number(_share, float, int, float), _share, "SHARE"
)
SHARE_OR_AUTO: Kind[float] = Kind(
    "a share from 1% to 100%, or 'auto'",
    _number(_share_or_auto, _share_or_auto, float, int),
    _share_or_auto,
    "SHARE|auto",
)
SWITCH: Kind[bool] = Kind(
    "true or false",
    lambda value: value if isinstance(value, bool) else _refuse(value),
    lambda text: _WORDS[text.lower()] if text.lower() in _WORDS else _refuse(text),
)


PLACES: Kind[tuple[str, ...]] = Kind(
    "a list of texts", _texts, lambda text: tuple(text.split()), "PLACE …"
)


def choice(*words: str) -> Kind[Any]:
    """Return the type whose values are ``words``."""

    def parse(text: Any) -> str:
        return text if isinstance(text, str) and text in words else _refuse(text)

    return Kind("one of " + ", ".join(f'"{word}"' for word in words), parse, parse, words=words)
