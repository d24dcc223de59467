"""Numbers as people read them; pure. What reads them back is in `icecore.config`."""

from __future__ import annotations

import time


def size(count: float) -> str:
    """Bytes with a binary unit: ``512 B``, ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 100 else f"{count:.1f} {unit}"


def seconds(value: float) -> str:
    """A duration: ``12.3 ms``, ``4.56 s``, ``3 min 20 s``."""
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
    """A time in this machine's zone: ``2026-01-31 12:00:05``."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_seconds))


def percent(part: float, whole: float) -> str:
    """``12.3 %``, or a dash of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "–"
