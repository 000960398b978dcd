"""What ends a session that an OpenID provider opened: time, who signs out, an administrator, the provider."""

from __future__ import annotations

import asyncio

import pytest
from collage_server.auth.principals import TokenDirectory
from collage_server.store import SqliteStore

from collage_monitor import wire
from tests import provider as providers
from tests.server.conftest import NOW, Clock
from tests.server.signing_in import (
    BACK_CHANNEL,
    IDLE_SECONDS,
    SESSION_SECONDS,
    begin,
    guarded,
    log_out,
    provider,
    running,
    server_of,
    signed_in,
    status,
    tokens,
)

__all__ = ["guarded", "provider", "running"]

pytestmark = [providers.MARK, pytest.mark.slow]


def test_a_session_ends_after_its_bound_however_much_it_is_used(guarded, provider):
    secret = signed_in(guarded, provider).secret
    for _ in range(SESSION_SECONDS // 3_000):
        guarded.clock.now += 3_000
        assert status(guarded, secret) == 200
    guarded.clock.now = NOW + SESSION_SECONDS - 1
    assert status(guarded, secret) == 200
    guarded.clock.now += 1
    assert status(guarded, secret) == 401


def test_a_session_that_a_clock_more_than_five_minutes_ahead_began_ends(guarded, provider):
    secret = signed_in(guarded, provider).secret
    guarded.clock.now -= 300
    assert status(guarded, secret) == 200
    guarded.clock.now -= 1
    assert status(guarded, secret) == 401


def test_a_session_that_is_not_used_ends(guarded, provider):
    secret = signed_in(guarded, provider).secret
    guarded.clock.now += IDLE_SECONDS - 1
    assert status(guarded, secret) == 200
    guarded.clock.now += IDLE_SECONDS - 1
    assert status(guarded, secret) == 200
    guarded.clock.now += IDLE_SECONDS
    for _ in range(2):
        assert status(guarded, secret) == 401


def test_a_session_that_was_never_used_ends(guarded, provider):
    secret = signed_in(guarded, provider).secret
    guarded.clock.now += IDLE_SECONDS
    assert status(guarded, secret) == 401


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


def test_a_shorter_bound_is_a_setting(provider, tmp_path):
    with server_of(provider, tmp_path, session_seconds=1_000.0) as opened:
        secret = signed_in(opened, provider).secret
        for seconds, expected in ((999, 200), (1, 401)):
            opened.clock.now += seconds
            assert status(opened, secret) == expected


def test_who_signs_out_is_out_and_led_to_the_provider(guarded, provider):
    ada, other = signed_in(guarded, provider), signed_in(guarded, provider)
    answer = guarded.ask("POST", "/api/v1/sign-out", ada.secret)
    url = answer.json()["log_out_url"]
    assert url.startswith(
        f"{provider.url}/oauth2/end_session?client_id={provider.client_id}&post_logout_redirect_uri="
    )
    assert url.endswith("http%3A%2F%2F127.0.0.1%3A7421%2Fsign-in")
    assert (status(guarded, ada.secret), status(guarded, other.secret)) == (401, 200)


def test_a_provider_without_a_page_to_sign_out_at(provider, tmp_path):
    with server_of(provider, tmp_path) as opened:
        secrets = [signed_in(opened, provider).secret for _ in range(3)]
        known = opened.app.state.collage.provider
        for secret, page in zip(secrets, (None, "javascript:alert(1)", 7), strict=True):
            known._metadata = known._metadata | {"end_session_endpoint": page}
            assert opened.ask("POST", "/api/v1/sign-out", secret).json() == {"log_out_url": None}
            assert status(opened, secret) == 401


def test_a_token_of_a_machine_is_not_signed_out(guarded):
    secret, _ = guarded.token("read", ["mine"])
    assert guarded.ask("POST", "/api/v1/sign-out", secret).json() == {"log_out_url": None}
    assert guarded.ask("POST", "/api/v1/sign-out").json() == {"log_out_url": None}
    assert status(guarded, secret) == 200


def test_an_administrator_sees_sessions_and_ends_one(guarded, provider):
    session = signed_in(guarded, provider)
    [shown] = tokens(guarded)
    assert (shown["name"], shown["subject"], shown["expires_at"]) == ("Ada", "ada", NOW + SESSION_SECONDS)
    guarded.ask("DELETE", f"/api/v1/tokens/{session.token.token_id}")
    assert status(guarded, session.secret) == 401


def test_who_signed_in_and_how_it_ended_stands_in_the_audit_log(guarded, provider):
    dashboard, token = guarded.token("read", name="dashboard")
    guarded.clock.now += 1
    begun = begin(guarded)
    finished = wire.SignInFinish(
        code=provider.code(begun.authorization_url, "ada"), code_verifier=begun.code_verifier, nonce=begun.nonce
    )
    created = guarded.ask("POST", "/api/v1/sessions", dashboard, finished, **{"X-Request-Id": "req-1"}).json()
    guarded.clock.now += 1
    guarded.ask("POST", "/api/v1/sign-out", created["secret"])
    guarded.clock.now += 1
    again = signed_in(guarded, provider)
    guarded.clock.now += 1
    log_out(guarded, provider.signed(provider.log_out_claims(sub="ada")))
    by_provider, _, ended, begun_entry, _ = guarded.audit_log()
    session_id = created["token"]["token_id"]
    assert (begun_entry.action, begun_entry.actor, begun_entry.subject) == (
        "session.begin",
        token.token_id,
        session_id,
    )
    assert (begun_entry.details["name"], begun_entry.details["subject"]) == ("Ada", "ada")
    assert begun_entry.details["grants"] == [
        {"role": "read", "projects": None},
        {"role": "operate", "projects": ["mine"]},
    ]
    assert begun_entry.request_id == "req-1"
    assert (ended.action, ended.actor, ended.subject) == ("session.end", session_id, session_id)
    assert (by_provider.action, by_provider.actor) == ("session.end", "oidc-provider")
    assert by_provider.subject == again.token.token_id


# Back-channel log-out.


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
    assert log_out(guarded, provider.signed(provider.log_out_claims(sid="s-1"))).status_code == 200
    assert [status(guarded, session.secret) for session in sessions] == [401, 200, 200]
    other = provider.log_out_claims(sid="s-2", sub="somebody else", jti="two")
    assert log_out(guarded, provider.signed(other)).status_code == 200
    assert [status(guarded, session.secret) for session in sessions] == [401, 200, 200]
    both = provider.log_out_claims(sid="s-2", sub="ada", jti="three")
    assert log_out(guarded, provider.signed(both)).status_code == 200
    # Of the last one it is not known whether it was the provider's s-2.
    assert [status(guarded, session.secret) for session in sessions] == [401, 401, 401]


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


def test_what_is_no_form_with_one_good_token_ends_nothing(guarded, provider):
    session = signed_in(guarded, provider)
    forged = provider.signed(provider.log_out_claims(sub="ada", nonce="as ID tokens have"))
    two, many = b"logout_token=a&logout_token=b", b"x=1&" * 20
    for body in (
        b"",
        b"logout_token",
        b"\xff=\xff",
        two,
        many,
        b'{"logout_token": 1}',
        b"logout_token=" + forged.encode(),
    ):
        answer = guarded.client.post(BACK_CHANNEL, content=body)
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "logout_token")
    assert status(guarded, session.secret) == 200


def test_a_full_disk_keeps_nobody_out(guarded, provider):
    """Who cannot sign in cannot see why the server takes no reports."""
    guarded.app.state.collage.guard._reason = "the disk is full"
    session = signed_in(guarded, provider)
    assert (
        guarded.ask(
            "POST", "/api/v1/tokens", message=wire.TokenCreate(name="n", role="read", projects=None)
        ).status_code
        == 503
    )
    assert log_out(guarded, provider.signed(provider.log_out_claims(sub="ada"))).status_code == 200
    assert status(guarded, session.secret) == 401
