"""Sign-in through an OpenID provider: who gets in, and every token that must not open a session."""

from __future__ import annotations

import logging

import pytest
from collage_server.auth.principals import Principal
from joserfc.jwk import OctKey, RSAKey

from collage_monitor import wire
from tests import provider as providers
from tests.server.conftest import NOW
from tests.server.guarded import guarded_server
from tests.server.signing_in import (
    OTHER_KEY,
    answered,
    attacked,
    begin,
    by_hand,
    finish,
    guarded,
    hmac_with_public_key,
    log_out,
    other_payload,
    provider,
    running,
    server_of,
    signed_in,
    status,
    target,
    tokens,
    without,
)

__all__ = ["attacked", "guarded", "provider", "running", "target"]

pytestmark = [providers.MARK, pytest.mark.slow]


# Who gets in, and where.


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


@pytest.mark.parametrize(
    ("groups", "seen", "deletes"),
    [
        (["team-a"], {"mine-1"}, {"mine-1"}),
        (["readers"], {"theirs-1"}, set()),
        (["readers", "team-a", "of no use"], {"mine-1", "theirs-1"}, {"mine-1"}),
        (["everyone"], {"mine-1", "theirs-1"}, set()),
        ("operators", {"mine-1", "theirs-1"}, {"mine-1", "theirs-1"}),
        (["admins", "readers"], {"mine-1", "theirs-1"}, {"mine-1", "theirs-1"}),
    ],
)
def test_roles_by_group_and_project(guarded, provider, groups, seen, deletes):
    for project in ("mine", "theirs"):
        guarded.fill(project, f"{project}-1")
    provider.person("eve", groups)
    secret = signed_in(guarded, provider, "eve").secret
    runs = guarded.ask("GET", "/api/v1/runs", secret).json()["runs"]
    assert {run["run_id"] for run in runs} == seen
    deleted = {
        run_id
        for run_id in ("mine-1", "theirs-1")
        if status(guarded, secret, f"/api/v1/runs/{run_id}", "DELETE") == 200
    }
    assert deleted == deletes
    assert (status(guarded, secret, "/api/v1/tokens") == 200) == ("admins" in groups)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (["strangers", "guests"], "none of the person's groups (strangers, guests) has a role"),
        ([], "none of the person's groups (none) has a role"),
        (None, "no claim 'groups'; let the provider add it, or set COLLAGE_SERVER_OIDC_GROUPS_CLAIM"),
        ({"team-a": True}, "no claim 'groups'"),
        ([["team-a"], 7], "none of the person's groups (none) has a role"),
        (["a\x00b", "c\n"], "none of the person's groups (ab, c) has a role"),
        ("team-a admins", "has a role"),
        (["*"], "has a role"),
    ],
)
def test_without_a_group_that_has_a_role_nobody_gets_in_and_is_told_why(target, provider, groups, said):
    before = tokens(target)
    provider.person("eve", groups)
    answer = answered(target, provider, "eve")
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "sign_in_refused")
    assert f"Eve may not sign in here: {said}" in answer.text or said in answer.text
    assert tokens(target) == before


@pytest.mark.parametrize(
    ("name", "shown"),
    [("A\x00d\ud800a\n", "Ada"), ("\x00 ", "Lovelace"), (7, "Lovelace"), ("x" * 300, "x" * 200)],
)
def test_a_name_that_cannot_be_shown_is_none(target, provider, name, shown):
    other = {"name": name, "preferred_username": "Lovelace"}
    provider.forge = lambda claims: provider.signed(claims | other)
    assert signed_in(target, provider).token.name == shown


def test_a_claim_of_another_name_and_a_role_for_everybody(provider, tmp_path):
    provider.person("eve", None, teams=["blue"])
    with server_of(
        provider, tmp_path, oidc_groups_claim="teams", oidc_roles="*=read:theirs; blue=read:mine"
    ) as opened:
        assert signed_in(opened, provider, "eve").token.projects == ["mine", "theirs"]
        assert signed_in(opened, provider, "ada").token.projects == ["theirs"]


