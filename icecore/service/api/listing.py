"""Pagination of lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from icecore.errors import UsageError
from icecore.service.api.requests import ListQuery

T = TypeVar("T")


def paginate(items: Sequence[T], query: ListQuery, key: Callable[[T], str]) -> tuple[list[T], str]:
    """Return one page of a list, and the parameter ``after`` of the next; empty: it is the last.

    Raises:
        UsageError: The item ``after`` is not in the list.
    """
    first = 0
    if query.after:
        keys = [key(item) for item in items]
        if query.after not in keys:
            raise UsageError(
                f"the list has no item {query.after}",
                cure="list from the beginning, without 'after'",
            )
        first = keys.index(query.after) + 1
    shown = list(items[first : first + query.limit])
    more = first + query.limit < len(items)
    return shown, key(shown[-1]) if more and shown else ""
