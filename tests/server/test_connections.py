"""Connections over real sockets: heads that are too large, half sent or no HTTP, and more of them than may be."""

from __future__ import annotations

import contextlib
import json
import select

import httpx
import pytest
from collage_server.app import create_app
from collage_server.command.serve import uvicorn_config
from collage_server.settings import Settings

from tests.server.sockets import HEAD, everything, listening, status_of
from tests.waiting import until

CLOSE = b"Connection: close\r\n\r\n"


def error_of(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert list(error) == ["code", "message", "field", "limit", "request_id"]
    assert f"x-request-id: {error['request_id']}".encode() in head
    return error


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent",
    [
        b"X-Long: " + b"x" * 2**20,
        b"X-Long: " + b"x" * 2**17 + b"\r\n\r\n",
        b"".join(b"x-%d: 1\r\n" % i for i in range(200)) + b"\r\n",
        b"".join(b"x-%d: 1\r\n" % i for i in range(2**17)),
    ],
    ids=["half a value", "a value", "many", "endless"],
)
def test_a_head_beyond_its_size_is_refused_as_it_comes(tmp_path, sent):
    with listening(tmp_path) as server, server.connect() as client:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # Closed before all was sent.
            client.sendall(HEAD + sent)
        answer = everything(client)
        if answer:  # A reset may overtake it.
            assert status_of(answer) == 431
            assert error_of(answer)["limit"] == 65536
        assert server.ask(HEAD + CLOSE).startswith(b"HTTP/1.1 200")


def test_a_head_within_its_size_is_answered_again_and_again(tmp_path):
    with listening(tmp_path) as server:
        long = HEAD + b"X-Long: " + b"x" * 60_000 + b"\r\n"
        answer = server.ask(5 * (long + b"\r\n") + long + CLOSE)
    assert answer.count(b"HTTP/1.1 200") == 6


def test_heads_of_one_byte_at_a_time_do_not_count_the_bodies(tmp_path):
    with listening(tmp_path) as server, server.connect() as client:
        client.sendall(b"POST /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 70000\r\n\r\n")
        client.sendall(b"x" * 70_000 + HEAD + CLOSE)
        answer = everything(client)
    assert answer.startswith(b"HTTP/1.1 405")
    assert b"HTTP/1.1 200" in answer


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"\r\n" + HEAD, HEAD + b"\r\n\r\n\r\n"])
def test_half_a_head_is_not_waited_for(tmp_path, sent):
    """The connection ends though nobody ends it from here; whole requests before are answered."""
    with listening(tmp_path, limits={"idle_seconds": 0.2}) as server, server.connect() as client:
        client.sendall(sent)
        answer = everything(client)
        assert answer.count(b"HTTP/1.1 200") == sent.count(b"\r\n\r\n") - sent.count(b"\r\n\r\n\r\n\r\n")


def test_a_body_that_trickles_after_its_answer_is_not_waited_for(tmp_path):
    head = b"POST /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n\r\n"
    with listening(tmp_path, limits={"idle_seconds": 0.2}) as server, server.connect() as client:
        client.sendall(head)
        assert status_of(client.recv(65536)) == 405
        client.settimeout(0.01)
        for _ in range(2_000):
            try:
                client.sendall(b"x")
                if client.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("the connection was kept")


def test_an_idle_connection_is_not_ended_just_when_a_client_uses_it_again(tmp_path):
    """What the client sends into a connection that is being closed is lost, and the server seems to be away."""
    settings = Settings(folder=tmp_path, no_auth=True)
    clients_keep_seconds = httpx.Limits().keepalive_expiry
    assert clients_keep_seconds
    assert uvicorn_config(create_app(settings), settings).timeout_keep_alive > clients_keep_seconds


def test_beyond_the_connections_the_silent_ones_go_and_who_asks_is_answered(tmp_path):
    with listening(tmp_path, limits={"connections": 20, "idle_seconds": 3600.0}) as server:
        silent = [server.connect() for _ in range(40)]
        for client in silent:
            client.setblocking(False)
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                client.sendall(HEAD)
        assert server.ask(HEAD + CLOSE).startswith(b"HTTP/1.1 200")
        # Twenty may stay; one of them gave its place to the request.
        until(lambda: len(select.select(silent, [], [], 0)[0]) == 21, "the end of the silent ones")
        for client in silent:
            client.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / SPAM\r\n\r\n",
        b"BREW / HTTP/1.1\r\n\r\n",
        b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_in_the_one_shape(tmp_path, sent):
    with listening(tmp_path) as server:
        answer = server.ask(sent)
    assert status_of(answer) == 400
    assert error_of(answer)["code"] == "bad_request"
