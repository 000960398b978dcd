"""An answer is one write, whatever it consists of; nothing is held back that the other side waits for."""

from __future__ import annotations

import asyncio

import pytest
import uvicorn
from collage_server.web.protocol import OneWriteProtocol
from uvicorn.server import ServerState

GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self):
        super().__init__()
        self.writes = []
        self.closed = False

    def write(self, data):
        self.writes.append(bytes(data))

    def writelines(self, parts):
        self.write(b"".join(parts))

    def close(self):
        self.closed = True

    def is_closing(self):
        return self.closed

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


def answered(parts, request, *, status=200, sized=True):
    """What is written in answer to `request` by an application that sends these parts of a body."""

    async def application(scope, receive, send):
        await receive()
        size = [(b"content-length", b"%d" % sum(map(len, parts)))] if sized else []
        await send({"type": "http.response.start", "status": status, "headers": size})
        for number, part in enumerate(parts, 1):
            await send({"type": "http.response.body", "body": part, "more_body": number < len(parts)})

    async def speak():
        state = ServerState()
        config = uvicorn.Config(application, http=OneWriteProtocol, lifespan="off", log_config=None)
        config.load()
        transport = Transport()
        protocol = OneWriteProtocol(config, state, {})
        protocol.connection_made(transport)
        protocol.data_received(request)
        await asyncio.gather(*state.tasks)
        protocol.connection_lost(None)
        return transport

    return asyncio.run(speak())


def get(method=b"GET", more=b""):
    return method + b" / HTTP/1.1\r\nHost: x\r\n" + more + b"\r\n"


def test_head_and_body_are_one_write():
    [sent] = answered([b"body"], get()).writes
    assert sent.startswith(b"HTTP/1.1 200 OK\r\n")
    assert sent.endswith(b"content-length: 4\r\n\r\nbody")


@pytest.mark.parametrize("request_", [get(b"HEAD"), get()], ids=["HEAD", "nothing"])
def test_an_answer_without_a_body_is_not_held_back(request_):
    [sent] = answered([b""], request_).writes
    assert sent.startswith(b"HTTP/1.1 200 OK\r\n")
    assert sent.endswith(b"\r\n\r\n")


def test_what_follows_the_first_part_is_written_as_it_comes():
    first, second, *end = answered([b"one", b"HTTP/1.1 two"], get(), sized=False).writes
    assert first.endswith(b"\r\n\r\n3\r\none\r\n")
    assert b"".join([second, *end]).startswith(b"c\r\nHTTP/1.1 two\r\n")


def test_a_body_that_looks_like_a_head_arrives_whole():
    sent = b"".join(answered([b"HTTP/1.1 x", b"HTTP/1.1 y", b"HTTP/1.1 z"], get()).writes)
    assert sent.endswith(b"\r\n\r\nHTTP/1.1 xHTTP/1.1 yHTTP/1.1 z")


def test_who_waits_for_leave_to_go_on_gets_it_at_once():
    more = b"Expect: 100-continue\r\nContent-Length: 0\r\n"
    first, second = answered([b"body"], get(b"POST", more)).writes
    assert first == GO_ON
    assert second.endswith(b"body")


def test_the_answer_leaves_before_the_connection_ends():
    transport = answered([b""], get(b"HEAD", b"Connection: close\r\n"))
    assert transport.closed
    assert transport.writes[-1].startswith(b"HTTP/1.1 200 OK\r\n")


def test_what_is_no_request_is_answered_and_closed():
    transport = answered([b""], b"nonsense\r\n\r\n")
    assert transport.closed
    assert transport.writes[0].startswith(b"HTTP/1.1 400 ")
