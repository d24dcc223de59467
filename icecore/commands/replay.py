"""Print the records of an operation as the command would print them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from icecore.commands.context import Context, Interrupted
from icecore.commands.output import Output
from icecore.errors import IcecoreError
from icecore.events import Event
from icecore.remote.connection import Service, at, error_of

_NAMES = {1: "HUP", 2: "INT", 10: "USR1", 15: "TERM"}
Record = dict[str, Any]


def replay(record: Record, output: Output) -> None:
    """Print one record."""
    match record["do"]:
        case "event":
            output.event(_event(record["event"]))
        case "result":
            if output.as_json:
                output.event(_event(record["event"]))
            elif record["text"]:
                output.line(record["text"])
        case "line":
            output.line(record["text"])
        case "note":
            output.note(record["text"])
        case "table":
            output.table(
                record["columns"], record["rows"], title=record["title"], right=record["right"]
            )


def _event(fields: Record) -> Event:
    known = dict(fields)
    name, moment = known.pop("event"), known.pop("at")
    return Event(name, known, moment)


def follow(
    service: Service,
    operation: Record,
    context: Context,
    *,
    told: Callable[[Record], bool] | None = None,
) -> Record:
    """Print the records of an operation until it ends; Ctrl-C cancels it.

    Args:
        told: Gets each record first; False: it shall not be printed.

    Returns:
        The operation.

    Raises:
        IcecoreError: What the command itself would raise.
    """
    last: IcecoreError | None = None
    try:
        for record in service.events(operation["id"]):
            if record["do"] == "end":
                return _checked(record["operation"], last, context)
            if record["do"] == "error":
                if last is not None:
                    context.output.error(last)  # the command raises the last one only
                last = _error(record["error"])
            elif told is None or told(record):
                replay(record, context.output)
    except Interrupted as interrupted:
        cancel(service, operation["id"], interrupted.number)
        for record in service.events(operation["id"]):
            if record["do"] == "end":
                break
        raise
    raise AssertionError("the events of an operation end with it")


def cancel(service: Service, id: str, number: int) -> None:
    """Send a signal to an operation."""
    service.post(at("operations", id, "cancel"), {"signal": _NAMES.get(number, "INT")})


def _checked(operation: Record, last: IcecoreError | None, context: Context) -> Record:
    """Return an operation; raise its error.

    Args:
        last: The last error that was recorded, maybe by a supervisor that has been replaced.
    """
    if operation["error"] and operation["exit_status"]:
        raise last or error_of(operation["error"])
    if last is not None:
        context.output.error(last)
    return operation


def _error(fields: Record) -> IcecoreError:
    return error_of(
        {
            "error_class": fields["class"],
            "detail": fields["message"],
            "cure": fields["cure"],
            "reasons": fields["reasons"],
        }
    )
