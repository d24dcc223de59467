"""Numbers as text for people. `icecore.config.kinds` parses sizes and durations."""

from __future__ import annotations

import time


def size(count: float) -> str:
    """Return bytes with a binary unit: ``512 B``, ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 100 else f"{count:.1f} {unit}"


def exact_size(count: int) -> str:
    """Return bytes in the largest binary unit that gives a whole number: ``2 GiB``, ``1500 B``."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count % 1024 or not count:
            break
        count, unit = count // 1024, larger
    return f"{count} {unit}"


def exact_seconds(value: float) -> str:
    """Return seconds in the largest unit that gives a whole number: ``30 s``, ``5 min``, ``7 d``."""
    if value != int(value):
        return f"{value * 1e3:g} ms" if value < 1 else f"{value:g} s"
    count, unit = int(value), "s"
    for step, larger in ((60, "min"), (60, "h"), (24, "d")):
        if count % step or not count:
            break
        count, unit = count // step, larger
    return f"{count} {unit}"


def seconds(value: float) -> str:
    """Return a duration: ``12.3 ms``, ``4.56 s``, ``3 min 20 s``."""
    if value < 1:
        return f"{value * 1e3:.1f} ms"
    if value < 60:
        return f"{value:.2f} s"
    if value < 3600:
        return f"{value // 60:.0f} min {value % 60:.0f} s"
    if value < 86400:
        return f"{value // 3600:.0f} h {value % 3600 // 60:.0f} min"
    return f"{value // 86400:.0f} d {value % 86400 // 3600:.0f} h"


def moment(unix_seconds: float) -> str:
    """Return a time in this machine's time zone: ``2026-01-31 12:00:05``."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_seconds))


def percent(part: float, whole: float) -> str:
    """Return a share: ``12.3 %``, or a dash if the whole is zero."""
    return f"{100 * part / whole:.1f} %" if whole else "–"
