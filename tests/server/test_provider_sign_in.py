"""Sign-in through an OpenID provider, from the code to the session (which tokens are good: `test_oidc.py`)."""

from __future__ import annotations

import logging

import pytest
from collage_server.auth.principals import Principal
from joserfc.jwk import RSAKey

from collage_monitor import wire
from tests import provider as providers
from tests.server.guarded import guarded_server
from tests.server.signing_in import (
    answered,
    begin,
    finish,
    guarded,
    provider,
    running,
    signed_in,
    status,
    tokens,
)

__all__ = ["guarded", "provider", "running"]

pytestmark = [providers.MARK, pytest.mark.slow]


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
    code = provider.code(first.authorization_url, "ada")
    other = second.code_verifier
    assert finish(guarded, first, code, code_verifier=other).status_code == 422
    assert (
        finish(guarded, first, provider.code(first.authorization_url, "ada"), nonce=second.nonce).status_code == 422
    )
    for short in ({"code_verifier": ""}, {"nonce": ""}, {"code": ""}):
        assert finish(guarded, first, code, **short).status_code == 422
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
