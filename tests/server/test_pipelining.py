"""Requests sent before the last is answered, trailers, and Host: what one connection may send without a token."""

from __future__ import annotations

import contextlib
import re
import socket
import sys
from pathlib import Path

import pytest

from tests.server.sockets import HEAD, everything, listening, status_of
from tests.server.test_connections import CLOSE, error_of
from tests.server.test_process import serving
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

NEXT = HEAD + b"\r\n"
CHUNKED = b"POST /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
FLOODS = {
    "requests": 6_000 * NEXT,
    "trailers": CHUNKED + b"0\r\nX-Long: " + 2**20 * b"x",
    "empty lines": NEXT + 2**18 * b"\r\n",
}


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


def test_requests_that_wait_are_answered_in_order_and_the_connection_is_kept(tmp_path):
    asked = [b"GET /%d HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % number for number in range(8)]
    with listening(tmp_path) as server, server.connect() as client:
        client.sendall(b"".join(asked))
        client.sendall(HEAD + CLOSE)
        answer = everything(client)
    assert re.findall(rb"GET /(\d): not found", answer) == [b"%d" % number for number in range(8)]
    assert answer.count(b"HTTP/1.1 ") == 9
    assert answer.lower().count(b"connection: close") == 1


def test_beyond_those_that_may_wait_the_connection_ends_after_their_answers(tmp_path):
    with listening(tmp_path) as server:
        answer = server.ask(1000 * NEXT)
        assert answer.startswith(b"HTTP/1.1 200")
        assert 9 <= answer.count(b"HTTP/1.1 ") <= 32
        assert answer.count(b"HTTP/1.1 200") == answer.count(b"HTTP/1.1 ")
        assert server.ask(HEAD + CLOSE).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("broken", [b"BREW / HTTP/1.1\r\n\r\n", HEAD + 200 * b"x: 1\r\n", HEAD + NEXT])
def test_an_error_is_not_told_in_place_of_an_answer_that_is_due(tmp_path, broken):
    with listening(tmp_path) as server:
        answer = server.ask(3 * NEXT + broken)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == 3 * [b"200"]


@pytest.mark.parametrize(
    "trailers",
    [
        b"X-Long: " + b"x" * 2**20,
        b"X-Long: " + b"x" * 2**17 + b"\r\n\r\n",
        b"".join(b"x-%d: 1\r\n" % i for i in range(2**17)),
    ],
    ids=["half a value", "a value", "endless"],
)
@pytest.mark.parametrize("head", [CHUNKED, CHUNKED.replace(b"/healthz", b"/api/v1/projects/p/runs")])
def test_trailers_count_as_the_head_does(tmp_path, head, trailers):
    with listening(tmp_path) as server, server.connect() as client:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # Closed before all was sent.
            client.sendall(head + b"1\r\nx\r\n0\r\n" + trailers)
        answer = everything(client)  # The connection ends though nobody ends it from here.
        assert status_of(answer) in (431, 405, 415, None)  # A reset may overtake it.
        assert answer.count(b"HTTP/1.1 ") <= 1


def test_trailers_are_no_headers(tmp_path):
    """A proxy that checks or overwrites headers leaves trailers as they came."""
    head = b"POST /api/v1/projects/p/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    with listening(tmp_path) as server:
        answer = server.ask(head + b"2\r\n{}\r\n0\r\nContent-Type: text/plain\r\n\r\n" + HEAD + CLOSE)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"400", b"200"]  # As JSON, not 415.


@pytest.mark.parametrize(
    "hosts", [b"", b"Host: 127.0.0.1\r\nHost: 127.0.0.1\r\n", b"Host: 127.0.0.1\r\nhost: a\r\n"]
)
def test_a_request_names_one_host(tmp_path, hosts):
    with listening(tmp_path) as server:
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
