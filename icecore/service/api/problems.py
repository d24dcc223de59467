"""Errors as responses (RFC 9457), with icecore's class, exit status and cure."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from icecore import errors
from icecore.errors import IcecoreError, PreflightRefused
from icecore.service.api.models import Error, Reason

CONTENT_TYPE = "application/problem+json"
_PREFIX = "urn:icecore:error:"


class Unauthenticated(errors.Denied):
    """The caller is not authenticated."""


class Conflict(errors.UsageError):
    """The request contradicts an earlier one, or the state of its subject."""


class Busy(errors.ServiceFailed):
    """The caller or the node has too many requests or operations."""

    def __init__(self, message: str, *, cure: str = "", after: float = 1.0) -> None:
        super().__init__(message, cure=cure)
        self.after = after


class Slow(Busy):
    """What the request waits for does not answer in time."""


class TooLarge(errors.UsageError):
    """The body of a request is too large."""


#: The first matching class decides.
_STATUS: tuple[tuple[type[IcecoreError], int], ...] = (
    (Unauthenticated, 401),
    (errors.Denied, 403),
    (errors.NotFound, 404),
    (errors.PreflightRefused, 409),
    (errors.RestoreRefused, 409),
    (errors.JobHeld, 409),
    (errors.SessionFenced, 409),
    (Conflict, 409),
    (TooLarge, 413),
    (errors.UsageError, 400),
    (Slow, 503),
    (Busy, 429),
    (errors.StoreFull, 507),
    (errors.StoreError, 502),
    (errors.ServiceFailed, 503),
)


def status_of(error: IcecoreError) -> int:
    """Return the HTTP status of an error."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def problem(error: IcecoreError) -> Error:
    """Return an error as a problem."""
    reasons = error.reasons if isinstance(error, PreflightRefused) else []
    return _problem(
        status_of(error),
        _public_class(error),
        error.message,
        error.cure,
        error.exit_code,
        [Reason(name=name, message=message, cure=cure) for name, message, cure in reasons],
    )


def problem_of_fields(fields: Mapping[str, Any]) -> Error:
    """Return the fields of an ``error`` event as a problem."""
    name = str(fields.get("class", "IcecoreError"))
    kind = getattr(errors, name, IcecoreError)
    known = isinstance(kind, type) and issubclass(kind, IcecoreError)
    status = next((s for base, s in _STATUS if known and issubclass(kind, base)), 500)
    return _problem(
        status,
        name,
        str(fields.get("message", "")),
        str(fields.get("cure", "")),
        int(fields.get("exit_code", 1)),
        [Reason(**reason) for reason in fields.get("reasons", [])],
    )


def plain(status: int, detail: str) -> Error:
    """Return a problem with only an HTTP status."""
    return Error(type="about:blank", title=HTTPStatus(status).phrase, status=status, detail=detail)


def _problem(
    status: int, name: str, message: str, cure: str, exit_status: int, reasons: list[Reason]
) -> Error:
    return Error(
        type=_PREFIX + name,
        title=HTTPStatus(status).phrase,
        status=status,
        detail=message,
        error_class=name,
        exit_status=exit_status,
        cure=cure,
        reasons=reasons,
    )


def _public_class(error: IcecoreError) -> str:
    """Return the name of the error's class, or of its first base class in `icecore.errors`."""
    return next(kind.__name__ for kind in type(error).__mro__ if hasattr(errors, kind.__name__))
