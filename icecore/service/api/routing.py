"""What a route is, and the argument of its handler; `route_table` lists the routes.

Every route has a role and a scope. `icecore.service.api.app` checks both before the handler runs, and
passes it the subject of the request, which the caller may access.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from aiohttp import web

from icecore.errors import IcecoreError
from icecore.service.api.caller import Caller, Role

if TYPE_CHECKING:
    from icecore.service.api.service import Service

#: The subject of a request:
#:
#: - ``none``: nothing that belongs to anybody
#: - ``own``: a list, limited to what the caller may see
#: - ``job``, ``snapshot``, ``operation``: one, named in the path; the subject is that
#: - ``repository``: the caller's repository; the subject is its location
#: - ``node``: the whole node, for callers that are not restricted to some jobs
Scope = Literal["none", "own", "job", "snapshot", "operation", "repository", "node"]
Method = Literal["GET", "POST", "DELETE"]
#: A streamed answer without data sends a sign of life after this time, and every streamed answer
#: ends within this time after its caller loses access.
BEAT_SECONDS = 15.0


class Call(msgspec.Struct):
    """One request.

    Attributes:
        caller: The caller; may be None for public routes.
        subject: As the route's scope defines.
        query, body: As the route declares them; None if it declares none.
        raw: The body as it was sent.
        audit: Further fields for the audit log.
        identify: Returns the caller as it is now, or raises; None: nobody was identified.
    """

    service: Service
    request: web.Request
    caller: Caller | None
    subject: Any = None
    query: Any = None
    body: Any = None
    raw: bytes = b""
    audit: dict[str, Any] | None = None
    identify: Callable[[], Caller] | None = None
    _looked: float = msgspec.field(default_factory=time.monotonic)
    _revoked: bool = False

    @property
    def gone(self) -> bool:
        """Whether the client has hung up. aiohttp lets a handler that writes nothing run on."""
        transport = self.request.transport
        return transport is None or transport.is_closing()

    def revoked(self) -> bool:
        """Return whether the caller has lost its access since the request began: its token has
        expired or was removed, or its session is over. This looks at most every `BEAT_SECONDS`, so
        streaming handlers can call it often.
        """
        now = time.monotonic()
        if not self._revoked and now - self._looked >= BEAT_SECONDS:
            self._looked = now
            self._revoked = not self._is_same()
        return self._revoked

    def _is_same(self) -> bool:
        try:
            return self.identify is None or self.identify().rights == self.known.rights
        except IcecoreError:
            return False

    @property
    def known(self) -> Caller:
        """The caller of a route that is not public."""
        assert self.caller is not None
        return self.caller


Handler = Callable[[Call], Awaitable[Any]]


class Route(msgspec.Struct, frozen=True):
    """One route.

    Attributes:
        path: With ``{job}``, ``{snapshot}`` or ``{operation}``, according to the scope.
        role: The least role of its callers.
        what: What it does, in one sentence.
        handle: Returns a struct or a response.
        answer: The type of the answer; a media type if it is not JSON.
        body, query: The types of the request's body and parameters.
        status: The status of success.
        starts: It starts an operation: it takes an Idempotency-Key and answers with 202.
        identify: Returns the caller, if requests are not authenticated like those of the API.
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
        """Whether it changes anything, so that the audit log must record it."""
        return self.method != "GET"


TABLE: web.AppKey[Iterable[Route]] = web.AppKey("table", Iterable)
