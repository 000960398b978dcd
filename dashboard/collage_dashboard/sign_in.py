"""Sign-in: people show a token, or come back from the server's provider; the session stays in this process.

The browser holds a random id and nothing else. A dashboard that only this machine reaches does without.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock
from typing import Any, Final
from urllib.parse import quote, urlsplit

from cachetools import TTLCache
from flask import Flask, Response, g, redirect, render_template_string, request, session

from collage_monitor import wire
from collage_monitor.client import Client
from collage_monitor.errors import CollageError, NotAuthorised, ServerRefusal
from collage_monitor.recent_failures import RecentFailures

__all__ = [
    "ClientOfToken",
    "MOST_FAILURES",
    "SignInsUnderWay",
    "UNDER_WAY_SECONDS",
    "forget_token",
    "install_sign_in",
    "token_of_session",
]

ClientOfToken = Callable[[str], Client]
"""Makes the client that speaks with a token."""

_LIFETIME: Final = timedelta(hours=12)
MOST_FAILURES: Final = 10
_FAILURE_SECONDS: Final = 60.0
_MOST_SESSIONS: Final = 10_000
_MOST_ADDRESSES: Final = 20_000
_OPEN: Final = frozenset(
    {"/sign-in", "/sign-in/provider", "/sign-in/callback", "/sign-out", "/healthz", "/assets/favicon.svg"}
)
_COOKIE: Final = "collage_sign_in"
UNDER_WAY_SECONDS: Final = 600
"""How long somebody may take at the provider."""
_TOO_MANY: Final = f"{MOST_FAILURES} failures from this address; try again in a minute."
_PAGE: Final = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>Sign in · Collage Monitor</title>
<link rel="icon" type="image/svg+xml" href="/assets/favicon.svg">
<style>:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;margin:0;display:grid;place-items:center;min-height:100vh}
main{width:min(24rem,calc(100vw - 3rem));padding:1.5rem 0}h1{font-size:1.5rem;margin:0 0 1rem}
input,button,.button{font:inherit;width:100%;box-sizing:border-box;padding:.6rem .8rem}
input,button,.button{border-radius:8px;border:1px solid #868e96}
button,.button{margin-top:1rem;background:#1864ab;color:#fff;border-color:#1864ab;font-weight:600}
.button{display:block;text-align:center;text-decoration:none;margin:0 0 1.5rem}
summary{cursor:pointer;margin-bottom:.75rem}
p{font-size:.9rem}[role=alert]{border-left:4px solid #d9480f;padding-left:.8rem}</style></head><body><main>
<h1>Collage Monitor</h1>{% if problem %}<p role="alert">{{ problem }}</p>{% endif %}
{% if provider %}<a class="button" href="/sign-in/provider?next={{ next | urlencode }}">Sign in with
{{ provider }}</a><details{% if by_token %} open{% endif %}><summary>Sign in with a token</summary>{% endif %}
<form method="post" action="/sign-in"><label for="token">Token</label>
<input id="token" name="token" type="password" autocomplete="current-password" required{% if not provider %}
autofocus{% endif %}>
<input type="hidden" name="next" value="{{ next }}"><button>Sign in</button></form>
<p>A token of role read, operate or admin. <code>collage-monitor token create</code> makes one; the server's own is
in the file <code>token</code> of its data folder.</p>{% if provider %}</details>{% endif %}</main></body></html>"""
_AGAIN: Final = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Collage Monitor</title>
<meta http-equiv="refresh" content="0; url={{ next }}"></head><body><a href="{{ next }}">Go on</a></body></html>"""


def token_of_session() -> str:
    """The token with which the person behind this request signed in."""
    return str(session["token"])


def forget_token() -> None:
    """End the session of this request, and answer it as if it had none: the server does not know its token."""
    session.clear()
    g.token_is_forgotten = True


@dataclass(frozen=True)
class _Begun:
    """A pending sign-in at the provider: the secrets that its answer must match, and the page to return to."""

    request: wire.SignInRequest
    wanted: str


class SignInsUnderWay:
    """Sign-ins that are under way at the provider, by the cookie of the browser that began; each is taken once."""

    def __init__(self, timer: Callable[[], float] = time.monotonic) -> None:
        self._begun: TTLCache[str, _Begun] = TTLCache(_MOST_SESSIONS, UNDER_WAY_SECONDS, timer)
        self._lock = Lock()

    def keep(self, request: wire.SignInRequest, wanted: str) -> str:
        """The cookie for the browser that begins."""
        cookie = secrets.token_urlsafe(32)
        with self._lock:
            self._begun[cookie] = _Begun(request, wanted)
        return cookie

    def take(self, cookie: str | None) -> _Begun | None:
        """The sign-in that this browser began; None the second time, and when it took too long."""
        with self._lock:
            found: _Begun | None = self._begun.pop(cookie or "", None)
        return found


def install_sign_in(server: Flask, client_of: ClientOfToken, own_client: Callable[[], Client]) -> None:
    """Require sign-in before anything is shown; a person then sees what their token, or their groups, may see.

    Failures are limited by address. The cookie is http-only and SameSite=Strict, Secure where the request came by
    HTTPS, and the session ends after LIFETIME, or when the server no longer knows the token.

    own_client: speaks with the dashboard's own token, to sign people in through the server's provider.
    """
    _install_sessions(server)
    failures = RecentFailures(_FAILURE_SECONDS, _MOST_ADDRESSES)
    form_page = _FormPage(own_client)
    _install_provider(server, form_page, failures)

    @server.before_request
    def require() -> Any:
        return None if request.path in _OPEN or "token" in session else _sign_in_first()

    @server.after_request
    def require_anew(answer: Response) -> Any:
        # A page made for a session that has just ended could not load its scripts.
        return _sign_in_first() if "token_is_forgotten" in g else answer

    @server.get("/sign-in")
    def form() -> Any:
        wanted = _own_path(request.args.get("next"))
        if request.headers.get("Sec-Fetch-Site") == "cross-site":
            # A link from elsewhere brings no SameSite=Strict cookie; asked for from this page, it does.
            return _answer(_led_on(wanted))
        return redirect(wanted, 303) if "token" in session else form_page(wanted)

    @server.post("/sign-in")
    def sign_in() -> Any:
        wanted, address = _own_path(request.form.get("next")), request.remote_addr
        if failures.count(address) >= MOST_FAILURES:
            return form_page(wanted, _TOO_MANY, 429)
        token = request.form.get("token", "").strip()
        problem, status = _refused(token, client_of)
        if problem is not None:
            if status == 403:
                failures.add(address)
            return form_page(wanted, problem, status, by_token=True)
        _begin_session(server, token=token)
        return redirect(wanted, 303)

    @server.post("/sign-out")
    def sign_out() -> Any:
        token = session.get("token") if "at_provider" in session else None
        session.clear()
        elsewhere = None if token is None else _signed_out(client_of, token)
        # A page instead of a redirect, because browsers stop forms that lead to another site.
        return redirect("/sign-in", 303) if elsewhere is None else _answer(_led_on(elsewhere))


def _begin_session(server: Flask, **holds: Any) -> None:
    session.clear()
    session.update(holds)
    # The id from before the sign-in may be known to somebody else.
    server.session_interface.regenerate(session)  # type: ignore[attr-defined]


def _signed_out(client_of: ClientOfToken, token: str) -> str | None:
    """End the session on the server, too; where the provider's own is ended."""
    try:
        with client_of(token) as client:
            return client.send("POST", "/sign-out", wire.SignedOut).log_out_url
    except CollageError:
        return None  # The session has ended already, or will by itself.


