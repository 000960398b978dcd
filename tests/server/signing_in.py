"""A server with an OpenID provider beside it, signing in to it and out of it, and tokens that are forged."""

from __future__ import annotations

import base64
import hmac
import json
from contextlib import contextmanager

import pytest
from joserfc.jwk import RSAKey

from collage_monitor import wire
from tests import provider as providers
from tests.server.guarded import guarded_server

OTHER_KEY = RSAKey.generate_key(2048)
IDLE_SECONDS, SESSION_SECONDS = 3_600, 43_200
BACK_CHANNEL = "/api/v1/back-channel-log-out"


@pytest.fixture(scope="module")
def running():
    with providers.running_provider() as provider:
        yield provider


def anew(provider):
    """Honest, with its two people."""
    provider.begin_anew()
    provider.person("ada", ["team-a", "everyone"])
    provider.person("root", ["admins", "team-a"])
    return provider


@pytest.fixture
def provider(running):
    return anew(running)


@contextmanager
def server_of(provider, folder, **settings):
    with guarded_server(folder, **provider.settings(**settings)) as opened:
        provider.clock = opened.clock
        yield opened


@pytest.fixture
def guarded(provider, tmp_path):
    with server_of(provider, tmp_path) as opened:
        yield opened


@pytest.fixture(scope="module")
def attacked(running, tmp_path_factory):
    """One server that all forgeries are sent to; who is honest gets in before and after them.

    `running.earlier` is an ID token that was good in another sign-in of the same person.
    """
    with server_of(anew(running), tmp_path_factory.mktemp("attacked")) as opened:

        def remember(claims):
            running.earlier = running.signed(claims)
            return running.earlier

        running.forge = remember
        signed_in(opened, running)
        yield opened
        running.clock = opened.clock
        signed_in(opened, anew(running))


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


@pytest.fixture
def target(attacked, provider):
    """The attacked server, on whose clock the provider dates its tokens."""
    provider.clock = attacked.clock
    return attacked


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
