"""Sessions of browsers: cookies, one-time links, and the tokens that protect forms.

A browser authenticates only with a cookie, never with its connection, which other pages in the
browser and other users of its machine could use. The cookie is SameSite=Strict, and each form has a
token that other sites cannot read (OWASP, Cross-Site Request Forgery Prevention).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec
from aiohttp import web

from icecore.errors import Denied, NotFound
from icecore.host.kernel import procfs
from icecore.service.api.app import of_socket, of_token
from icecore.service.api.caller import Caller
from icecore.service.api.connections import guard_of
from icecore.service.api.problems import Unauthenticated
from icecore.service.api.service import Service
from icecore.service.api.tokens import Token

COOKIE = "icecore_page"
PATH = "/page"
FORM_TOKEN = "form_token"
LINK_SECONDS = 60.0
SESSION_SECONDS = 12 * 3600.0
_MOST = 1000


class Holder(msgspec.Struct, frozen=True):
    """Whose session it is. What the holder may do is looked up for each request.

    Attributes:
        process: Pid and start time of the process at the other end of the unix socket, which is
            ``icecore page``; None: the session is used on TCP. Whoever listens on the port after it,
            and gets the cookie from the browser, is another process.
        token: Digest of the token that signed in; empty: the process itself is the caller.
    """

    process: tuple[int, int] | None
    token: str = ""


class Session(msgspec.Struct, frozen=True):
    """A browser that has signed in.

    Attributes:
        form_token: Contained in each form of the page.
        until: When it ends, on the clock of `Sessions`.
    """

    holder: Holder
    form_token: str
    until: float


class Sessions:
    """The sessions of a service; they end with it.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._links: OrderedDict[str, tuple[Holder, float]] = OrderedDict()

    def link(self, holder: Holder) -> str:
        """Return the secret of a link that signs a holder in, once, within `LINK_SECONDS`."""
        secret = secrets.token_urlsafe(32)
        self._links[_digest(secret)] = (holder, self._clock() + LINK_SECONDS)
        _bound(self._links)
        return secret

    def enter(self, secret: str, by: Holder) -> str | None:
        """Return the cookie of a new session for the secret of a link; None: it is not valid.

        Args:
            by: Who uses it: the process that asked for it, or somebody on TCP with that of a token.
        """
        holder, until = self._links.pop(_digest(secret), (None, 0.0))
        if holder is None or holder.process != by.process or self._clock() > until:
            return None
        return self.begin(holder)

    def begin(self, holder: Holder) -> str:
        """Return the cookie of a new session."""
        secret = secrets.token_urlsafe(32)
        until = self._clock() + SESSION_SECONDS
        self._sessions[_digest(secret)] = Session(holder, secrets.token_urlsafe(32), until)
        _bound(self._sessions)
        return secret

    def find(self, secret: str) -> Session | None:
        """Return the session of a cookie."""
        session = self._sessions.get(_digest(secret)) if secret else None
        return session if session is not None and self._clock() <= session.until else None

    def end(self, secret: str) -> None:
        """Sign out."""
        self._sessions.pop(_digest(secret), None)


SESSIONS: web.AppKey[Sessions] = web.AppKey("sessions", Sessions)


def session_of(request: web.Request) -> Session | None:
    """Return the session of a request."""
    return request.app[SESSIONS].find(request.cookies.get(COOKIE, ""))


def holder_of(request: web.Request, token: Token | None) -> Holder:
    """Return who would have a session that begins with a request.

    Args:
        token: That it signs in with.

    Raises:
        Unauthenticated: The process at the other end has ended.
    """
    guard = guard_of(request)
    digest = token.digest if token is not None else ""
    if guard is None or guard.peer is None:
        return Holder(None, digest)
    try:
        return Holder((guard.peer.pid, procfs.start_time(guard.peer.pid)), digest)
    except NotFound as error:
        raise Unauthenticated("the calling process has ended") from error


def caller_of(service: Service, request: web.Request) -> Caller:
    """Return the caller of a session, with the rights that it has now.

    Raises:
        Unauthenticated: There is no session; its token was removed or has expired; or the request
            comes from another process than the session.
        Denied: The user may no longer use the service.
    """
    session = session_of(request)
    guard = guard_of(request)
    if session is None or session.holder.process != holder_of(request, None).process:
        raise _unknown()
    if not session.holder.token:
        if guard is None or guard.peer is None:
            raise _unknown()
        return of_socket(service, guard.peer, guard.refusal)
    now = time.time()
    for token in service.tokens.all():
        if token.digest == session.holder.token and (not token.expires or token.expires > now):
            return of_token(token, request)
    raise _unknown()


def _unknown() -> Unauthenticated:
    return Unauthenticated("sign in first", cure="get a link: icecore page")


def require_own_form(request: web.Request, given: str) -> None:
    """Require that a form comes from this page.

    Raises:
        Denied: It may come from another site.
    """
    site = request.headers.get("Sec-Fetch-Site", "same-origin")
    session = session_of(request)
    known = session.form_token if session is not None else ""
    if site not in ("same-origin", "none") or not known or not _same(given, known):
        raise Denied("this form does not come from this page", cure="load the page again")


def set_cookie(response: web.StreamResponse, request: web.Request, secret: str) -> None:
    """Give the browser the cookie of a session."""
    response.set_cookie(
        COOKIE,
        secret,
        path=PATH,
        httponly=True,
        samesite="Strict",
        secure=request.secure,
        max_age=int(SESSION_SECONDS),
    )


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def _bound(
    table: OrderedDict[str, object]
    | OrderedDict[str, Session]
    | OrderedDict[str, tuple[Holder, float]],
) -> None:
    while len(table) > _MOST:
        table.popitem(last=False)