def _install_provider(server: Flask, form_page: _FormPage, failures: RecentFailures) -> None:
    """The way to the server's provider and back.

    The state comes back through the browser's address bar: it counts only together with the cookie of the browser
    that began, and once. That cookie is SameSite=Lax, because the way back begins at another site.
    """
    under_way = SignInsUnderWay()

    @server.get("/sign-in/provider")
    def begin() -> Any:
        wanted = _own_path(request.args.get("next"))
        if request.headers.get("Sec-Fetch-Site") == "cross-site":
            return redirect(f"/sign-in?next={quote(wanted, safe='')}", 303)
        try:
            with form_page.own_client() as client:
                asked = client.send("POST", "/sign-in", wire.SignInRequest)
        except CollageError as error:
            return form_page(wanted, str(error), 503)
        answer = redirect(asked.authorization_url, 303)
        answer.headers["Cache-Control"] = "no-store"
        answer.set_cookie(
            _COOKIE,
            under_way.keep(asked, wanted),
            max_age=UNDER_WAY_SECONDS,
            path="/sign-in",
            secure=request.is_secure,
            httponly=True,
            samesite="Lax",
        )
        return answer

    @server.get("/sign-in/callback")
    def callback() -> Any:
        begun = under_way.take(request.cookies.get(_COOKIE))
        if failures.count(request.remote_addr) >= MOST_FAILURES:
            answer = form_page("/", _TOO_MANY, 429)
        elif begun is None or not secrets.compare_digest(
            request.args.get("state", "").encode(), begun.request.state.encode()
        ):
            answer = form_page(
                "/", "This browser did not start this sign-in, or started it too long ago. Begin again.", 403
            )
        else:
            answer = finish(begun)
        answer.delete_cookie(_COOKIE, path="/sign-in")
        return answer

    def finish(begun: _Begun) -> Response:
        code = request.args.get("code")
        if not code:
            said = request.args.get("error", "no code")[:100]
            return form_page(begun.wanted, f"The provider did not sign you in ({said}).", 403)
        message = wire.SignInFinish(code=code, code_verifier=begun.request.code_verifier, nonce=begun.request.nonce)
        content = wire.encode_message(message)
        try:
            with form_page.own_client() as client:
                created = client.send(
                    "POST", "/sessions", wire.TokenCreated, content=content, content_type=wire.MSGPACK
                )
        except CollageError as error:
            if not isinstance(error, ServerRefusal) or error.status != 422:
                return form_page(begun.wanted, str(error), 503)
            failures.add(request.remote_addr)
            return form_page(begun.wanted, f"{str(error)[:1].upper()}{str(error)[1:]}.", 403)
        _begin_session(server, token=created.secret, at_provider=True)
        # A page instead of a redirect, because one from the provider's site would not carry the new cookie.
        return _answer(_led_on(begun.wanted))


