"""An OpenID provider as a real HTTP server: oidc-provider-mock, with what it lacks put before it.

It checks PKCE, which the mock does not, dates its ID tokens by the test's clock, and forges them when told to.
Tests that use it take `pytestmark = provider.MARK`: the mock stands on parts of authlib that warn.
"""

import json
import threading
import warnings
from contextlib import contextmanager
from io import BytesIO
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from joserfc import jws, jwt
from joserfc.jwk import RSAKey
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.test import run_wsgi_app

__all__ = ["DASHBOARD", "MARK", "ROLES", "Provider", "running_provider"]

MARK = pytest.mark.filterwarnings("ignore::DeprecationWarning")
DASHBOARD = "http://127.0.0.1:7421"
ROLES = "admins=admin; team-a=operate:mine; readers=read:theirs; everyone=read; operators=operate"
LOG_OUT_EVENT = "http://schemas.openid.net/event/backchannel-logout"


class Provider:
    """The mock behind a WSGI application of the test's own; `forge` makes ID tokens of the claims that are due."""

    def __init__(self, app, storage, dashboard):
        self._app = app
        self._dashboard = dashboard
        self.storage = storage
        self.key = RSAKey.import_key(storage.jwk.as_dict(is_private=True))
        self.url = ""
        self.client_id = ""
        self.client_secret = ""
        self.clock = lambda: 0.0
        self._challenges = {}
        self._http = httpx.Client(trust_env=False)
        self.begin_anew()

    def begin_anew(self):
        """Honest, up, and never asked."""
        self.forge = self.signed
        self.answers = {}
        self.token_requests = []
        self.asked = []

    def register(self):
        """Make this server known here, with the dashboard's way back."""
        way_back = {"redirect_uris": [f"{self._dashboard}/sign-in/callback"]}
        made = self._http.post(f"{self.url}/oauth2/clients", json=way_back).raise_for_status().json()
        self.client_id, self.client_secret = made["client_id"], made["client_secret"]

    def close(self):
        self._http.close()

    def settings(self, **more):
        """What a server needs to know."""
        return {
            "oidc_issuer": self.url,
            "oidc_client_id": self.client_id,
            "oidc_client_secret": self.client_secret,
            "oidc_roles": ROLES,
            "dashboard_url": self._dashboard,
        } | more

    def person(self, sub, groups=None, **claims):
        """Somebody with an account here, a member of these groups."""
        from oidc_provider_mock import User

        listed = {} if groups is None else {"groups": groups}
        self.storage.store_user(User(sub=sub, claims={"name": sub.title(), **listed, **claims}))

    def approve(self, authorization_url, sub):
        """The address to which a browser is sent back when this person agrees."""
        answer = self._http.post(authorization_url, data={"sub": sub})
        assert answer.status_code == 302, answer.text
        return answer.headers["Location"]

    def code(self, authorization_url, sub):
        """The code in that address."""
        return parse_qs(urlsplit(self.approve(authorization_url, sub)).query)["code"][0]

    def signed(self, claims, key=None, **header):
        """These claims, signed by the provider's key."""
        given = {"alg": "RS256", "typ": "JWT", **header}
        # As ASCII, so that a claim may be what is no Unicode.
        return jws.serialize_compact(given, json.dumps(claims).encode(), key or self.key, algorithms=[given["alg"]])

    def log_out_claims(self, **claims):
        """What a good log-out token says, with these claims; one that is None is left out."""
        now = int(self.clock())
        due = {"iss": self.url, "aud": self.client_id, "iat": now, "exp": now + 120, "jti": "one", **claims}
        due.setdefault("events", {LOG_OUT_EVENT: {}})
        return {name: value for name, value in due.items() if value is not None}

    def __call__(self, environ, start_response):
        path = environ["PATH_INFO"]
        self.asked.append(path)
        if path in self.answers:
            status, body = self.answers[path]
        elif path == "/oauth2/token":
            status, body = self._tokens(environ)
        else:
            parts, status, headers = run_wsgi_app(self._app, environ)
            self._note_challenge(environ, headers.get("Location", ""))
            start_response(status, list(headers))
            return [b"".join(parts)]
        start_response(status, [("Content-Type", "application/json")])
        return [json.dumps(body).encode()]

    def _note_challenge(self, environ, location):
        asked, given = parse_qs(environ["QUERY_STRING"]), parse_qs(urlsplit(location).query)
        if environ["PATH_INFO"] == "/oauth2/authorize" and "code" in given:
            assert asked["code_challenge_method"] == ["S256"]
            self._challenges[given["code"][0]] = asked["code_challenge"][0]

    def _tokens(self, environ):
        content = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        form = {name: values[0] for name, values in parse_qs(content.decode()).items()}
        self.token_requests.append(form)
        if create_s256_code_challenge(form.get("code_verifier", "")) != self._challenges.get(form["code"]):
            return "400 Bad Request", {"error": "invalid_grant"}
        parts, status, _ = run_wsgi_app(self._app, {**environ, "wsgi.input": BytesIO(content)})
        body = json.loads(b"".join(parts))
        if "id_token" in body:
            now = int(self.clock())
            claims = jwt.decode(body["id_token"], self.key).claims | {
                "iat": now,
                "auth_time": now,
                "exp": now + 300,
            }
            body["id_token"] = self.forge(claims)
        return status, body


class _Quiet(WSGIRequestHandler):
    def log(self, *_):
        """Nothing: the test's output is its own."""


@contextmanager
def running_provider(dashboard=DASHBOARD):
    """The provider on a port of its own, where a client with the dashboard's way back is registered."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import flask
        import oidc_provider_mock

        app = oidc_provider_mock.app(require_client_registration=True, require_nonce=True)
    with app.test_request_context():
        app.preprocess_request()
        storage = flask.g.oidc_provider_mock_storage
    provider = Provider(app, storage, dashboard)
    server = make_server("localhost", 0, provider, threaded=True, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    provider.url = f"http://localhost:{server.server_port}"
    try:
        provider.register()
        yield provider
    finally:
        provider.close()
        server.shutdown()
        thread.join()
        server.server_close()
