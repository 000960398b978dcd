"""Sign-in through an OpenID provider, from the code to the session (which tokens are good: `test_oidc.py`).

And what ends a session: time, who signs out, an administrator, the provider.
"""

import asyncio
import logging
from contextlib import contextmanager

import pytest
from collage_server.auth.principals import Principal, TokenDirectory
from collage_server.store import SqliteStore
from joserfc.jwk import RSAKey

from collage_monitor import wire
from tests import provider as providers
from tests.server.conftest import NOW, Clock
from tests.server.guarded import OWN, guarded_server

pytestmark = [providers.MARK, pytest.mark.slow]

IDLE_SECONDS, SESSION_SECONDS = 3_600, 43_200
BACK_CHANNEL = "/api/v1/back-channel-log-out"


@pytest.fixture(scope="module")
def running():
    with providers.running_provider() as provider:
        yield provider


@pytest.fixture
def provider(running):
    """Honest, with its two people."""
    running.begin_anew()
    running.person("ada", ["team-a", "everyone"])
    running.person("root", ["admins", "team-a"])
    return running


@contextmanager
def server_of(provider, folder, **settings):
    with guarded_server(folder, **provider.settings(**settings)) as opened:
        provider.clock = opened.clock
        yield opened


@pytest.fixture
def guarded(provider, tmp_path):
    with server_of(provider, tmp_path) as opened:
        yield opened


def begin(guarded):
    answer = guarded.ask("POST", "/api/v1/sign-in")
    assert answer.status_code == 200, answer.text
    return wire.decode_message(answer.content, wire.SignInRequest, wire.JSON)


def finish(guarded, begun, given, **other):
    kept = {"code": given, "code_verifier": begun.code_verifier, "nonce": begun.nonce} | other
    return guarded.ask("POST", "/api/v1/sessions", message=wire.SignInFinish(**kept))


def answered(guarded, provider, sub):
    begun = begin(guarded)
    return finish(guarded, begun, provider.code(begun.authorization_url, sub))


def signed_in(guarded, provider, sub="ada"):
    answer = answered(guarded, provider, sub)
    assert answer.status_code == 201, answer.text
    return wire.decode_message(answer.content, wire.TokenCreated, wire.JSON)


def status(guarded, secret, path="/api/v1/runs", method="GET"):
    return guarded.ask(method, path, secret).status_code


def log_out(guarded, token):
    return guarded.client.post(BACK_CHANNEL, data={"logout_token": token})


def tokens(guarded):
    return guarded.ask("GET", "/api/v1/tokens").json()["tokens"]


def test_whoever_signs_in_may_what_the_groups_say_by_project(guarded, provider):
    for project in ("mine", "theirs"):
        guarded.fill(project, f"{project}-1")
    session = signed_in(guarded, provider)
    assert (session.token.name, session.token.subject) == ("Ada", "ada")
    assert (session.token.role, session.token.projects) == ("read", None)
    assert session.token.also == [wire.Grant(role="operate", projects=["mine"])]
    runs = guarded.ask("GET", "/api/v1/runs", session.secret).json()["runs"]
    assert {run["run_id"] for run in runs} == {"mine-1", "theirs-1"}
    refused = guarded.ask("DELETE", "/api/v1/runs/theirs-1", session.secret)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    assert "may not do that in project 'theirs', only in mine" in refused.text
    assert status(guarded, session.secret, "/api/v1/runs/never-seen", "DELETE") == 404
    assert status(guarded, session.secret, "/api/v1/runs/mine-1", "DELETE") == 200
    assert status(guarded, session.secret, "/api/v1/tokens") == 403


def test_what_a_principal_may_is_narrowed_to_what_a_route_needs():
    several = Principal("ada", "read", frozenset({"a"}), (wire.Grant(role="operate", projects=["b", "c"]),), True)
    read, operate = several.narrowed("read"), several.narrowed("operate")
    assert read == Principal("ada", "read", frozenset("abc"), is_session=True)
    assert operate == Principal("ada", "operate", frozenset("bc"), is_session=True)
    assert several.narrowed("admin") is None
    everywhere = Principal("ada", "operate", frozenset({"a"}), (wire.Grant(role="read"),))
    assert everywhere.narrowed("any") == Principal("ada", "read", None)


def test_who_is_refused_has_no_session(guarded, provider):
    provider.person("eve", ["strangers"])
    answer = answered(guarded, provider, "eve")
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "sign_in_refused")
    assert "Eve may not sign in here: none of the person's groups (strangers) has a role" in answer.text
    provider.forge = lambda claims: provider.signed(claims | {"nonce": "of another sign-in"})
    assert answered(guarded, provider, "ada").status_code == 422
    provider.answers["/oauth2/token"] = ("500 Oops", {})
    assert answered(guarded, provider, "ada").status_code == 503
    assert tokens(guarded) == []
    provider.begin_anew()
    signed_in(guarded, provider)


