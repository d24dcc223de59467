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
from dataclasses import dataclass, replace

from aiohttp import web

from icecore.errors import Denied
from icecore.service.api.caller import Caller
from icecore.service.api.core import Service
from icecore.service.api.problems import Unauthenticated
from icecore.service.api.tokens import Token

COOKIE = "icecore_page"
PATH = "/page"
FORM_TOKEN = "form_token"
LINK_SECONDS = 60.0
SESSION_SECONDS = 12 * 3600.0
_MOST = 1000


@dataclass(frozen=True)
class Session:
    """A browser that has signed in.

    Attributes:
        caller: The user or token that signed in; without a process, which may end before the session.
        form_token: Contained in each form of the page.
        until: When it ends, on the clock of `Sessions`.
        token: The digest of the token that it signed in with; empty: a link.
    """

    caller: Caller
    form_token: str
    until: float
    token: str = ""


class Sessions:
    """The sessions of a service; they end with it.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._links: OrderedDict[str, tuple[Caller, float]] = OrderedDict()

    def link(self, caller: Caller) -> str:
        """Return the secret of a link that signs a caller in, once, within `LINK_SECONDS`."""
        secret = secrets.token_urlsafe(32)
        self._links[_digest(secret)] = (caller, self._clock() + LINK_SECONDS)
        _bound(self._links)
        return secret

    def enter(self, secret: str) -> str | None:
        """Return the cookie of a new session for the secret of a link; None: it is not valid."""
        caller, until = self._links.pop(_digest(secret), (None, 0.0))
        if caller is None or self._clock() > until:
            return None
        return self.begin(caller)

    def begin(self, caller: Caller, token: Token | None = None) -> str:
        """Return the cookie of a new session.

        Args:
            token: It signed in with this token, and the session ends with it.
        """
        secret = secrets.token_urlsafe(32)
        session = Session(
            caller=replace(caller, peer=None),
            form_token=secrets.token_urlsafe(32),
            until=self._clock() + SESSION_SECONDS,
            token=token.digest if token is not None else "",
        )
        self._sessions[_digest(secret)] = session
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


def caller_of(service: Service, request: web.Request) -> Caller:
    """Return the caller of a session.

    Raises:
        Unauthenticated: There is no session, or its token was removed or has expired.
    """
    session = session_of(request)
    if session is None or not _is_valid(service, session):
        raise Unauthenticated("sign in first", cure="get a link: icecore page")
    return replace(session.caller, where=request.remote or session.caller.where)


def _is_valid(service: Service, session: Session) -> bool:
    if not session.token:
        return True
    now = time.time()
    return any(
        one.digest == session.token and (not one.expires or one.expires > now)
        for one in service.tokens.all()
    )


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
    | OrderedDict[str, tuple[Caller, float]],
) -> None:
    while len(table) > _MOST:
        table.popitem(last=False)