def _install_sessions(server: Flask) -> None:
    # Imported here, because a dashboard for this machine alone needs neither.
    from cachelib import SimpleCache
    from flask_session import Session

    server.config.update(
        SESSION_TYPE="cachelib",
        SESSION_CACHELIB=SimpleCache(threshold=_MOST_SESSIONS),
        SESSION_PERMANENT=False,
        SESSION_REFRESH_EACH_REQUEST=False,
        PERMANENT_SESSION_LIFETIME=_LIFETIME,
        SESSION_COOKIE_NAME="collage_session",
        SESSION_COOKIE_HTTPONLY=True,
        SESSION_COOKIE_SAMESITE="Strict",
    )
    Session(server)

    def came_by_https(app: Flask) -> bool:
        return request.is_secure

    server.session_interface.get_cookie_secure = came_by_https  # type: ignore[method-assign]


def _refused(token: str, client_of: ClientOfToken) -> tuple[str | None, int]:
    """The reason for refusing this token, with the HTTP status."""
    if not token:
        return "Type a token.", 422
    try:
        with client_of(token) as client:
            client.run_table(limit=1)
    except NotAuthorised as error:
        return (
            "This token may not read runs." if error.status == 403 else "The server does not know this token."
        ), 403
    except CollageError as error:
        return str(error), 503
    return None, 200


def _sign_in_first() -> Any:
    """A page leads to the form and back; its other requests are refused."""
    if request.method != "GET" or request.path.startswith(("/_", "/assets/")):
        return Response("sign in first, at /sign-in\n", 401, mimetype="text/plain")
    asked = request.full_path.removesuffix("?")
    return redirect(f"/sign-in?next={quote(asked, safe='')}", 303)


class _FormPage:
    """The sign-in page, with the server's provider if it has one."""

    def __init__(self, own_client: Callable[[], Client]) -> None:
        self.own_client = own_client

    def __call__(
        self, wanted: str, problem: str | None = None, status: int = 200, *, by_token: bool = False
    ) -> Response:
        about = {"next": wanted, "problem": problem, "provider": self._provider(), "by_token": by_token}
        return _answer(render_template_string(_PAGE, **about), status)

    def _provider(self) -> str | None:
        try:
            with self.own_client() as client:
                return client.send("GET", "/sign-in", wire.SignInOffer).provider
        except CollageError:
            return None  # The token's form says what is the matter with the server.


def _led_on(address: str) -> str:
    return render_template_string(_AGAIN, next=address)


def _answer(page: str, status: int = 200) -> Response:
    return Response(page, status, mimetype="text/html", headers={"Cache-Control": "no-store"})


def _own_path(text: str | None) -> str:
    """A path of this dashboard; other addresses become the first page."""
    parts = urlsplit(text or "/")
    plain = text is not None and text.startswith("/") and not text.startswith("//") and text.isprintable()
    return text if text and plain and not (parts.scheme or parts.netloc) and "\\" not in text else "/"