def test_a_code_counts_once_and_with_its_own_verifier_and_nonce_alone(guarded, provider):
    first, second = begin(guarded), begin(guarded)
    code, other = (provider.code(first.authorization_url, "ada") for _ in range(2))
    for given, wrong in (
        (code, {"code_verifier": second.code_verifier}),
        (other, {"nonce": second.nonce}),
        *((code, {name: ""}) for name in ("code_verifier", "nonce", "code")),
    ):
        assert finish(guarded, first, given, **wrong).status_code == 422
    assert tokens(guarded) == []
    assert finish(guarded, first, code).status_code == 201
    for _ in range(2):
        replayed = finish(guarded, first, code)
        assert (replayed.status_code, replayed.json()["error"]["code"]) == (422, "sign_in_refused")
    assert len(tokens(guarded)) == 1


def test_secrets_of_a_sign_in_are_nowhere_but_in_the_answer(guarded, provider, caplog, tmp_path):
    caplog.set_level(logging.DEBUG, "collage_server")
    begun = begin(guarded)
    code = provider.code(begun.authorization_url, "ada")
    secret = finish(guarded, begun, code).json()["secret"]
    provider.forge = lambda claims: provider.signed(claims, RSAKey.generate_key(2048))
    assert answered(guarded, provider, "ada").status_code == 422
    assert "a sign-in is refused" in caplog.text
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    for text in (secret, code, begun.state, begun.nonce, begun.code_verifier, provider.client_secret, "eyJ"):
        assert text not in caplog.text
        assert text.encode() not in kept
    assert provider.client_secret not in guarded.ask("GET", "/api/v1/audit").text


def test_where_no_provider_is_named_there_is_none(tmp_path):
    with guarded_server(tmp_path) as opened:
        assert opened.ask("GET", "/api/v1/sign-in", None).json() == {"provider": None}
        for path in ("sign-in", "sessions", "sign-out", "back-channel-log-out"):
            answer = opened.ask("POST", f"/api/v1/{path}")
            assert answer.status_code == 404
            assert "COLLAGE_SERVER_OIDC_ISSUER" in answer.text


@pytest.mark.parametrize(
    ("settings", "waited"),
    [
        ({}, [*[(3_000, 200)] * 14, (1_199, 200), (1, 401)]),
        ({}, [(IDLE_SECONDS - 1, 200), (IDLE_SECONDS - 1, 200), (IDLE_SECONDS, 401), (0, 401)]),
        ({}, [(IDLE_SECONDS, 401)]),
        ({}, [(-300, 200), (-1, 401)]),
        ({"session_seconds": 1_000.0}, [(999, 200), (1, 401)]),
    ],
    ids=[
        "used",
        "not used for long",
        "never used",
        "begun by a clock more than five minutes ahead",
        "a shorter bound",
    ],
)
def test_a_session_ends_when_its_time_is_over(provider, tmp_path, settings, waited):
    with server_of(provider, tmp_path, **settings) as opened:
        secret = signed_in(opened, provider).secret
        for seconds, expected in waited:
            opened.clock.now += seconds
            assert status(opened, secret) == expected


def test_another_process_knows_how_long_a_session_was_not_used(guarded, provider, tmp_path):
    secret = signed_in(guarded, provider).secret.encode()
    guarded.clock.now += 3_000
    assert status(guarded, secret.decode()) == 200
    guarded.client.portal.call(guarded.app.state.collage.directory.close, 5.0)
    store = SqliteStore(tmp_path / "collage.sqlite", stale_after_seconds=600.0)
    store.open()
    try:
        for later, knows in ((IDLE_SECONDS - 1, True), (IDLE_SECONDS, False)):
            directory = TokenDirectory(store.access, None, clock=Clock(NOW + 3_000 + later))
            assert (asyncio.run(directory.principal(secret)) is not None) is knows
    finally:
        store.close()


def test_who_signs_out_is_out_and_led_to_the_provider_and_an_administrator_ends_others(guarded, provider):
    """A token of a machine is not signed out."""
    ada, other = signed_in(guarded, provider), signed_in(guarded, provider)
    answer = guarded.ask("POST", "/api/v1/sign-out", ada.secret)
    asked = f"client_id={provider.client_id}&post_logout_redirect_uri=http%3A%2F%2F127.0.0.1%3A7421%2Fsign-in"
    assert answer.json()["log_out_url"] == f"{provider.url}/oauth2/end_session?{asked}"
    assert (status(guarded, ada.secret), status(guarded, other.secret)) == (401, 200)
    [shown] = [token for token in tokens(guarded) if token["token_id"] == other.token.token_id]
    assert (shown["name"], shown["subject"], shown["expires_at"]) == ("Ada", "ada", NOW + SESSION_SECONDS)
    guarded.ask("DELETE", f"/api/v1/tokens/{other.token.token_id}")
    assert status(guarded, other.secret) == 401
    machine, _ = guarded.token("read", ["mine"])
    for secret in (machine, OWN):
        assert guarded.ask("POST", "/api/v1/sign-out", secret).json() == {"log_out_url": None}
        assert status(guarded, secret) == 200


