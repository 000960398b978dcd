"""A server with an OpenID provider beside it, signing in to it and out of it."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from collage_monitor import wire
from tests import provider as providers
from tests.server.guarded import guarded_server

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
