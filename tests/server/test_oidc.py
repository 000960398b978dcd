"""What is taken from an OpenID provider: whose codes, which tokens, which roles, and how long an answer counts.

The provider is a real HTTP server; tokens are made here, signed with its key. What a server makes of a person
and what ends a session stands in `test_provider_sign_in.py`.
"""

import asyncio
import base64
import hmac
import json
from functools import partial

import pytest
from collage_server.auth.oidc import Provider
from collage_server.errors import BadRequest, Busy, SignInRefused
from collage_server.settings import Settings
from joserfc.jwk import OctKey, RSAKey

from collage_monitor import wire
from tests import provider as providers
from tests.server.conftest import NOW, Clock
from tests.server.guarded import OWN

pytestmark = providers.MARK
OTHER_KEY = RSAKey.generate_key(2048)
METADATA, KEYS, TOKENS = "/.well-known/openid-configuration", "/jwks", "/oauth2/token"
FINISH = wire.SignInFinish(code="code", code_verifier="verifier", nonce="nonce")


class Asked:
    """The server's side of a provider, on clocks of the test's own; `ends` counts seconds since something else."""

    def __init__(self, running, folder, **settings):
        self.running, self.age = running, Clock(0.0)
        known = Settings(folder=folder, token=OWN, **running.settings(**settings))
        self._provider = Provider(known, clock=Clock(), monotonic=self.age)

    def begin(self):
        return asyncio.run(self._provider.begin())

    def person(self, forge=None, access_token="access", **claims):
        """Who the ID token with these claims, or the one that is forged of them, is about."""
        due = {"iss": self.running.url, "aud": self.running.client_id, "nonce": FINISH.nonce}
        due |= {"iat": int(NOW), "exp": int(NOW) + 300}
        due |= {"sub": "ada", "name": "Ada", "groups": ["team-a"]} | claims
        token = self.running.signed(due) if forge is None else forge(self.running, due)
        told = {"access_token": access_token, "token_type": "Bearer", "id_token": token}
        self.running.answers.setdefault(TOKENS, ("200 OK", told))
        try:
            return asyncio.run(self._provider.person(FINISH))
        finally:
            if self.running.answers[TOKENS][1] is told:
                del self.running.answers[TOKENS]

    def log_out(self, forge=None, **claims):
        due = self.running.log_out_claims(**claims)
        return asyncio.run(self._provider.log_out(forge(self.running, due) if forge else self.running.signed(due)))


@pytest.fixture(scope="module")
def running():
    with providers.running_provider() as provider:
        provider.clock = Clock()
        yield provider


@pytest.fixture
def provider(running):
    running.begin_anew()
    return running


@pytest.fixture
def asked(provider, tmp_path):
    return partial(Asked, provider, tmp_path)


@pytest.fixture(scope="module")
def attacked(running, tmp_path_factory):
    """One that all forgeries are sent to; who is honest gets in before and after them."""
    running.begin_anew()
    asked = Asked(running, tmp_path_factory.mktemp("attacked"))
    assert asked.person().subject == "ada"
    yield asked
    running.begin_anew()
    assert asked.person().subject == "ada"
    assert asked.log_out(sub="ada").subject == "ada"


# Who it is, and what the groups allow.


OTHERS = {"oidc_groups_claim": "teams", "oidc_roles": "*=read:theirs; blue=read:mine"}
"""A claim of another name, and a role for everybody."""


