"""Sign-in: people show a token, the server says whether it is one, and the session stays in this process.

The browser holds a random id and nothing else. A dashboard that only this machine reaches does without.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final
from urllib.parse import quote, urlsplit

from flask import Flask, Response, g, redirect, render_template_string, request, session

from collage_monitor.client import Client
from collage_monitor.errors import CollageError, NotAuthorised
from collage_monitor.recent_failures import RecentFailures

__all__ = ["ClientOfToken", "forget_token", "install_sign_in", "token_of_session"]

ClientOfToken = Callable[[str], Client]
"""Makes the client that speaks with a token."""

LIFETIME: Final = timedelta(hours=12)
MOST_FAILURES: Final = 10
FAILURE_SECONDS: Final = 60.0
_MOST_SESSIONS: Final = 10_000
_MOST_ADDRESSES: Final = 20_000
_OPEN: Final = frozenset({"/sign-in", "/healthz", "/assets/favicon.svg"})
_PAGE: Final = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>Sign in · Collage Monitor</title>
<link rel="icon" type="image/svg+xml" href="/assets/favicon.svg">
<style>:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;margin:0;display:grid;place-items:center;min-height:100vh}
main{width:min(24rem,calc(100vw - 3rem));padding:1.5rem 0}h1{font-size:1.5rem;margin:0 0 1rem}
input,button{font:inherit;width:100%;box-sizing:border-box;padding:.6rem .8rem}
input,button{border-radius:8px;border:1px solid #868e96}
button{margin-top:1rem;background:#1864ab;color:#fff;border-color:#1864ab;font-weight:600}
p{font-size:.9rem}[role=alert]{border-left:4px solid #d9480f;padding-left:.8rem}</style></head><body><main>
<h1>Collage Monitor</h1>{% if problem %}<p role="alert">{{ problem }}</p>{% endif %}
<form method="post" action="/sign-in"><label for="token">Token</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus>
<input type="hidden" name="next" value="{{ next }}"><button>Sign in</button></form>
<p>A token of role read, operate or admin. <code>collage-monitor token create</code> makes one; the server's own is
in the file <code>token</code> of its data folder.</p></main></body></html>"""
_AGAIN: Final = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Collage Monitor</title>
<meta http-equiv="refresh" content="0; url={{ next }}"></head><body><a href="{{ next }}">Go on</a></body></html>"""


def token_of_session() -> str:
    """The token with which the person behind this request signed in."""
    return str(session["token"])


def forget_token() -> None:
    """End the session of this request, and answer it as if it had none: the server does not know its token."""
    session.clear()
    g.token_is_forgotten = True


def install_sign_in(server: Flask, client_of: ClientOfToken) -> None:
    """Ask for a token before anything is shown; a person then sees what that token may.

    Failures are limited by address. The cookie is http-only and SameSite=Strict, Secure where the request came by
    HTTPS, and the session ends after LIFETIME, or when the server no longer knows the token.
    """
    _install_sessions(server)
    failures = RecentFailures(FAILURE_SECONDS, _MOST_ADDRESSES)

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
            return _answer(render_template_string(_AGAIN, next=wanted))
        return redirect(wanted, 303) if "token" in session else _form(wanted)

    @server.post("/sign-in")
    def sign_in() -> Any:
        wanted, address = _own_path(request.form.get("next")), request.remote_addr
        if failures.count(address) >= MOST_FAILURES:
            return _form(wanted, f"{MOST_FAILURES} failures from this address; try again in a minute.", 429)
        token = request.form.get("token", "").strip()
        problem, status = _refused(token, client_of)
        if problem is not None:
            if status == 403:
                failures.add(address)
            return _form(wanted, problem, status)
        session.clear()
        session["token"] = token
        # The id from before the sign-in may be known to somebody else.
        server.session_interface.regenerate(session)  # type: ignore[attr-defined]
        return redirect(wanted, 303)

    @server.post("/sign-out")
    def sign_out() -> Any:
        session.clear()
        return redirect("/sign-in", 303)


def _install_sessions(server: Flask) -> None:
    # Loaded here: a dashboard of this machine alone needs neither.
    from cachelib import SimpleCache
    from flask_session import Session

    server.config.update(
        SESSION_TYPE="cachelib",
        SESSION_CACHELIB=SimpleCache(threshold=_MOST_SESSIONS),
        SESSION_PERMANENT=False,
        SESSION_REFRESH_EACH_REQUEST=False,
        PERMANENT_SESSION_LIFETIME=LIFETIME,
        SESSION_COOKIE_NAME="collage_session",
        SESSION_COOKIE_HTTPONLY=True,
        SESSION_COOKIE_SAMESITE="Strict",
    )
    Session(server)

    def came_by_https(app: Flask) -> bool:
        return request.is_secure

    server.session_interface.get_cookie_secure = came_by_https  # type: ignore[method-assign]


def _refused(token: str, client_of: ClientOfToken) -> tuple[str | None, int]:
    """Why this token is not let in, with the status to say it with."""
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
    """A page leads to the form and back; whatever else a page asks for is refused."""
    if request.method != "GET" or request.path.startswith(("/_", "/assets/")):
        return Response("sign in first, at /sign-in\n", 401, mimetype="text/plain")
    asked = request.full_path.removesuffix("?")
    return redirect(f"/sign-in?next={quote(asked, safe='')}", 303)


def _form(wanted: str, problem: str | None = None, status: int = 200) -> Response:
    return _answer(render_template_string(_PAGE, next=wanted, problem=problem), status)


def _answer(page: str, status: int = 200) -> Response:
    return Response(page, status, mimetype="text/html", headers={"Cache-Control": "no-store"})


def _own_path(text: str | None) -> str:
    """A path of this dashboard; whatever leads elsewhere becomes the first page."""
    parts = urlsplit(text or "/")
    plain = text is not None and text.startswith("/") and not text.startswith("//") and text.isprintable()
    return text if text and plain and not (parts.scheme or parts.netloc) and "\\" not in text else "/"