def test_what_a_principal_may_is_narrowed_to_what_a_route_needs():
    several = Principal("ada", "read", frozenset({"a"}), (wire.Grant(role="operate", projects=["b", "c"]),), True)
    read, operate = several.narrowed("read"), several.narrowed("operate")
    assert read == Principal("ada", "read", frozenset("abc"), is_session=True)
    assert operate == Principal("ada", "operate", frozenset("bc"), is_session=True)
    assert several.narrowed("admin") is None
    everywhere = Principal("ada", "operate", frozenset({"a"}), (wire.Grant(role="read"),))
    assert everywhere.narrowed("any") == Principal("ada", "read", None)


def test_a_sign_in_is_begun_by_a_dashboard_and_with_a_secret_each(guarded):
    first, second = begin(guarded), begin(guarded)
    for name in ("state", "nonce", "code_verifier", "authorization_url"):
        assert getattr(first, name) != getattr(second, name)
    assert first.code_verifier not in first.authorization_url
    assert status(guarded, None, "/api/v1/sign-in", "POST") == 401
    assert status(guarded, guarded.token("ingest", ["mine"])[0], "/api/v1/sign-in", "POST") == 403
    assert guarded.ask("GET", "/api/v1/sign-in", None).json() == {"provider": "localhost"}


# Which tokens must not open a session. `forge` gets the claims of an ID token that would be good.


FORGERIES = {
    "signed by another key": lambda p, c: p.signed(c, OTHER_KEY),
    "signed by another key that it brings along": lambda p, c: p.signed(c, OTHER_KEY, jwk=OTHER_KEY.as_dict(False)),
    "another payload under a good signature": other_payload,
    "no signature": lambda p, c: p.signed(c).rpartition(".")[0] + ".",
    "a signature cut short": lambda p, c: p.signed(c)[:-4],
    "a key that the provider does not have": lambda p, c: p.signed(c, kid="unknown"),
    "alg none": lambda p, c: by_hand({"alg": "none"}, c),
    "alg None": lambda p, c: by_hand({"alg": "None"}, c),
    "alg none with a good signature": lambda p, c: by_hand({"alg": "none"}, c, b"x" * 256),
    "HS256 with the public key": hmac_with_public_key,
    "HS256 with the client's secret": lambda p, c: p.signed(c, OctKey.import_key(p.client_secret * 2), alg="HS256"),
    "no token at all": lambda p, c: "",
    "not a token": lambda p, c: "a.b.c",
    "something else": lambda p, c: None,
    "claims that are a list": lambda p, c: by_hand({"alg": "RS256"}, [c], b"x" * 256),
    "expired": lambda p, c: p.signed(c | {"exp": NOW - 61}),
    "expired for ever": lambda p, c: p.signed(c | {"exp": 0}),
    "no end": lambda p, c: p.signed(without(c, "exp")),
    "an end that is no number": lambda p, c: p.signed(c | {"exp": "later"}),
    "not yet valid": lambda p, c: p.signed(c | {"nbf": NOW + 61}),
    "issued in the future": lambda p, c: p.signed(c | {"iat": NOW + 61}),
    "no date": lambda p, c: p.signed(without(c, "iat")),
    "another issuer": lambda p, c: p.signed(c | {"iss": "https://evil.example"}),
    "an issuer that begins alike": lambda p, c: p.signed(c | {"iss": c["iss"] + "/"}),
    "no issuer": lambda p, c: p.signed(without(c, "iss")),
    "another audience": lambda p, c: p.signed(c | {"aud": "another"}),
    "other audiences": lambda p, c: p.signed(c | {"aud": ["another", "third"]}),
    "no audience": lambda p, c: p.signed(without(c, "aud")),
    "an empty audience": lambda p, c: p.signed(c | {"aud": []}),
    "two audiences, for nobody of them": lambda p, c: p.signed(c | {"aud": [p.client_id, "another"]}),
    "for another of two": lambda p, c: p.signed(c | {"aud": [p.client_id, "another"], "azp": "another"}),
    "for another": lambda p, c: p.signed(c | {"azp": "another"}),
    "another nonce": lambda p, c: p.signed(c | {"nonce": "another"}),
    "no nonce": lambda p, c: p.signed(without(c, "nonce")),
    "an empty nonce": lambda p, c: p.signed(c | {"nonce": ""}),
    "nobody": lambda p, c: p.signed(without(c, "sub")),
    "an empty subject": lambda p, c: p.signed(c | {"sub": ""}),
    "a subject beyond its bound": lambda p, c: p.signed(c | {"sub": "x" * 256}),
    "a subject that is no text": lambda p, c: p.signed(c | {"sub": 7}),
    "a subject that no database takes": lambda p, c: p.signed(c | {"sub": "a\x00"}),
    "a subject that is no Unicode": lambda p, c: p.signed(c | {"sub": "a\ud800"}),
    "a session that no database takes": lambda p, c: p.signed(c | {"sid": "a\x00"}),
    "of another access token": lambda p, c: p.signed(c | {"at_hash": "AAAAAAAAAAAAAAAAAAAAAA"}),
    "a log-out token": lambda p, c: p.signed(p.log_out_claims(sub="ada"), typ="logout+jwt"),
    "of another sign-in": lambda p, c: p.earlier,
}