@pytest.mark.parametrize(
    ("claims", "settings", "expected"),
    [
        ({"groups": ["team-a"]}, {}, {"operate": ["mine"]}),
        ({"groups": ["readers"]}, {}, {"read": ["theirs"]}),
        ({"groups": ["readers", "team-a", "of no use"]}, {}, {"read": ["theirs"], "operate": ["mine"]}),
        ({"groups": ["everyone"]}, {}, {"read": None}),
        ({"groups": ["readers", "everyone"]}, {}, {"read": None}),
        ({"groups": ["everyone", "readers"]}, {}, {"read": None}),
        ({"groups": "operators"}, {}, {"operate": None}),
        ({"groups": ["admins", "readers"]}, {}, {"admin": None}),
        ({"teams": ["blue"]}, OTHERS, {"read": ["mine", "theirs"]}),
        ({}, OTHERS, {"read": ["theirs"]}),
    ],
)
def test_roles_by_group_and_project(asked, claims, settings, expected):
    person = asked(**settings).person(**claims)
    assert {grant.role: grant.projects for grant in person.grants} == expected


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
def test_without_a_group_that_has_a_role_nobody_gets_in_and_is_told_why(asked, groups, said):
    with pytest.raises(SignInRefused) as refused:
        asked().person(groups=groups)
    assert str(refused.value).startswith("Ada may not sign in here: ")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("name", "shown"),
    [("A\x00d\ud800a\n", "Ada"), ("\x00 ", "Lovelace"), (7, "Lovelace"), ("x" * 300, "x" * 200)],
)
def test_a_name_that_cannot_be_shown_is_none(asked, name, shown):
    person = asked().person(name=name, preferred_username="Lovelace")
    assert (person.name, person.subject, person.provider_session) == (shown, "ada", None)


# Which tokens are not taken. A forger gets the claims of a token that would be good.


def segment(value):
    return base64.urlsafe_b64encode(value if isinstance(value, bytes) else json.dumps(value).encode()).rstrip(b"=")


def by_hand(header, claims, signature=b""):
    return b".".join([segment(header), segment(claims), segment(signature)]).decode()


def without(claims, *names):
    return {name: value for name, value in claims.items() if name not in names}


def other_payload(provider, claims):
    head, _, signature = provider.signed(claims).split(".")
    return ".".join([head, segment({**claims, "groups": ["admins"]}).decode(), signature])


def hmac_with_public_key(provider, claims):
    """By hand: joserfc takes no public key for a secret."""
    signed = b".".join([segment({"alg": "HS256"}), segment(claims)])
    return b".".join([signed, segment(hmac.digest(provider.key.as_pem(private=False), signed, "sha256"))]).decode()


