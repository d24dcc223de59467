"""What a route declares, and what its handler gets.

A route cannot be made without a role and a scope. `icecore.service.api.app` checks both before the
handler runs, and hands it the subject of the request, which the caller may touch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from aiohttp import web

from icecore.service.api.caller import Caller, Role

if TYPE_CHECKING:
    from icecore.service.api.core import Service

#: What a request is about:
#:
#: - ``none``: nothing that belongs to anybody
#: - ``own``: a list, of which the caller sees its part
#: - ``job``, ``snapshot``, ``operation``: one, named in the path; the subject is that
#: - ``repository``: the caller's repository; the subject is its location
#: - ``node``: the whole node, for callers that nothing restricts to some jobs
Scope = Literal["none", "own", "job", "snapshot", "operation", "repository", "node"]
Method = Literal["GET", "POST", "DELETE"]


@dataclass
class Call:
    """One request.

    Attributes:
        caller: Who calls; for public routes maybe None.
        subject: What the route's scope says.
        query, body: As the route declares them; None where it declares none.
        raw: The body as it was sent.
        audit: What the audit log shall say besides.
    """

    service: Service
    request: web.Request
    caller: Caller | None
    subject: Any = None
    query: Any = None
    body: Any = None
    raw: bytes = b""
    audit: dict[str, Any] | None = None

    @property
    def known(self) -> Caller:
        """The caller of a route that is not public."""
        assert self.caller is not None
        return self.caller


Handler = Callable[[Call], Awaitable[Any]]


@dataclass(frozen=True)
class Route:
    """One route.

    Attributes:
        path: With ``{job}``, ``{snapshot}`` or ``{operation}``, as the scope says.
        role: The least role of its callers.
        what: What it does, in one sentence.
        handle: Returns the answer: a struct, or a response.
        answer: The type of the answer; a media type where it is no JSON.
        body, query: The types of the request's body and parameters.
        status: The status of success.
        starts: It starts an operation: it takes an Idempotency-Key and answers with 202.
        identify: Says who calls, where a request shows it otherwise than those of the API.
    """

    method: Method
    path: str
    role: Role
    scope: Scope
    what: str
    handle: Handler
    answer: Any
    body: Any = None
    query: Any = None
    status: int = 200
    starts: bool = False
    identify: Callable[[Service, web.Request], Caller] | None = None

    @property
    def name(self) -> str:
        """A name of the route, for the document and the audit log."""
        return self.handle.__name__

    @property
    def changes(self) -> bool:
        """Whether it changes anything, so that the audit log must know of it."""
        return self.method != "GET"


TABLE: web.AppKey[Iterable[Route]] = web.AppKey("table", Iterable)