@pytest.mark.parametrize("name", FORGERIES)
def test_no_forged_token_opens_a_session(target, provider, name):
    before, made = tokens(target), []

    def forged(claims):
        made.append(claims)
        return FORGERIES[name](provider, claims)

    provider.forge = forged
    answer = answered(target, provider, "ada")
    assert len(made) == 1
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "sign_in_refused")
    assert tokens(target) == before


@pytest.mark.parametrize(
    "good",
    [
        lambda p, c: p.signed(c | {"aud": [p.client_id]}),
        lambda p, c: p.signed(c | {"aud": [p.client_id, "another"], "azp": p.client_id}),
        lambda p, c: p.signed(c | {"exp": NOW - 59}),
        lambda p, c: p.signed(c | {"iat": NOW + 59, "nbf": NOW + 59}),
        lambda p, c: p.signed(c, kid=p.key.thumbprint()),
        lambda p, c: p.signed(c, alg="PS256"),
    ],
)
def test_what_is_at_the_edge_of_good_is_good(target, provider, good):
    """Or the refusals above would prove little."""
    provider.forge = lambda claims: good(provider, claims)
    signed_in(target, provider)


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
    provider.forge = lambda claims: provider.signed(claims, OTHER_KEY)
    assert answered(guarded, provider, "ada").status_code == 422
    assert "a sign-in is refused" in caplog.text
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    for text in (secret, code, begun.state, begun.nonce, begun.code_verifier, provider.client_secret, "eyJ"):
        assert text not in caplog.text
        assert text.encode() not in kept
    assert provider.client_secret not in guarded.ask("GET", "/api/v1/audit").text


# The provider, when something is wrong with it.