BAD_TOKENS = {
    "signed by another key": lambda p, c: p.signed(c, OTHER_KEY),
    "another payload under a good signature": other_payload,
    "alg none": lambda p, c: by_hand({"alg": "none"}, c),
    "HS256 with the public key": hmac_with_public_key,
    "expired": lambda p, c: p.signed(c | {"exp": NOW - 61}),
    "no end": lambda p, c: p.signed(without(c, "exp")),
    "issued in the future": lambda p, c: p.signed(c | {"iat": NOW + 61}),
    "no date": lambda p, c: p.signed(without(c, "iat")),
    "another issuer": lambda p, c: p.signed(c | {"iss": "https://evil.example"}),
    "another audience": lambda p, c: p.signed(c | {"aud": "another"}),
    "nobody": lambda p, c: p.signed(without(c, "sub")),
    "a subject that no database takes": lambda p, c: p.signed(c | {"sub": "a\x00"}),
}
"""Of a person, or to log out."""
FORGERIES = BAD_TOKENS | {
    "signed by another key that it brings along": lambda p, c: p.signed(c, OTHER_KEY, jwk=OTHER_KEY.as_dict(False)),
    "no signature": lambda p, c: p.signed(c).rpartition(".")[0] + ".",
    "a signature cut short": lambda p, c: p.signed(c)[:-4],
    "a key that the provider does not have": lambda p, c: p.signed(c, kid="unknown"),
    "alg None": lambda p, c: by_hand({"alg": "None"}, c),
    "alg none with a good signature": lambda p, c: by_hand({"alg": "none"}, c, b"x" * 256),
    "HS256 with the client's secret": lambda p, c: p.signed(c, OctKey.import_key(p.client_secret * 2), alg="HS256"),
    "no token at all": lambda p, c: "",
    "not a token": lambda p, c: "a.b.c",
    "something else": lambda p, c: None,
    "claims that are a list": lambda p, c: by_hand({"alg": "RS256"}, [c], b"x" * 256),
    "expired for ever": lambda p, c: p.signed(c | {"exp": 0}),
    "an end that is no number": lambda p, c: p.signed(c | {"exp": "later"}),
    "not yet valid": lambda p, c: p.signed(c | {"nbf": NOW + 61}),
    "an issuer that begins alike": lambda p, c: p.signed(c | {"iss": c["iss"] + "/"}),
    "no issuer": lambda p, c: p.signed(without(c, "iss")),
    "other audiences": lambda p, c: p.signed(c | {"aud": ["another", "third"]}),
    "no audience": lambda p, c: p.signed(without(c, "aud")),
    "an empty audience": lambda p, c: p.signed(c | {"aud": []}),
    "two audiences, for nobody of them": lambda p, c: p.signed(c | {"aud": [p.client_id, "another"]}),
    "for another of two": lambda p, c: p.signed(c | {"aud": [p.client_id, "another"], "azp": "another"}),
    "for another": lambda p, c: p.signed(c | {"azp": "another"}),
    "another nonce": lambda p, c: p.signed(c | {"nonce": "another"}),
    "no nonce": lambda p, c: p.signed(without(c, "nonce")),
    "an empty nonce": lambda p, c: p.signed(c | {"nonce": ""}),
    "an empty subject": lambda p, c: p.signed(c | {"sub": ""}),
    "a subject beyond its bound": lambda p, c: p.signed(c | {"sub": "x" * 256}),
    "a subject that is no text": lambda p, c: p.signed(c | {"sub": 7}),
    "a subject that is no Unicode": lambda p, c: p.signed(c | {"sub": "a\ud800"}),
    "a session that no database takes": lambda p, c: p.signed(c | {"sid": "a\x00"}),
    "of another access token": lambda p, c: p.signed(c | {"at_hash": "AAAAAAAAAAAAAAAAAAAAAA"}),
    "a log-out token": lambda p, c: p.signed(p.log_out_claims(sub="ada"), typ="logout+jwt"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_no_forged_token_is_taken_for_a_person(attacked, name):
    with pytest.raises(SignInRefused, match="ID token is refused"):
        attacked.person(FORGERIES[name])


def test_what_is_at_the_edge_of_good_is_good(attacked):
    """Or the refusals above would prove little."""
    for good in (
        lambda p, c: p.signed(c | {"aud": [p.client_id]}),
        lambda p, c: p.signed(c | {"aud": [p.client_id, "another"], "azp": p.client_id}),
        lambda p, c: p.signed(c | {"exp": NOW - 59}),
        lambda p, c: p.signed(c | {"iat": NOW + 59, "nbf": NOW + 59}),
        lambda p, c: p.signed(c, kid=p.key.thumbprint()),
        lambda p, c: p.signed(c, alg="PS256"),
    ):
        assert attacked.person(good).subject == "ada"


BAD_LOG_OUTS = BAD_TOKENS | {
    "no id": lambda p, c: p.signed(without(c, "jti")),
    "an empty id": lambda p, c: p.signed(c | {"jti": ""}),
    "an id that is no text": lambda p, c: p.signed(c | {"jti": 7}),
    "an id that is no Unicode": lambda p, c: p.signed(c | {"jti": "a\ud800"}),
    "a nonce": lambda p, c: p.signed(c | {"nonce": "some"}),
    "no events": lambda p, c: p.signed(without(c, "events")),
    "another event": lambda p, c: p.signed(c | {"events": {"https://evil.example": {}}}),
    "events that are a list": lambda p, c: p.signed(c | {"events": list(c["events"])}),
    "a subject that is no text": lambda p, c: p.signed(c | {"sub": ["ada"]}),
    "another type": lambda p, c: p.signed(c, typ="at+jwt"),
    "an ID token": lambda p, c: p.signed(without(c, "events", "jti") | {"nonce": "nonce"}),
    "nothing": lambda p, c: "",
}


@pytest.mark.parametrize("name", BAD_LOG_OUTS)
def test_no_forged_log_out_token_is_taken(attacked, name):
    with pytest.raises(BadRequest, match="log-out token is refused") as refused:
        attacked.log_out(BAD_LOG_OUTS[name], sub="ada")
    assert refused.value.field == "logout_token"


# The provider, when something is wrong with it.


@pytest.mark.parametrize(
    ("path", "answer", "kind"),
    [
        (METADATA, ("500 Oops", {}), Busy),
        (METADATA, ("200 OK", []), Busy),
        (METADATA, ("200 OK", {"issuer": "https://evil.example"}), Busy),
        (KEYS, ("500 Oops", {}), Busy),
        (KEYS, ("200 OK", {"keys": []}), Busy),
        (KEYS, ("200 OK", {"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}), Busy),
        (TOKENS, ("500 Oops", {}), Busy),
        (TOKENS, ("200 OK", []), Busy),
        (TOKENS, ("200 OK", {"access_token": "x", "token_type": "Bearer"}), SignInRefused),
        (TOKENS, ("400 Bad Request", {"error": "invalid_grant"}), SignInRefused),
    ],
)
def test_a_provider_that_is_away_or_wrong_vouches_for_nobody(asked, provider, path, answer, kind):
    known = asked()
    known.begin()
    known.age.now += 3_601.0
    provider.answers[path] = answer
    with pytest.raises(kind):
        known.person()
    provider.answers.clear()
    known.age.now += 5.0
    assert known.person().subject == "ada"


@pytest.mark.parametrize("path", [METADATA, KEYS])
def test_a_provider_that_is_away_is_not_asked_again_and_again(asked, provider, path):
    """Anybody may send log-out tokens."""
    provider.answers[path] = ("500 Oops", {})
    known = asked()
    for _ in range(5):
        with pytest.raises(Busy):
            known.log_out(sub="ada")
    assert provider.asked.count(path) == 1
    known.age.now += 5.0
    with pytest.raises(Busy):
        known.log_out(sub="ada")
    assert provider.asked.count(path) == 2
    provider.answers.clear()
    known.age.now += 5.0
    for name in ("unknown-1", "unknown-2", "unknown-3"):
        with pytest.raises(BadRequest):
            known.log_out(lambda p, c, name=name: p.signed(c, kid=name), sub="ada")
    assert provider.asked.count(path) == 3
    assert known.log_out(sub="ada").subject == "ada"


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"issuer": "https://login.example/a"}, "'https://login.example/a': set COLLAGE_SERVER_OIDC_ISSUER to"),
        ({"token_endpoint": "ftp://box.lan/token"}, "no https:// address as token_endpoint"),
        ({"token_endpoint": "javascript:alert(1)"}, "no https:// address as token_endpoint"),
        ({"token_endpoint": None}, "no https:// address as token_endpoint"),
    ],
)
def test_a_provider_of_another_name_or_with_an_unsafe_address_is_told(asked, provider, told, said):
    named = {"issuer": provider.url, "authorization_endpoint": provider.url, "jwks_uri": provider.url}
    provider.answers[METADATA] = ("200 OK", named | told)
    with pytest.raises(Busy) as refused:
        asked().begin()
    assert said in str(refused.value)


def test_a_new_key_of_the_provider_is_found_and_asked_for_seldom(asked, provider):
    known = asked()
    known.person()
    keys = [key.as_dict(private=False, kid=key.thumbprint()) for key in (provider.key, OTHER_KEY)]
    provider.answers[KEYS] = ("200 OK", {"keys": keys})

    def by_the_new_key(p, claims):
        return p.signed(claims, OTHER_KEY, kid=OTHER_KEY.thumbprint())

    with pytest.raises(SignInRefused):
        known.person(by_the_new_key)
    known.age.now += 31.0
    assert known.person(by_the_new_key).subject == "ada"


def test_each_sign_in_has_secrets_of_its_own_and_the_session_with_the_provider_is_known_by_its_id(asked):
    known = asked()
    first, second = known.begin(), known.begin()
    for name in ("state", "nonce", "code_verifier", "authorization_url"):
        assert getattr(first, name) != getattr(second, name)
    assert first.code_verifier not in first.authorization_url
    assert known.person(sid="s-1").provider_session == "s-1"
    assert known.log_out(sid="s-1").provider_session == "s-1"
