"""Connections over real sockets: heads that are too large, half sent or no HTTP, and more of them than may be.

And requests sent before the last is answered, trailers, and Host: what one connection may send without a token.
"""

import contextlib
import json
import re
import select
import socket
import sys
from pathlib import Path

import httpx
import pytest
from collage_server.app import create_app
from collage_server.command.serve import uvicorn_config
from collage_server.settings import Settings

from tests.server.sockets import HEAD, everything, listening, status_of
from tests.server.test_process import serving
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.slow

CLOSE = b"Connection: close\r\n\r\n"
NEXT = HEAD + b"\r\n"
CHUNKED = b"POST /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS = b"".join(b"x-%d: 1\r\n" % i for i in range(2**17))
TOO_LONG = {"half a value": b"X-Long: " + b"x" * 2**20, "a value": b"X-Long: " + b"x" * 2**17 + b"\r\n\r\n"}
FLOODS = {
    "requests": 6_000 * NEXT,
    "trailers": CHUNKED + b"0\r\nX-Long: " + 2**20 * b"x",
    "empty lines": NEXT + 2**18 * b"\r\n",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with listening(tmp_path_factory.mktemp("anyone")) as server:
        yield server


def error_of(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert list(error) == ["code", "message", "field", "limit", "request_id"]
    assert f"x-request-id: {error['request_id']}".encode() in head
    return error


def sent_until_closed(client, content):
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # Closed before all was sent.
        client.sendall(content)
    return everything(client)


@pytest.mark.parametrize(
    "sent",
    [*TOO_LONG.values(), b"".join(b"x-%d: 1\r\n" % i for i in range(200)) + b"\r\n", ENDLESS],
    ids=[*TOO_LONG, "many", "endless"],
)
def test_a_head_beyond_its_size_is_refused_as_it_comes(server, sent):
    with server.connect() as client:
        if answer := sent_until_closed(client, HEAD + sent):  # A reset may overtake it.
            assert status_of(answer) == 431
            assert error_of(answer)["limit"] == 65536
        assert server.ask(HEAD + CLOSE).startswith(b"HTTP/1.1 200")


def test_heads_within_their_size_are_answered_again_and_again_and_do_not_count_the_bodies(server):
    long = HEAD + b"X-Long: " + b"x" * 60_000 + b"\r\n"
    assert server.ask(5 * (long + b"\r\n") + long + CLOSE).count(b"HTTP/1.1 200") == 6
    with server.connect() as client:
        client.sendall(b"POST /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 70000\r\n\r\n")
        client.sendall(b"x" * 70_000 + HEAD + CLOSE)
        answer = everything(client)
    assert answer.startswith(b"HTTP/1.1 405")
    assert b"HTTP/1.1 200" in answer


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


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / SPAM\r\n\r\n",
        b"BREW / HTTP/1.1\r\n\r\n",
        b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_in_the_one_shape(server, sent):
    answer = server.ask(sent)
    assert status_of(answer) == 400
    assert error_of(answer)["code"] == "bad_request"


def highest_memory_mib(process):
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_flood_without_a_token_takes_little_memory_and_others_are_answered(tmp_path, flood):
    with serving(tmp_path, "--no-auth", idle_seconds=3600.0) as (process, client, ready):
        client.get("/healthz").raise_for_status()
        before = highest_memory_mib(process)
        address = ("127.0.0.1", int(ready["server_url"].rpartition(":")[2]))
        with contextlib.ExitStack() as stack:
            senders = [stack.enter_context(socket.create_connection(address)) for _ in range(40)]
            for sender in senders:
                sender.setblocking(False)
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    sender.send(flood)
            client.get("/healthz", timeout=5.0).raise_for_status()
            for sender in senders:
                sender.settimeout(PATIENCE_SECONDS)
                everything(sender)  # The server ends each.
        assert highest_memory_mib(process) - before < 32


def test_requests_that_wait_are_answered_in_order_and_beyond_those_that_may_the_connection_ends(server):
    asked = [b"GET /%d HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % number for number in range(8)]
    with server.connect() as client:
        client.sendall(b"".join(asked))
        client.sendall(HEAD + CLOSE)
        answer = everything(client)
    assert re.findall(rb"GET /(\d): not found", answer) == [b"%d" % number for number in range(8)]
    assert answer.count(b"HTTP/1.1 ") == 9
    assert answer.lower().count(b"connection: close") == 1
    answer = server.ask(1000 * NEXT)
    assert answer.startswith(b"HTTP/1.1 200")
    assert 9 <= answer.count(b"HTTP/1.1 ") <= 32
    assert answer.count(b"HTTP/1.1 200") == answer.count(b"HTTP/1.1 ")
    assert server.ask(HEAD + CLOSE).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("broken", [b"BREW / HTTP/1.1\r\n\r\n", HEAD + 200 * b"x: 1\r\n", HEAD + NEXT])
def test_an_error_is_not_told_in_place_of_an_answer_that_is_due(server, broken):
    answer = server.ask(3 * NEXT + broken)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == 3 * [b"200"]


@pytest.mark.parametrize("trailers", [*TOO_LONG.values(), ENDLESS], ids=[*TOO_LONG, "endless"])
@pytest.mark.parametrize("head", [CHUNKED, CHUNKED.replace(b"/healthz", b"/api/v1/projects/p/runs")])
def test_trailers_count_as_the_head_does(server, head, trailers):
    with server.connect() as client:
        answer = sent_until_closed(client, head + b"1\r\nx\r\n0\r\n" + trailers)  # Nobody ends it from here.
        assert status_of(answer) in (431, 405, 415, None)  # A reset may overtake it.
        assert answer.count(b"HTTP/1.1 ") <= 1


def test_trailers_are_no_headers(server):
    """A proxy that checks or overwrites headers leaves trailers as they came."""
    head = CHUNKED.replace(b"/healthz", b"/api/v1/projects/p/runs")
    answer = server.ask(head + b"2\r\n{}\r\n0\r\nContent-Type: text/plain\r\n\r\n" + HEAD + CLOSE)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"400", b"200"]  # As JSON, not 415.


@pytest.mark.parametrize(
    "hosts", [b"", b"Host: 127.0.0.1\r\nHost: 127.0.0.1\r\n", b"Host: 127.0.0.1\r\nhost: a\r\n"]
)
def test_a_request_names_one_host(server, hosts):
    answer = server.ask(b"GET /healthz HTTP/1.1\r\n" + hosts + b"\r\n")
    assert status_of(answer) == 400
    assert error_of(answer)["field"] == "Host"


def test_an_upgrade_is_not_taken_and_what_follows_it_is_not_read(tmp_path):
    """What comes behind may be in the other protocol, or the body of the request."""
    asked = HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 3\r\n\r\n"
    with listening(tmp_path, limits={"idle_seconds": 3600.0}) as server:
        answer = server.ask(asked + b"abc" + NEXT)
    assert answer.count(b"HTTP/1.1 200") == answer.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in answer