def test_a_provider_without_a_page_to_sign_out_at(provider, tmp_path):
    with server_of(provider, tmp_path) as opened:
        secrets = [signed_in(opened, provider).secret for _ in range(3)]
        known = opened.app.state.collage.provider
        for secret, page in zip(secrets, (None, "javascript:alert(1)", 7), strict=True):
            known._metadata = known._metadata | {"end_session_endpoint": page}
            assert opened.ask("POST", "/api/v1/sign-out", secret).json() == {"log_out_url": None}
            assert status(opened, secret) == 401


def test_who_signed_in_and_how_it_ended_stands_in_the_audit_log(guarded, provider):
    dashboard, token = guarded.token("read", name="dashboard")
    guarded.clock.now += 1
    begun = begin(guarded)
    code = provider.code(begun.authorization_url, "ada")
    finished = wire.SignInFinish(code=code, code_verifier=begun.code_verifier, nonce=begun.nonce)
    created = guarded.ask("POST", "/api/v1/sessions", dashboard, finished, **{"X-Request-Id": "req-1"}).json()
    guarded.clock.now += 1
    guarded.ask("POST", "/api/v1/sign-out", created["secret"])
    guarded.clock.now += 1
    again = signed_in(guarded, provider)
    guarded.clock.now += 1
    log_out(guarded, provider.signed(provider.log_out_claims(sub="ada")))
    by_provider, _, ended, begun_entry, _ = guarded.audit_log()
    session_id = created["token"]["token_id"]
    told = [(entry.action, entry.actor, entry.subject) for entry in (begun_entry, ended, by_provider)]
    assert told == [
        ("session.begin", token.token_id, session_id),
        ("session.end", session_id, session_id),
        ("session.end", "oidc-provider", again.token.token_id),
    ]
    assert (begun_entry.details["name"], begun_entry.details["subject"]) == ("Ada", "ada")
    grants = [{"role": "read", "projects": None}, {"role": "operate", "projects": ["mine"]}]
    assert (begun_entry.details["grants"], begun_entry.request_id) == (grants, "req-1")


def test_the_provider_ends_all_sessions_of_a_person(guarded, provider):
    ada, again, root = (signed_in(guarded, provider, sub) for sub in ("ada", "ada", "root"))
    machine, _ = guarded.token("read", name="ada")
    answer = log_out(guarded, provider.signed(provider.log_out_claims(sub="ada"), typ="logout+jwt"))
    assert (answer.status_code, answer.content, answer.headers["Cache-Control"]) == (200, b"", "no-store")
    ended = [status(guarded, session.secret) for session in (ada, again, root)]
    assert (ended, status(guarded, machine)) == ([401, 401, 200], 200)


def test_the_provider_ends_one_session(guarded, provider):
    sessions = []
    for sid in ("s-1", "s-2", None):
        provider.person("ada", ["everyone"], **({} if sid is None else {"sid": sid}))
        sessions.append(signed_in(guarded, provider))
    for claims, left in (
        ({"sid": "s-1"}, [401, 200, 200]),
        ({"sid": "s-2", "sub": "somebody else", "jti": "two"}, [401, 200, 200]),
        # Of the last one it is not known whether it was the provider's s-2.
        ({"sid": "s-2", "sub": "ada", "jti": "three"}, [401, 401, 401]),
    ):
        assert log_out(guarded, provider.signed(provider.log_out_claims(**claims))).status_code == 200
        assert [status(guarded, session.secret) for session in sessions] == left


def test_a_log_out_token_counts_once(guarded, provider):
    token = provider.signed(provider.log_out_claims(sub="ada"))
    assert log_out(guarded, token).status_code == 200
    session = signed_in(guarded, provider)
    for seconds in (0, 60, 60, 59, 1, 3_000):
        guarded.clock.now += seconds
        answer = log_out(guarded, token)
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "logout_token")
        assert status(guarded, session.secret) == 200
    fresh = provider.signed(provider.log_out_claims(sub="ada"))
    assert log_out(guarded, fresh).status_code == 200
    assert status(guarded, session.secret) == 401


def test_what_is_no_form_with_one_good_token_ends_nothing_and_a_full_disk_keeps_nobody_out(guarded, provider):
    """Who cannot sign in cannot see why the server takes no reports."""
    guarded.state.guard._reason = "the disk is full"
    session = signed_in(guarded, provider)
    create = wire.TokenCreate(name="n", role="read", projects=None)
    assert guarded.ask("POST", "/api/v1/tokens", message=create).status_code == 503
    forged = provider.signed(provider.log_out_claims(sub="ada", nonce="as ID tokens have"))
    two, many = b"logout_token=a&logout_token=b", b"x=1&" * 20
    others = (b"logout_token", b"\xff=\xff", b'{"logout_token": 1}', b"logout_token=" + forged.encode())
    for body in (b"", two, many, *others):
        answer = guarded.client.post(BACK_CHANNEL, content=body)
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "logout_token")
    assert status(guarded, session.secret) == 200
    assert log_out(guarded, provider.signed(provider.log_out_claims(sub="ada"))).status_code == 200
    assert status(guarded, session.secret) == 401