@pytest.mark.parametrize(
    ("path", "answer", "status_code"),
    [
        ("/.well-known/openid-configuration", ("500 Oops", {}), 503),
        ("/.well-known/openid-configuration", ("200 OK", []), 503),
        ("/.well-known/openid-configuration", ("200 OK", {"issuer": "https://evil.example"}), 503),
        ("/jwks", ("500 Oops", {}), 503),
        ("/jwks", ("200 OK", {"keys": []}), 503),
        ("/jwks", ("200 OK", {"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}), 503),
        ("/oauth2/token", ("500 Oops", {}), 503),
        ("/oauth2/token", ("200 OK", []), 503),
        ("/oauth2/token", ("200 OK", {"access_token": "x", "token_type": "Bearer"}), 422),
    ],
)
def test_a_provider_that_is_away_or_wrong_opens_nothing(provider, tmp_path, path, answer, status_code):
    with server_of(provider, tmp_path) as opened:
        begun = begin(opened)
        code = provider.code(begun.authorization_url, "ada")
        known = opened.app.state.collage.provider
        known._metadata_at = float("-inf")
        provider.answers[path] = answer
        refused = finish(opened, begun, code)
        assert refused.status_code == status_code, refused.text
        assert tokens(opened) == []
        provider.answers.clear()
        known._silent_until = float("-inf")
        signed_in(opened, provider)


@pytest.mark.parametrize("path", ["/.well-known/openid-configuration", "/jwks"])
def test_a_provider_that_is_away_is_not_asked_again_and_again(provider, tmp_path, path):
    """Anybody may send log-out tokens."""
    provider.answers[path] = ("500 Oops", {})
    with server_of(provider, tmp_path) as opened:
        token = provider.signed(provider.log_out_claims(sub="ada"))
        for _ in range(5):
            assert log_out(opened, token).status_code == 503
        assert provider.asked.count(path) == 1
        opened.app.state.collage.provider._silent_until -= 5.0
        assert log_out(opened, token).status_code == 503
        assert provider.asked.count(path) == 2
        provider.answers.clear()
        opened.app.state.collage.provider._silent_until -= 5.0
        for name in ("unknown-1", "unknown-2", "unknown-3"):
            assert log_out(opened, provider.signed(provider.log_out_claims(sub="ada"), kid=name)).status_code == 400
        assert provider.asked.count(path) == 3
        assert log_out(opened, token).status_code == 200


def test_a_provider_of_another_name_is_told_apart(provider, tmp_path):
    told = {"issuer": "https://login.example/realms/team"}
    provider.answers["/.well-known/openid-configuration"] = ("200 OK", told)
    with server_of(provider, tmp_path) as opened:
        answer = opened.ask("POST", "/api/v1/sign-in")
    assert answer.status_code == 503
    assert "'https://login.example/realms/team': set COLLAGE_SERVER_OIDC_ISSUER to just that" in answer.text


def test_no_endpoint_away_from_this_machine_is_asked_in_plain_http(provider, tmp_path):
    told = {
        "issuer": provider.url,
        "authorization_endpoint": f"{provider.url}/a",
        "jwks_uri": f"{provider.url}/jwks",
    }
    for endpoint in ("ftp://box.lan/token", "javascript:alert(1)", None):
        found = told | {"token_endpoint": endpoint}
        provider.answers["/.well-known/openid-configuration"] = ("200 OK", found)
        with server_of(provider, tmp_path) as opened:
            answer = opened.ask("POST", "/api/v1/sign-in")
        assert (answer.status_code, "no https:// address as token_endpoint" in answer.text) == (503, True)


def test_a_new_key_of_the_provider_is_found_and_asked_for_seldom(guarded, provider):
    signed_in(guarded, provider)
    known = guarded.app.state.collage.provider
    new = RSAKey.generate_key(2048)
    keys = [key.as_dict(private=False, kid=key.thumbprint()) for key in (provider.key, new)]
    provider.answers["/jwks"] = ("200 OK", {"keys": keys})
    provider.forge = lambda claims: provider.signed(claims, new, kid=new.thumbprint())
    assert answered(guarded, provider, "ada").status_code == 422
    known._keys_at -= 31.0
    signed_in(guarded, provider)


def test_where_no_provider_is_named_there_is_none(tmp_path):
    with guarded_server(tmp_path) as opened:
        assert opened.ask("GET", "/api/v1/sign-in", None).json() == {"provider": None}
        for path in ("sign-in", "sessions", "sign-out", "back-channel-log-out"):
            answer = opened.ask("POST", f"/api/v1/{path}")
            assert answer.status_code == 404
            assert "COLLAGE_SERVER_OIDC_ISSUER" in answer.text
