"""Templates, headers and files of the page.

The content security policy allows only scripts and styles of this service, and none inline.
Templates escape all values, because names of jobs, labels and messages are untrusted.
"""

from __future__ import annotations

import hashlib
import mimetypes
import re
import shlex
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from aiohttp import web
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from icecore import units
from icecore.errors import NotFound
from icecore.service.api.responses import Response
from icecore.text import harmless

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_FOREVER = "public, max-age=31536000, immutable"
_ZERO_REST = re.compile(r" 0 (s|min|h)$")
_STATIC = re.compile(r"(vendor/)?[a-z0-9.-]+\.(css|js|svg)")


def page(template: str, *, status: int = 200, **values: Any) -> web.Response:
    """Return a page."""
    text = templates().get_template(template).render(**values)
    headers = {**HEADERS, "Cache-Control": "no-store"}
    return Response(text=text, status=status, content_type="text/html", headers=headers)


@cache
def templates() -> Environment:
    """Return the templates; a missing value is an error."""
    made = Environment(
        loader=PackageLoader("icecore.service.page", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., Any]] = {
        "size": units.size,
        "seconds": duration,
        "span": span,
        "moment": units.moment,
        "iso": iso,
        "ago": ago,
        "share": share,
        "ratio": lambda value: f"{value:.2f}",
        "count": lambda value: f"{value:,}".replace(",", "\N{THIN SPACE}"),
        "short": lambda value: value[:12],
        "safe_text": harmless,
        "command": command,
    }
    made.filters |= filters
    made.globals |= {"asset": asset, "now": time.time}
    return made


def command(words: Sequence[str]) -> str:
    """Return the equivalent command line."""
    return shlex.join(["icecore", *words])


def duration(value: float | None) -> str:
    """Return a duration for a table; a dash if unknown."""
    if value is None:
        return "\N{EN DASH}"
    return f"{1e3 * value:.0f} ms" if 0.01 <= value < 0.9995 else units.seconds(value)


def iso(at: float) -> str:
    """Return a time in the format of HTML's ``datetime`` attribute."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def span(value: float | None) -> str:
    """Return a duration in whole seconds or coarser; a dash if unknown."""
    if value is None:
        return "\N{EN DASH}"
    if value < 60:
        return f"{value:.0f} s"
    return _ZERO_REST.sub("", units.seconds(round(value)))


def ago(at: float) -> Markup:
    """Return the age of a time, with the time itself as a tooltip and for assistive technology."""
    text = span(max(0.0, time.time() - at))
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        iso(at), units.moment(at), text
    )


def share(value: float | None) -> str:
    """Return a share in percent."""
    return "\N{EN DASH}" if value is None else f"{100 * value:.2f} %"


# -- files


@cache
def _file(name: str) -> tuple[bytes, str]:
    """Return a file and its version."""
    if not _STATIC.fullmatch(name):
        raise NotFound(f"there is no file {name}")
    path = files("icecore.service.page").joinpath("static", name)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise NotFound(f"there is no file {name}") from error
    return data, hashlib.sha256(data).hexdigest()[:16]


def asset(name: str) -> str:
    """Return the URL of a file, which changes with its content."""
    return f"/page/static/{_file(name)[1]}/{name}"


def static(version: str, name: str) -> web.Response:
    """Return a file.

    Raises:
        NotFound: There is no such file, or its version differs.
    """
    data, known = _file(name)
    if version != known:
        raise NotFound(f"there is no such version of {name}")
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    headers = {**HEADERS, "Cache-Control": _FOREVER}
    return web.Response(body=data, content_type=kind, headers=headers)
